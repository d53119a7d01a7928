package core_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core/coretest"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// spanWalk is a random walk over the commands of the golden files of groups that span engines.
type spanWalk struct {
	spanScript
	lines []string
	err   error // of the first line that broke a rule; what follows is not carried out
}

func (w *spanWalk) do(format string, args ...any) {
	if w.err != nil {
		return
	}
	line := fmt.Sprintf(format, args...)
	w.lines = append(w.lines, line)
	w.out.Reset()
	defer func() {
		if p := recover(); p != nil { // a command that makes no sense without one that was left out, or a fault
			w.err = fmt.Errorf("panic: %v", p)
		}
	}()
	cmd, cmdArgs, err := datadriven.ParseLine(line)
	if err == nil {
		err = w.run(cmd, cmdArgs)
	}
	w.err = err
}

var layoutsOfSpans = []string{
	"span P1=0 D1=0 D2=1 heads=2", "span P1=0 P2=1 D1=0 heads=2", "span P1=0 P2=1 D1=0 D2=1", "span P1=0 P2=1 D1=0,1 D2=2,3 heads=4", "span P1=0,1 D1=0 D2=1",
}

// choices are the commands that make sense now; what brings the room forward is there more often.
func (w *spanWalk) choices() (out []string) {
	add := func(weight int, format string, args ...any) {
		for range weight {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	for _, g := range w.Engines {
		for _, o := range w.Engines {
			if !w.Linked(g, o) {
				continue
			}
			if n := w.Waiting(g, o); n > 0 {
				add(12, "deliver %s %s", g.Name, o.Name)
				add(2, "deliver %s %s kind=Abort", g.Name, o.Name)
				add(2, "deliver %s %s kind=Verdict", g.Name, o.Name)
			}
			if g.Name < o.Name {
				if w.Down(g, o) {
					add(6, "connect %s %s", g.Name, o.Name)
				} else {
					add(1, "disconnect %s %s", g.Name, o.Name)
				}
			}
		}
		att, live := w.Newest(g)
		switch {
		case !live && att < 3:
			add(6, "open %s att=%d", g.Name, att+1)
		case live && g.Role == statemachine.Destination:
			add(5, "register %s from=%d pages=1", g.Name, 10*att)
			add(1, "abort %s", g.Name)
		case live:
			add(5, "send %s from=%d pages=1 last", g.Name, 10*att)
			add(1, "abort %s", g.Name)
		default:
			add(1, "release %s", g.Name)
		}
		if g.Inc%100 < 2 {
			add(1, "restart %s", g.Name)
		}
		add(1, "plugin-dies %s", g.Name)
		if g.Unproven() {
			add(4, "plugin-fenced %s", g.Name)
		}
		if g.Asked() {
			add(4, "fenced %s", g.Name)
			add(1, "fenced %s unknown", g.Name)
		}
		for i, o := range g.Ops {
			switch {
			case o.State == coretest.OpOpen:
				add(12, "op-end %s op=%d", g.Name, i+1)
				add(1, "op-end %s op=%d unquiet", g.Name, i+1)
				add(1, "op-end %s op=%d end=failed", g.Name, i+1)
			case o.State == coretest.OpLinger:
				add(6, "op-quiesced %s op=%d", g.Name, i+1)
			}
		}
	}
	add(2, "wait 1s")
	add(1, "wait 16s")
	add(1, "wait 11s silent")
	add(1, "wait 305s")
	slices.Sort(out)
	return out
}

// finish lets everything end: every record does, by a clock at the latest.
func (w *spanWalk) finish() {
	for _, a := range w.Engines {
		for _, b := range w.Engines {
			if w.Linked(a, b) && a.Name < b.Name && w.Down(a, b) {
				w.do("connect %s %s", a.Name, b.Name)
			}
		}
	}
	w.do("settle")
	for range 4 {
		w.do("wait 400s")
		w.do("settle")
	}
	for _, g := range w.Engines {
		if w.err == nil {
			if _, live := w.Newest(g); live {
				w.err = fmt.Errorf("R1: %s: the room has not ended", g.Name)
			}
		}
	}
}

func replaySpan(lines []string) *spanWalk {
	w := &spanWalk{}
	for _, l := range lines {
		w.do("%s", l)
	}
	w.finish()
	return w
}

// TestSpanRandom walks groups that span engines at random and checks coretest.Span.Check after every step.
func TestSpanRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		w := &spanWalk{}
		w.do("%s", layoutsOfSpans[rng.IntN(len(layoutsOfSpans))])
		for range 30 + rng.IntN(120) {
			c := w.choices()
			w.do("%s", c[rng.IntN(len(c))])
		}
		lines := slices.Clone(w.lines)
		if w.finish(); w.err == nil {
			return
		}
		err := w.err
		rule, _, _ := strings.Cut(err.Error(), ":")
		for size := len(lines) / 2; size > 0; size /= 2 {
			for i := 1; i+size <= len(lines); { // the first line says which engines there are
				less := slices.Delete(slices.Clone(lines), i, i+size)
				if r := replaySpan(less); r.err != nil && strings.HasPrefix(r.err.Error(), rule+":") {
					lines, err = less, r.err
				} else {
					i += size
				}
			}
		}
		t.Fatalf("%v\n\n%s\n----\n", err, strings.Join(lines, "\n----\n\n"))
	})
}
