package node_test

import (
	"context"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
)

// said is what a process writes to its standard error.
type said struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

// lines are those that match, in order.
func (s *said) lines(pattern string) (found []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	re := regexp.MustCompile(pattern)
	for _, l := range strings.Split(s.text.String(), "\n") {
		if re.MatchString(l) {
			found = append(found, l)
		}
	}
	return found
}

// spawnTo is spawn with a log, and does not wait.
func spawnTo(t *testing.T, log *said, dir, name string, set ...string) *engine {
	t.Helper()
	flags := flagsOf(dir, name, set)
	cfg, err := config.Load(config.LoadOptions{Flags: flags})
	must(t, err)
	e := &engine{cfg: cfg, admin: admin.NewClient(cfg.Admin.Socket), cmd: command(t, append([]string{"engine"}, flags...)...)}
	e.cmd.Env = append(e.cmd.Env, "TERMINUS_TEST_LOG=1")
	e.cmd.Stderr = log
	if os.Getenv("TERMINUS_TEST_LOG") != "" {
		e.cmd.Stderr = os.Stderr
	}
	must(t, e.cmd.Start())
	e.register(t, func() { e.kill(); e.admin.Close() })
	return e
}

// sees waits until the engine has a stream to another one.
func (e *engine) sees(t *testing.T, other string) {
	t.Helper()
	eventually(t, e.cfg.Node+" has a stream to "+other, func() bool {
		peers, err := e.admin.Peers(context.Background())
		if err != nil {
			return false
		}
		for _, p := range peers {
			if p.Node == other && p.State == "ready" {
				return true
			}
		}
		return false
	})
}

// TestStartIsNoRefusal: an engine that came back, or came first, dialled before the other had read its record, and was
// refused as unknown: three warnings, and one to two seconds until the two were together.
func TestStartIsNoRefusal(t *testing.T) {
	dir := tempDir(t)
	var p, d said
	de := spawnTo(t, &d, dir, "d")
	de.awaitReady(t)
	pe := spawnTo(t, &p, dir, "p")
	pe.awaitReady(t)
	pe.sees(t, "d")
	de.sees(t, "p")
	for _, s := range []*said{&p, &d} {
		if w := s.lines("level=(WARN|ERROR)"); len(w) > 0 {
			t.Errorf("a healthy start warns:\n%s", strings.Join(w, "\n"))
		}
	}
	const restarts = 3
	for range restarts {
		pe.kill()
		time.Sleep(300 * time.Millisecond) // the death is known, and nobody looks for another one
		began := time.Now()
		pe = spawnTo(t, &p, dir, "p")
		pe.awaitReady(t)
		ready := time.Since(began)
		pe.sees(t, "d")
		de.sees(t, "p")
		t.Logf("ready %v after its start, together with the other engine after %v", ready, time.Since(began))
	}
	for _, s := range []*said{&p, &d} {
		if r := s.lines("refuse|unknown_peer"); len(r) > 0 {
			t.Errorf("%d refusals:\n%s", len(r), strings.Join(r, "\n"))
		}
	}
	if gone := d.lines("peer engine is gone"); len(gone) != restarts {
		t.Errorf("%d deaths were noticed, want %d", len(gone), restarts)
	}
	t.Logf("streams:\n%s", strings.Join(d.lines("peer is (up|down)"), "\n"))
}
