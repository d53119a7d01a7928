package pluginhost

import (
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// TestOnce: with Once there is no restart, neither after a failed start nor after a loss, and the epochs
// begin where they are told to.
func TestOnce(t *testing.T) {
	t.Parallel()
	for _, m := range []string{"crash-at-start", "crash"} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, func(cfg *Config) { cfg.Once, cfg.FirstEpoch = true, 7 })
			p := start(t, h, mode(m))
			if m == "crash" {
				rec.waitKind(t, Up, 7)
				if err := p.Send(7, submit(1)); err != nil {
					t.Fatal(err)
				}
			}
			rec.waitKind(t, Down, 0)
			if s := p.Status(); s.Restarts != 0 || s.Epoch != 7 || s.Exit == "" {
				t.Errorf("restarts %d, epoch %d, exit %q; want 0, 7 and a status", s.Restarts, s.Epoch, s.Exit)
			}
		})
	}
}

// TestEndSession: a plugin of which the Session alone ends exits by itself, if it is given the time, and what
// it leaves running is noticed.
func TestEndSession(t *testing.T) {
	t.Parallel()
	for m, orphans := range map[string]bool{"sdk": false, "sdk-with-child": true} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, func(cfg *Config) { cfg.Once, cfg.Linger = true, 20*time.Second })
			p := start(t, h, mode(m))
			rec.waitKind(t, Up, 1)
			if err := p.EndSession(1); err != nil {
				t.Fatal(err)
			}
			rec.waitKind(t, Reaped, 1)
			s := p.Status()
			if s.Exit != "exit status 0" || s.Orphans != orphans {
				t.Errorf("exit %q, orphans %v; want \"exit status 0\", %v", s.Exit, s.Orphans, orphans)
			}
		})
	}
}

// TestAsking: the suite's own request goes out, and the refusal comes back as it was sent.
func TestAsking(t *testing.T) {
	t.Parallel()
	answers := make(chan *contract.HandshakeResponse, 1)
	h, rec := newTestHost(t, func(cfg *Config) {
		cfg.Asking = func(r *contract.HandshakeRequest) { r.Versions = []uint32{99} }
		cfg.Answered = func(r *contract.HandshakeResponse) { answers <- r }
	})
	start(t, h, mode("sdk"))
	rec.waitKind(t, Down, 0)
	if a := <-answers; a.Version != 0 || a.Error == "" {
		t.Errorf("answer %v, want version 0 and an error", a)
	}
}
