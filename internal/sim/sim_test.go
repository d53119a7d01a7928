package sim

import (
	"os"
	"testing"
)

// schedules of the test; `make sim` runs more.
const schedules = 100_000

// TestSchedules runs schedules and demands that every promise holds in each.
func TestSchedules(t *testing.T) {
	res := Run(t.Context(), Config{Schedules: schedules, Seed: 1})
	for _, v := range res.Broken {
		less, v := Shrink(v.Seed)
		Repro(v.Seed, less, os.Stderr)
		t.Errorf("%v; without %+v", v, less)
	}
	t.Logf("%d schedules, %d distinct, %.0f events and %.1f faults each, %d rooms, verdicts %v", res.Schedules, res.Distinct,
		float64(res.Events)/float64(res.Schedules), float64(res.Faults)/float64(res.Schedules), res.Rooms, res.Verdicts)
	if res.Events < 300*schedules || res.Faults < 2*schedules || res.Distinct < schedules*99/100 {
		t.Errorf("schedules are too tame: %+v", res)
	}
}

// TestSameSeed: the same seeds give the same histories, however many run at once.
func TestSameSeed(t *testing.T) {
	a := Run(t.Context(), Config{Schedules: 1000, Seed: 77, Workers: 1})
	b := Run(t.Context(), Config{Schedules: 1000, Seed: 77, Workers: 3})
	if a.Hash != b.Hash || a.Events != b.Events {
		t.Errorf("histories differ: %s and %s, %d and %d events", a.Hash, b.Hash, a.Events, b.Events)
	}
}
