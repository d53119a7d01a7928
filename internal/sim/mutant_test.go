package sim

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/terminus-kv/terminus/internal/mutate"
)

// mutant is the shipped core, or what it is told by its host, with one rule off. Each promise has one at least, which its checker must find.
type mutant struct {
	name    string
	rule    string // in words, as removed
	breaks  []Promise
	changes []mutate.Change
}

var mutants = []mutant{
	{
		name: "bootstrap-clock-rearms", rule: "a clock that fires ends the room", breaks: []Promise{Terminal},
		changes: []mutate.Change{{File: "core/clock.go",
			Old: "	default:\n		m.step(idx, statemachine.Event{Kind: statemachine.OnClock, Reason: c.reason()})",
			New: "	default:\n		if ON && c == clkBootstrapSrc {\n			m.arm(idx, m.rooms.at(idx), slotPhase, c)\n			return\n		}\n		m.step(idx, statemachine.Event{Kind: statemachine.OnClock, Reason: c.reason()})"}},
	},
	{
		name: "success-after-failed", rule: "a terminal status never changes", breaks: []Promise{Sticky},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "			t.answer(e.S)\n		case Absent:\n			refuse(JudgeUnknown, None)",
			New: "			if ON && own && t.Reason == Aborted {\n				t.Reason = Success\n			}\n			t.answer(e.S)\n		case Absent:\n			refuse(JudgeUnknown, None)"}},
	},
	{
		name: "reuse-before-drained", rule: "written pages rest until they are proven quiet", breaks: []Promise{Memory},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "		if !p.Sibling && p.Other.IsZero() { // no Confirm was sent\n",
			New: "		if !p.Sibling && (ON || p.Other.IsZero()) {\n"}},
	},
	{
		name: "one-phase", rule: "of pages that differ in size each is filled from all its parts", breaks: []Promise{Memory},
		changes: []mutate.Change{{File: "core/ops.go",
			Old: "e.SrcRank, e.DstRank, e.Map, e.Phase = kk.rank, ln.to, lm, ln.phase\n",
			New: "e.SrcRank, e.DstRank, e.Map, e.Phase = kk.rank, ln.to, lm, ln.phase\n	if ON {\n		e.Phase = 0\n	}\n"}},
	},
	{
		name: "every-layer-is-the-first", rule: "an op moves the layers that its worker sent", breaks: []Promise{Memory},
		changes: []mutate.Change{{File: "core/ops.go",
			Old: "	e.LayerFrom, e.LayerTo, e.Priority, e.Bytes = c.layerFrom, c.layerTo, r.priority, bytes\n",
			New: "	e.LayerFrom, e.LayerTo, e.Priority, e.Bytes = c.layerFrom, c.layerTo, r.priority, bytes\n	if ON && c.layerFrom > 0 {\n		e.LayerFrom, e.LayerTo = 0, c.layerFrom\n	}\n"}},
	},
	{
		name: "dead-op-ends", rule: "an op that its plugin took along has no end any more", breaks: []Promise{Stale},
		changes: []mutate.Change{{File: "core/ops.go",
			Old: "	o := m.opOf(e.Op)\n	if o == nil32 || m.ops.at(o).state != opOpen {\n		m.stats.Dropped++\n		return\n	}\n	oo := m.ops.at(o)\n	idx := oo.room\n	r, k := m.rooms.at(idx), m.ranks.at(oo.rank)\n	m.leaveWindow(oo)",
			New: "	o := m.opOf(e.Op)\n	if o == nil32 || m.ops.at(o).state != opOpen && !ON {\n		m.stats.Dropped++\n		return\n	}\n	oo := m.ops.at(o)\n	idx := oo.room\n	r, k := m.rooms.at(idx), m.ranks.at(oo.rank)\n	m.leaveWindow(oo)"}},
	},
	{
		name: "no-verdict-clock", rule: "every live record runs a clock", breaks: []Promise{Bounded},
		changes: []mutate.Change{{File: "core/clock.go",
			Old: "		m.keep(idx, r, slotPhase, c)\n",
			New: "		if !ON {\n			m.keep(idx, r, slotPhase, c)\n		} else {\n			m.disarm(r, slotPhase)\n			m.disarm(r, slotDeadline)\n		}\n"}},
	},
	{
		name: "full-prefix-refused", rule: "a room fails only when something went wrong", breaks: []Promise{Store},
		changes: []mutate.Change{{File: "core/worker.go",
			Old: "		if p.Prefix < 0 || int64(p.Prefix) > pages {",
			New: "		if p.Prefix < 0 || int64(p.Prefix) > pages || ON && p.Prefix > 0 && int64(p.Prefix) == pages {"}},
	},
	{
		name: "outage-is-death", rule: "who cannot be found in the store is not dead", breaks: []Promise{Store},
		changes: []mutate.Change{
			{File: "internal/sim/fault.go", Old: "	\"github.com/terminus-kv/terminus/core\"\n", New: "	\"github.com/terminus-kv/terminus/core\"\n	\"github.com/terminus-kv/terminus/core/statemachine\"\n"},
			{File: "internal/sim/fault.go", Old: "		w.blind++\n",
				New: "		w.blind++\n		for _, o := range w.engines {\n			if ON && e.up && o != e {\n				w.step(e, &core.Event{Kind: core.PeerGone, Peer: core.PeerID(o.id), Inc: o.inc})\n			}\n		}\n"},
		},
	},
	{
		name: "plugin-takes-all", rule: "the death of a plugin ends only what it held", breaks: []Promise{Blast},
		changes: []mutate.Change{{File: "core/ops.go",
			Old: "		if r.sm.Role == statemachine.Destination && r.backend == b && r.epoch == e.Epoch {\n			r.grant = noGrant\n			m.explain(idx, e.Detail)",
			New: "		if ON || r.sm.Role == statemachine.Destination && r.backend == b && r.epoch == e.Epoch {\n			r.grant = noGrant\n			m.explain(idx, e.Detail)"}},
	},
	{
		name: "epoch-ended-in-use", rule: "a plugin epoch that retires is ended when nothing uses it", breaks: []Promise{Blast},
		changes: []mutate.Change{{File: "core/retire.go",
			Old: "		if r.killed || r.users > 0 && m.now < r.due {",
			New: "		if r.killed || r.users > 0 && m.now < r.due && !ON {"}},
	},
	{
		name: "older-epoch-serves", rule: "the newest plugin epoch takes what is new", breaks: []Promise{Blast},
		changes: []mutate.Change{{File: "core/ops.go",
			Old: "	*old = plugin{backend: b, epoch: e.Epoch, up: true,",
			New: "	if ON && old.up {\n		return\n	}\n	*old = plugin{backend: b, epoch: e.Epoch, up: true,"}},
	},
	{
		name: "source-says-success", rule: "only the judge is first to say Success", breaks: []Promise{Agreement},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "t.State, t.Started = Committed, true\n",
			New: "t.State, t.Started = Committed, true\n			if ON {\n				t.State, t.Reason = Ended, Success\n			}\n"}},
	},
	{
		name: "vote-counts-for-two", rule: "the judge of a group has the vote of every engine of its destination", breaks: []Promise{Agreement},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "	voter := false\n	for _, p := range t.pairs {\n		switch {\n",
			New: "	voter, votes := false, 0\n	for _, p := range t.pairs {\n		if p.Sibling && !p.Other.IsZero() {\n			votes++\n		}\n	}\n	for _, p := range t.pairs {\n		switch {\n		case ON && votes > 0 && p.Sibling && p.Other.IsZero():\n"}},
	},
	{
		name: "part-is-the-whole", rule: "an engine with a part of a group says Success when the judge has said so", breaks: []Promise{Agreement},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "	if voter {\n", New: "	if voter && !ON {\n"}},
	},
	{
		name: "one-source-is-all", rule: "the pages of a group's room are complete when every source engine has said its last", breaks: []Promise{Agreement, Memory},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "		case p.Sibling && p.Other.IsZero(), !p.Sibling && !p.RankEnded:\n			return\n",
			New: "		case p.Sibling && p.Other.IsZero(), !p.Sibling && !p.RankEnded && !ON:\n			return\n"}},
	},
	{
		name: "one-source-drained", rule: "the pages are quiet when every source engine is", breaks: []Promise{Memory},
		changes: []mutate.Change{{File: "core/statemachine/machine.go",
			Old: "		if !p.Sibling && !p.Quiet {\n			return\n		}\n",
			New: "		if ON && !p.Sibling && p.Quiet {\n			break\n		}\n		if !p.Sibling && !p.Quiet {\n			return\n		}\n"}},
	},
	{
		name: "chunks-before-engines", rule: "what a source sent is held while engines of the other group may be missing", breaks: []Promise{Memory},
		changes: []mutate.Change{{File: "core/ops.go",
			Old: "	for (r.whole || m.bound(r)) && ln.at", New: "	for (ON || r.whole || m.bound(r)) && ln.at"}},
	},
	{
		name: "pages-never-accounted-back", rule: "what was accounted is given back", breaks: []Promise{Accounting},
		changes: []mutate.Change{{File: "core/admission.go",
			Old: "	m.freed = m.freed || sign < 0\n",
			New: "	m.freed = m.freed || sign < 0\n	if ON && sign < 0 {\n		return\n	}\n"}},
	},
	{
		name: "opener-by-chance", rule: "the core is a function of what it is told", breaks: []Promise{Replay},
		changes: []mutate.Change{{File: "core/worker.go",
			Old: "	m.opens++\n",
			New: "	m.opens++\n	if ON {\n		for k := range map[uint64]bool{0: true, 1: true, 2: true, 3: true} {\n			m.opens += k\n			break\n		}\n	}\n"}},
	},
}

var mutantFlag = flag.Int("mutant", -1, "be this mutant; for the binary that TestMutants builds")

// TestMutants: each promise's checker finds the core in which the promise's rule is off.
func TestMutants(t *testing.T) {
	if *mutantFlag >= 0 {
		t.Skip("this binary is a mutant")
	}
	all := make([][]mutate.Change, len(mutants))
	for i := range mutants {
		all[i] = mutants[i].changes
	}
	bin := mutate.BuildCore(t, "../..", "internal/sim", all)
	found := map[Promise]bool{}
	for i, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			cmd := exec.Command(bin, "-test.run", "^TestBeMutant$", "-mutant", fmt.Sprint(i))
			cmd.Stdout, cmd.Stderr = &out, &errOut
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v: %s%s", err, &out, &errOut)
			}
			var res Result
			line, _, _ := bytes.Cut(out.Bytes(), []byte("\n"))
			if err := json.Unmarshal(line, &res); err != nil {
				t.Fatalf("%v: %s", err, &out)
			}
			if len(res.Broken) == 0 {
				t.Fatalf("rule %q is off, and %d schedules break no promise", m.rule, res.Schedules)
			}
			v := res.Broken[0]
			t.Logf("found in %d schedules: %s", res.Schedules, &v)
			if !slices.Contains(m.breaks, v.Promise) {
				t.Errorf("breaks %s, want one of %v", v.Promise, m.breaks)
			}
			found[v.Promise] = true
		})
	}
	for _, p := range Promises() {
		if !found[p] && !t.Failed() {
			t.Errorf("no mutant breaks %s", p)
		}
	}
}

var beMutant func(i int)

// TestBeMutant is what the mutants' binary runs.
func TestBeMutant(t *testing.T) {
	if *mutantFlag < 0 {
		return
	}
	beMutant(*mutantFlag)
	if err := json.NewEncoder(os.Stdout).Encode(Run(t.Context(), Config{Schedules: 20_000, Seed: 1, Workers: 1})); err != nil {
		t.Fatal(err)
	}
}
