package node

import (
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/config"
)

// While an engine drained, a room's next clock was named as if the drain would not cut it before.
func TestNextClockDuringADrain(t *testing.T) {
	n := &Node{cfg: &config.Config{}}
	n.cfg.Limits.OpBytes = 1 << 20
	for _, c := range []struct {
		name     string
		draining bool
		state    statemachine.State
		clock    string
		left     time.Duration
		want     string // name of the next clock
		why      string // the end of the sentence
	}{
		{"not draining", false, statemachine.Unbound, "bootstrap", 5 * time.Minute, "bootstrap", "; it fails in 5m0s by the bootstrap clock."},
		{"before the clock", true, statemachine.Unbound, "bootstrap", 5 * time.Minute, "drain.budget", "waiting for a destination to register pages; it ends Failed (draining) in 23s, when the drain's budget is over."},
		{"after the clock", true, statemachine.Confirmed, "stall", 5 * time.Second, "stall", "; it fails in 5s by the stall clock."},
		{"no clock", true, statemachine.Unbound, "", 0, "drain.budget", "; it ends Failed (draining) in 23s, when the drain's budget is over."},
		{"committed", true, statemachine.Committed, "verdict", time.Minute, "drain.budget", "; it ends Failed (outcome_unknown) in 23s, when the drain's budget is over."},
		{"ended", true, statemachine.Ended, "drain", time.Minute, "drain", "."},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.draining, n.drainBy = c.draining, time.Now().Add(23*time.Second)
			v := &core.View{Room: 1, Role: statemachine.Source, Admitted: true, State: c.state, Clock: c.clock, Remaining: c.left}
			if got := n.roomInfo(v).Clock; got == nil || got.Name != c.want || c.want == "drain.budget" && got.RemainingNS > int64(23*time.Second) {
				t.Errorf("next clock %+v, want %s", got, c.want)
			}
			why := n.why(v)
			why = strings.ReplaceAll(why, "in 22s", "in 23s") // a busy machine
			if !strings.HasSuffix(why, c.why) || strings.Contains(why, "it fails") && c.want == "drain.budget" {
				t.Errorf("%q, want %q", why, c.why)
			}
		})
	}
	n.draining, n.drainBy = true, time.Now().Add(-time.Second) // the rooms are being cut
	if left, cuts := n.cutIn(&core.View{State: statemachine.Bound, Clock: "input", Remaining: time.Minute}); left != 0 || !cuts {
		t.Errorf("%v %v", left, cuts)
	}
}
