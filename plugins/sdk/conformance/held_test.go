package conformance

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// deafCarrier is a plugin that takes no more after a few submits.
type deafCarrier struct{ Carrier }

func (c deafCarrier) Launch(ctx context.Context, id Identity, sink func(Arrival)) (Plugin, error) {
	p, err := c.Carrier.Launch(ctx, id, sink)
	return &deafPlugin{Plugin: p}, err
}

type deafPlugin struct {
	Plugin
	submits atomic.Int32
}

func (p *deafPlugin) Send(events ...*contract.HostEvent) error {
	if events[0].GetSubmit() != nil && p.submits.Add(1) > 10 {
		return errors.New("gone")
	}
	return p.Plugin.Send(events...)
}

// TestCaseThatFailsWhileItHolds: a case that failed between Hold and release left the plugin's stream held
// up, and the end of the plugin waited for it for ever.
func TestCaseThatFailsWhileItHolds(t *testing.T) {
	done := make(chan Outcome, 1)
	go func() {
		res, err := Run(t.Context(), Config{
			Carrier: deafCarrier{Memory(func() sdk.Backend { return tcp.New() })}, Run: []string{"storm/slow-host"}, Seed: 1, Scale: 0.2,
		})
		if err != nil {
			t.Error(err)
		}
		outcome := Unknown
		for _, r := range res.Cases {
			if r.Case.ID == "storm/slow-host" {
				outcome = r.Outcome
			}
		}
		done <- outcome
	}()
	select {
	case outcome := <-done:
		if outcome != Failed {
			t.Errorf("the case %s", outcome)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("the run does not end")
	}
}
