package core

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Tests of mistakes that were found by reading, by the fuzzer or by random walks, each named after its
// mistake. Those that two engines can show in words are golden files.

// lone is one machine of incarnation 10 with a source and a destination worker (sessions 1 and 2),
// peer 0 of incarnation 20 and peer 1 of incarnation 30.
type lone struct {
	t   *testing.T
	m   *Machine
	now int64
	seq uint64
}

func newLone(t *testing.T) *lone {
	t.Helper()
	m, err := New(Config{Incarnation: 10, Clocks: DefaultClocks(), Limits: DefaultLimits()})
	if err != nil {
		t.Fatal(err)
	}
	l := &lone{t: t, m: m, now: int64(time.Second)}
	pool := func(s SessionID, id uint64) Event {
		return Event{Kind: PoolUp, Session: s, Pool: id, Pages: 64, Layers: 2, PageBytes: 1024}
	}
	l.step(
		Event{Kind: PluginUp, Backend: "tcp", Epoch: 1},
		Event{Kind: SessionUp, Session: 1, Role: statemachine.Source, Group: "prefill", Size: 1, Slots: 8}, pool(1, 1),
		Event{Kind: SessionUp, Session: 2, Role: statemachine.Destination, Group: "decode", Size: 1, Slots: 8}, pool(2, 2),
	)
	for id, inc := range []uint64{20, 30} {
		l.step(
			Event{Kind: PeerHello, Peer: PeerID(id), Node: fmt.Sprint("peer", id), Inc: inc},
			Event{Kind: PeerPool, Peer: PeerID(id), Pool: 1, Pages: 64, Layers: 2, PageBytes: 1024})
	}
	l.step(Event{Kind: PeerGroup, Peer: 0, Group: "far", PeerGroup: "decode", Role: statemachine.Source, Size: 1, Backends: []string{"tcp"}})
	return l
}

func (l *lone) step(in ...Event) *Effects {
	l.t.Helper()
	for i := range in {
		if in[i].Kind >= Open && in[i].Kind <= Release {
			l.seq++
			in[i].Seq = l.seq
		}
	}
	var out Effects
	l.m.Step(l.now, in, &out)
	return &out
}

func (l *lone) frame(from PeerID, f Frame) *Effects {
	l.t.Helper()
	return l.step(Event{Kind: PeerFrame, Peer: from, Frame: f})
}

func opener(inc, seq uint64) statemachine.Opener { return statemachine.Opener{Inc: inc, Seq: seq} }

func registerFrame(room int64, d statemachine.Opener) Frame {
	return Frame{
		Kind: FrameRegister, Room: room, D: d, Group: "far", PeerGroup: "prefill", Backend: "tcp", Epoch: 1,
		Ranks: []RankPages{{Parts: []PartPages{{Pool: 1, Runs: []layout.Run{{Start: 0, Count: 2, Stride: 1}}}}}},
	}
}

func (l *lone) only(room int64) View {
	l.t.Helper()
	v := l.m.Room(room)
	if len(v) != 1 {
		l.t.Fatalf("%d records of room %d", len(v), room)
	}
	return v[0]
}

// A rank of a group of another size indexed the pages of ranks out of range.
func TestJoinOfAnotherSize(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: SessionUp, Session: 3, Role: statemachine.Destination, Group: "decode", Size: 2, Rank: 1, Slots: 8})
	l.step(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "far"})
	r := l.step(Event{Kind: Open, Session: 3, Room: 1, PeerGroup: "far"}).Replies[0]
	if r.Code != Refused || !strings.Contains(r.Detail, "2") {
		t.Errorf("%+v", r)
	}
	// Nor does a session come in that claims a rank outside its group.
	for _, e := range []Event{{Size: 2, Rank: 2}, {Size: 0}, {Size: 1, Rank: -1}, {Size: 1 << 20}, {Size: 1, Slots: -1}} {
		e.Kind, e.Session, e.Role, e.Group = SessionUp, 9, statemachine.Source, "x"
		l.step(e)
		if r := l.step(Event{Kind: Open, Session: 9, Room: 5}).Replies[0]; r.Code != Refused {
			t.Errorf("%+v: %+v", e, r)
		}
	}
}

// A second PoolUp of an ordinal forgot which pages rooms had armed (found by the fuzzer: a panic).
func TestPoolTwice(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "far"})
	parts := []Part{{Runs: []layout.Run{{Start: 1, Count: 2, Stride: 1}}}}
	l.step(Event{Kind: Register, Session: 2, Parts: parts})
	l.step(Event{Kind: PoolUp, Session: 2, Pool: 7, Pages: 8, Layers: 1, PageBytes: 1}, Event{Kind: PoolUp, Session: 2, Ordinal: -1, Pages: 8}, Event{Kind: PoolUp, Session: 2, Ordinal: 1 << 30, Pages: 8})
	l.step(Event{Kind: Open, Session: 2, Slot: 1, Room: 2, PeerGroup: "far"})
	if r := l.step(Event{Kind: Register, Session: 2, Slot: 1, Parts: parts}).Replies[0]; r.Code != Refused || !strings.Contains(r.Detail, "armed") {
		t.Errorf("%+v", r)
	}
	l.step(Event{Kind: Abort, Session: 2})
}

// A reason that this version does not know, or that only its own side can mean, was kept as it came: the
// first indexed the counters out of range, the second said of a judge that its outcome is unknown.
func TestReasonOfPeer(t *testing.T) {
	for why, want := range map[statemachine.Reason]statemachine.Reason{
		200: statemachine.PeerAborted, statemachine.OutcomeUnknown: statemachine.PeerAborted, statemachine.EngineLost: statemachine.PeerAborted,
		statemachine.Success: statemachine.PeerAborted, statemachine.Aborted: statemachine.PeerAborted, statemachine.Stalled: statemachine.Stalled,
	} {
		l := newLone(t)
		l.step(Event{Kind: Open, Session: 1, Room: 1})
		d := opener(20, 1)
		l.frame(0, registerFrame(1, d))
		l.frame(0, Frame{Kind: FrameVerdict, Room: 1, S: l.only(1).Own, D: d, Outcome: OutcomeFailed, Reason: why})
		if v := l.only(1); v.Reason != want {
			t.Errorf("%d became %s, want %s", why, v.Reason, want)
		}
	}
}

// Any peer could end a room between two others.
func TestFrameOfAnotherPeer(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "far"})
	l.step(Event{Kind: Register, Session: 2})
	d, s := l.only(1).Own, opener(20, 5)
	l.frame(1, Frame{Kind: FrameBound, Room: 1, S: opener(30, 1), D: d})
	if v := l.only(1); v.State != statemachine.Registered {
		t.Fatalf("bound to a peer that was not asked: %s", v.Why())
	}
	l.frame(1, Frame{Kind: FrameAbort, Room: 1, S: opener(30, 1), Att: 9}) // kept for that attempt (R7)
	if c := l.m.Counts(); c.Marks != 1 || l.only(1).State != statemachine.Registered {
		t.Errorf("%d marks", c.Marks)
	}
	l.frame(0, Frame{Kind: FrameBound, Room: 1, S: s, D: d})
	for _, f := range []Frame{{Kind: FrameAbort, S: s, D: d}, {Kind: FrameDrained, S: s, D: d}, {Kind: FrameRankEnd, S: s, D: d}, {Kind: FrameBound, S: opener(30, 1), D: d}, {Kind: FrameAbort, S: s}} {
		f.Room = 1
		l.frame(1, f)
	}
	if v := l.only(1); v.State != statemachine.Bound {
		t.Errorf("another peer changed the room: %s", v.Why())
	}
}

// Once a source has its destination no other engine can speak for the pair, though it knows both openers. (Its own
// Register ends the room: peer_superseded.)
func TestBoundSourceHearsItsPeerOnly(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 1, Room: 1})
	d := opener(20, 1)
	l.frame(0, registerFrame(1, d))
	s := l.only(1).Own
	for _, f := range []Frame{
		{Kind: FrameConfirm, S: s, D: d}, {Kind: FrameVerdict, S: s, D: d, Outcome: statemachine.JudgeFailed}, {Kind: FrameVerdict, S: s, D: opener(30, 1), Outcome: statemachine.JudgeFailed},
		{Kind: FrameAbort, S: s, D: d}, {Kind: FrameAbort, D: d}, {Kind: FrameAbort, D: opener(30, 1)},
	} {
		f.Room = 1
		l.frame(1, f)
		if v := l.only(1); v.State != statemachine.Offered || v.Peer != 0 {
			t.Errorf("frame kind %d of another peer: %s", f.Kind, v.Why())
		}
	}
	l.frame(0, Frame{Kind: FrameConfirm, Room: 1, S: s, D: d})
	if v := l.only(1); v.State != statemachine.Confirmed {
		t.Errorf("its own peer is not heard: %s", v.Why())
	}
}

// A Register of another attempt made its sender the peer of a room that was waiting for somebody else.
func TestPeerOfAnotherAttempt(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 1, Room: 1, Att: 1})
	f := registerFrame(1, opener(30, 1))
	f.Att = 2
	l.frame(1, f)
	if v := l.only(1); v.Peer != -1 {
		t.Errorf("peer %d", v.Peer)
	}
	if c := l.m.Counts(); c.Placeholders != 1 {
		t.Errorf("%+v", c)
	}
}

// The placeholder of one peer was replaced by that of another without a word; its destination waited for
// its clock.
func TestPlaceholderReplaced(t *testing.T) {
	l := newLone(t)
	l.frame(0, registerFrame(1, opener(20, 1)))
	out := l.frame(1, registerFrame(1, opener(30, 1)))
	if len(out.Frames) != 1 || out.Frames[0].Peer != 0 || out.Frames[0].Frame.Kind != FrameAbort || out.Frames[0].Frame.D != opener(20, 1) {
		t.Errorf("%+v", out.Frames)
	}
}

// A frame of an older incarnation that was read late bound a room to nobody.
func TestStaleIncarnation(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 1, Room: 1}, Event{Kind: PeerHello, Peer: 0, Node: "peer0", Inc: 21})
	l.frame(0, registerFrame(1, opener(20, 1)))
	if v := l.only(1); v.State != statemachine.Unbound {
		t.Errorf("%s", v.Why())
	}
}

// The queues of abort marks, of waiting rooms and of names grew with every message of a peer or a worker.
func TestQueuesAreBounded(t *testing.T) {
	l := newLone(t)
	for range 5000 {
		l.frame(0, Frame{Kind: FrameAbort, Room: 1, D: opener(20, 1)})
		l.frame(0, registerFrame(2, opener(20, 1)))
	}
	if n := len(l.m.markQueue) + len(l.m.holdQueue); n > 300 {
		t.Errorf("%d entries for one mark and one placeholder", n)
	}
	l.m.cfg.Limits.Rooms = 1
	l.step(Event{Kind: Open, Session: 1, Room: 10}, Event{Kind: Open, Session: 1, Slot: 1, Room: 11}) // 11 waits at the head
	for range 5000 {
		l.step(Event{Kind: Open, Session: 1, Slot: 2, Room: 12}, Event{Kind: Abort, Session: 1, Slot: 2}, Event{Kind: Release, Session: 1, Slot: 2})
	}
	if n := len(l.m.waiting); n > 300 {
		t.Errorf("%d entries for one room that waits", n)
	}
	var refused int
	for i := range maxNames + 10 {
		r := l.step(Event{Kind: Open, Session: 1, Slot: 3, Room: 13, PeerGroup: fmt.Sprint("g", i)}, Event{Kind: Abort, Session: 1, Slot: 3}, Event{Kind: Release, Session: 1, Slot: 3}).Replies[0]
		if r.Code == Refused {
			refused++
		}
	}
	if n := len(l.m.Room(13)); n > maxOpens+1 {
		t.Errorf("%d records of one room", n)
	}
	if refused == 0 || len(l.m.names) > maxNames {
		t.Errorf("%d names, %d refused", len(l.m.names), refused)
	}
}

// The first op of a room, often its only one, had no deadline: the transfer clock starts with it.
func TestFirstOpHasDeadline(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 1, Room: 1, Deadline: int64(8 * time.Second)})
	d := opener(20, 1)
	l.frame(0, registerFrame(1, d))
	l.frame(0, Frame{Kind: FrameConfirm, Room: 1, S: l.only(1).Own, D: d, ClockLog2: 7})
	out := l.step(Event{Kind: Send, Session: 1, Last: true, Parts: []Part{{Runs: []layout.Run{{Start: 0, Count: 2, Stride: 1}}}}})
	if len(out.Plugin) != 1 || time.Duration(out.Plugin[0].DeadlineIn) != 8800*time.Millisecond {
		t.Errorf("%+v", out.Plugin)
	}
}

// Page counts overflowed: lists may name more pages than there are, and a source could send for ever.
func TestPagesBeyondPool(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 1, Room: 1})
	all := []Part{{Runs: []layout.Run{{Start: 0, Count: 64, Stride: 1}}}}
	twice := []Part{{Runs: []layout.Run{{Start: 0, Count: 64, Stride: 1}, {Start: 0, Count: 64, Stride: 1}}}}
	if r := l.step(Event{Kind: Send, Session: 1, Parts: twice}).Replies[0]; r.Code != Refused {
		t.Errorf("%+v", r)
	}
	if r := l.step(Event{Kind: Send, Session: 1, Parts: all}).Replies[0]; r.Code != OK {
		t.Errorf("%+v", r)
	}
	if r := l.step(Event{Kind: Send, Session: 1, Parts: all}).Replies[0]; r.Code != Refused {
		t.Errorf("the pool is sent twice: %+v", r)
	}
	f := registerFrame(1, opener(20, 1))
	f.Ranks[0].Parts[0].Runs = twice[0].Runs
	l.frame(0, f)
	if v := l.only(1); v.Reason != statemachine.Protocol {
		t.Errorf("%s", v.Why())
	}
}

// An engine that is its own peer: Abort(d) and Abort(0,d) have the same openers on the same link.
func TestSelfPeer(t *testing.T) {
	for _, abort := range []string{"", "before", "unbound", "bound", "source"} {
		l := newLone(t)
		l.step(
			Event{Kind: PeerHello, Peer: 2, Node: "self", Inc: 10},
			Event{Kind: PeerPool, Peer: 2, Pool: 2, Pages: 64, Layers: 2, PageBytes: 1024},
			Event{Kind: PeerGroup, Peer: 2, Group: "prefill", PeerGroup: "decode", Role: statemachine.Source, Size: 1, Backends: []string{"tcp"}},
			Event{Kind: PeerGroup, Peer: 2, Group: "decode", PeerGroup: "prefill", Role: statemachine.Destination, Size: 1, Backends: []string{"tcp"}},
		)
		words := map[SessionID]WordEffect{}
		var op OpID
		run := func(in ...Event) {
			for len(in) > 0 {
				out := l.step(in...)
				in = nil
				for _, w := range out.Words {
					words[w.Session] = w
				}
				for _, f := range out.Frames {
					in = append(in, Event{Kind: PeerFrame, Peer: f.Peer, Frame: f.Frame})
				}
				for _, p := range out.Plugin {
					if p.Kind == PluginSubmit {
						op = p.Op
					}
				}
			}
		}
		parts := []Part{{Runs: []layout.Run{{Start: 0, Count: 2, Stride: 1}}}}
		run(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "prefill"})
		if abort == "before" {
			run(Event{Kind: Abort, Session: 2})
		}
		run(Event{Kind: Register, Session: 2, Parts: parts})
		if abort == "unbound" {
			run(Event{Kind: Abort, Session: 2})
		}
		run(Event{Kind: Open, Session: 1, Room: 1})
		if abort == "bound" {
			run(Event{Kind: Abort, Session: 2})
		}
		if abort == "source" {
			run(Event{Kind: Abort, Session: 1})
		}
		run(Event{Kind: Send, Session: 1, Parts: parts, Last: true})
		run(Event{Kind: OpEnd, Op: op, End: EndDone, Quiet: true, Bytes: 2048})
		for _, w := range words {
			if ok := w.Status == statemachine.Succeeded; ok != (abort == "") || !w.Status.Terminal() || !w.Residency.Reusable() {
				t.Errorf("abort %q: session %d: %s (%s), pages %s", abort, w.Session, w.Status, w.Reason, w.Residency)
			}
		}
		run(Event{Kind: Release, Session: 1}, Event{Kind: Release, Session: 2})
		l.now += int64(601 * time.Second)
		run(Event{Kind: Tick})
		if c := l.m.Counts(); c != (Counts{}) {
			t.Errorf("abort %q: %+v", abort, c)
		}
	}
}
