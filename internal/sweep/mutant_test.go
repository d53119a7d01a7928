package sweep

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/mutate"
)

// mutant is the product with a bug that the sweep must find, where it strikes one kind of process.
type mutant struct {
	name    string
	strikes Kind
	says    string // a part of what is reported
	change  mutate.Change
}

var mutants = []mutant{
	{"plugin-exit-ignored", PluginPrefill, "the play is not over", mutate.Change{File: "internal/pluginhost/supervise.go",
		Old: "	p.emit(Event{Kind: Lost, Epoch: e.n, Err: err})",
		New: "	if !ON {\n		p.emit(Event{Kind: Lost, Epoch: e.n, Err: err})\n	}"}},
	{"dead-peer-by-clock", EngineDecode, "the play is not over", mutate.Change{File: "internal/node/peers.go",
		Old: "	for _, g := range u.Gone {",
		New: "	if ON {\n		u.Gone = nil\n	}\n	for _, g := range u.Gone {"}},
	{"done-without-bytes", WorkerPrefill, "Success with other pages", mutate.Change{File: "plugins/tcp/peer.go",
		Old: "	if x.total == 0 {",
		New: "	if x.total == 0 || ON && x.total%5 == 0 {"}},
	{"write-after-quiet", WorkerPrefill, "that nobody held", mutate.Change{File: "plugins/tcp/tcp.go",
		Old: "	b.table.revoke(g.Destination)\n	b.recv.barrier()\n",
		New: "	b.table.revoke(g.Destination)\n	b.recv.barrier()\n	if t := g.Parts[0].Pool.Tensors[0]; ON && t.Region != nil && g.Parts[0].Pages.Contains(7) {\n		mutantLater(func() { t.Region.Bytes[t.Offset+7*t.PageStride] = 1 })\n	}\n"}},
	{"memory-of-dead-workers-kept", WorkerDecode, "of kind", mutate.Change{File: "internal/node/memory.go",
		Old: "		if reg := n.regions[id]; reg != nil {\n			n.answerRegion(reg, errors.New(\"the session is closed\"))",
		New: "		if reg := n.regions[id]; reg != nil && !ON {\n			n.answerRegion(reg, errors.New(\"the session is closed\"))"}},
}

// buildMutants returns the directory with an engine that has all bugs, each only where a file in its working directory
// asks for it, and the worker.
func buildMutants(t *testing.T) string {
	t.Helper()
	bugs := map[string]mutate.Change{}
	for _, m := range mutants {
		bugs[m.name] = m.change
	}
	return build(t, "-overlay", mutate.Processes(t, "../..", mutantFile, bugs))
}

// TestMutants: the sweep finds each bug, and says what it is.
func TestMutants(t *testing.T) {
	available(t)
	dir := buildMutants(t)
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			r, err := Run(t.Context(), Options{
				Engine: filepath.Join(dir, "engine"), Worker: filepath.Join(dir, "sweepworker"), Mode: Kill, Lanes: []string{"shm"}, Kinds: []Kind{m.strikes},
				Pairs: 12, Seed: 1, Parallel: 1, CleanRuns: 1, Mutant: m.name, Enough: 1, Progress: t.Output(),
			})
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for _, o := range r.Broken {
				found = found || strings.Contains(strings.Join(o.Faults, "\n"), m.says)
			}
			if !found {
				t.Errorf("not found: %+v", r)
			}
		})
	}
}

// TestMemory: what the workers look at tells one page from another, and what was written from what was not.
func TestMemory(t *testing.T) {
	m := newMemory(make([]byte, poolPages*tensors*tensorBytes))
	ids, written, err := m.take(3)
	if err != nil || written != 0 || len(ids) != 3 {
		t.Fatal(ids, written, err)
	}
	for i, id := range ids {
		m.fill(id, 9, i)
	}
	if !m.holds(ids[1], 9, 1) || m.holds(ids[1], 9, 2) || m.holds(ids[1], 8, 1) {
		t.Error("the content of a page does not name it")
	}
	m.page(1, ids[2])[tensorBytes-1]++
	if m.holds(ids[2], 9, 2) {
		t.Error("one changed byte of a page is not seen")
	}
	m.give(ids)
	if n := m.check(); n != 0 {
		t.Errorf("%d pages are written that are not", n)
	}
	m.page(0, ids[0])[100] = 1
	m.page(1, m.free[0])[0] = 1
	if _, written, _ = m.take(1); written != 1 {
		t.Error("a page that was written before it was taken is not seen")
	}
	if n := m.check(); n != 1 {
		t.Errorf("%d pages were written that nobody holds, want 1", n)
	}
	if _, _, err := m.take(poolPages); err == nil {
		t.Error("more pages than there are")
	}
}
