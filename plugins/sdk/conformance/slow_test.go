package conformance

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
)

// TestSlowIsNotWrong: a plugin that does one op after the other, and the last first, failed the cases of many ops: an op
// that waited for others did not end within the bound of an answer, or the time of the case was over.
func TestSlowIsNotWrong(t *testing.T) {
	t.Parallel()
	const late, behind = "transfer/visible-at-done", "transfer/many-in-one-frame"
	m := mutant{backend: func(h *hooks) {
		var mu sync.Mutex
		var stack []*sdk.Op
		h.transfer = func(b *reference, op *sdk.Op) {
			op.Async()
			mu.Lock()
			defer mu.Unlock()
			if stack = append(stack, op); len(stack) > 1 {
				return
			}
			go func() {
				for left := true; left; {
					time.Sleep(50 * time.Millisecond)
					mu.Lock()
					last := stack[len(stack)-1]
					mu.Unlock()
					b.move(last)
					mu.Lock()
					stack = slices.DeleteFunc(stack, func(o *sdk.Op) bool { return o == last })
					left = len(stack) > 0
					mu.Unlock()
				}
			}()
		}
	}}
	res, err := Run(t.Context(), Config{Carrier: m.carrier(), Run: []string{late, behind}, Seed: 1, Scale: 0.25, Fresh: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res.Cases {
		switch want := map[string]Outcome{late: Skipped, behind: Passed}[r.Case.ID]; {
		case want == Unknown: // left out
		case r.Outcome != want:
			t.Errorf("%s %s, want %s: %v", r.Case.ID, r.Outcome, want, r.Failures)
		case want == Skipped:
			t.Log(r.Reason)
		}
	}
}
