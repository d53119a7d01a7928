package core

import (
	"testing"

	"github.com/terminus-kv/terminus/core/layout"
)

// TestRefusalsAreCountedByCause: all were counted as one, so nobody saw whether a limit or a wrong request was behind.
func TestRefusalsAreCountedByCause(t *testing.T) {
	register := func(slot, start, pages int32) Event {
		return Event{Kind: Register, Session: 2, Slot: slot, Parts: []Part{{Runs: []layout.Run{{Start: start, Count: pages, Stride: 1}}}}}
	}
	open := func(room int64, slot int32) Event {
		return Event{Kind: Open, Session: 2, Room: room, Att: 1, Slot: slot, PeerGroup: "far"}
	}
	again := open(1, 5)
	again.Att = 2
	cases := []struct {
		want   Refusal
		limits func(l *Limits)
		e      Event
	}{
		{RefusedRequest, nil, Event{Kind: Send, Session: 2, Slot: 7}},
		{RefusedSession, nil, Event{Kind: Open, Session: 9, Room: 3, PeerGroup: "far"}},
		{RefusedPeerGroup, nil, Event{Kind: Open, Session: 2, Room: 3, Slot: 5}},
		{RefusedRoomOpen, nil, again},
		{RefusedInflightRooms, func(l *Limits) { l.Rooms, l.AdmitQueue = 1, 0 }, open(3, 5)},
		{RefusedInflightBytes, func(l *Limits) { l.RoomBytes = 1 }, register(1, 10, 2)},
		{RefusedInflightPages, func(l *Limits) { l.RoomPages = 1 }, register(1, 10, 2)},
		{RefusedWorkerBytes, func(l *Limits) { l.SessionBytes = 1 }, register(1, 10, 2)},
		{RefusedWorkerPages, func(l *Limits) { l.SessionPages = 1 }, register(1, 10, 2)},
		{RefusedArmed, nil, register(1, 1, 1)},
		{RefusedNotEnded, nil, Event{Kind: Release, Session: 2, Slot: 0}},
		{RefusedNotReusable, nil, Event{Kind: Release, Session: 2, Slot: 2}},
		{RefusedDraining, nil, open(3, 5)}, // last: it stays
	}
	l := newLone(t)
	l.step(open(1, 0), register(0, 1, 1), open(2, 1)) // one with page 1, one that waits for its pages
	l.bindTo("far", 0, 4, 2, 20, opener(20, 9))
	l.step(Event{Kind: Abort, Session: 2, Slot: 2}) // and one that has ended and is not quiet
	limits, seen := l.m.cfg.Limits, map[Refusal]bool{}
	for _, c := range cases {
		l.m.cfg.Limits = limits
		if c.limits != nil {
			c.limits(&l.m.cfg.Limits)
		}
		if c.want == RefusedDraining {
			l.step(Event{Kind: DrainBegin})
		}
		want := l.m.Stats().Refused
		want[c.want]++
		out := l.step(c.e)
		if len(out.Replies) != 1 || out.Replies[0].Code != Refused {
			t.Errorf("%v: it was not refused: %+v", c.want, out.Replies)
		} else if got := l.m.Stats().Refused; got != want {
			t.Errorf("%v: %q was counted as %v, want %v", c.want, out.Replies[0].Detail, got, want)
		}
		seen[c.want] = true
	}
	names := map[string]bool{}
	for r := range NumRefusals {
		if !seen[r] {
			t.Errorf("cause %v has no case", r)
		}
		if names[r.String()] || r.String() == "" {
			t.Errorf("cause %d is called %q", r, r)
		}
		names[r.String()] = true
	}
}
