package peer

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// A peer that announces without end loses its stream and is not heard beyond the bound; our own
// announcements stop at the same bounds.
func TestAnnouncementsAreBounded(t *testing.T) {
	endpoint := func(i int) *wire.Frame {
		return encodeEndpoint(Endpoint{Backend: "tcp", Epoch: uint32(i), Secret: make([]byte, 32)}, 3, "a", 1)
	}
	group := func(i int) *wire.Frame {
		g := testGroup()
		g.Name = fmt.Sprint("g", i)
		f, _ := encodeGroup(g)
		return f
	}
	pool := func(tensors int) func(i int) *wire.Frame {
		return func(i int) *wire.Frame {
			f, _ := encodePool(Pool{ID: uint64(i), Group: "g", Role: statemachine.Destination, Pages: 1, Layers: 1, Tensors: manyTensors(tensors)})
			return f
		}
	}
	for what, c := range map[string]struct {
		kind  EventKind
		frame func(i int) *wire.Frame
		most  int
	}{
		"endpoints": {EndpointUp, endpoint, maxEndpoints},
		"groups":    {GroupUp, group, maxGroups},
		"pools":     {PoolUp, pool(1), maxPools},
		"tensors":   {PoolUp, pool(maxTensors), maxAllTensors / maxTensors},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			cfg := fast("a", 1, socket(t))
			cfg.Silence = time.Minute // the fake has no beats
			a := start(t, cfg)
			f := fakeEngine(t, "b", 3)
			a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: f.address}}})
			a.awaitUp("b", 3)
			for from := 1; from <= c.most+1; from += 256 {
				var batch []*wire.Frame
				for i := from; i < min(from+256, c.most+2); i++ {
					batch = append(batch, c.frame(i))
				}
				for len(batch) > 0 { // messages are bounded
					n := min(len(batch), 256, max(1, 256*16/max(1, len(batch[0].GetPool().GetTensors()))))
					f.send(batch[:n]...)
					batch = batch[n:]
				}
			}
			a.await("down", func() bool { return len(a.find(Down)) == 1 })
			if d := a.find(Down)[0].Detail; !strings.Contains(d, "announced more than") || !strings.HasSuffix(d, " "+what) {
				t.Errorf("down because %q", d)
			}
			if n := len(a.find(c.kind)); n != c.most {
				t.Errorf("%d were delivered, want %d", n, c.most)
			}
		})
	}
	t.Run("own", func(t *testing.T) {
		t.Parallel()
		a := start(t, fast("a", 1, socket(t)))
		p := Pool{Group: "g", Role: statemachine.Destination, Pages: 1, Layers: 1, Tensors: manyTensors(maxTensors)}
		for i := range maxAllTensors / maxTensors {
			p.ID = uint64(i + 1)
			if err := a.AnnouncePool(p); err != nil {
				t.Fatal(err)
			}
		}
		p.ID++
		if err := a.AnnouncePool(p); err == nil {
			t.Error("one pool too many was accepted")
		}
		a.RemovePool(1)
		if err := a.AnnouncePool(p); err != nil {
			t.Error(err)
		}
	})
}

func manyTensors(n int) []Tensor {
	ts := make([]Tensor, n)
	for i := range ts {
		ts[i] = Tensor{Region: 1, PageBytes: 1, PageStride: 1}
	}
	return ts
}

// An endpoint that went while the link was down, and is too old for the list of lost epochs, is
// reported lost when the same incarnation is back.
func TestEndpointGoneWhileDown(t *testing.T) {
	a, b := start(t, fast("a", 7, socket(t))), start(t, fast("b", 1, socket(t)))
	e := Endpoint{Backend: "tcp", Epoch: 1, Secret: make([]byte, 32)}
	if err := a.AnnounceEndpoint(e); err != nil {
		t.Fatal(err)
	}
	meet(a, b)
	b.await("the endpoint", func() bool { return len(b.find(EndpointUp)) == 1 })
	a.SetPeers(nil) // no redial
	breakLink(a, "b")
	b.await("down", func() bool { return len(b.find(Down)) == 1 })
	for epoch := uint32(1); epoch <= maxLost+1; epoch++ {
		a.AnnounceLost("tcp", epoch)
	}
	meet(a, b)
	b.await("lost", func() bool {
		for _, ev := range b.find(Lost) {
			if ev.Endpoint.Epoch == 1 {
				return true
			}
		}
		return false
	})
	checkOrder(t, b.all())
}

// A group that went while membership did not name its engine, and there was no stream, is reported gone
// when the same incarnation is back.
func TestGroupGoneWhileUnnamed(t *testing.T) {
	a, b := start(t, fast("a", 7, socket(t))), start(t, fast("b", 1, socket(t)))
	if err := a.AnnounceGroup(testGroup()); err != nil {
		t.Fatal(err)
	}
	meet(a, b)
	b.await("the group", func() bool { return len(b.find(GroupUp)) == 1 })
	a.SetPeers(nil) // no redial
	b.SetPeers(nil)
	breakLink(a, "b")
	b.await("not listed", func() bool { return len(b.Status().Peers) == 0 })
	a.RemoveGroup(testGroup().Name, testGroup().Role)
	meet(a, b)
	b.await("the group to go", func() bool { return len(b.find(GroupGone)) == 1 })
	checkOrder(t, b.all())
}
