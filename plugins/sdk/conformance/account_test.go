package conformance

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// threadsEnv makes this test binary a plugin that keeps a thread for each peer that it ever had.
const threadsEnv = "TEST_THREADS"

func init() {
	if os.Getenv(threadsEnv) != "" {
		sdk.Main(threaded{tcp.New()})
	}
}

type threaded struct{ *tcp.Backend }

func (b threaded) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	go func() {
		runtime.LockOSThread()
		select {}
	}()
	return b.Backend.AddPeer(p)
}

// TestThreads: threads that are left behind are found.
func TestThreads(t *testing.T) {
	c := FromSpec("threads", pluginhost.Spec{Name: "under-test", Exec: "/proc/self/exe", Env: map[string]string{threadsEnv: "1"}})
	if got := ranOne(t, c, "leak/hundred-peers").Failures[0].Got; !strings.Contains(got, " threads") {
		t.Errorf("got %s", got)
	}
}

// TestWhatEveryCaseSees: what a plugin says about itself is held against what is so, in whatever case.
func TestWhatEveryCaseSees(t *testing.T) {
	for _, c := range []struct {
		name, id string
		change   func(*contract.PluginEvent)
		got      []string // of the failures, in order
	}{
		{"last_seq too high", "transfer/one-page", func(e *contract.PluginEvent) {
			if s := e.GetStats(); s != nil {
				s.LastSeq++
			}
		}, []string{"Stats.last_seq up to the last Submit, ", "Stats.last_seq to be the last Submit, "}},
		{"open op that is none", "transfer/one-page", func(e *contract.PluginEvent) {
			if s := e.GetStats(); s != nil {
				s.OpenOps = append(s.OpenOps, 1<<40)
			}
		}, []string{"Stats that list ops which were submitted", "Stats without open ops"}},
		{"export of 64 KiB and a byte", "transfer/one-page", func(e *contract.PluginEvent) {
			if r := e.GetRegionReady(); r != nil {
				r.Export = make([]byte, 64<<10+1)
			}
		}, []string{"an export of at most 64 KiB"}},
		{"revoked, not quiet", "transfer/one-page", func(e *contract.PluginEvent) {
			if r := e.GetRevoked(); r != nil {
				r.Quiet = false
			}
		}, []string{"Revoked with quiet=true"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mutant{frames: func(m *mangler) {
				m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
					c.change(e)
					return one(e)
				}
			}}
			var all strings.Builder
			for _, f := range ranOne(t, m.carrier(), c.id).Failures {
				all.WriteString(f.String() + "\n")
			}
			rest := all.String()
			for _, want := range c.got {
				var found bool
				if _, rest, found = strings.Cut(rest, want); !found {
					t.Fatalf("not seen, or not in order: %q\n%s", want, all.String())
				}
			}
		})
	}
}

// ranOne runs one case, which is to fail.
func ranOne(t *testing.T, c Carrier, id string) *Result {
	t.Helper()
	res, err := Run(t.Context(), Config{Carrier: c, Run: []string{id}, Seed: 1, Scale: 0.3})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res.Cases {
		if r.Case.ID == id {
			if r.Outcome != Failed {
				t.Fatalf("%s %s: %s", id, r.Outcome, r.Why())
			}
			return r
		}
	}
	t.Fatalf("no case %s", id)
	return nil
}
