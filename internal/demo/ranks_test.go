package demo

import (
	"reflect"
	"testing"
)

func TestRanksOf(t *testing.T) {
	for text, want := range map[string][2]int{"1:1": {1, 1}, "2:4": {2, 4}, "8:3": {8, 3}} {
		if got, err := ranksOf(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "2", "0:1", "2:9", "2:4:1", "a:b", "-1:1"} {
		if _, err := ranksOf(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
	for n, want := range map[[2]int]int{{1, 1}: 1, {2, 4}: 4, {2, 3}: 6, {6, 8}: 24} {
		if got := headsFor(n); got != want {
			t.Errorf("%v: %d heads, want %d", n, got, want)
		}
	}
}

// What two ranks make of a page is, head by head, what one of the whole model makes, and no rank takes another's
// share for its own.
func TestContentOfRanks(t *testing.T) {
	h := PlanHeader{Seed: 5, PageBytes: 4096, PageTokens: 64, Heads: 4}
	whole := make([]byte, h.PageBytes)
	newContent(h, 0, 1).fill(whole, 7, 3, 1)
	row := h.PageBytes / h.PageTokens / h.Heads
	for rank := range 2 {
		own := make([]byte, h.ofRank(2).PageBytes)
		for token := range h.PageTokens {
			copy(own[token*2*row:][:2*row], whole[(token*4+rank*2)*row:])
		}
		c, other := newContent(h, rank, 2), newContent(h, 1-rank, 2)
		if !c.holds(own, 7, 3, 1) || other.holds(own, 7, 3, 1) {
			t.Errorf("rank %d: own %t, the other's %t", rank, c.holds(own, 7, 3, 1), other.holds(own, 7, 3, 1))
		}
		own[len(own)-1]++
		if c.holds(own, 7, 3, 1) {
			t.Errorf("rank %d: a changed byte was not seen", rank)
		}
	}
}

func TestRanksReportAsOne(t *testing.T) {
	room := func(kind, status, reason string, opened, ended int64) report {
		return report{T: kind, Room: 1, Status: status, Reason: reason, Opened: opened, Ended: ended, Bytes: 5}
	}
	won := room("room", statusSuccess, reasonSuccess, 10, 40)
	for name, c := range map[string]struct {
		lines []report // of rank 0, rank 1, rank 0, …
		want  []report // what came of each; T empty: nothing
	}{
		"ready":    {[]report{{T: "ready"}, {T: "ready"}}, []report{{}, {T: "ready"}}},
		"progress": {[]report{{T: "progress", Done: 3, Bytes: 5}, {T: "progress", Done: 2, Bytes: 4, Written: 1}}, []report{{T: "progress", Bytes: 5}, {T: "progress", Done: 2, Bytes: 9, Written: 1}}},
		"open":     {[]report{{T: "open", Room: 1}, {T: "open", Room: 1}}, []report{{T: "open", Room: 1}, {}}},
		"success": {
			[]report{won, room("room", statusSuccess, reasonSuccess, 8, 50)},
			[]report{{}, {T: "room", Room: 1, Status: statusSuccess, Reason: reasonSuccess, Opened: 8, Ended: 50, Bytes: 10}},
		},
		"failed at one, heard at once": {
			[]report{room("ended", statusFailed, "", 10, 40), room("ended", statusSuccess, "", 10, 45)},
			[]report{room("ended", statusFailed, "", 10, 40), {}},
		},
		"success at one only": {
			[]report{won, room("room", statusFailed, reasonPeerLost, 10, 60)},
			[]report{{}, {T: "room", Room: 1, Status: statusFailed, Reason: reasonPeerLost, Opened: 10, Ended: 60, Bytes: 10, split: true}},
		},
		"success at one, the other lost its engine": {
			[]report{won, room("room", statusFailed, reasonEngineLost, 10, 60)},
			[]report{{}, {T: "room", Room: 1, Status: statusFailed, Reason: reasonEngineLost, Opened: 10, Ended: 60, Bytes: 10}},
		},
		"no end at one": {
			[]report{{T: "room", Room: 1, Status: "Transferring", Opened: 10}, won},
			[]report{{}, {T: "room", Room: 1, Status: "Transferring", Opened: 10, Ended: 40, Bytes: 5}},
		},
		"end": {
			[]report{{T: "end", Leaked: 1, Pages: 4}, {T: "end", Written: 2, Pages: 5}},
			[]report{{}, {T: "end", Leaked: 1, Written: 2, Pages: 9}},
		},
		"an end that went wrong": {
			[]report{{T: "end", Error: "told to stop"}, {T: "end"}},
			[]report{{T: "end", Error: "rank 0: told to stop"}, {T: "end", Error: "rank 0: told to stop"}},
		},
	} {
		r := newRanks(2)
		for i, line := range c.lines {
			got, ok := r.add(i, line)
			if !ok {
				got = report{}
			}
			if !reflect.DeepEqual(got, c.want[i]) {
				t.Errorf("%s, rank %d: %+v, want %+v", name, i, got, c.want[i])
			}
		}
	}
}

// A room that failed at one rank only is aborted at the others: no engine that lost it would.
func TestRouterAbortsAtTheOtherRanks(t *testing.T) {
	rt := newRouterTest(t, 1)
	rt.router.several[1] = true
	rt.pass(0)
	rt.tell(1, opens(1, 0), report{T: "ended", Room: 1, Status: statusFailed})
	rt.said()
	if got := rt.pass(2 * abortGrace); got != "p1.0! d1.0!" {
		t.Errorf("ordered %q", got)
	}
}
