package bench

import (
	"runtime"
	"slices"
	"testing"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

func TestStep(t *testing.T) {
	report := measure(t, step, "source_lives", "source_lives_allocations", "destination_lives", "destination_lives_allocations",
		"source_lives_unbatched", "source_lives_unbatched_allocations", "destination_lives_unbatched", "destination_lives_unbatched_allocations")
	for _, r := range report.Results {
		if r.Unit == "allocations/event" && r.Value != 0 {
			t.Errorf("%s: %v allocations an event", r.Name, r.Value)
		}
	}
}

// BenchmarkStep is the benchmark step, for the profiler: an op is a life.
func BenchmarkStep(b *testing.B) {
	for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
		b.Run(role.String(), func(b *testing.B) {
			l, err := newLives(role, int(core.DefaultLimits().Tombstones))
			if err != nil {
				b.Fatal(err)
			}
			runtime.LockOSThread() // for threadTime
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			b.ResetTimer()
			var rounds []float64
			for l.done = 0; l.done < b.N; {
				done, cpu := l.done, threadTime()
				for range 64 {
					if err := l.step(stepBatch); err != nil {
						b.Fatal(err)
					}
				}
				rounds = append(rounds, float64((threadTime()-cpu).Nanoseconds())/float64(l.done-done))
			}
			slices.Sort(rounds)
			b.ReportMetric(rounds[0], "best-cpu-ns/op")
			b.ReportMetric(rounds[len(rounds)/2], "median-cpu-ns/op")
		})
	}
}
