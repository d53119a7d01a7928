package explore

import (
	"strings"
	"testing"
)

// TestGroups searches groups that span engines.
func TestGroups(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  GroupConfig
	}{
		{"1x1", GroupConfig{Sources: 1, Destinations: 1, Ops: true, Faults: 1, Kinds: "braq"}},
		{"2x2 without clocks", GroupConfig{Sources: 2, Destinations: 2, NoClocks: true}},
		{"1x2 without clocks, ops", GroupConfig{Sources: 1, Destinations: 2, Ops: true, NoClocks: true}},
		{"2x1 without clocks, a fault", GroupConfig{Sources: 2, Destinations: 1, Ops: true, NoClocks: true, Faults: 1, Kinds: "ab"}},
		{"1x2 without clocks, a fault", GroupConfig{Sources: 1, Destinations: 2, NoClocks: true, Faults: 1, Kinds: "ab"}},
		{"1x2 bound, ops, an abort", GroupConfig{Sources: 1, Destinations: 2, Ops: true, Bound: true, Faults: 1, Kinds: "a"}},
		{"1x2 bound, a fault", GroupConfig{Sources: 1, Destinations: 2, Bound: true, Faults: 1, Kinds: "bra"}},
		{"2x1 bound, ops", GroupConfig{Sources: 2, Destinations: 1, Ops: true, Bound: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := GroupRun(c.cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s", r)
			if r.Violation != "" {
				t.Fatalf("%s\n%s", r.Violation, strings.Join(r.Trace, "\n"))
			}
			if !r.Complete {
				t.Fatal("not complete")
			}
		})
	}
}
