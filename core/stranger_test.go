package core

import (
	"fmt"
	"testing"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// member is a lone machine whose peer 0 hosts both groups "far" (sources) and "near" (destinations), and one room
// of it in some state. Peer 1 is admitted too, and hosts neither.
type member struct {
	*lone
	s, d statemachine.Opener // 0: none yet
}

const attempt = 7

// sourceIn brings a source that names its group into a state.
func sourceIn(t *testing.T, state statemachine.State) *member {
	m := &member{lone: newLone(t)}
	m.step(Event{Kind: PeerGroup, Peer: 0, Group: "near", PeerGroup: "prefill", Role: statemachine.Destination, Size: 1, Backends: []string{"tcp"}})
	m.step(Event{Kind: Open, Session: 1, Room: 1, Att: attempt, PeerGroup: "near"})
	m.s = m.only(1).Own
	if state >= statemachine.Offered {
		m.d = opener(20, 1)
		f := registerFrame(1, m.d)
		f.Group, f.Att, f.Ranks = "near", attempt, []RankPages{{}}
		m.frame(0, f)
	}
	if state >= statemachine.Confirmed {
		m.frame(0, Frame{Kind: FrameConfirm, Room: 1, S: m.s, D: m.d})
	}
	if state >= statemachine.Committed {
		m.step(Event{Kind: Send, Session: 1, Last: true})
	}
	if state == statemachine.Ended {
		m.frame(0, Frame{Kind: FrameVerdict, Room: 1, S: m.s, D: m.d, Outcome: statemachine.JudgeSuccess})
	}
	return m
}

// destinationIn does the same for a destination.
func destinationIn(t *testing.T, state statemachine.State) *member {
	m := &member{lone: newLone(t)}
	m.step(Event{Kind: Open, Session: 2, Room: 1, Att: attempt, PeerGroup: "far"})
	m.d = m.only(1).Own
	if state >= statemachine.Registered {
		m.step(Event{Kind: Register, Session: 2, Parts: []Part{{Runs: []layout.Run{{Start: 1, Count: 1, Stride: 1}}}}})
	}
	if state >= statemachine.Bound {
		m.s = opener(20, 5)
		m.frame(0, Frame{Kind: FrameBound, Room: 1, S: m.s, D: m.d, Att: attempt})
	}
	if state == statemachine.Ended {
		m.frame(0, Frame{Kind: FrameAbort, Room: 1, S: m.s, D: m.d, Att: attempt})
	}
	return m
}

// An engine that knows the id of a room, its attempt and both openers can neither end it, bind it nor change what
// it waits for, if the room named a group that this engine does not host.
func TestStrangerChangesNoRoom(t *testing.T) {
	source := []statemachine.State{statemachine.Unbound, statemachine.Offered, statemachine.Confirmed, statemachine.Committed, statemachine.Ended}
	destination := []statemachine.State{statemachine.Opened, statemachine.Registered, statemachine.Bound, statemachine.Ended}
	try := func(bring func(*testing.T, statemachine.State) *member, state statemachine.State) {
		base := bring(t, state)
		if v := base.only(1); v.State != state {
			t.Fatalf("brought to %s, want %s: %s", v.State, state, v.Why())
		}
		was := fmt.Sprintf("%+v", base.only(1))
		for kind := FrameQueued; kind < statemachine.NumFrameKinds; kind++ {
			for _, s := range []statemachine.Opener{{}, base.s, opener(30, 1)} {
				for _, d := range []statemachine.Opener{{}, base.d, opener(30, 1)} {
					for _, att := range []uint64{attempt, attempt + 1} {
						for _, group := range []string{"near", "far", "other"} {
							f := registerFrame(1, d)
							f.Kind, f.S, f.Att, f.Group = kind, s, att, group
							f.Outcome, f.Quiet = statemachine.JudgeFailed, true
							m := lone{t: t, m: base.m.Clone(), now: base.now}
							m.frame(1, f)
							if now := fmt.Sprintf("%+v", m.only(1)); now != was {
								t.Errorf("%s in %s, %s(s=%v, d=%v, att %d, %s) of a stranger:\n was %s\n now %s", base.only(1).Role, state, kind, s, d, att, group, was, now)
							}
						}
					}
				}
			}
		}
	}
	for _, s := range source {
		try(sourceIn, s)
	}
	for _, s := range destination {
		try(destinationIn, s)
	}
}

// What a stranger said before the room was opened does not count either: an abort mark, a destination that claims
// the group, the end of somebody else's destination.
func TestStrangerBeforeTheRoom(t *testing.T) {
	near := Event{Kind: PeerGroup, Peer: 0, Group: "near", PeerGroup: "prefill", Role: statemachine.Destination, Size: 1, Backends: []string{"tcp"}}
	open := Event{Kind: Open, Session: 1, Room: 1, Att: attempt, PeerGroup: "near"}
	claim := func(inc uint64) Frame {
		f := registerFrame(1, opener(inc, 1))
		f.Group, f.Att = "near", attempt
		return f
	}
	for _, c := range []struct {
		name   string
		frames []Event
		want   statemachine.State
	}{
		{"mark", []Event{{Peer: 1, Frame: Frame{Kind: FrameAbort, Room: 1, D: opener(30, 1), Att: attempt}}}, statemachine.Unbound},
		{"placeholder", []Event{{Peer: 1, Frame: claim(30)}}, statemachine.Unbound},
		{"end of a placeholder", []Event{{Peer: 0, Frame: claim(20)}, {Peer: 1, Frame: Frame{Kind: FrameAbort, Room: 1, D: opener(20, 1), Att: attempt}}}, statemachine.Offered},
		{"its own mark", []Event{{Peer: 0, Frame: Frame{Kind: FrameAbort, Room: 1, D: opener(20, 1), Att: attempt}}}, statemachine.Ended},
	} {
		l := newLone(t)
		l.step(near)
		for _, e := range c.frames {
			l.frame(e.Peer, e.Frame)
		}
		l.step(open)
		if v := l.only(1); v.State != c.want {
			t.Errorf("%s: the room is %s, want %s: %s", c.name, v.State, c.want, v.Why())
		}
	}
	// A destination: the mark that an abort of its source leaves.
	for from, want := range []statemachine.State{statemachine.Ended, statemachine.Opened} {
		l := newLone(t)
		l.frame(PeerID(from), Frame{Kind: FrameAbort, Room: 1, S: opener(5, 1), Att: attempt})
		l.step(Event{Kind: Open, Session: 2, Room: 1, Att: attempt, PeerGroup: "far"})
		if v := l.only(1); v.State != want {
			t.Errorf("mark of peer %d: the destination is %s, want %s", from, v.State, want)
		}
	}
}

// A destination whose source group nobody hosts yet has told its opener to no engine, so one that names it guessed.
func TestGuessedDestination(t *testing.T) {
	l := newLone(t)
	l.step(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "unknown"})
	l.step(Event{Kind: Register, Session: 2})
	l.frame(0, Frame{Kind: FrameBound, Room: 1, S: opener(20, 1), D: l.only(1).Own})
	if v := l.only(1); v.State != statemachine.Registered || v.Peer != -1 {
		t.Errorf("a guess bound it: %s", v.Why())
	}
}

// A room tried again at another engine is not this stranger's: its destination is remembered beside the old attempt
// and binds when the new one opens.
func TestNextAttemptAtAnotherEngine(t *testing.T) {
	m := sourceIn(t, statemachine.Offered)
	f := registerFrame(1, opener(30, 1))
	f.Att = attempt + 1
	m.frame(1, f)
	if v := m.only(1); v.State != statemachine.Offered {
		t.Fatalf("the old attempt: %s", v.Why())
	}
	m.step(Event{Kind: Abort, Session: 1})
	m.step(Event{Kind: PeerGroup, Peer: 1, Group: "far", PeerGroup: "prefill", Role: statemachine.Destination, Size: 1, Backends: []string{"tcp"}})
	m.step(Event{Kind: Open, Session: 1, Slot: 1, Room: 1, Att: attempt + 1, PeerGroup: "far"})
	for _, v := range m.m.Room(1) {
		if v.Attempt == attempt+1 && (v.State != statemachine.Offered || v.Peer != 1) {
			t.Errorf("the new attempt: %s", v.Why())
		}
	}
}

// TestEndedRoomOfAnotherGroup: a record that ended before it met a destination takes that attempt's words of its own
// group's engine, and of its own group, only: those of another one are for the room that is open now.
func TestEndedRoomOfAnotherGroup(t *testing.T) {
	at := func(peer PeerID, group string) Event {
		return Event{Kind: PeerGroup, Peer: peer, Group: group, PeerGroup: "prefill", Role: statemachine.Destination, Size: 1, Backends: []string{"tcp"}}
	}
	register := registerFrame(1, opener(30, 1))
	register.Group, register.Att = "next", attempt
	end := Frame{Kind: FrameAbort, Room: 1, D: opener(30, 1), Att: attempt}
	sameEngine := register
	sameEngine.D = opener(20, 1)
	for _, c := range []struct {
		name  string
		peer  PeerID // that hosts the group of the open room; peer 0 hosts that of the ended one
		frame Frame
		want  statemachine.State
	}{
		{"Register", 1, register, statemachine.Offered},
		{"Abort", 1, end, statemachine.Ended},
		{"Register from an engine of both", 0, sameEngine, statemachine.Offered},
	} {
		l := newLone(t)
		l.step(at(0, "near"), at(c.peer, "next"))
		l.step(Event{Kind: Open, Session: 1, Room: 1, Att: attempt, PeerGroup: "near"})
		l.step(Event{Kind: Abort, Session: 1})
		l.step(Event{Kind: Open, Session: 1, Slot: 1, Room: 1, Att: attempt, PeerGroup: "next"})
		l.frame(c.peer, c.frame)
		for _, v := range l.m.Room(1) {
			if v.PeerGroup == "next" && v.State != c.want {
				t.Errorf("%s: the open room is %s, want %s: %s", c.name, v.State, c.want, v.Why())
			}
		}
	}
}

// A destination registered with the source that it named by its group, and was bound to one of the same room and attempt
// that another group on that engine had opened: Success over the pages of the other. Once that was bound, it was ended.
func TestDestinationOfAnotherSourceGroup(t *testing.T) {
	stranger := registerFrame(1, opener(20, 1))
	stranger.Att, stranger.PeerGroup = attempt, "other"
	own := registerFrame(1, opener(20, 2))
	own.Att = attempt
	newer := stranger
	newer.Att++
	open := Event{Kind: Open, Session: 1, Room: 1, Att: attempt}
	stale := func(t *testing.T, out *Effects) {
		t.Helper()
		if len(out.Frames) != 1 || out.Frames[0].Frame.Kind != FrameAbort || out.Frames[0].Frame.Reason != statemachine.StaleRoom {
			t.Errorf("the destination is answered %+v", out.Frames)
		}
	}
	state := func(t *testing.T, l *lone, want statemachine.State) {
		t.Helper()
		if v := l.only(1); v.State != want {
			t.Errorf("the source is %s, want %s: %s", v.State, want, v.Why())
		}
	}
	t.Run("registered first", func(t *testing.T) {
		l := newLone(t)
		l.frame(0, stranger)
		l.step(open)
		state(t, l, statemachine.Unbound)
	})
	t.Run("opened first", func(t *testing.T) {
		l := newLone(t)
		l.step(open)
		stale(t, l.frame(0, stranger))
		state(t, l, statemachine.Unbound)
		l.frame(0, own)
		state(t, l, statemachine.Offered)
		for _, f := range []Frame{stranger, newer} {
			stale(t, l.frame(0, f))
			state(t, l, statemachine.Offered)
		}
	})
	t.Run("ended first", func(t *testing.T) {
		l := newLone(t)
		l.step(open)
		l.step(Event{Kind: Abort, Session: 1})
		if out := l.frame(0, stranger); len(out.Frames) != 0 {
			t.Errorf("a destination that waits for another group is answered %+v", out.Frames)
		}
	})
}
