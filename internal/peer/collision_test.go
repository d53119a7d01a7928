package peer

import (
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// Both dial at the same moment, over and over: one stream survives, that of the smaller name, and both
// sides agree on it.
func TestCollision(t *testing.T) {
	for range 20 {
		ca, cb := fast("a", 1, socket(t)), fast("b", 1, socket(t))
		cb.RedialMin = time.Microsecond // no head start for a
		a, b := start(t, ca), start(t, cb)
		meetBoth(b, a)
		until(t, "agreement", func() bool {
			p, q := a.peer("b"), b.peer("a")
			return p.State == "up" && q.State == "up" && p.Dialled != q.Dialled
		})
		// Frames go both ways, so it is one stream and not two halves.
		until(t, "frames both ways", func() bool {
			a.Send("b", 0, frame(1), false)
			b.Send("a", 0, frame(1), false)
			return len(a.find(Frame)) > 0 && len(b.find(Frame)) > 0
		})
		checkOrder(t, a.all())
		checkOrder(t, b.all())
		a.close()
		b.close()
	}
}

// Two streams are up at once: the preferred one replaces the other, never the reverse while it lives.
func TestCollisionForced(t *testing.T) {
	a := start(t, fast("b", 5, socket(t))) // the engine under test is "b"; the peers are played here
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}, {Record: membership.Record{Node: "c"}}})
	hello := func(node string, inc, attempt uint64) *wire.Hello {
		return &wire.Hello{Versions: []uint32{1}, Node: node, Incarnation: inc, Attempt: attempt, To: "b"}
	}
	one := rawDial(t, a.Addr())
	one.say(hello("a", 1, 10)) // preferred: a < b
	one.wantHello()
	late := rawDial(t, a.Addr())
	late.say(hello("a", 1, 9))
	late.wantRefused(RefusedStale)
	two := rawDial(t, a.Addr())
	two.say(hello("a", 1, 11))
	two.wantHello()
	one.wantEnd()
	three := rawDial(t, a.Addr())
	three.say(hello("a", 2, 1)) // a new incarnation counts anew
	three.wantHello()
	two.wantEnd()
	old := rawDial(t, a.Addr())
	old.say(hello("a", 1, 99))
	old.wantRefused(RefusedStale)
	checkOrder(t, a.all())

	// c > b: what c dials is not preferred. Newer replaces older all the same.
	c1 := rawDial(t, a.Addr())
	c1.say(hello("c", 1, 1))
	c1.wantHello()
	c2 := rawDial(t, a.Addr())
	c2.say(hello("c", 1, 2))
	c2.wantHello()
	c1.wantEnd()
}

// While the preferred stream is alive another is a duplicate; when it is silent it is replaced.
func TestCollisionSilent(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	ln := fakeEngine(t, "b", 3)
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: ln.address}}})
	a.awaitUp("b", 3) // a dialled: preferred
	stop := make(chan struct{})
	var beats sync.WaitGroup
	beats.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				ln.send(beatFrame)
			}
		}
	})
	dup := rawDial(t, a.Addr())
	dup.say(&wire.Hello{Versions: []uint32{1}, Node: "b", Incarnation: 3, Attempt: 1, To: "a"})
	dup.wantRefused(RefusedDuplicate)
	close(stop)
	beats.Wait()
	until(t, "the silent stream to be replaced", func() bool {
		d := rawDial(t, a.Addr())
		d.say(&wire.Hello{Versions: []uint32{1}, Node: "b", Incarnation: 3, Attempt: 2, To: "a"})
		f, _ := d.recv()
		return f.GetHello() != nil
	})
	checkOrder(t, a.all())
}
