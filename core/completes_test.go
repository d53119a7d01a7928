package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// manyRanks is a bound destination of n ranks at one engine, each with one page in two pools and rank 0 with one in a
// third, whose source has a rank for each and sits at another one, and the RankEnd that completes it.
func manyRanks(tb testing.TB, n int32) (m *Machine, r *room, f *Frame) {
	m, err := New(Config{Incarnation: 1, Clocks: DefaultClocks(), Limits: DefaultLimits()})
	if err != nil {
		tb.Fatal(err)
	}
	s, d := statemachine.Opener{Inc: 2, Seq: 1}, statemachine.Opener{Inc: 1, Seq: 1}
	in := []Event{
		{Kind: PluginUp, Backend: "tcp", Epoch: 1},
		{Kind: PeerHello, Node: "peer", Inc: s.Inc},
		{Kind: PeerGroup, Group: "prefill", PeerGroup: "decode", Role: statemachine.Source, Size: n, Backends: []string{"tcp"}},
	}
	page := []layout.Run{{Count: 1, Stride: 1}}
	f = &Frame{Kind: FrameRankEnd, Room: 1, S: s, D: d, Quiet: true}
	for i := range n {
		id := SessionID(i) + 1
		in = append(in, Event{Kind: SessionUp, Session: id, Group: "decode", Role: statemachine.Destination, Rank: i, Size: n, Slots: 1})
		register, sent := Event{Kind: Register, Session: id}, RankSent{Rank: i, Chunks: 1}
		for o := int32(0); o < 2 || o == 2 && i == 0; o++ {
			in = append(in, Event{Kind: PoolUp, Session: id, Pool: uint64(3*i + o + 1), Ordinal: o, Pages: 1, Layers: 1, PageBytes: 1})
			register.Parts = append(register.Parts, Part{Ordinal: o, Runs: page})
			sent.Parts = append(sent.Parts, PartSent{Ordinal: o, Pages: 1})
		}
		in = append(in, Event{Kind: Open, Session: id, Room: 1, PeerGroup: "prefill"}, register)
		f.Sent = append(f.Sent, sent)
	}
	in = append(in, Event{Kind: PeerFrame, Frame: Frame{Kind: FrameBound, Room: 1, S: s, D: d}})
	var out Effects
	m.Step(1, in, &out)
	if r = m.rooms.at(0); r.sm.State != statemachine.Bound {
		tb.Fatalf("the destination is %s", r.sm.State)
	}
	return m, r, f
}

// TestCompletes: a RankEnd completes a room only if it says of every rank exactly what that rank's counterparts have
// registered (R11).
func TestCompletes(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Frame)
		want   bool
	}{
		"all":                             {func(*Frame) {}, true},
		"a rank is missing":               {func(f *Frame) { f.Sent = f.Sent[1:] }, false},
		"a rank twice":                    {func(f *Frame) { f.Sent[0].Rank = 1 }, false},
		"a rank that is not":              {func(f *Frame) { f.Sent[0].Rank = 4 }, false},
		"a page short":                    {func(f *Frame) { f.Sent[2].Parts[1].Pages = 0 }, false},
		"a page more":                     {func(f *Frame) { f.Sent[2].Parts[0].Pages = 2 }, false},
		"less than none":                  {func(f *Frame) { f.Sent[2].Parts[0].Pages = -1 }, false},
		"a pool is missing":               {func(f *Frame) { f.Sent[3].Parts = f.Sent[3].Parts[:1] }, false},
		"a pool that nobody registered":   {func(f *Frame) { f.Sent[0].Parts = append(f.Sent[0].Parts, PartSent{Ordinal: 3, Pages: 1}) }, false},
		"a pool that only rank 0 has":     {func(f *Frame) { f.Sent[3].Parts = append(f.Sent[3].Parts, PartSent{Ordinal: 2, Pages: 1}) }, false},
		"nothing of a pool that is not":   {func(f *Frame) { f.Sent[0].Parts = append(f.Sent[0].Parts, PartSent{Ordinal: 3}) }, true},
		"a pool in two entries, together": {func(f *Frame) { f.Sent[0].Parts = append(f.Sent[0].Parts, PartSent{Ordinal: 1}) }, true},
		"an aux record that was changed":  {func(f *Frame) { f.Aux = []byte("x") }, false},
	} {
		m, r, f := manyRanks(t, 4)
		if c.change(f); m.completes(r, m.firstPair(r), f) != c.want {
			t.Errorf("%s: it completes the room: %t, want %t", name, !c.want, c.want)
		}
	}
}

// BenchmarkCompletes is rule R11 over the RankEnd of a large group. It reports the time over that of half the
// ranks: about 2, and 4 if it were quadratic.
func BenchmarkCompletes(b *testing.B) {
	var times [2]time.Duration
	for i, n := range []int32{MaxRanks / 2, MaxRanks} {
		m, r, f := manyRanks(b, n)
		b.Run(fmt.Sprintf("%dx%d", n, n), func(b *testing.B) {
			for b.Loop() {
				if !m.completes(r, m.firstPair(r), f) {
					b.Fatal("every page was sent")
				}
			}
			times[i] = b.Elapsed() / time.Duration(b.N)
			if i > 0 {
				b.ReportMetric(float64(times[1])/float64(times[0]), "times-half")
			}
		})
	}
}
