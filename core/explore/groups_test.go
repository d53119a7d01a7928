package explore

import (
	"strings"
	"testing"
)

type groupSearch struct {
	name string
	cfg  GroupConfig
}

// groupSearches are those of every run of the tests: complete, or the test fails.
var groupSearches = []groupSearch{
	{"1x1", GroupConfig{Sources: 1, Destinations: 1, Ops: true, Faults: 1, Kinds: "braqmwegd"}},
	{"1x1 twice, an abort or a break", GroupConfig{Sources: 1, Destinations: 1, Attempts: 2, Ops: true, NoClocks: true, Faults: 1, Kinds: "ab"}},
	{"2x2 without clocks", GroupConfig{Sources: 2, Destinations: 2, NoClocks: true}},
	{"2x2 bound without clocks, a link breaks, overtaking", GroupConfig{Sources: 2, Destinations: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "b", Overtake: true}},
	{"1x2 without clocks, ops", GroupConfig{Sources: 1, Destinations: 2, Ops: true, NoClocks: true}},
	{"2x1 without clocks, a fault, overtaking", GroupConfig{Sources: 2, Destinations: 1, Ops: true, NoClocks: true, Faults: 1, Kinds: "ab", Overtake: true}},
	{"1x2 without clocks, a fault", GroupConfig{Sources: 1, Destinations: 2, NoClocks: true, Faults: 1, Kinds: "ab"}},
	{"1x2 bound, ops, an abort", GroupConfig{Sources: 1, Destinations: 2, Ops: true, Bound: true, Faults: 1, Kinds: "a"}},
	{"1x2 bound, a fault", GroupConfig{Sources: 1, Destinations: 2, Bound: true, Faults: 1, Kinds: "bra"}},
	{"1x2 bound without clocks, ops, a plugin dies", GroupConfig{Sources: 1, Destinations: 2, Ops: true, Bound: true, NoClocks: true, Faults: 1, Kinds: "m"}},
	{"1x2 bound without clocks, workers die", GroupConfig{Sources: 1, Destinations: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "w"}},
	{"1x2 without clocks, P1 and D1 come late, an abort", GroupConfig{Sources: 1, Destinations: 2, NoClocks: true, Late: "P1 D1", Faults: 1, Kinds: "a"}},
	{"2x1 bound, ops", GroupConfig{Sources: 2, Destinations: 1, Ops: true, Bound: true}},
	{"2x1 bound without clocks, ops, a plugin dies", GroupConfig{Sources: 2, Destinations: 1, Ops: true, Bound: true, NoClocks: true, Faults: 1, Kinds: "m"}},
	{"2x1 without clocks, P2 comes late, an abort", GroupConfig{Sources: 2, Destinations: 1, NoClocks: true, Late: "P2", Faults: 1, Kinds: "a"}},
}

// longGroups are walked by TestExploreLong.
var longGroups = []groupSearch{
	{"1x1, 2 faults", GroupConfig{Sources: 1, Destinations: 1, Ops: true, Faults: 2, Kinds: "braqmwegd"}},
	{"1x1 twice, a fault", GroupConfig{Sources: 1, Destinations: 1, Attempts: 2, Ops: true, NoClocks: true, Faults: 1, Kinds: "mrw"}},
	{"1x2 bound without clocks, ops, a fault, overtaking", GroupConfig{Sources: 1, Destinations: 2, Ops: true, Bound: true, NoClocks: true, Faults: 1, Kinds: "rabdwq", Overtake: true}},
	{"1x2 bound without clocks, ops, 2 faults", GroupConfig{Sources: 1, Destinations: 2, Ops: true, Bound: true, NoClocks: true, Faults: 2, Kinds: "mb"}},
	{"1x2 bound, ops, a plugin or workers die", GroupConfig{Sources: 1, Destinations: 2, Ops: true, Bound: true, Faults: 1, Kinds: "mw"}},
	{"1x2 bound twice, an abort", GroupConfig{Sources: 1, Destinations: 2, Attempts: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "a"}},
	{"2x1 bound twice, an abort", GroupConfig{Sources: 2, Destinations: 1, Attempts: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "a"}},
	{"2x1 without clocks, ops, a fault", GroupConfig{Sources: 2, Destinations: 1, Ops: true, NoClocks: true, Faults: 1, Kinds: "mwrq"}},
	{"1x2, D2 comes late or never", GroupConfig{Sources: 1, Destinations: 2, Late: "D2"}},
	{"1x2, D2 and P1 come late, a fault", GroupConfig{Sources: 1, Destinations: 2, NoClocks: true, Late: "D2 P1", Faults: 1, Kinds: "ab"}},
	{"1x2, D1 comes late, a fault", GroupConfig{Sources: 1, Destinations: 2, NoClocks: true, Late: "D1", Faults: 1, Kinds: "aw"}},
	{"2x1, P2 comes late, ops, a fault", GroupConfig{Sources: 2, Destinations: 1, Ops: true, NoClocks: true, Late: "P2", Faults: 1, Kinds: "abw"}},
	{"2x1, P1 comes late, a fault", GroupConfig{Sources: 2, Destinations: 1, NoClocks: true, Late: "P1", Faults: 1, Kinds: "ar"}},
	{"2x2 bound without clocks, an abort", GroupConfig{Sources: 2, Destinations: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "a"}},
	{"2x2 bound without clocks, an engine restarts", GroupConfig{Sources: 2, Destinations: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "r"}},
	{"2x2 bound without clocks, workers die", GroupConfig{Sources: 2, Destinations: 2, Bound: true, NoClocks: true, Faults: 1, Kinds: "w"}},
}

// TestGroups searches groups that span engines.
func TestGroups(t *testing.T) {
	for _, s := range groupSearches {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			exploreGroup(t, s.cfg)
		})
	}
}

func exploreGroup(t *testing.T, cfg GroupConfig) {
	r, err := GroupRun(cfg)
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
}

// TestGroupPackLosesNothing: a state that is packed and unpacked is the same.
func TestGroupPackLosesNothing(t *testing.T) {
	x := &groups{GroupConfig: GroupConfig{Sources: 2, Destinations: 2, Ops: true}, n: 4}
	st := groupState{faults: 2, hurt: true}
	for e := range x.n {
		st.node[e] = 1<<31 + uint32(e)
		st.at[e] = groupAt{inc: 1, opens: 2, moved: e == 0, known: 15 - uint8(e), epoch: 1, down: e == 1, unproven: e == 2, sealed: 9}
		for o := range x.n {
			if x.linked(e, o) {
				st.queue[e][o] = uint32(7 + 4*e + o)
			}
		}
		for s := range maxSlots {
			st.at[e].att[s], st.at[e].end[s] = uint8(s%3), end(3-s)
			st.won[s] = uint16(1 + 2*s + e<<7)
			st.ops[e%2][e/2][s] = groupOp{state: opState(3 + s), d: uint8(3 - s), epoch: uint8(s % 2), done: s == 1, cut: s == 2}
		}
	}
	var got groupState
	b := x.pack(nil, &st)
	if x.unpack(b, &got); got != st {
		t.Errorf("%+v\n%+v", st, got)
	}
	for i := range b { // every byte counts
		c := append([]byte(nil), b...)
		c[i] ^= 1
		var other groupState
		if x.unpack(c, &other); other == st {
			t.Errorf("byte %d of %d does not matter", i, len(b))
		}
	}
}
