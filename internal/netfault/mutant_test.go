package netfault

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/mutate"
)

// mutants are bugs of the product, each with a fault of the network that brings it out.
var mutants = []struct {
	name  string
	under string // fault
	says  string // a part of what TestFaults reports
	mutate.Change
}{
	{"lost-connection-is-done", "reset-data", "holds other bytes than were sent", mutate.Change{File: "plugins/tcp/peer.go",
		Old: "	for _, x := range c.ops {\n		out = p.finish(x, e, out)",
		New: "	if ON {\n		e = ending{kind: endDone, quiet: true, lane: c.lane}\n	}\n	for _, x := range c.ops {\n		out = p.finish(x, e, out)"}},
	{"revoked-pages-take-bytes", "data-only-lost", "was written after it was released", mutate.Change{File: "plugins/tcp/grants.go",
		Old: "		o.revoked.Store(true)\n		delete(t.live, d)",
		New: "		if !ON {\n			o.revoked.Store(true)\n			delete(t.live, d)\n		}"}},
	{"no-second-stream", "reset-control", "no new room has succeeded", mutate.Change{File: "internal/peer/link.go",
		Old: "k.named && k.address != \"\" && k.cur == nil\n",
		New: "k.named && k.address != \"\" && k.cur == nil && !(ON && k.seen != 0)\n"}},
	{"connections-stay", "data-only-lost", "connections between", mutate.Change{File: "plugins/tcp/peer.go",
		Old: "	p.slots[i] = nil\n	p.retired = append(p.retired, c)\n",
		New: "	p.slots[i] = nil\n	if ON {\n		return\n	}\n	p.retired = append(p.retired, c)\n"}},
	{"pages-stay-held", "reset-data", "pages of a room that ended as", mutate.Change{File: "internal/workerapi/session.go",
		Old: "	ss.page.set(w.Slot,",
		New: "	if ON && w.Reason.String() == \"transfer_failed\" && w.Residency.Reusable() {\n		return false\n	}\n	ss.page.set(w.Slot,"}},
	{"unknown-is-success", "control-only-lost", "success at the source, peer_lost at the destination", mutate.Change{File: "core/statemachine/machine.go",
		Old: "func (t *turn) unknown() { t.endCommitted(OutcomeUnknown) }",
		New: "func (t *turn) unknown() {\n	if ON {\n		t.endCommitted(Success)\n		return\n	}\n	t.endCommitted(OutcomeUnknown)\n}"}},
	{"worker-not-told", "mute", "no terminal status", mutate.Change{File: "internal/workerapi/session.go",
		Old: "	s := &ss.slots[w.Slot]\n	s.status, s.residency,",
		New: "	if ON && w.Reason.String() == \"peer_lost\" {\n		return false\n	}\n	s := &ss.slots[w.Slot]\n	s.status, s.residency,"}},
}

// until keeps what a process says, and tells when that has a certain part.
type until struct {
	words
	says  string
	found chan struct{}
	once  sync.Once
}

func (u *until) Write(b []byte) (int, error) {
	n, err := u.words.Write(b)
	if u.has() {
		u.once.Do(func() { close(u.found) })
	}
	return n, err
}

func (u *until) has() bool { return strings.Contains(u.String(), u.says) }

const mutantFile = "mutant-"

// TestBugs: TestFaults finds each bug, and says what it is.
func TestBugs(t *testing.T) {
	newHosts(t) // skips where there can be none
	t.Parallel()
	bugs := map[string]mutate.Change{}
	for _, m := range mutants {
		bugs[m.name] = m.Change
	}
	program := filepath.Join(t.TempDir(), "mutants")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", mutate.Processes(t, "../..", mutantFile, bugs), "-o", program, ".")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			must(t, os.WriteFile(filepath.Join(dir, mutantFile+m.name), nil, 0o600))
			cmd := exec.CommandContext(t.Context(), program, "-test.run", "^TestFaults$", "-test.v", "-only", m.under, "-pairs", "1")
			cmd.Dir = dir
			cmd.WaitDelay = 10 * time.Second
			said := &until{says: m.says, found: make(chan struct{})}
			cmd.Stdout, cmd.Stderr = said, said
			must(t, cmd.Start())
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			select {
			case <-said.found: // the rest of the play is of no interest
				_ = cmd.Process.Kill()
				<-ended
			case err := <-ended:
				if !said.has() {
					t.Errorf("not found (%v):\n%s", err, said)
				}
			}
		})
	}
}
