package sim

import "testing"

// BenchmarkSchedule is one schedule: draw, run, check.
func BenchmarkSchedule(b *testing.B) {
	var w world
	var p plan
	seed := uint64(0)
	for b.Loop() {
		seed++
		p.draw(seed)
		w.reset(&p, nil)
		if v := w.run(); v != nil {
			b.Fatal(v)
		}
	}
}
