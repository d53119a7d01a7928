package peer

import (
	"slices"
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

// A stream replaces one of an earlier attempt or incarnation, never the reverse.
func TestCollisionForced(t *testing.T) {
	a := start(t, fast("b", 5, socket(t))) // the engine under test is "b"; the peers are played here
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}, {Record: membership.Record{Node: "c"}}})
	hello := func(node string, inc, attempt uint64) *wire.Hello {
		return &wire.Hello{Versions: []uint32{1}, Node: node, Incarnation: inc, Attempt: attempt, To: "b"}
	}
	one := rawDial(t, a.Addr())
	one.say(hello("a", 1, 10))
	one.wantHello()
	late := rawDial(t, a.Addr())
	late.say(hello("a", 1, 9))
	late.wantRefused(RefusedDuplicate)
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

	// The same with a name that is larger than b's.
	c1 := rawDial(t, a.Addr())
	c1.say(hello("c", 1, 1))
	c1.wantHello()
	c2 := rawDial(t, a.Addr())
	c2.say(hello("c", 1, 2))
	c2.wantHello()
	c1.wantEnd()
}

// Both dialled with the same attempt: the stream of the smaller name is the later one. A greater attempt
// replaces it at once, because who says it knew of that stream and has lost it; and the next attempt of this
// side is greater again.
func TestCollisionOrder(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	b := fakeEngine(t, "b", 3)
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: b.address}}})
	a.awaitUp("b", 3)
	if got := b.attempts(); !slices.Equal(got, []uint64{1}) {
		t.Fatalf("a dialled with attempts %d, want 1", got)
	}
	say := func(attempt uint64) *raw {
		r := rawDial(t, a.Addr())
		r.say(&wire.Hello{Versions: []uint32{1}, Node: "b", Incarnation: 3, Attempt: attempt, To: "a"})
		return r
	}
	say(1).wantRefused(RefusedDuplicate)
	later := say(41)
	later.wantHello()
	say(2).wantRefused(RefusedDuplicate)
	breakLink(a, "b")
	later.wantEnd()
	until(t, "a to dial", func() bool { return len(b.attempts()) == 2 })
	if got := b.attempts(); got[1] != 42 {
		t.Errorf("a dialled with attempts %d, want 1 and 42", got)
	}
	checkOrder(t, a.all())
}

// TestCrossedStreams: a dials b; b answers, sends, loses that stream and dials a itself, and a hears of
// the second stream before the first. Where the ends took the two in opposite order, what b sent on the first
// arrived after what it sent on the second.
func TestCrossedStreams(t *testing.T) {
	ca, cb := fast("a", 1, "127.0.0.1:0"), fast("b", 1, "127.0.0.1:0")
	ca.Handshake = 20 * time.Second // b's answer is late
	a, b := start(t, ca), start(t, cb)
	relay := newProxy(t, b.Addr())
	b.on = func(ev Event) {
		if ev.Kind == Hello && len(b.find(Hello)) == 1 {
			relay.hold() // b has not answered yet
		}
	}
	b.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}})
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: relay.ln.Addr().String()}}})
	b.awaitUp("a", 1)
	b.Send("a", 0, frame(1), false)
	b.Send("a", 0, frame(2), false)
	w, err := encodeRoom(frame(2))
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the frames to leave b", func() bool { return relay.holds(w) })
	relay.cutTarget()
	b.await("down", func() bool { return len(b.find(Down)) == 1 })
	b.SetPeers([]membership.Peer{a.as()})
	b.awaitUp("a", 1)
	b.Send("a", 0, frame(3), false)
	a.await("the frame of the second stream", func() bool { return len(a.find(Frame)) == 1 })
	relay.release()
	until(t, "a to be done with the first stream", func() bool {
		relay.mu.Lock()
		defer relay.mu.Unlock()
		return relay.left == 1
	})
	for _, e := range a.find(Frame)[1:] {
		t.Errorf("frame %d after frame 3", e.Frame.Room)
	}
	if n := len(a.find(Hello)); n != 1 {
		t.Errorf("%d streams of b, want the second alone", n)
	}
	checkOrder(t, a.all())
}
