package conformance

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

var rewrite = flag.Bool("rewrite", false, "rewrite testdata/mutants from what the cases find")

// carrier runs the mutant; none of its hooks set is the sound reference.
func (m *mutant) carrier() Carrier {
	if m.process != "" {
		return Exec(m.program, m.process)
	}
	c := Memory(func() sdk.Backend {
		var h hooks
		if m.backend != nil {
			m.backend(&h)
		}
		return newReference(h)
	})
	if m.frames != nil {
		return mangled{c, m.frames}
	}
	return c
}

// TestSound: what the mutants are made of fails nothing, in all its legal ways.
func TestSound(t *testing.T) {
	for _, m := range []mutant{
		{name: "reference", also: []string{"**"}},
		{name: "mangler", frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent { return []*contract.HostEvent{e} }
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent { return one(e) }
		}},
		{name: "slow-to-be-quiet", also: []string{"abort/*", "quiesce/*", "drain/*"}, backend: func(h *hooks) {
			h.piece = linger
			h.cancelled = func(_ *reference, op *sdk.Op, _ []sdk.Copy) {
				op.Aborted(false)
				time.Sleep(5 * time.Millisecond)
				op.Quiesced()
			}
		}},
		{name: "few-ops", also: []string{"**"}, backend: limited(&contract.Limits{MaxOps: 4})},
		{name: "few-ops-a-peer", also: []string{"**"}, backend: limited(&contract.Limits{MaxOpsPerPeer: 3})},
		{name: "small-ops", also: []string{"**"}, backend: limited(&contract.Limits{MaxOpBytes: 1 << 20})},
		{name: "few-bytes", also: []string{"**"}, backend: limited(&contract.Limits{MaxBytesPerPeer: 4 << 20})},
		{name: "few-runs", also: []string{"**"}, backend: limited(&contract.Limits{MaxRuns: 16})},
		{name: "few-regions", also: []string{"**"}, backend: limited(&contract.Limits{MaxRegions: 8})},
		{name: "finishes-what-is-aborted", also: []string{"abort/*", "quiesce/*", "drain/*"}, backend: func(h *hooks) {
			h.piece = linger
			h.cancelled = (*reference).finish
		}},
	} {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			for _, r := range m.run(t) {
				t.Logf("%6d ms %s %s", r.Took.Milliseconds(), r.Case.ID, r.Outcome)
				if r.Outcome >= Failed {
					t.Error(r.Text(m.name))
				}
			}
		})
	}
}

// TestUnproved: a case that could not bring about what it is about does not pass.
func TestUnproved(t *testing.T) {
	for _, m := range []mutant{
		{name: "never-aborts", also: []string{"abort/before-submit", "abort/many-overtake"}, frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if e.GetAbort() != nil {
					return nil
				}
				return []*contract.HostEvent{e}
			}
		}},
		{name: "knows-of-no-fence", also: []string{"fence/outlives-the-answer"}, backend: func(h *hooks) {
			h.fence = func(*reference, string, fence) contract.FenceResult { return contract.FenceResult_FENCE_RESULT_UNKNOWN }
		}},
	} {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			res, err := Run(t.Context(), Config{Carrier: m.carrier(), Run: m.also, Seed: 1})
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range res.Cases {
				if slices.Contains(m.also, r.Case.ID) && r.Outcome != Unsupported {
					t.Errorf("%s %s, want unsupported: %v", r.Case.ID, r.Outcome, r.Failures)
				}
			}
		})
	}
}

// TestWithinLimits: where a case goes on beside ops that the receiver refuses from now on, it leaves them their places
// in the plugin's window.
func TestWithinLimits(t *testing.T) {
	t.Parallel()
	m := mutant{backend: func(h *hooks) {
		limited(&contract.Limits{MaxOps: 4})(h)
		h.piece = linger
	}}
	res, err := Run(t.Context(), Config{Carrier: m.carrier(), Run: []string{"quiesce/revoked", "generation/room-reuse"}, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res.Cases {
		if r.Outcome >= Failed {
			t.Error(r.Text(m.name))
		}
	}
}

// limited is the reference with limits, as a plugin may declare.
func limited(limits *contract.Limits) func(*hooks) {
	return func(h *hooks) { h.info = func(i *sdk.Info) { i.Limits = limits } }
}

// TestMutants: each mutant fails exactly the cases of testdata/mutants/NAME.txt, which `go test -run
// TestMutants -rewrite` writes, and its killer is among them; and each case is failed by a mutant.
func TestMutants(t *testing.T) {
	var mu sync.Mutex
	killed := map[string]int{} // cases, by how many mutants fail them
	ran := 0
	// Mutants wait more than they work, so several run at once, whatever -parallel says. Those in memory do not
	// run beside processes: one that is just starting holds the leases of all.
	group := func(name string, mutants []mutant, atOnce int) {
		slots := make(chan struct{}, atOnce)
		dir := t.TempDir()
		program := sync.OnceValues(func() (string, error) { return buildMutant(dir) })
		t.Run(name, func(t *testing.T) {
			for _, m := range mutants {
				t.Run(m.name, func(t *testing.T) {
					if m.process != "" {
						var err error
						if m.program, err = program(); err != nil {
							t.Fatal(err)
						}
					}
					var results []*Result
					var took time.Duration
					var work sync.WaitGroup
					work.Go(func() {
						slots <- struct{}{}
						defer func() { <-slots }()
						began := time.Now()
						results = m.run(t)
						took = time.Since(began)
					})
					t.Parallel() // from here on when every mutant has been started
					work.Wait()
					t.Logf("%d cases in %v", len(results), took.Round(time.Millisecond))
					failing := map[string]*Result{}
					for _, r := range results {
						switch r.Outcome {
						case Errored:
							t.Errorf("the suite broke: %s", r.Text(m.name))
						case Failed:
							failing[r.Case.ID] = r
						}
					}
					mu.Lock()
					ran++
					for id := range failing {
						killed[id]++
					}
					mu.Unlock()
					m.compare(t, failing)
				})
			}
		})
	}
	group("memory", memoryMutants, 6)
	group("process", processMutants, 3) // the grace of 2 s of a shutdown knows no load
	lateWrites.Wait()
	if ran < len(memoryMutants)+len(processMutants) {
		return // -run left some out
	}
	for _, c := range Cases() {
		if killed[c.ID] == 0 && !slices.ContainsFunc(c.Needs, func(need string) bool { return slices.Contains(noMutant, need) }) {
			t.Errorf("no mutant fails %s: a case that nothing can fail proves nothing", c.ID)
		}
	}
}

// noMutant are the needs of cases that no mutant runs: there is none with memory of a GPU, and none that serves
// collectives.
var noMutant = []string{NeedCUDAIPC, NeedCUDAVMM, NeedCollective}

// TestMutantsAreWrittenOut: what mutants name is there, and each list of testdata is that of a mutant.
func TestMutantsAreWrittenOut(t *testing.T) {
	lists := map[string]bool{}
	for _, m := range slices.Concat(memoryMutants, processMutants) {
		file := m.name + ".txt"
		if lists[file] {
			t.Errorf("there are two mutants %s", m.name)
		}
		lists[file] = true
		common, _ := (&mutant{process: m.process}).cases()
		for _, p := range m.also {
			if !slices.ContainsFunc(Cases(), func(c Case) bool { return Match(p, c.ID) && !slices.Contains(common, c.ID) }) {
				t.Errorf("%s: also names %s, which is no case that it would not run without", m.name, p)
			}
		}
		for _, p := range m.unsure {
			if !slices.ContainsFunc(common, func(id string) bool { return Match(p, id) }) {
				t.Errorf("%s: unsure names %s, which is no case that it would run", m.name, p)
			}
		}
	}
	files, err := os.ReadDir(filepath.Join("testdata", "mutants"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !lists[f.Name()] {
			t.Errorf("testdata/mutants/%s: there is no such mutant", f.Name())
		}
	}
}

// compare holds what failed against the mutant's list.
func (m *mutant) compare(t *testing.T, failing map[string]*Result) {
	if failing[m.killer] == nil {
		t.Errorf("%s: not found by %s, which is there for it", m.fault, m.killer)
	}
	got := slices.Sorted(maps.Keys(failing))
	file := filepath.Join("testdata", "mutants", m.name+".txt")
	if *rewrite {
		text := fmt.Sprintf("# %s: %s.\n%s\n", m.name, m.fault, strings.Join(got, "\n"))
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; write it with: go test ./plugins/sdk/conformance -run TestMutants -rewrite", err)
	}
	var want []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			want = append(want, line)
		}
	}
	for _, id := range want {
		if failing[id] == nil {
			t.Errorf("%s does not fail, but is in %s", id, file)
		}
	}
	for _, id := range got {
		r := failing[id]
		if !slices.Contains(want, id) {
			t.Errorf("%s fails, but is not in %s:\n%s", id, file, r.Text(m.name))
		} else if len(r.Failures) > 0 {
			t.Logf("%s: %s", id, r.Failures[0])
		}
	}
}

// apart are the cases that a mutant runs only if they are there for its like, its killer and those that it
// names: they cost more than the others, or what they find hangs on the moment when an abort or a removal comes.
var apart = []string{
	"abort/before-submit", "abort/many-overtake", "abort/mid-transfer", "abort/neighbours-unharmed", "abort/queued", "abort/storm", "abort/twice",
	"beat/during-big-registration", "beat/every-second", "drain/abort-what-is-left", "fence/live-writer", "generation/room-reuse",
	"layout/64-mib-op", "layout/pages-of-1-mib", "layout/sizes-by-octave", "leak/*",
	"lease/host-gone-busy", "lease/host-gone-receiver", "lease/host-gone-registering", "leftover/nothing-after-kill", "loss/*",
	"order/last-seq", "order/stats-is-a-barrier", "peer/added-again", "peer/remove-ends-open-ops", "progress/counts-bytes", "proto/near-limit-frame",
	"quiesce/aborted-pages-reused", "quiesce/not-before-last-write", "quiesce/peer-removed", "quiesce/revoked", "quiesce/stays-quiet", "quiesce/writer-dropped",
	"shutdown/slow-drain", "shutdown/with-open-ops", "window/*",
}

// cases are the ids of the cases that the mutant runs. It is there for some: to be among them, a storm, or a case for a
// mutant that is a process and which needs none, must be named without a pattern.
func (m *mutant) cases() (common, special []string) {
	for _, c := range Cases() {
		process := slices.Contains(c.Needs, NeedProcess)
		alike := process == (m.process != "")
		switch {
		case process && !alike, matchesAny(m.unsure, c.ID):
		case c.ID == m.killer, slices.Contains(m.also, c.ID), alike && !c.Storm && matchesAny(m.also, c.ID):
			special = append(special, c.ID)
		case c.Storm, matchesAny(apart, c.ID):
		case alike, c.ID == "transfer/one-page":
			common = append(common, c.ID)
		}
	}
	return common, special
}

// run runs the cases of the mutant in several runs side by side, each case with plugins of its own, so that
// what one case finds does not depend on the others.
func (m *mutant) run(t *testing.T) (results []*Result) {
	common, special := m.cases()
	lanes, scale := [][]string{common, special}, 1.0
	if m.process != "" { // these wait for processes most of the time, long where many run
		lanes, scale = lanes[:0], 2
		for i := range 3 {
			lanes = append(lanes, every(slices.Concat(common, special), 3, i))
		}
	}
	var mu sync.Mutex
	var work sync.WaitGroup
	for _, ids := range lanes {
		if len(ids) == 0 {
			continue
		}
		work.Go(func() {
			res, err := Run(t.Context(), Config{Carrier: m.carrier(), Run: ids, Seed: 1, Scale: scale, Fresh: true})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			for _, r := range res.Cases {
				if slices.Contains(ids, r.Case.ID) {
					results = append(results, r)
				}
			}
		})
	}
	work.Wait()
	return results
}

// every returns the elements i, i+n, i+2n …
func every(list []string, n, i int) (some []string) {
	for ; i < len(list); i += n {
		some = append(some, list[i])
	}
	return some
}
