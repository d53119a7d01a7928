// Command loopback is the smallest complete backend: it copies between regions of one engine, whose only
// peer is itself. Read it as the tutorial for a backend of your own; docs/contract.md has the rules.
package main

import (
	"context"
	"errors"
	"sync"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func main() { sdk.Main(&loopback{}) }

type loopback struct {
	self    string       // our endpoint
	mu      sync.RWMutex // read while copying, so that a region is not unmapped under a copy into it
	regions map[uint64]*sdk.Region
}

func (*loopback) Info() sdk.Info {
	return sdk.Info{Name: "loopback", Version: "1.0.0",
		Features: []string{sdk.FeatureByteProgress, sdk.FeatureStrided, sdk.FeatureLayerRange}}
}

// Start returns what peers get in AddPeer. The runtime directory is private to this epoch: a name for it.
func (l *loopback) Start(_ context.Context, s sdk.Start) ([]byte, error) {
	l.self, l.regions = s.RuntimeDir, map[uint64]*sdk.Region{}
	return []byte(l.self), nil
}

// The SDK has mapped the memory, and unmaps it after RemoveRegion. A library would register it here.
func (l *loopback) AddRegion(r *sdk.Region) error {
	l.locked(func() { l.regions[r.ID] = r })
	return nil
}
func (l *loopback) RemoveRegion(r *sdk.Region) { l.locked(func() { delete(l.regions, r.ID) }) }
func (l *loopback) locked(f func())            { l.mu.Lock(); defer l.mu.Unlock(); f() }
func (l *loopback) RemovePeer(*sdk.Peer)       {}
func (l *loopback) Close() error               { return nil }

func (l *loopback) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	if string(p.Endpoint) != l.self {
		return 0, errors.New("loopback reaches only itself; choose another backend for this pair")
	}
	return contract.Lane_LANE_SHM, nil
}

// Transfer runs on a goroutine of its own and ends the op exactly once. quiet is true throughout: when
// it returns, nothing of the op can land any more.
func (l *loopback) Transfer(op *sdk.Op) {
	var moved uint64
	for c := range op.Copies() {
		if op.Context().Err() != nil {
			op.Aborted(true)
			return
		}
		if !l.copy(c) {
			op.Fail(contract.Cause_CAUSE_BOUNDS, true, "region %d has no bytes [%d,+%d)", c.DstRegion, c.DstOff, c.Len)
			return
		}
		moved += c.Len
		op.Progress(moved)
	}
	op.Done(contract.Lane_LANE_SHM)
}

func (l *loopback) copy(c sdk.Copy) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	dst := l.regions[c.DstRegion]
	return dst != nil && c.DstOff+c.Len <= dst.Size && copy(dst.Bytes[c.DstOff:][:c.Len], c.Src.Bytes[c.SrcOff:]) > 0
}
