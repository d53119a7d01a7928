// Package tcp is the reference backend and the embedded default: it moves pages over shared memory
// when both regions are on one host, and over TCP otherwise.
//
// The receiving process does all the copying into destination pages. At the moment of each copy, at
// most 64 KiB of it at a time, it checks that the destination opener is still granted and that the
// bytes lie inside the granted pages (rung 2 of the ladder). Over TCP a slice is complete in a private
// buffer before it is checked, so a sender that stalls holds no page open. A connection carries ops
// only after both ends have proved that they know the peer token; what follows is neither encrypted
// nor authenticated byte by byte, so the TCP listener belongs on a trusted network.
//
// The sending half is peer.go (connections of one peer), outbound.go (one connection) and xfer.go (one
// op); the receiving half is receiver.go (listeners, admitted writers), inbound.go (one connection) and
// grants.go (who may write where). wire.go and handshake.go are the protocol between them.
package tcp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Version of the plugin, shown in listings. It is not the version of the wire, see wireVersion.
const Version = "1.0.0"

// Interface guards.
var (
	_ sdk.Backend       = (*Backend)(nil)
	_ sdk.Granter       = (*Backend)(nil)
	_ sdk.Fencer        = (*Backend)(nil)
	_ sdk.StatsReporter = (*Backend)(nil)
)

// Backend implements sdk.Backend, sdk.Granter, sdk.Fencer and sdk.StatsReporter. Use New.
type Backend struct {
	cfg   Config
	start sdk.Start
	self  instance
	count counters
	table openers
	recv  *receiver
	lock  *lockFile
	ctx   context.Context // done at Close
	stop  context.CancelFunc

	mu      sync.Mutex
	regions map[uint64]*region
	peers   map[*peer]struct{}
}

// instance names one run of this backend for ever; a connection meant for another run is refused.
type instance [16]byte

// region is memory of a local worker, as source or destination.
type region struct {
	id      uint64
	bytes   []byte
	fd      int
	removed atomic.Bool // no slice may land any more
}

// counters are shown by Stats.
type counters struct {
	bytesOut, bytesIn             atomic.Uint64
	lateRefused, outOfBounds      atomic.Uint64
	lateFrames, badFrames         atomic.Uint64
	handshakes, handshakesRefused atomic.Uint64
	connectionsRefused            atomic.Uint64
	connectionsLost, faults       atomic.Uint64
}

// New returns a backend that is not started.
func New() *Backend {
	b := &Backend{
		cfg:     DefaultConfig(),
		regions: map[uint64]*region{},
		peers:   map[*peer]struct{}{},
	}
	b.ctx, b.stop = context.WithCancel(context.Background())
	return b
}

// Info implements sdk.Backend.
func (b *Backend) Info() sdk.Info {
	return sdk.Info{
		Name:    "tcp",
		Version: Version,
		Features: []string{
			sdk.FeatureReceiverChecked, sdk.FeatureByteProgress, sdk.FeatureFencePeer,
			sdk.FeatureStrided, sdk.FeatureLayerRange,
		},
		MemoryKinds:   []contract.MemoryKind{contract.MemoryKind_MEMORY_KIND_HOST_SHM},
		Limits:        &contract.Limits{MaxOpsPerPeer: maxOpsPerPeer, MaxOpBytes: maxOpBytes},
		Config:        &b.cfg,
		OpConcurrency: 16, // Transfer only queues, it never waits
	}
}

// Start implements sdk.Backend: it takes the lock that proves this process alive, opens both listeners
// and returns the endpoint.
func (b *Backend) Start(_ context.Context, s sdk.Start) ([]byte, error) {
	if err := b.cfg.check(); err != nil {
		return nil, err
	}
	b.start = s
	if _, err := rand.Read(b.self[:]); err != nil {
		return nil, fmt.Errorf("instance id: %w", err)
	}
	var err error
	if b.lock, err = takeLock(s.RuntimeDir); err != nil {
		return nil, err
	}
	b.recv = newReceiver(b)
	ep, err := b.recv.listen()
	if err != nil {
		b.recv = nil
		return nil, errors.Join(err, b.lock.Close())
	}
	return ep.encode()
}

// AddRegion implements sdk.Backend.
func (b *Backend) AddRegion(r *sdk.Region) error {
	if r.Kind != contract.MemoryKind_MEMORY_KIND_HOST_SHM {
		return fmt.Errorf("region %d: memory kind %s is not served; use %s", r.ID, r.Kind, contract.MemoryKind_MEMORY_KIND_HOST_SHM)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.regions[r.ID]; ok {
		return fmt.Errorf("region %d is there already", r.ID)
	}
	b.regions[r.ID] = &region{id: r.ID, bytes: r.Bytes, fd: r.FD}
	return nil
}

// RemoveRegion implements sdk.Backend. When it returns, no slice lands in the region and no peer is
// sent a byte of it.
func (b *Backend) RemoveRegion(r *sdk.Region) {
	b.mu.Lock()
	own := b.regions[r.ID]
	delete(b.regions, r.ID)
	peers := make([]*peer, 0, len(b.peers))
	for p := range b.peers {
		peers = append(peers, p)
	}
	b.mu.Unlock()
	if own == nil {
		return
	}
	own.removed.Store(true)
	b.recv.barrier()
	for _, p := range peers {
		p.forget(r.ID)
	}
}

// region returns a local region, nil when it is not there.
func (b *Backend) region(id uint64) *region {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.regions[id]
}

// Accept implements sdk.Granter.
func (b *Backend) Accept(p *sdk.Peer) error { return b.recv.accept(p) }

// Unaccept implements sdk.Granter. When it returns, the writer's connections are closed and no slice of
// it lands any more.
func (b *Backend) Unaccept(p *sdk.Peer) { b.recv.unaccept(p) }

// Grant implements sdk.Granter.
func (b *Backend) Grant(g *sdk.Grant) error { return b.table.grant(g) }

// Revoke implements sdk.Granter. It waits for at most one slice of each connection and is always quiet.
func (b *Backend) Revoke(g *sdk.Grant) bool {
	b.table.revoke(g.Destination)
	b.recv.barrier()
	return true
}

// FencePeer implements sdk.Fencer. This process alone copies into its pages, so refusing a writer epoch
// for good and waiting until the goroutines that served it have ended is a proof.
func (b *Backend) FencePeer(ctx context.Context, node string, incarnation uint64, epoch uint32) contract.FenceResult {
	if b.recv.fence(ctx, node, incarnation, epoch) {
		return contract.FenceResult_FENCE_RESULT_QUIET
	}
	return contract.FenceResult_FENCE_RESULT_UNKNOWN
}

// Counters implements sdk.StatsReporter.
func (b *Backend) Counters() map[string]uint64 {
	c := &b.count
	m := map[string]uint64{
		"bytes_out":           c.bytesOut.Load(),
		"bytes_in":            c.bytesIn.Load(),
		"late_refused":        c.lateRefused.Load(),
		"out_of_bounds":       c.outOfBounds.Load(),
		"late_frames":         c.lateFrames.Load(),
		"bad_frames":          c.badFrames.Load(),
		"handshakes":          c.handshakes.Load(),
		"handshakes_refused":  c.handshakesRefused.Load(),
		"connections_refused": c.connectionsRefused.Load(),
		"connections_lost":    c.connectionsLost.Load(),
		"faults":              c.faults.Load(),
	}
	if b.recv != nil {
		m["connections_in"] = uint64(b.recv.connections())
	}
	return m
}

// Close implements sdk.Backend. Copying ends before the listeners close.
func (b *Backend) Close() error {
	b.stop()
	b.mu.Lock()
	peers := make([]*peer, 0, len(b.peers))
	for p := range b.peers {
		peers = append(peers, p)
	}
	b.mu.Unlock()
	for _, p := range peers {
		p.close(false)
	}
	if b.recv == nil {
		return nil
	}
	return errors.Join(b.recv.close(), b.lock.Close())
}
