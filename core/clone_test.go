package core_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/coretest"
)

// TestClone: a clone is not touched by what happens to the original, and given the same events it does
// the same.
func TestClone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		w := &walk{}
		step := func(n int) {
			for range n {
				c, forth := w.choices(2)
				if len(forth) > 0 && rng.IntN(3) > 0 {
					c = forth
				}
				w.do("%s", c[rng.IntN(len(c))])
			}
		}
		w.do("%s", configs[rng.IntN(len(configs))])
		step(rng.IntN(60))
		g := w.env.Engines()[rng.IntN(2)]
		original := g.M
		clone := original.Clone()
		then := original.Hash()

		type batch struct {
			now int64
			in  []core.Event
		}
		var batches []batch
		w.env.OnStep = func(at *coretest.Engine, in []core.Event) {
			if at.M == original {
				batches = append(batches, batch{int64(w.env.Now), slices.Clone(in)})
			}
		}
		step(20)
		if w.err != nil {
			t.Fatal(w.err)
		}
		if got := clone.Hash(); got != then {
			t.Fatal("the clone changed with the original")
		}
		for _, b := range batches {
			var out core.Effects
			clone.Step(b.now, b.in, &out)
		}
		if clone.Hash() != original.Hash() || clone.Counts() != original.Counts() || !reflect.DeepEqual(clone.Stats(), original.Stats()) {
			t.Fatal("the clone went another way")
		}
	})
}

// TestReset: a machine with a history that is reset is a new one, and given the same events it does the same.
func TestReset(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
		w := &walk{}
		w.do("%s", configs[rng.IntN(len(configs))])
		type batch struct {
			now int64
			in  []core.Event
		}
		var life []batch // of D, from its last start on
		var lives *core.Machine
		w.env.OnStep = func(g *coretest.Engine, in []core.Event) {
			if g != w.env.D {
				return
			}
			if g.M != lives {
				lives, life = g.M, nil
			}
			life = append(life, batch{int64(w.env.Now), slices.Clone(in)})
		}
		w.do("restart D")
		for range 20 + rng.IntN(60) {
			c, forth := w.choices(2)
			if len(forth) > 0 && rng.IntN(3) > 0 {
				c = forth
			}
			w.do("%s", c[rng.IntN(len(c))])
		}
		if w.err != nil {
			t.Fatal(w.err)
		}
		cfg := w.env.Core
		cfg.Incarnation = w.env.D.Inc
		used := w.env.Engines()[rng.IntN(2)].M.Clone()
		if err := used.Reset(core.Config{}); err == nil {
			t.Fatal("an empty configuration was taken")
		}
		if err := used.Reset(cfg); err != nil {
			t.Fatal(err)
		}
		fresh, err := core.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		var a, b core.Effects
		for i, l := range life {
			a.Reset()
			b.Reset()
			used.Step(l.now, l.in, &a)
			fresh.Step(l.now, l.in, &b)
			if !reflect.DeepEqual(a.Words, b.Words) || !reflect.DeepEqual(a.Replies, b.Replies) || !reflect.DeepEqual(a.Frames, b.Frames) ||
				!reflect.DeepEqual(a.Plugin, b.Plugin) || !reflect.DeepEqual(a.Records, b.Records) || used.Next() != fresh.Next() {
				t.Fatalf("step %d: the machine that was reset says %+v, a new one %+v", i, a, b)
			}
		}
		if d := w.env.D.M; used.Hash() != d.Hash() || used.Counts() != d.Counts() || used.Stats() != d.Stats() || fresh.Hash() != d.Hash() {
			t.Fatal("the machine that was reset went another way")
		}
	})
}

// TestHashKnowsNoTime: the same events at other times lead to the same hash, after every step.
func TestHashKnowsNoTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 2))
		a, b := &walk{}, &walk{}
		cfg := configs[rng.IntN(len(configs))]
		a.do("%s", cfg)
		b.do("%s", cfg)
		b.do("wait 12345s")
		for range 40 {
			c, forth := a.choices(2)
			if len(forth) > 0 && rng.IntN(3) > 0 {
				c = forth
			}
			line := c[rng.IntN(len(c))]
			a.do("%s", line)
			b.do("%s", line)
			if a.err != nil || b.err != nil {
				t.Fatal(a.err, b.err)
			}
			for i, g := range a.env.Engines() {
				if g.M.Hash() != b.env.Engines()[i].M.Hash() {
					t.Fatalf("%s: the hash depends on time after %q", g.Name, line)
				}
			}
		}
	})
}

// TestHashTellsStatesApart: every step of a room's life that an engine takes part in changes its hash,
// and rooms that differ in one thing differ.
func TestHashTellsStatesApart(t *testing.T) {
	life := []string{
		"open P room=1", "send P room=1 from=0 pages=1", "open D room=1", "deliver D", "register D room=1 from=10 pages=2", "deliver D", "deliver P",
		"deliver D", "op-progress P op=1 bytes=5", "op-end P op=1 end=done", "send P room=1 from=1 pages=1 last", "op-end P op=2 end=done",
		"deliver P n=3", "deliver P", "deliver D", "release P room=1", "release D room=1", "wait 601s",
	}
	w := &walk{}
	w.do("config plain")
	type both struct{ p, d uint64 }
	seen := map[both]string{}
	for _, line := range life {
		w.do("%s", line)
		if w.err != nil {
			t.Fatal(w.err)
		}
		h := both{w.env.P.M.Hash(), w.env.D.M.Hash()}
		if old, dup := seen[h]; dup {
			t.Errorf("%q leaves the hash as %q", line, old)
		}
		seen[h] = line
	}
	variants := map[uint64]string{}
	for _, line := range []string{
		"open D room=1", "open D room=2", "open D room=1 att=1", "open D room=1 deadline=2s", "open P room=1", "drain D", "plugin-dies D", "worker-dies D",
		"group D refused=layout_mismatch", "peer-draining D", "disconnect",
	} {
		w := &walk{}
		w.do("config plain")
		w.do("%s", line)
		h := w.env.D.M.Hash()
		if line == "open P room=1" {
			h = w.env.P.M.Hash()
		}
		if old, dup := variants[h]; dup {
			t.Errorf("%q and %q hash the same", line, old)
		}
		variants[h] = line
	}
}

// BenchmarkRoom is a room's life at both engines: open, register, bind, one op, verdict, release. It
// reports events, frames and workers' requests in all, a second.
func BenchmarkRoom(b *testing.B) {
	e, err := coretest.New(coretest.Config{Core: core.Config{Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}, Plain: true, Pages: 1 << 16}, nil)
	if err != nil {
		b.Fatal(err)
	}
	p, d := e.P.M, e.D.M
	events := 0
	var out core.Effects
	var frames []core.Frame
	var op core.OpID
	step := func(m *core.Machine, ev core.Event) {
		events++
		out.Reset()
		m.Step(int64(e.Now), []core.Event{ev}, &out)
		for i := range out.Frames {
			frames = append(frames, out.Frames[i].Frame.Clone())
		}
		if len(out.Plugin) > 0 {
			op = out.Plugin[0].Op
		}
	}
	deliver := func(m *core.Machine) {
		pending := frames
		frames = nil
		for i := range pending {
			step(m, core.Event{Kind: core.PeerFrame, Frame: pending[i]})
		}
	}
	parts := coretest.Pages(0, 64)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		room := int64(i)
		e.Now += 1e6
		step(p, core.Event{Kind: core.Open, Session: 1, Room: room})
		step(d, core.Event{Kind: core.Open, Session: 1, Room: room, PeerGroup: "prefill"})
		deliver(p)
		step(d, core.Event{Kind: core.Register, Session: 1, Parts: parts})
		deliver(p)
		deliver(d)
		deliver(p)
		step(p, core.Event{Kind: core.Send, Session: 1, Parts: parts, Last: true})
		deliver(d)
		step(p, core.Event{Kind: core.OpEnd, Op: op, End: core.EndDone, Quiet: true, Bytes: 64 << 10})
		deliver(d)
		deliver(p)
		step(p, core.Event{Kind: core.Release, Session: 1})
		step(d, core.Event{Kind: core.Release, Session: 1})
	}
	b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "events/s")
	if got := d.Stats().Verdicts[2][1]; got != uint64(b.N) {
		b.Fatalf("%d of %d rooms succeeded", got, b.N)
	}
}
