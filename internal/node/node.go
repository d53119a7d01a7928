// Package node runs the core: one owner goroutine steps it over what workers, peers and plugins say and
// carries out its effects. Everything that is not the protocol itself is wired here: time, memory,
// plugin processes, links, membership, the admin API.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/flight"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/internal/telemetry"
	"github.com/terminus-kv/terminus/internal/workerapi"
)

// Options are what Run needs besides the configuration.
type Options struct {
	Log     *slog.Logger
	Limiter *telemetry.Limiter // of Log, for its metrics; may be nil
	Version string
	// Started is called once the engine serves, with the sockets that it listens on. May be nil.
	Started func(Sockets)
}

// Sockets are the addresses of a running engine.
type Sockets struct {
	Worker, Admin, Peer string
}

// Node is one running engine.
type Node struct {
	cfg         *config.Config
	opts        Options
	log         *slog.Logger
	ctx         context.Context
	incarnation uint64
	publisher   membership.GroupPublisher // nil where groups are not published
	looker      membership.Looker         // nil where proofs of death are not looked for
	hostID      string
	started     time.Time

	inbox   *inbox
	quit    chan struct{}
	stopped chan struct{}
	clock   clock
	steps   atomic.Uint64
	stepped atomic.Int64 // monotonic time of the last step, since clock.start

	// Owned by the owner goroutine.
	m          *core.Machine
	out        core.Effects
	events     []core.Event
	lastBeat   int64
	backends   []*backend // in order of preference
	leases     map[leaseKey]*epochLease
	handover   *handover // that is not over; nil: none
	sessions   map[core.SessionID]*worker
	regions    map[uint64]*region
	pools      map[uint64]*localPool
	groups     map[string]*group
	groupNames map[string]bool // ever used
	remotes    map[string]*remote
	peerIDs    map[string]core.PeerID
	peerNames  []string
	refused    map[refusalKey]string
	paired     map[pairKey]*pairing // what the core was told of groups
	moved      map[telemetry.Moved]uint64
	opEnds     map[telemetry.OpEnd]uint64
	nextID     uint64 // regions and pools
	draining   bool
	drainBy    time.Time          // when a drain cuts what is left
	verdicts   map[string]verdict // on every node that has said Hello
	frozen     string             // why membership cannot be read at present
	peersDead  uint64             // of the core's stats, at the last step
	recorder   recorder
	bad        counters

	stages [3][core.NumStages]telemetry.Histogram // by role

	workers *workerapi.Server
	links   *peer.Links
	host    *pluginhost.Host

	drained     chan struct{}
	drainedOnce sync.Once
	drainAsked  chan struct{}
	drainOnce   sync.Once
	drainResult admin.DrainResult
	drainDone   chan struct{}
}

// linkSilence is how long a stream to a peer may be silent before it is given up and another is dialled: early
// enough for that one to say Hello before the peer is dead by its clock.
func linkSilence(dead time.Duration) time.Duration {
	return min(5*time.Second, max(dead/2, time.Second))
}

// Run serves until ctx is done (drain first) or `engine drain`, and returns nil when nothing was cut.
func Run(ctx context.Context, cfg *config.Config, o Options) error {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	n := &Node{
		cfg: cfg, opts: o, log: o.Log, started: time.Now(), inbox: newInbox(), quit: make(chan struct{}), stopped: make(chan struct{}),
		clock: clock{start: time.Now()}, leases: map[leaseKey]*epochLease{}, sessions: map[core.SessionID]*worker{}, regions: map[uint64]*region{}, pools: map[uint64]*localPool{},
		groups: map[string]*group{}, groupNames: map[string]bool{}, remotes: map[string]*remote{}, peerIDs: map[string]core.PeerID{}, refused: map[refusalKey]string{}, paired: map[pairKey]*pairing{}, verdicts: map[string]verdict{},
		moved: map[telemetry.Moved]uint64{}, opEnds: map[telemetry.OpEnd]uint64{},
		drained: make(chan struct{}), drainAsked: make(chan struct{}), drainDone: make(chan struct{}),
	}
	var cancel context.CancelFunc
	n.ctx, cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	return n.serve(ctx)
}

// closer runs what was started, in reverse order.
type closer struct{ fns []func() }

func (c *closer) add(fn func()) { c.fns = append(c.fns, fn) }
func (c *closer) close() {
	for i := len(c.fns) - 1; i >= 0; i-- {
		c.fns[i]()
	}
}

const stopBound = 15 * time.Second

func (n *Node) serve(ctx context.Context) (err error) {
	var stack closer
	defer stack.close()
	stopping := func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(context.Background(), stopBound)
	}

	for _, dir := range []string{n.cfg.RuntimeDir, n.cfg.NodeDir()} {
		if err := membership.MakeDir(dir); err != nil {
			return fmt.Errorf("runtime_dir: %w", err)
		}
	}
	if n.hostID, err = membership.HostID(); err != nil {
		return err
	}
	driver, listen, address, err := n.driver()
	if err != nil {
		return err
	}
	stack.add(func() { driver.Close() })
	lease, err := driver.Register(ctx, membership.Record{Node: n.cfg.Node, Address: address, HostID: n.hostID, PID: os.Getpid()})
	if err != nil {
		return fmt.Errorf("membership: %w", err)
	}
	stack.add(func() { lease.Close() }) // last: from here on others may hold a proof that we are gone
	n.incarnation = lease.Incarnation()
	n.publisher, _ = lease.(membership.GroupPublisher)
	n.looker, _ = driver.(membership.Looker)
	if n.recorder.file, err = flight.Create(n.cfg.NodeDir(), n.cfg.Node, n.incarnation, flight.DefaultRecords); err != nil {
		n.log.Error("no room's history will outlive this engine", "err", err)
	}
	stack.add(func() {
		if n.recorder.file != nil {
			n.recorder.file.Close()
		}
	})

	if n.m, err = core.New(coreConfig(n.cfg, n.incarnation)); err != nil {
		return err
	}
	n.peerID(n.cfg.Node) // selfPeer
	self := newRemote()
	self.inc, self.hostID, self.up = n.incarnation, n.hostID, true
	n.remotes[n.cfg.Node] = self
	n.events = append(n.events, core.Event{Kind: core.PeerHello, Peer: selfPeer, Node: n.cfg.Node, Inc: n.incarnation})

	if n.host, err = pluginhost.New(pluginhost.Config{
		Node: n.cfg.Node, Incarnation: n.incarnation, HostID: n.hostID, EngineVersion: n.opts.Version, RuntimeDir: n.cfg.NodeDir(),
		Features: hostFeatures,
		Log:      n.log, Sink: func(ev pluginhost.Event) { n.inbox.put(item{fn: func() { n.pluginEvent(ev) }}, true) },
	}); err != nil {
		return err
	}
	stack.add(func() {
		c, cancel := stopping()
		defer cancel()
		if err := n.host.Close(c); err != nil {
			n.log.Error("plugins did not stop", "err", err)
		}
	})

	var tlsFiles *peer.TLS
	if n.cfg.Peers.TLS.Enabled() {
		tlsFiles = &peer.TLS{Cert: n.cfg.Peers.TLS.Cert, Key: n.cfg.Peers.TLS.Key, CA: n.cfg.Peers.TLS.CA}
	}
	// The names are what a pair is chosen by and never change; whether a plugin is up is announced.
	var names []peer.Backend
	for _, name := range n.cfg.Transfer.Backend {
		names = append(names, peer.Backend{Name: name})
	}
	var look func()
	if n.looker != nil {
		look = n.looker.Look
	}
	if n.links, err = peer.New(peer.Config{
		Backends: names, Features: []string{featureGroups}, Node: n.cfg.Node, Incarnation: n.incarnation, HostID: n.hostID, Listen: listen, TLS: tlsFiles, InsecureListen: n.cfg.Peers.InsecureListen,
		Sink: n.peerSink, Log: n.log, Alive: n.alive, Look: look, Silence: linkSilence(n.cfg.Clocks.PeerDead.Std()),
	}); err != nil {
		return fmt.Errorf("peers: %w", err)
	}
	stack.add(func() {
		c, cancel := stopping()
		defer cancel()
		n.links.Close(c)
	})

	var gid *int
	if n.cfg.Worker.Mode == "0660" {
		if gid, err = lookupGroup(n.cfg.Worker.Group); err != nil {
			return err
		}
	}
	if n.workers, err = workerapi.Listen(workerapi.Config{
		Socket: n.cfg.Worker.Socket, Group: gid, Node: n, Post: func(ev core.Event) { n.inbox.put(item{ev: ev}, true) },
		Alive: n.alive, Log: n.log, MaxSessions: n.cfg.Worker.MaxSessions,
		RequirePeerGroup: n.cfg.Worker.RequirePeerGroup,
	}); err != nil {
		return fmt.Errorf("worker.socket: %w", err)
	}
	stack.add(func() {
		c, cancel := stopping()
		defer cancel()
		n.workers.Close(c)
	})

	for _, name := range n.cfg.Transfer.Backend {
		sp, err := spec(name, n.cfg)
		if err != nil {
			return err
		}
		p, err := n.host.Start(sp)
		if err != nil {
			return fmt.Errorf("plugins.%s: %w", name, err)
		}
		n.backends = append(n.backends, &backend{name: name, p: p, spec: sp})
	}

	go n.run()
	stack.add(func() {
		n.inbox.close()
		close(n.quit)
		select {
		case <-n.stopped:
			n.closeLeases()
		case <-time.After(stopBound):
			n.log.Error("the owner loop is stuck and is left behind")
		}
	})
	watch, unwatch := context.WithCancel(n.ctx)
	stack.add(unwatch)
	go func() {
		for u := range driver.Watch(watch) {
			n.do(func() { n.membershipUpdate(u) })
		}
	}()

	closeHTTP, err := n.serveHTTP()
	if err != nil {
		return err
	}
	stack.add(closeHTTP)

	n.log.Info("engine serves", "node", n.cfg.Node, "incarnation", n.incarnation, "worker_socket", n.cfg.Worker.Socket, "admin_socket", n.cfg.Admin.Socket, "peer", n.links.Addr())
	if n.opts.Started != nil {
		n.opts.Started(Sockets{Worker: n.cfg.Worker.Socket, Admin: n.cfg.Admin.Socket, Peer: n.links.Addr()})
	}
	select {
	case <-ctx.Done():
	case <-n.drainAsked:
	case <-lease.Lost():
		return fmt.Errorf("membership: another engine may act under this node's name, stopped at once: %w", lease.Err())
	}
	return n.drain()
}

// alive reports whether the owner goroutine steps: workers see a frozen beat otherwise.
func (n *Node) alive() bool {
	return time.Since(n.clock.start)-time.Duration(n.stepped.Load()) < time.Second
}

// drain stops admission, tells peers and waits for the rooms, at most for the budget.
func (n *Node) drain() error {
	defer close(n.drainDone)
	n.log.Info("draining", "budget", n.cfg.Drain.Budget)
	by := time.Now().Add(n.cfg.Drain.Budget.Std())
	n.do(func() {
		n.draining, n.drainBy = true, by
		n.links.AnnounceDraining()
		n.events = append(n.events, core.Event{Kind: core.DrainBegin})
	})
	select {
	case <-n.drained:
		n.drainResult.Clean = true
		n.log.Info("drained, nothing was cut")
		return nil
	case <-time.After(time.Until(by)):
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopBound)
	defer cancel()
	if err := n.ask(ctx, func() {
		n.drainResult.Cut = n.m.Counts().Live
		n.drainResult.Unreleased = max(n.m.Unreleased()-n.drainResult.Cut, 0)
		n.events = append(n.events, core.Event{Kind: core.DrainEnd})
	}); err != nil {
		return err
	}
	if n.drainResult.Cut == 0 {
		n.drainResult.Clean = true
		n.log.Warn("drained; some rooms had ended and were not released by their workers", "unreleased", n.drainResult.Unreleased)
		return nil
	}
	select { // let the verdicts reach workers and peers
	case <-n.drained:
	case <-time.After(2 * tick):
	}
	return fmt.Errorf("drain: the budget of %v is over, %d rooms were cut", n.cfg.Drain.Budget, n.drainResult.Cut)
}

// driver makes the membership driver and the addresses of the peer listener.
func (n *Node) driver() (d membership.Driver, listen, address string, err error) {
	p := n.cfg.Peers
	switch p.Driver {
	case "local":
		listen = p.Listen
		if listen == "" {
			listen = "unix:" + filepath.Join(n.cfg.NodeDir(), "peer.sock")
		}
		d, err = membership.NewLocal(membership.LocalConfig{Dir: n.cfg.RuntimeDir, StateDir: n.cfg.StateDir})
	case "static":
		listen = p.Listen
		var peers []membership.StaticPeer
		for _, s := range p.Static {
			peers = append(peers, membership.StaticPeer{Node: s.Node, Address: s.Address})
		}
		d, err = membership.NewStatic(membership.StaticConfig{StateDir: n.cfg.StateDir, Peers: peers})
	case "etcd":
		listen = p.Listen
		e := p.Etcd
		d, err = membership.NewEtcd(membership.EtcdConfig{
			Endpoints: e.Endpoints, Prefix: e.Prefix, Lease: e.Lease.Std(), Timeout: e.DialTimeout.Std(), Username: e.Username, PasswordFile: e.PasswordFile,
			TLS: membership.EtcdTLS(e.TLS), StateDir: n.cfg.StateDir,
		})
	default:
		err = fmt.Errorf("peers.driver: %q is not served; local, static and etcd are", p.Driver)
	}
	if address = p.Advertise; address == "" {
		address = listen
	}
	return d, listen, address, err
}

func lookupGroup(name string) (*int, error) {
	if name == "" {
		id := os.Getgid()
		return &id, nil
	}
	if id, err := strconv.Atoi(name); err == nil {
		return &id, nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return nil, fmt.Errorf("worker.group: %w", err)
	}
	id, err := strconv.Atoi(g.Gid)
	return &id, err
}

func coreConfig(c *config.Config, inc uint64) core.Config {
	k, l := c.Clocks, c.Limits
	cfg := core.Config{
		Incarnation: inc,
		Clocks: core.Clocks{
			Queue: k.Queue.Std(), Bootstrap: k.Bootstrap.Std(), PeerQueued: k.PeerQueued.Std(), Register: k.Register.Std(),
			Input: k.Input.Std(), Stall: k.Stall.Std(), TransferMin: k.TransferMin.Std(), Verdict: k.Verdict.Std(), Drain: k.Drain.Std(),
			PeerSuspect: k.PeerSuspect.Std(), PeerDead: k.PeerDead.Std(), Tombstone: k.Tombstone.Std(), Retire: k.Retire.Std(), FloorRate: int64(k.TransferFloorRate),
		},
		Limits:     core.DefaultLimits(),
		Quarantine: core.Quarantine{Share: max(int32(100*c.Limits.Quarantine), 1), Age: c.Limits.QuarantineAge.Std()},
	}
	cfg.Limits.Rooms, cfg.Limits.RoomsPerSession = int32(l.InflightRooms), int32(l.RoomsPerWorker)
	cfg.Limits.RoomBytes, cfg.Limits.RoomPages = int64(l.InflightBytes), int64(l.InflightPages)
	cfg.Limits.SessionBytes, cfg.Limits.SessionPages = int64(l.WorkerBytes), int64(l.WorkerPages)
	cfg.Limits.OpBytes = int64(l.OpBytes)
	cfg.Limits.PeerOps, cfg.Limits.PeerBytes = int32(l.PeerOps), int64(l.PeerBytes)
	cfg.Limits.Tombstones = int32(l.TombstonesPerPeer)
	if c.Scheduler.Policy == "fifo" {
		cfg.Policy = core.NewFIFO()
	} else {
		p := core.NewSRF()
		p.Quantum, p.AgeBound = int64(c.Scheduler.Quantum), c.Scheduler.AgeBound.Std()
		cfg.Policy = p
	}
	return cfg
}

// serveHTTP starts the admin API and, when configured, the metrics listener.
func (n *Node) serveHTTP() (func(), error) {
	metrics := telemetry.Handler(telemetry.NewRegistry(n, telemetry.Build{Version: n.opts.Version, Node: n.cfg.Node}, n.opts.Limiter))
	l, err := admin.Listen(n.cfg.Admin.Socket)
	if err != nil {
		return nil, fmt.Errorf("admin.socket: %w", err)
	}
	api := admin.NewServer(admin.Options{Engine: n, Mutations: n.cfg.Admin.EnableMutations, Metrics: metrics, Log: n.log})
	serve := func(what string, fn func() error) {
		if err := fn(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			n.log.Error("a listener ended", "what", what, "err", err)
		}
	}
	stops := []func(context.Context) error{api.Shutdown}
	if a := n.cfg.Metrics.Listen; a != "" {
		ml, server, err := telemetry.Listen(a, metrics)
		if err != nil {
			l.Close()
			return nil, err
		}
		go serve("metrics", func() error { return server.Serve(ml) })
		stops = append(stops, server.Shutdown)
	}
	go serve("admin", func() error { return api.Serve(l) })
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		for _, stop := range stops {
			if err := stop(ctx); err != nil {
				n.log.Debug("a listener did not stop in time", "err", err)
			}
		}
	}, nil
}

// counters counts by (source, code).
type counters struct {
	mu sync.Mutex
	by map[telemetry.BadFrame]uint64
}

func (c *counters) add(source, code string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[telemetry.BadFrame]uint64{}
	}
	c.by[telemetry.BadFrame{Source: source, Code: strings.ToLower(code)}]++
}

var (
	_ workerapi.Node   = (*Node)(nil)
	_ admin.Engine     = (*Node)(nil)
	_ telemetry.Source = (*Node)(nil)
)
