// Package nixl is the backend that moves pages with NIXL, the library that the user has installed: it is loaded from
// a wheel at run time, and nothing of it is part of this program.
//
// What the contract asks for and the library does not give is made here. The library's release, deregistration and
// invalidation are no fences: an op is quiet when each of its requests has ended well, or else when the receiver has
// destroyed the agent that it wrote to. So the receiver makes one agent for each link (receiver.go), and a writer that
// lost one asks for the proof by making the next (peer.go). A request shows no bytes, so ops are cut into requests of at
// most 2 MiB, and progress is their ends (link.go). Metadata that is damaged can end the process, so none is loaded that
// its maker has not authenticated (wire.go). Only writes are made: a reader that dies can take the process that it
// read from along.
package nixl

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Version of the plugin, shown in listings. It is not the version of the library.
const Version = "1.0.0"

// lane is what the transports that are served make.
const lane = contract.Lane_LANE_TCP

// Interface guards.
var (
	_ sdk.Backend       = (*Backend)(nil)
	_ sdk.Accepter      = (*Backend)(nil)
	_ sdk.Fencer        = (*Backend)(nil)
	_ sdk.StatsReporter = (*Backend)(nil)
)

// Backend implements sdk.Backend, sdk.Accepter, sdk.Fencer and sdk.StatsReporter. Use New.
type Backend struct {
	cfg       Config
	start     sdk.Start
	instance  string // names this run for ever
	agentName string // of the sending agent; those of links begin with it
	lib       *library
	driver    *driver
	recv      *receiver
	lock      *lockFile
	count     counters
	ctx       context.Context // done at Close
	stop      context.CancelFunc
	closing   sync.Once

	mu      sync.Mutex
	regions map[uint64]*region
}

type region struct {
	bytes []byte
	reg   registration // with the sending agent
}

// counters are shown by Stats.
type counters struct {
	bytesOut, failed, refused, linksLost atomic.Uint64
}

// New returns a backend that is not started.
func New() *Backend {
	b := &Backend{cfg: DefaultConfig(), regions: map[uint64]*region{}}
	b.ctx, b.stop = context.WithCancel(context.Background())
	return b
}

// Info implements sdk.Backend.
func (b *Backend) Info() sdk.Info {
	return sdk.Info{
		Name:    "nixl",
		Version: Version,
		Features: []string{
			sdk.FeatureByteProgress, sdk.FeatureFencePeer, sdk.FeatureStrided, sdk.FeatureLayerRange, sdk.FeatureRepage,
		},
		MemoryKinds:   []contract.MemoryKind{contract.MemoryKind_MEMORY_KIND_HOST_SHM},
		Limits:        &contract.Limits{MaxOpsPerPeer: maxOpsPerPeer, MaxOpBytes: maxOpBytes},
		Config:        &b.cfg,
		OpConcurrency: 16, // Transfer only hands over
	}
}

// Start implements sdk.Backend: it loads the library and makes the sending agent.
func (b *Backend) Start(_ context.Context, s sdk.Start) (_ []byte, err error) {
	if err := b.cfg.check(); err != nil {
		return nil, err
	}
	b.start = s
	b.instance = hex.EncodeToString(nonce())
	b.agentName = agentName(s, b.instance)
	path, err := locate(&b.cfg)
	if err != nil {
		return nil, err
	}
	if err := setEnvironment(&b.cfg, s.RuntimeDir); err != nil {
		return nil, err
	}
	if b.lib, err = open(path); err != nil {
		return nil, err
	}
	if b.lock, err = takeLock(s.RuntimeDir); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", b.cfg.Listen)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("option listen: %w", err), b.lock.Close())
	}
	a, err := b.lib.newAgent(b.agentName, b.cfg.ProgressDelay)
	if err != nil {
		return nil, errors.Join(err, listener.Close(), b.lock.Close())
	}
	b.driver = newDriver(b, a)
	go b.driver.run()
	b.recv = &receiver{
		b: b, listener: listener, admit: handshakeBound, writers: map[uint32]*writer{}, fences: map[string]fence{},
		changed: make(chan struct{}), conns: map[net.Conn]struct{}{}, sessions: map[string]*session{}, open: map[*inbound]struct{}{},
	}
	go b.recv.serve()
	return json.Marshal(endpoint{
		Version: wireVersion, Instance: b.instance, Host: s.HostID, Addrs: b.addrs(),
		Lock: b.lock.f.Name(), LockDev: b.lock.dev, LockIno: b.lock.ino, NIXL: wheelVersion(path),
	})
}

// agentName is for people who read the library's log, and unique: the library keeps its peers apart by name.
func agentName(s sdk.Start, instance string) string {
	node := strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' { // a zero would end the name
			return '_'
		}
		return r
	}, s.Node)
	return fmt.Sprintf("%.64s-%d-%d-%s", node, s.Incarnation, s.Epoch, instance)
}

// addrs are what peers dial.
func (b *Backend) addrs() []string {
	_, port, _ := net.SplitHostPort(b.recv.listener.Addr().String())
	if len(b.cfg.Advertise) == 0 {
		return []string{b.recv.listener.Addr().String()}
	}
	var list []string
	for _, a := range b.cfg.Advertise {
		if host, p, _ := net.SplitHostPort(a); p == "0" {
			a = net.JoinHostPort(host, port)
		}
		list = append(list, a)
	}
	return list
}

// AddRegion implements sdk.Backend: the sending agent registers the memory; an agent of a link does when its writer
// asks for it.
func (b *Backend) AddRegion(r *sdk.Region) error {
	reg, err := b.driver.agent.register(r.Bytes)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.regions[r.ID] = &region{bytes: r.Bytes, reg: reg}
	return nil
}

// RemoveRegion implements sdk.Backend.
func (b *Backend) RemoveRegion(r *sdk.Region) {
	b.mu.Lock()
	own := b.regions[r.ID]
	delete(b.regions, r.ID)
	b.mu.Unlock()
	if own == nil {
		return
	}
	b.recv.removeRegion(r.ID)
	if err := b.driver.agent.deregister(own.reg); err != nil {
		b.start.Logf(contract.Log_LEVEL_ERROR, "region %d: %v", r.ID, err)
	}
}

func (b *Backend) region(id uint64) *region {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.regions[id]
}

// AddPeer implements sdk.Backend: it connects, so that a peer that cannot be reached is refused at once.
func (b *Backend) AddPeer(sp *sdk.Peer) (contract.Lane, error) {
	if sp.RequireLane != contract.Lane_LANE_ANY && sp.RequireLane < lane {
		return lane, nil // the SDK refuses it by name
	}
	e, err := decodeEndpoint(sp.Endpoint)
	if err != nil {
		return 0, err
	}
	p := &peer{b: b, sdk: sp, ep: e, session: hex.EncodeToString(nonce())}
	if e.Host == b.start.HostID {
		p.lock = watchLock(e)
	}
	l, err := p.open()
	if err != nil {
		p.lock.Close()
		return 0, err
	}
	sp.Data = p
	b.driver.do(func() { p.use(l) })
	return lane, nil
}

// RemovePeer implements sdk.Backend.
func (b *Backend) RemovePeer(sp *sdk.Peer) {
	p, ok := sp.Data.(*peer)
	if !ok {
		return
	}
	done := make(chan struct{})
	b.driver.do(func() { p.remove(); close(done) })
	select {
	case <-done:
	case <-b.driver.done:
	}
}

// Transfer implements sdk.Backend.
func (b *Backend) Transfer(op *sdk.Op) {
	p := op.Peer().Data.(*peer)
	op.Async()
	x := &xfer{op: op}
	x.unhook = context.AfterFunc(op.Context(), func() { b.driver.do(func() { x.cancel(p) }) })
	b.driver.do(func() { p.submit(x) })
}

// Accept implements sdk.Accepter.
func (b *Backend) Accept(p *sdk.Peer) error { return b.recv.accept(p) }

// Unaccept implements sdk.Accepter. When it returns, nothing of the writer can land any more.
func (b *Backend) Unaccept(p *sdk.Peer) { b.recv.unaccept(p) }

// FencePeer implements sdk.Fencer: the agents that the epoch could write to are destroyed, and it gets no other.
func (b *Backend) FencePeer(ctx context.Context, node string, incarnation uint64, epoch uint32) contract.FenceResult {
	fenced := make(chan bool, 1)
	go func() { fenced <- b.recv.fence(node, incarnation, epoch) }()
	select {
	case ok := <-fenced:
		if ok {
			return contract.FenceResult_FENCE_RESULT_QUIET
		}
	case <-ctx.Done():
	}
	return contract.FenceResult_FENCE_RESULT_UNKNOWN
}

// Counters implements sdk.StatsReporter.
func (b *Backend) Counters() map[string]uint64 {
	return map[string]uint64{
		"bytes_out":       b.count.bytesOut.Load(),
		"requests_failed": b.count.failed.Load(),
		"writers_refused": b.count.refused.Load(),
		"links_lost":      b.count.linksLost.Load(),
	}
}

// Close implements sdk.Backend. Nothing of the process touches the regions, or is let to them, when it returns.
func (b *Backend) Close() (err error) {
	b.closing.Do(func() {
		b.stop()
		if b.driver == nil {
			return
		}
		b.driver.close()
		err = errors.Join(b.recv.close(), b.lock.Close())
	})
	return err
}
