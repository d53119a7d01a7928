package node

import (
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core"
)

// After a pause the ends of workers go before the frames of peers, also those that were posted behind them: their
// readers had been faster than the owner, and rooms succeeded that their worker had seen fail.
func TestLeaversFirst(t *testing.T) {
	items := []item{
		{ev: core.Event{Kind: core.PeerFrame}}, {fn: func() {}}, {ev: core.Event{Kind: core.SessionDown, Session: 2}}, {ev: core.Event{Kind: core.PeerFrame}},
	}
	got := leaversFirst(nil, []core.SessionID{1}, items)
	if len(got) != 2 || got[0].Kind != core.SessionDown || got[0].Session != 1 || got[1].Kind != core.SessionDown || got[1].Session != 2 {
		t.Errorf("%+v", got)
	}
}

// Core time stands still over a pause of the process, and after it until a tick has found the inbox
// empty or a second is over; a busy stretch that is no pause counts.
func TestClockOverPauses(t *testing.T) {
	c := clock{start: time.Now()}
	at := func(d time.Duration, idle bool) time.Duration { // as if d had passed since the start
		c.start = time.Now().Add(-d)
		return time.Duration(c.now(idle)) - time.Second
	}
	const ms = time.Millisecond
	for i, step := range []struct {
		at      time.Duration
		idle    bool
		want    time.Duration
		resumed bool
	}{
		{100 * ms, true, 100 * ms, false},
		{200 * ms, false, 200 * ms, false},
		{700 * ms, true, 700 * ms, false}, // late, and no pause
		{3700 * ms, true, 700 * ms, true}, // stopped for 3 s
		{3710 * ms, true, 700 * ms, true}, // readers have had no time yet
		{3790 * ms, false, 700 * ms, true},
		{3890 * ms, false, 700 * ms, true},
		{3990 * ms, true, 800 * ms, false}, // nothing is left over
		{4090 * ms, true, 900 * ms, false},
		{9090 * ms, true, 900 * ms, true},
		{9590 * ms, false, 900 * ms, true},
		{10100 * ms, false, 1410 * ms, false}, // an inbox that is never empty: a second at most
		{10190 * ms, false, 1500 * ms, false},
	} {
		got := at(step.at, step.idle)
		if d := got - step.want; d < -5*ms || d > 50*ms || c.resumed != step.resumed {
			t.Fatalf("step %d: %v, resumed=%v, want %v, %v", i, got, c.resumed, step.want, step.resumed)
		}
	}
	if c.pauses != 2 {
		t.Errorf("%d pauses", c.pauses)
	}
}
