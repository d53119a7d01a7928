package explore

import (
	"flag"
	"testing"
	"time"
)

// kinds without the worker's death and without a link that is down for ever.
const engineFaults = "bpdmnacsqefh"

type search struct {
	name string
	cfg  Config
}

// searches of every run of the tests: exhaustive, or the test fails.
var searches = []search{
	{"2 openers a side, no fault", Config{Sources: 1, Rooms: 1, Openers: 2, Chunks: 1, Graph: true}},
	{"2 openers a side of one attempt", Config{Sources: 1, Rooms: 1, Openers: 2, Chunks: 1, SameAttempt: true, NoHints: true, Connected: true, Graph: true}},
	{"1 opener, 3 faults", Config{Sources: 1, Rooms: 1, Openers: 1, Chunks: 1, Faults: 3, Kinds: engineFaults, NoHints: true, NoProof: true, Connected: true}},
	{"1 opener, 1 fault of any kind", Config{Sources: 1, Rooms: 1, Openers: 1, Chunks: 1, Faults: 1}},
	{"1 opener, 1 fault, that leaves attempts able to succeed", Config{Sources: 1, Rooms: 1, Openers: 1, Chunks: 1, Faults: 1, Kinds: "bpdmnacsqef", Graph: true}},
	{"2 chunks, 1 fault", Config{Sources: 1, Rooms: 1, Openers: 1, Chunks: 2, Faults: 1, NoHints: true, Connected: true}},
	{"fully cached, 1 opener, 2 faults", Config{Sources: 1, Rooms: 1, Openers: 1, Chunks: 0, Faults: 2, NoHints: true}},
	{"receiver checked, 1 fault", Config{Sources: 1, Rooms: 1, Openers: 1, Chunks: 1, Faults: 1, Checked: true}},
	{"2 source engines claim the group, no fault", Config{Sources: 2, Rooms: 1, Openers: 1, Chunks: 1}},
	{"2 source engines claim the group, 1 fault", Config{Sources: 2, Rooms: 1, Openers: 1, Chunks: 1, Faults: 1, Kinds: "bpd", NoHints: true, NoProof: true, Connected: true}},
}

// long searches take an hour or two and up to 16 GB: make explore.
var long = []search{
	{"2 openers a side, 1 fault", Config{Sources: 1, Rooms: 1, Openers: 2, Chunks: 1, Faults: 1, NoHints: true, Connected: true}},
	{"2 rooms, no fault", Config{Sources: 1, Rooms: 2, Chunks: 1, Graph: true, Openers: 1, NoHints: true}},
	{"2 rooms, 1 fault", Config{Sources: 1, Rooms: 2, Chunks: 1, Openers: 1, Faults: 1, Kinds: engineFaults, NoHints: true, NoProof: true, Connected: true}},
	{"2 openers a side, 2 faults", Config{Sources: 1, Rooms: 1, Openers: 2, Chunks: 1, Faults: 2, Kinds: engineFaults, NoHints: true, NoProof: true, Connected: true}},
}

var longFlag = flag.Bool("long", false, "run the searches that take an hour")

// TestExploreComposed walks two and three composed engines.
func TestExploreComposed(t *testing.T) {
	for _, s := range searches {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			explore(t, s.cfg, true)
		})
	}
}

// TestExploreLong walks what does not fit into every run of the tests.
func TestExploreLong(t *testing.T) {
	if !*longFlag {
		return
	}
	for _, s := range long {
		t.Run(s.name, func(t *testing.T) { explore(t, s.cfg, true) })
	}
	for _, s := range longGroups {
		t.Run("groups "+s.name, func(t *testing.T) { exploreGroup(t, s.cfg) })
	}
}

// TestExploreOneEngine walks one engine whose counterpart may send anything at any time.
func TestExploreOneEngine(t *testing.T) {
	for _, s := range []search{
		{"source, 1 opener, 1 fault", Config{Alone: 'P', Sources: 1, Rooms: 1, Openers: 1, Chunks: 2, Faults: 1, Kinds: "maswqe"}},
		{"source, 2 openers, no fault", Config{Alone: 'P', Sources: 1, Rooms: 1, Openers: 2, Chunks: 1, Depth: 7}},
		{"destination, 1 opener, 1 fault", Config{Alone: 'D', Sources: 1, Rooms: 1, Openers: 1, Chunks: 1, Faults: 1, Kinds: "ncvf"}},
		{"destination, 2 openers, no fault", Config{Alone: 'D', Sources: 1, Rooms: 1, Openers: 2, Chunks: 1, Depth: 7}},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			s.cfg.Connected = true
			explore(t, s.cfg, s.cfg.Depth == 0)
		})
	}
}

// TestPackLosesNothing: a state that is packed and unpacked is the same.
func TestPackLosesNothing(t *testing.T) {
	for _, cfg := range []Config{{Sources: 1, Openers: 1, Chunks: 1}, {Sources: 2, Openers: 2, Chunks: 2}} {
		x := &explorer{Config: cfg}
		var st, got state
		st.faults = 3
		for e := range cfg.Sources + 1 {
			st.engine[e], st.plugin[e] = 1<<31+uint32(e), plugin{inc: 1, epoch: 2, down: e == 0, gone: 5, orphans: 3}
		}
		fill := func(side []opener) {
			for i := range side {
				side[i] = opener{seq: uint8(i) + 1, inc: 2, attempt: 2, sent: 2, epoch: 3, end: endUnknown, pair: 2, at: 1, asked: askedGrant | askedFence, flags: workerGone | sealed}
			}
		}
		fill(st.d[:cfg.Openers])
		for e := range cfg.Sources {
			st.toD[e], st.toP[e], st.link[e] = 7, 1<<20, linkGone
			fill(st.s[e][:cfg.Openers])
			for k := range cfg.Openers {
				for c := range cfg.Chunks {
					st.ops[e][k][c] = op{state: opSkipped, d: 2, epoch: 3, done: k == 0, cut: c == 0}
				}
			}
		}
		b := x.pack(nil, &st)
		if x.unpack(b, &got); got != st {
			t.Errorf("%+v\n%+v", st, got)
		}
		for i := range b { // every bit counts
			c := append([]byte(nil), b...)
			c[i] ^= 1
			var other state
			if x.unpack(c, &other); other == st {
				t.Errorf("byte %d of %d does not matter", i, len(b))
			}
		}
	}
}

func explore(t *testing.T, cfg Config, exhaustive bool) {
	at := time.Now()
	r, err := Run(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s; %d with a success; %v", r, r.Successes, time.Since(at).Round(time.Millisecond))
	if r.Violation != "" {
		t.Fatalf("\n%s", r.Story())
	}
	if exhaustive && r.Frontier > 0 {
		t.Errorf("%d states were not expanded", r.Frontier)
	}
	if cfg.Alone == 0 && r.Successes == 0 {
		t.Error("no destination ever succeeded: this search shows nothing")
	}
	if !cfg.Graph {
		return
	}
	t.Logf("%d states with two fresh attempts, %d of them cannot succeed; a run can go on for ever: %v", r.Fresh, r.Stuck, r.Cyclic)
	if r.Cyclic {
		t.Error("a run can go on for ever")
	}
	if cfg.SameAttempt {
		return // an abort of the first open may end the second
	}
	if r.Stuck > 0 || r.Fresh == 0 {
		t.Errorf("%d of %d fresh states cannot reach Success; the first:\n%s", r.Stuck, r.Fresh, r.Story())
	}
}
