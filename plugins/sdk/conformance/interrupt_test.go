package conformance

import (
	"context"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// TestInterruptedCaseIsNoFailure: a case that the end of the run cuts short waits for things that will not
// come; that says nothing about the plugin.
func TestInterruptedCaseIsNoFailure(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := 0
	res, err := Run(ctx, Config{
		Carrier: Memory(func() sdk.Backend { return tcp.New() }), Seed: 1, Run: []string{"transfer/*"},
		OnStart: func(*Case) {
			if started++; started == 3 {
				cancel()
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if res.Count(Failed) > 0 || res.Count(Errored) > 0 || res.Count(Passed) < 2 || res.Verdict() != Partial || !res.Interrupted || started != 3 {
		t.Errorf("%d started, %d passed, %d failed, verdict %s, interrupted %v", started, res.Count(Passed), res.Count(Failed), res.Verdict(), res.Interrupted)
	}
	if _, err := Run(ctx, Config{Carrier: Memory(func() sdk.Backend { return tcp.New() })}); err != context.Canceled {
		t.Errorf("a run that was over before it began: %v", err)
	}
}

// TestInterruptedWait: a run that was interrupted while a plugin did not answer went on for as long as each check of the
// end waits.
func TestInterruptedWait(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var began time.Time
	res, err := Run(ctx, Config{
		Carrier: falter("sleeps"), Seed: 1, Run: []string{"transfer/one-page"},
		OnStart: func(*Case) {
			time.AfterFunc(time.Second, func() { // it waits for RegionReady
				began = time.Now()
				cancel()
			})
		},
	})
	took := time.Since(began)
	if err != nil {
		t.Fatal(err)
	}
	if !res.Interrupted || res.Count(Failed) > 0 || took > 4*time.Second {
		t.Errorf("interrupted %v, %d failed, %v after the interruption", res.Interrupted, res.Count(Failed), took)
	}
}
