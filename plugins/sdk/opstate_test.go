package sdk

import (
	"context"
	"math"
	"testing"
)

// TestEndedOps: the last recentIDs/2 ids are known, whatever numbers the host uses, and no more is kept.
func TestEndedOps(t *testing.T) {
	for name, id := range map[string]func(n uint64) uint64{
		"in order":  func(n uint64) uint64 { return n },
		"downwards": func(n uint64) uint64 { return math.MaxUint64 - n },
		"one place": func(n uint64) uint64 { return n * recentIDs },
		"scattered": func(n uint64) uint64 { return n * 0x9E3779B97F4A7C15 },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEndedOps()
			const total = 3 * recentIDs
			for n := range uint64(total) {
				if e.has(id(n)) {
					t.Fatalf("%d is known before it ended", n)
				}
				e.add(id(n))
			}
			for n := uint64(total - recentIDs/2); n < total; n++ {
				if !e.has(id(n)) {
					t.Fatalf("%d is forgotten", n)
				}
			}
			if name == "in order" && len(e.crowded.ids) > 0 {
				t.Errorf("%d ids have no place of their own", len(e.crowded.ids))
			}
			if kept := len(e.places) + len(e.crowded.ids); kept > 2*recentIDs {
				t.Errorf("%d ids are kept", kept)
			}
		})
	}
}

// TestOpContext: the context says the first cause, whenever the author asks for it.
func TestOpContext(t *testing.T) {
	over, end := context.WithCancelCause(context.Background())
	defer end(nil)
	s := &Session{ctx: over}
	before, after := &opState{s: s}, &opState{s: s}
	ctx := before.context()
	if ctx.Err() != nil || before.context() != ctx {
		t.Fatal("the context is done, or not the same")
	}
	for _, st := range []*opState{before, after} {
		st.cancelLocked(ErrPeerRemoved)
		st.cancelLocked(context.Canceled)
		if err := context.Cause(st.context()); err != ErrPeerRemoved {
			t.Errorf("cause %v", err)
		}
	}
	end(ErrSessionOver)
	if err := context.Cause((&opState{s: s}).context()); err != ErrSessionOver {
		t.Errorf("cause %v", err)
	}
}
