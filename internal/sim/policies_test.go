package sim

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/trace"
)

const llama70B = 327_680

func smallTrace(seed uint64) PoliciesConfig {
	reqs := trace.Generate(500, seed)
	trace.Spread(reqs, seed)
	return PoliciesConfig{Requests: reqs, Peers: 1, TokenBytes: llama70B}
}

// TestPolicies: on a trace of the published distribution the shipped policy reaches its targets beside FIFO.
// That every room ends in Success and every byte is moved, Policies itself demands.
func TestPolicies(t *testing.T) {
	res, err := Policies(t.Context(), smallTrace(1))
	if err != nil {
		t.Fatal(err)
	}
	if len(res) != 2*(len(policies)+1) {
		t.Fatalf("%d results", len(res))
	}
	for _, r := range res {
		t.Logf("%-6s %-11s mean %.3f s, p50 %.3f, p99 %.3f, worst %.3f; %.2f, %.2f", r.Variant, r.Policy, r.Mean, r.P50, r.P99, r.Worst, r.MeanGain, r.WorstRatio)
		if best := res[len(policies)]; r.Variant == best.Variant && r.Mean < best.Mean {
			t.Errorf("%s: %s has a better mean than the oracle: %.3f s", r.Variant, r.Policy, r.Mean)
		}
		if r.Policy == "srf" && !*r.Met {
			t.Errorf("%s: the mean is %.2f times better than FIFO's and the worst room takes %.2f times what FIFO's takes", r.Variant, r.MeanGain, r.WorstRatio)
		}
		if r.Policy == "fifo" && (r.MeanGain != 1 || r.WorstRatio != 1) {
			t.Errorf("FIFO beside itself: %+v", r)
		}
		if (r.Empty > 0) != (r.Variant == "cached") {
			t.Errorf("%s: %d rooms move nothing", r.Variant, r.Empty)
		}
	}
}

// TestPoliciesSameSeed: the same trace gives the same figures, and several peers change nothing about that.
func TestPoliciesSameSeed(t *testing.T) {
	cfg := smallTrace(1)
	cfg.Requests, cfg.Peers = cfg.Requests[:150], 3
	a, err := Policies(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := Policies(t.Context(), cfg); err != nil || !reflect.DeepEqual(a, b) {
		t.Errorf("%v\n%+v\n%+v", err, a, b)
	}
}

// TestPoliciesByHand: figures that can be worked out. A page has 1 MB, an op at most 67 pages; three requests
// in a span of 10 s and 800 MB make a link of 100 MB/s.
func TestPoliciesByHand(t *testing.T) {
	ids := func(from, n int64) []int64 {
		out := make([]int64, n)
		for i := range out {
			out[i] = from + int64(i)
		}
		return out
	}
	reqs := []trace.Request{
		{Timestamp: 0, InputLength: 700, HashIDs: ids(0, 2)},
		{Timestamp: 1000, InputLength: 50, HashIDs: ids(2, 1)},
		{Timestamp: 10_000, InputLength: 50, HashIDs: ids(2, 1)},
	}
	res, err := Policies(t.Context(), PoliciesConfig{Requests: reqs, Peers: 1, TokenBytes: 1e6})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res {
		if r.Variant != "all" {
			continue
		}
		if r.Policy == oraclePolicy { // the second room goes before what is left of the first
			if r.Worst < 7.499 || r.Worst > 7.501 || r.P50 < 0.499 || r.P50 > 0.501 || r.Mean < 2.833 || r.Mean > 2.834 {
				t.Errorf("%+v", r)
			}
			continue
		}
		// All ops of the first room fit into the window (1 GiB): whatever the policy, the second waits for them.
		if r.Rate != 100e6 || r.Bytes != 800e6 || r.Worst < 6.999 || r.Worst > 7.001 || r.P50 < 6.499 || r.P50 > 6.501 || r.Mean < 4.666 || r.Mean > 4.667 {
			t.Errorf("%+v", r)
		}
	}
	if r := res[0]; r.Empty != 1 || r.Bytes != 750e6 {
		t.Errorf("the last request is cached: %+v", r)
	}
}

// TestPoliciesStarvation: short rooms arrive for 400 s, faster than the link is. The shipped policy ends the long
// room that came first; without its age bound the room starves until a clock fails it, which is an error.
func TestPoliciesStarvation(t *testing.T) {
	cfg := PoliciesConfig{Peers: 1, TokenBytes: llama70B, Requests: []trace.Request{{InputLength: 40_000}}}
	for i := range int64(400) {
		cfg.Requests = append(cfg.Requests, trace.Request{Timestamp: 1000 * i, InputLength: 3000})
	}
	cfg.Requests = append(cfg.Requests, trace.Request{Timestamp: 600_000, InputLength: 1})
	var tokens []int
	for _, q := range cfg.Requests {
		tokens = append(tokens, q.InputLength)
	}
	run := func(age time.Duration) error {
		p := core.NewSRF()
		p.AgeBound = age
		r, err := newReplay(&cfg, tokens, p)
		if err != nil {
			t.Fatal(err)
		}
		return r.run(t.Context())
	}
	if err := run(core.NewSRF().AgeBound); err != nil {
		t.Error(err)
	}
	if err := run(time.Hour); err == nil || !strings.Contains(err.Error(), "room 0 failed 33") || !strings.HasSuffix(err.Error(), ": input_timeout") {
		t.Errorf("without an age bound: %v", err)
	}
}

// TestOracleSharesTheLink: two rooms of two peers get half of the link each, as with every policy, and a later and
// shorter one of the second peer goes first there.
func TestOracleSharesTheLink(t *testing.T) {
	cfg := PoliciesConfig{Peers: 2, TokenBytes: 1e6, Requests: []trace.Request{{InputLength: 400}, {InputLength: 300}, {Timestamp: 10_000, InputLength: 1}, {Timestamp: 10_000, InputLength: 99}}}
	tokens := []int{400, 300, 0, 100} // 800 MB in 10 s at 80 %: a link of 100 MB/s
	r, err := newReplay(&cfg, tokens, core.NewFIFO())
	if err != nil {
		t.Fatal(err)
	}
	r.rooms[3].at = int64(time.Second) // to the second peer, when 250 MB of its first room are left
	r.rooms[2].at = int64(time.Second)
	r.oracle()
	for i, want := range []float64{8, 8, 0, 2} {
		if got := float64(r.rooms[i].took) / 1e9; got < want-1e-6 || got > want+1e-6 {
			t.Errorf("room %d took %.6f s, want %.0f", i, got, want)
		}
	}
}

func TestPoliciesRefuses(t *testing.T) {
	for _, c := range []struct {
		name, want string
		change     func(*PoliciesConfig)
	}{
		{"no peer", "0 peers: want 1 to", func(c *PoliciesConfig) { c.Peers = 0 }},
		{"no bytes", "0 bytes a token: want 1 to", func(c *PoliciesConfig) { c.TokenBytes = 0 }},
		{"nothing", "arrive at one time", func(c *PoliciesConfig) { c.Requests = nil }},
		{"one moment", "arrive at one time", func(c *PoliciesConfig) { c.Requests = c.Requests[:1] }},
		{"too many bytes", "requests have more than", func(c *PoliciesConfig) {
			c.TokenBytes, c.Requests = MaxTokenBytes, nil
			for i := range int64(40_000) {
				c.Requests = append(c.Requests, trace.Request{Timestamp: i, InputLength: trace.MaxTokens, HashIDs: []int64{i}})
			}
		}},
	} {
		cfg := smallTrace(1)
		c.change(&cfg)
		if _, err := Policies(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// TestWire: the link does its rate's worth of work whenever it has something, peers that have something get
// equal parts, and ops of a peer are done in order.
func TestWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const rate = 1e6 // a byte is 1,000 ns
		w := newWire(rate, rapid.IntRange(1, 4).Draw(t, "peers"))
		var sent, next core.OpID
		var work, idle int64
		for sent < 30 || next < sent {
			at, ok := w.next()
			if sent < 30 && (!ok || rapid.Bool().Draw(t, "send")) {
				// At a time that is not after the next end.
				gap := rapid.Int64Range(0, 5e6).Draw(t, "gap")
				if ok {
					gap = min(gap, at-w.now)
				} else {
					idle += gap
				}
				w.advance(w.now+gap, func(flight) { next++ })
				bytes := rapid.Int64Range(1, 1e4).Draw(t, "bytes")
				sent++
				work += bytes * 1000
				w.send(core.PeerID(rapid.IntRange(0, len(w.peers)-1).Draw(t, "peer")), sent, bytes)
				continue
			}
			if !ok {
				t.Fatalf("%d of %d ops are done and the link has nothing", next, sent)
			}
			before := next
			w.advance(at, func(flight) { next++ })
			if next == before {
				t.Fatal("nothing is done when something should be")
			}
		}
		if late := w.now - idle - work; late < -1000 || late > 1000 {
			t.Fatalf("%d ns of work took %d", work, w.now-idle)
		}
	})
}

// TestWireShares: two peers with ops in flight get half each, and the one that is left gets all.
func TestWireShares(t *testing.T) {
	w := newWire(1000, 2) // a byte is 1 ms
	w.send(0, 1, 10)
	w.send(0, 2, 10)
	w.send(1, 3, 30)
	type end struct {
		op core.OpID
		at int64
	}
	var got []end
	for at, ok := w.next(); ok; at, ok = w.next() {
		w.advance(at, func(f flight) { got = append(got, end{f.op, at / 1e6}) })
	}
	if want := []end{{1, 20}, {2, 40}, {3, 50}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

type closed core.PeerID

func (c closed) Open(p core.PeerID) bool { return p != core.PeerID(c) }

// TestRoundRobin: rooms take turns op by op; a room whose peer is closed is passed over and keeps its place.
func TestRoundRobin(t *testing.T) {
	p := new(roundRobin)
	for room := range int32(4) {
		p.Add(room, core.PeerID(room%2), 0, 0, 0)
	}
	serve := func(w closed) int32 {
		room, ok := p.Next(0, w)
		if !ok {
			return -1
		}
		p.Charge(core.PeerID(room%2), 1)
		p.Add(room, core.PeerID(room%2), 0, 0, 0)
		return room
	}
	name := func(room int32) uint64 { return uint64(room) }
	clone, hash := p.Clone(), p.Hash(name)
	for i, want := range []struct {
		closed closed
		room   int32
	}{{9, 0}, {9, 1}, {9, 2}, {1, 0}, {1, 2}, {9, 3}, {9, 1}, {9, 0}} {
		if got := serve(want.closed); got != want.room {
			t.Fatalf("op %d is of room %d, want %d", i, got, want.room)
		}
	}
	if clone.Hash(name) != hash || p.Hash(name) == hash {
		t.Error("the clone took part, or the turns do not count")
	}
	for room := range int32(4) {
		p.Remove(room)
		p.Remove(room)
	}
	if serve(9) != -1 || p.Len() != 0 || clone.Len() != 4 {
		t.Errorf("%d and %d rooms are left", p.Len(), clone.Len())
	}
}
