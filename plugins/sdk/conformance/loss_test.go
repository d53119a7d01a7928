package conformance

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// falterEnv makes this test binary a plugin that falters, in one of its ways.
const falterEnv = "TEST_FALTER"

func init() {
	if mode := os.Getenv(falterEnv); mode != "" {
		sdk.Main(&faltering{Backend: tcp.New(), mode: mode})
	}
}

type faltering struct {
	*tcp.Backend
	mode string
	node string
	open sync.Once
}

func (b *faltering) Start(ctx context.Context, s sdk.Start) ([]byte, error) {
	b.node = s.Node
	return b.Backend.Start(ctx, s)
}

func (b *faltering) AddRegion(r *sdk.Region) error {
	if b.mode == "sleeps" {
		time.Sleep(time.Hour)
	}
	return b.Backend.AddRegion(r)
}

func (b *faltering) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	if b.mode == "keeps a descriptor a peer" {
		openMany(1)
	}
	return b.Backend.AddPeer(p)
}

func (b *faltering) RemoveRegion(r *sdk.Region) {
	if b.mode == "exits at removal" {
		os.Exit(3)
	}
	b.Backend.RemoveRegion(r)
}

func (b *faltering) Accept(p *sdk.Peer) error {
	switch b.mode {
	case "receiver exits":
		os.Exit(3)
	case "receiver exits amid ops":
		// A child that lives on: the host waits a moment before it says that the plugin is lost, and the writer is quicker.
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), strayEnv+"=child")
		if err := child.Start(); err != nil {
			panic(err)
		}
		time.AfterFunc(50*time.Millisecond, func() { os.Exit(3) })
	}
	return b.Backend.Accept(p)
}

func (b *faltering) Transfer(op *sdk.Op) {
	switch b.mode {
	case "exits":
		os.Exit(3)
	case "swallows ops":
		op.Async()
		return
	case "opens late":
		b.open.Do(func() { openMany(30) })
	case "keeps a descriptor an op":
		openMany(1)
	}
	b.Backend.Transfer(op)
}

func (b *faltering) Counters() map[string]uint64 {
	if b.mode == "exits late" { // when the bound of an answer has just passed
		time.Sleep(falterAnswer + lossGrace/2)
		os.Exit(3)
	}
	return b.Backend.Counters()
}

const (
	falterScale  = 0.2
	falterAnswer = answerBound / 5 // an answer's bound by that scale
)

func falter(mode string) Carrier {
	return FromSpec(mode, pluginhost.Spec{Name: "under-test", Exec: "/proc/self/exe", Env: map[string]string{falterEnv: mode}})
}

// runFalter runs one case.
func runFalter(t *testing.T, mode, id string) *Result {
	t.Helper()
	res, err := Run(t.Context(), Config{Carrier: falter(mode), Run: []string{id}, Seed: 1, Scale: falterScale, HandshakeTimeout: 15 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res.Cases {
		if r.Case.ID == id {
			return r
		}
	}
	return nil
}

// TestLossIsTheFailure: where a plugin is lost, what came of it (an answer that is missing, a frame that nobody
// takes) was reported first, and the loss again by each check of the end. A plugin that ended just after it had not
// answered in time was said to be silent.
func TestLossIsTheFailure(t *testing.T) {
	for _, c := range []struct{ mode, id string }{
		{"exits", "transfer/one-page"},
		{"exits", "transfer/many-in-one-frame"},
		{"receiver exits", "transfer/one-page"},
		{"receiver exits amid ops", "leak/ten-thousand-ops"},
		{"exits at removal", "transfer/one-page"},
		{"exits late", "order/stats-is-a-barrier"},
	} {
		t.Run(strings.ReplaceAll(c.mode, " ", "-")+"/"+c.id, func(t *testing.T) {
			r := runFalter(t, c.mode, c.id)
			losses := map[string]int{}
			for _, f := range r.Failures {
				if node, ok := strings.CutPrefix(f.Got, "the loss of the plugin of "); ok {
					losses[node[:1]]++
				}
			}
			if r.Outcome != Failed || !strings.HasPrefix(r.Failures[0].Got, "the loss of the plugin of ") || losses["A"] > 1 || losses["B"] > 1 {
				t.Error(r.Text(c.mode))
			}
		})
	}
}

// TestLossBetweenCases: a plugin that ends with nothing to do fails the next case, by its loss.
func TestLossBetweenCases(t *testing.T) {
	n := harness(t)
	was := n.t
	n.t = nil
	n.arrive(Arrival{Lost: pluginhost.ErrBudget})
	next := &T{Case: was.Case, run: was.run, trace: &recorder{}, broken: make(chan struct{})}
	n.attach(next)
	if len(next.failures) != 1 || !strings.Contains(next.failures[0].Got, "the loss of the plugin of A: before the case began") {
		t.Errorf("%v", next.failures)
	}
}

// TestLossAfterABreach: when the host ends a plugin that broke the contract, the breach stays the first failure.
func TestLossAfterABreach(t *testing.T) {
	n := harness(t)
	n.t.violate("R8", "order", "none", nil)
	n.arrive(Arrival{Lost: pluginhost.ErrViolation})
	if f := n.t.failures; len(f) != 2 || f[0].Rule != "R8" {
		t.Errorf("%v", f)
	}
}

// TestSilenceIsWaitedForOnce: a case whose op never ended took, after it had failed, as long again for each check of
// the end, and longer for the end of the plugins.
func TestSilenceIsWaitedForOnce(t *testing.T) {
	r := runFalter(t, "swallows ops", "transfer/one-page")
	if took := r.Took; r.Outcome != Failed || len(r.Failures) != 1 || !strings.Contains(r.Failures[0].Got, "still lists the op as open") || took > falterAnswer+lossGrace+4*time.Second {
		t.Errorf("in %v\n%s", took, r.Text("swallows"))
	}
}
