package core_test

import (
	"testing"

	"github.com/terminus-kv/terminus/core/coretest"
)

// BenchmarkClone is what an explorer pays for a state besides the step: a clone and a hash of an engine
// with two rooms, one bound with an op outstanding, one open.
func BenchmarkClone(b *testing.B) {
	w := &walk{}
	for _, l := range []string{
		"config plain pages=16", "open P room=1", "send P room=1 from=0 pages=1", "open D room=1", "deliver D", "register D room=1 from=10 pages=2",
		"deliver D", "deliver P", "deliver D", "open P room=2",
	} {
		w.do("%s", l)
	}
	if w.err != nil {
		b.Fatal(w.err)
	}
	for _, g := range []*coretest.Engine{w.env.P, w.env.D} {
		b.Run("clone-"+g.Name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				g.M.Clone()
			}
		})
		b.Run("hash-"+g.Name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				g.M.Hash()
			}
		})
	}
}
