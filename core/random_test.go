package core_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/coretest"
)

// walk is a random walk over the commands of the golden files.
type walk struct {
	script
	lines []string
	err   error // of the first line that broke a rule; what follows is not carried out
}

func (w *walk) do(format string, args ...any) {
	if w.err != nil {
		return
	}
	line := fmt.Sprintf(format, args...)
	w.lines = append(w.lines, line)
	cmd, cmdArgs, err := datadriven.ParseLine(line)
	if err == nil {
		_, err = w.run(cmd, cmdArgs)
	}
	w.err = err
}

func (w *walk) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// replay walks lines and, when all hold, lets everything end.
func replay(lines []string) *walk {
	w := &walk{}
	for _, l := range lines {
		w.do("%s", l)
	}
	w.finish()
	return w
}

// shrink leaves out lines as long as the same rule breaks, and returns the walk as a golden file: paste
// it into testdata and fill it in with -rewrite.
func shrink(lines []string, err error) string {
	rule, _, _ := strings.Cut(err.Error(), ":")
	for size := len(lines) / 2; size > 0; size /= 2 {
		for i := 1; i+size <= len(lines); { // the first line is the configuration
			less := slices.Delete(slices.Clone(lines), i, i+size)
			if w := replay(less); w.err != nil && strings.HasPrefix(w.err.Error(), rule+":") {
				lines, err = less, w.err
			} else {
				i += size
			}
		}
	}
	return fmt.Sprintf("%v\n\n# A random walk that broke a rule; everything ends after it.\n\n%s\n----\n", err, strings.Join(lines, "\n----\n\n"))
}

// choices are the commands that make sense now; what is more likely is there more often. Those that
// bring a room forward (weight 4 and more) are also in forth.
func (w *walk) choices(rooms int) (all, forth []string) {
	e := w.env
	var c []string
	add := func(weight int, format string, args ...any) {
		line := fmt.Sprintf(format, args...)
		for range weight {
			c = append(c, line)
			if weight >= 4 {
				forth = append(forth, line)
			}
		}
	}
	for _, g := range e.Engines() {
		n := g.Name
		if len(g.Out) > 0 {
			add(12, "deliver %s", n)
			for _, k := range []core.FrameKind{core.FrameAbort, core.FrameVerdict} {
				if i := slices.IndexFunc(g.Out, func(f core.Frame) bool { return f.Kind == k }); i > 0 {
					add(4, "deliver %s kind=%s", n, k)
				}
			}
		}
		for rank := range e.Size(g) {
			if !g.Alive(rank) {
				add(6, "worker-starts %s rank=%d", n, rank)
				continue
			}
			for room := 1; room <= rooms; room++ {
				if s := g.Slot(int64(room), rank); s < 0 || g.Words[coretest.SlotKey{Rank: rank, Slot: s}].Status.Terminal() {
					add(6, "open %s room=%d att=0 rank=%d", n, room, rank)
				}
				for att := range 2 {
					add(1, "open %s room=%d att=%d rank=%d", n, room, att, rank)
				}
				add(1, "open %s room=%d rank=%d deadline=4s", n, room, rank)
				if g.Slot(int64(room), rank) < 0 {
					continue
				}
				add(1, "abort %s room=%d rank=%d", n, room, rank)
				if g == e.D {
					add(6, "register D room=%d rank=%d from=%d pages=2", room, rank, 8*room+2*int(g.Slot(int64(room), rank)%3))
					add(1, "register D room=%d rank=%d", room, rank)
				} else {
					add(4, "send P room=%d rank=%d from=%d pages=1", room, rank, 8*room)
					add(4, "send P room=%d rank=%d from=%d pages=1 last", room, rank, 8*room+1)
					add(1, "send P room=%d rank=%d from=%d pages=2 last", room, rank, 8*room)
					add(1, "send P room=%d rank=%d last", room, rank)
				}
			}
			add(1, "worker-dies %s rank=%d", n, rank)
		}
		for k, word := range g.Words {
			if word.Status.Terminal() && word.Residency.Reusable() {
				c = append(c, fmt.Sprintf("release %s slot=%d rank=%d", n, k.Slot, k.Rank))
			}
		}
		switch {
		case !g.PluginUp:
			add(6, "plugin-starts %s", n)
		case g.Replacing != 0:
			add(6, "plugin-starts %s", n)
			add(1, "plugin-kept %s", n)
		case len(g.Old) == 0:
			add(1, "plugin-starts %s", n) // beside the one that is up
		}
		if g.PluginUp {
			add(1, "plugin-dies %s", n)
		}
		for _, epoch := range g.Old {
			add(1, "plugin-dies %s epoch=%d", n, epoch)
		}
		if len(g.Ending) > 0 {
			add(4, "plugin-ends %s", n)
		}
		add(2, "plugin-fenced %s", n)
		if g.Inc%10 < 4 {
			add(1, "restart %s", n)
		}
		if len(g.Grants) > 0 {
			add(8, "granted %s", n)
			add(1, "granted %s failed", n)
		}
		if len(g.Revokes) > 0 {
			add(3, "revoked %s", n)
			add(1, "revoked %s unknown", n)
		}
		if len(g.Fences) > 0 {
			add(3, "fenced %s", n)
			add(1, "fenced %s unknown", n)
		}
	}
	for i, o := range e.P.Ops {
		switch o.State {
		case coretest.OpOpen:
			add(12, "op-end P op=%d end=done", i+1)
			add(1, "op-end P op=%d end=done unquiet", i+1)
			add(1, "op-end P op=%d end=failed", i+1)
			add(1, "op-end P op=%d end=skipped unquiet", i+1)
			add(1, "op-end P op=%d end=aborted", i+1)
			add(1, "op-progress P op=%d bytes=500", i+1)
		case coretest.OpLinger:
			add(5, "op-quiesced P op=%d", i+1)
		default:
			if i == len(e.P.Ops)-1 {
				add(1, "op-again P op=%d", i+1) // a late end of an op that is gone
			}
		}
	}
	if e.Connected {
		add(1, "disconnect")
	} else {
		add(6, "connect")
	}
	add(3, "wait 1s")
	add(1, "wait 6s")
	add(1, "wait 16s")
	add(1, "wait 11s silent")
	add(1, "wait 305s")
	slices.Sort(c) // map order must not decide what a draw means
	return c, forth
}

// finish lets every op end and every clock run, and demands that everything ends and nothing is left:
// conservation at idle.
func (w *walk) finish() {
	e := w.env
	settle := func() {
		if !e.Connected {
			w.do("connect")
		}
		w.do("settle")
		for _, g := range e.Engines() {
			for len(g.Grants) > 0 && w.err == nil {
				w.do("granted %s", g.Name)
			}
			for len(g.Revokes) > 0 && w.err == nil {
				w.do("revoked %s", g.Name)
			}
			for len(g.Fences) > 0 && w.err == nil {
				w.do("fenced %s unknown", g.Name)
			}
			w.do("plugin-fenced %s", g.Name)
		}
		for i := 0; i < len(e.P.Ops) && w.err == nil; i++ {
			switch e.P.Ops[i].State {
			case coretest.OpOpen:
				w.do("op-end P op=%d end=done", i+1)
			case coretest.OpLinger:
				w.do("op-quiesced P op=%d", i+1)
			}
		}
		w.do("settle")
	}
	if w.err != nil {
		return
	}
	for range 4 {
		settle()
		w.do("wait 331s")
	}
	settle()
	for range 3 { // the ladder
		w.do("wait 6s")
		settle()
	}
	for _, g := range e.Engines() {
		g.M.Rooms(func(v *core.View) bool {
			if v.State.Live() {
				w.fail("R1: %s: not terminal: %s", g.Name, v.Why())
			}
			return true
		})
		for len(g.Old) > 0 && w.err == nil {
			if !slices.Contains(g.Ending, g.Old[0]) {
				w.fail("retire: %s: epoch %d is not ended, though its time is over", g.Name, g.Old[0])
			}
			w.do("plugin-ends %s", g.Name)
			w.do("plugin-fenced %s", g.Name)
		}
		if g.PluginUp {
			w.do("plugin-dies %s", g.Name) // rung 5 of docs/protocol.md
		}
		w.do("plugin-fenced %s", g.Name)
		for k, word := range g.Words {
			if !word.Residency.Reusable() {
				w.fail("R4: %s slot %d: pages are still %s", g.Name, k.Slot, word.Residency)
			}
			w.do("release %s slot=%d rank=%d", g.Name, k.Slot, k.Rank)
		}
	}
	w.do("settle")
	w.do("wait 901s") // tombstones and abort marks 600 s, placeholders 900 s
	for _, g := range e.Engines() {
		if g.M.Counts() != (core.Counts{}) {
			w.fail("not idle: %s", g.Held())
		}
	}
}

var configs = []string{
	"config plain", "config manual", "config", "config plain ranks=2", "config manual peer-ops=1 op-bytes=1024", "config plain marks=1 tombstones=1 rooms=1", "config manual room-bytes=3000 admit-queue=1",
	"config manual quarantine=1", "config plain quarantine=1 quarantine-age=30s retire=1s",
	"config plain ranks=2 d-ranks=1 heads=2", "config plain ranks=1 d-ranks=2 heads=1 peer-ops=1", "config plain heads=2 tokens=16:8 op-bytes=1024", "config ranks=2 d-ranks=1 heads=1 mla",
	"config plain heads=2 tokens=8:16", "config plain ranks=2 state",
}

// TestRandom walks at random and checks every rule after every step (coretest.Env.Check), then lets
// everything end.
func TestRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		w := &walk{}
		w.do("%s", configs[rng.IntN(len(configs))])
		rooms := 1 + rng.IntN(2)
		for range 20 + rng.IntN(80) {
			c, forth := w.choices(rooms)
			if len(forth) > 0 && rng.IntN(3) > 0 {
				c = forth
			}
			w.do("%s", c[rng.IntN(len(c))])
		}
		lines := slices.Clone(w.lines)
		w.finish()
		if w.err != nil {
			t.Fatal(shrink(lines, w.err))
		}
	})
}
