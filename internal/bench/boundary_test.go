package bench

import (
	"context"
	"testing"
	"time"
)

func TestBoundary(t *testing.T) {
	report := measure(t, boundary, "event", "ping_pong_p50", "ping_pong_p99", "ops")
	for _, r := range report.Results {
		if r.Value <= 0 || r.Reference == nil {
			t.Errorf("%+v", r)
		}
	}
}

// TestInterrupted: a benchmark that is interrupted ends soon, and its processes with it: TestMain finds the
// goroutines that wait for them.
func TestInterrupted(t *testing.T) {
	for _, b := range []Bench{boundary, poll} {
		t.Run(b.Name, func(t *testing.T) {
			o := testOptions(t)
			o.Duration = time.Hour
			ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
			defer cancel()
			began := time.Now()
			if _, err := b.Measure(ctx, o); err == nil {
				t.Error("it says nothing of the interruption")
			}
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("it took %s to end", took)
			}
		})
	}
}
