package sim

import "testing"

// BenchmarkSchedule is one schedule: draw, run, check.
func BenchmarkSchedule(b *testing.B) {
	var w world
	seed := uint64(0)
	for b.Loop() {
		seed++
		w.reset(draw(seed), nil)
		if v := w.run(); v != nil {
			b.Fatal(v)
		}
	}
}
