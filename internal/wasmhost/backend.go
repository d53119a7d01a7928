// Package wasmhost hosts one WebAssembly guest as a transfer backend: the guest decides, the host moves the
// bytes. docs/wasm-abi.md is the interface between the two.
//
// A Backend is an sdk.Backend. The SDK keeps the order of events, beats, drain, stats, descriptors, canaries and
// leases as for any plugin, plugins/sdk/shm shares the memory of peers, and this package hands on to the
// guest what remains, as frames of the contract. One goroutine, the loop, calls the guest and runs all host
// functions; the tables of memory that the guest can name are changed there or under a lock. Whatever the
// guest does wrong is Start.Fatal with a cause: the process ends, and the engine ends its rooms (R6).
package wasmhost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/tetratelabs/wazero"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/shm"
)

// Limits bound a guest. Zero values take the default in brackets, which is what docs/wasm-abi.md promises.
type Limits struct {
	Pages      uint32        // of memory, 64 KiB each [1024]
	Call       time.Duration // wall time of one call of an export [5 s]
	Pump       time.Duration // asked of one pump [2 ms]
	Answer     time.Duration // to answers, and to the end of an aborted op [10 s]
	Frames     int           // emitted in one call [4096]
	FrameBytes int           // emitted in one call [16 MiB]
}

func (l *Limits) setDefaults() {
	if l.Pages == 0 {
		l.Pages = 1024
	}
	if l.Call <= 0 {
		l.Call = 5 * time.Second
	}
	if l.Pump <= 0 {
		l.Pump = 2 * time.Millisecond
	}
	if l.Answer <= 0 {
		l.Answer = 10 * time.Second
	}
	if l.Frames <= 0 {
		l.Frames = 4096
	}
	if l.FrameBytes <= 0 {
		l.FrameBytes = 16 << 20
	}
}

// Config says which module is hosted.
type Config struct {
	File   string // the module
	SHA256 string // hex digest that the file must have; empty: any
	// CacheDir holds compiled modules; empty: a directory of the user's. One that others could write to is
	// not used.
	CacheDir string
	Limits   Limits

	cache wazero.CompilationCache // in place of CacheDir, for tests that load one module often
}

// features are those that a guest may declare: what the host can do for it.
var features = []string{sdk.FeatureByteProgress, sdk.FeatureStrided, sdk.FeatureLayerRange, sdk.FeatureRepage}

// Backend is a guest as a transfer backend.
type Backend struct {
	g       *guest
	info    sdk.Info
	noCache error // why compiled modules are not kept

	start  sdk.Start
	share  *shm.Share
	ctx    context.Context
	cancel context.CancelCauseFunc
	in     inbox
	looped chan struct{} // closed when the loop has ended; nil before Start

	failOnce sync.Once

	mu      sync.Mutex
	asked   map[question]chan error
	regions map[uint64]*region
	peers   map[uint32]*peer
	counts  counts

	// The loop's own.
	ops map[uint64]*openOp
	seq uint64
}

type counts struct{ turns, refused uint64 }

// region is memory of a worker of this engine.
type region struct {
	bytes   []byte
	revoked bool
}

// peer is where ops lead. targets, by region, are those of the ops that are open, and belong to the loop.
type peer struct {
	remote  *shm.Remote
	revoked bool
	targets map[uint64][]*target
}

// New loads the module and asks it what it is. The caller closes the Backend.
func New(ctx context.Context, cfg Config) (*Backend, error) {
	cfg.Limits.setDefaults()
	b := &Backend{
		asked: map[question]chan error{}, regions: map[uint64]*region{}, peers: map[uint32]*peer{}, ops: map[uint64]*openOp{},
		in: newInbox(),
	}
	b.g = &guest{name: filepath.Base(cfg.File), limits: cfg.Limits, sink: b, began: time.Now()}
	code, err := readModule(cfg.File, cfg.SHA256)
	if err != nil {
		return nil, err
	}
	cache := cfg.cache
	if cache == nil {
		if cache, b.noCache = openCache(cfg.CacheDir); b.noCache != nil {
			cache = nil
		}
	}
	if err := b.g.load(ctx, code, cache); err != nil {
		return nil, b.g.named(err)
	}
	if err := b.describe(ctx); err != nil {
		_ = b.g.close()
		return nil, err
	}
	return b, nil
}

// named makes sure that an error says which guest it is about.
func (g *guest) named(err error) error {
	if strings.HasPrefix(err.Error(), "guest "+g.name) {
		return err
	}
	return fmt.Errorf("guest %s: %w", g.name, err)
}

func (b *Backend) describe(ctx context.Context) error {
	payload, err := b.g.request(ctx, methodDescribe, exportCall+"(DESCRIBE)", nil, nil)
	if err != nil {
		return err
	}
	var d contract.HandshakeResponse
	if err := proto.Unmarshal(payload, &d); err != nil {
		return fmt.Errorf("guest %s: %s(DESCRIBE): the payload is no HandshakeResponse", b.g.name, exportCall)
	}
	for _, f := range d.Features {
		if !slices.Contains(features, f) {
			return fmt.Errorf("guest %s: it declares feature %q; a guest can have %s", b.g.name, f, strings.Join(features, ", "))
		}
	}
	b.info = sdk.Info{Name: d.Name, Version: d.PluginVersion, Features: d.Features, Limits: d.Limits}
	if d.ConfigSchema != "" {
		if _, err := compileSchema(d.ConfigSchema); err != nil {
			return fmt.Errorf("guest %s: its config_schema: %w", b.g.name, err)
		}
		b.info.Schema = json.RawMessage(d.ConfigSchema)
	}
	return nil
}

func compileSchema(text string) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("options.json", doc); err != nil {
		return nil, err
	}
	return c.Compile("options.json")
}

// checkOptions holds the options against the guest's schema.
func (b *Backend) checkOptions(options []byte) error {
	if b.info.Schema == nil {
		return nil // the SDK has refused all
	}
	schema, err := compileSchema(string(b.info.Schema))
	if err != nil {
		return err
	}
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(options)))
	if err != nil {
		return fmt.Errorf("options: %w", err)
	}
	if err := schema.Validate(doc); err != nil {
		lines := strings.Split(err.Error(), "\n")
		return fmt.Errorf("plugins.%s.options: %s", b.info.Name, strings.TrimSpace(lines[len(lines)-1]))
	}
	return nil
}

// Info is what the guest said of itself.
func (b *Backend) Info() sdk.Info { return b.info }

// Start hands the configuration to the guest and begins to serve it.
func (b *Backend) Start(ctx context.Context, s sdk.Start) (endpoint []byte, err error) {
	b.start = s
	b.g.output.setLog(s.Logf)
	if b.noCache != nil {
		s.Logf(contract.Log_LEVEL_WARN, "the module is compiled at every start: %v", b.noCache)
	}
	if err := b.checkOptions(s.Config); err != nil {
		return nil, err
	}
	request, err := proto.Marshal(&contract.HandshakeRequest{
		Versions: []uint32{sdk.ContractVersion}, EngineVersion: sdk.Version, Node: s.Node, Incarnation: s.Incarnation, Epoch: s.Epoch,
		ConfigJson: s.Config, HostId: s.HostID, Features: features,
	})
	if err != nil {
		return nil, err
	}
	if _, err := b.g.request(ctx, methodStart, exportCall+"(START)", nil, request); err != nil {
		var r *refusal
		if errors.As(err, &r) {
			return nil, errors.New(r.message)
		}
		return nil, err
	}
	if b.share, err = shm.Listen(s); err != nil {
		return nil, err
	}
	b.ctx, b.cancel = context.WithCancelCause(ctx)
	b.looped = make(chan struct{})
	go b.loop()
	return b.share.Endpoint(), nil
}

// fail ends the process: the guest cannot be trusted any more.
func (b *Backend) fail(err error) {
	b.failOnce.Do(func() {
		b.cancel(err)
		b.start.Fatal(err)
	})
}

// question is something that the guest has to answer.
type question struct {
	what string // the host's event
	id   uint64
}

func (q question) String() string { return fmt.Sprintf("%s %d", q.what, q.id) }

// ask gives an event to the guest and waits for its answer.
func (b *Backend) ask(q question, event *contract.HostEvent) error {
	answer := make(chan error, 1)
	b.mu.Lock()
	b.asked[q] = answer
	b.mu.Unlock()
	b.tell(item{event: event})
	bound := time.NewTimer(b.g.limits.Answer)
	defer bound.Stop()
	select {
	case err := <-answer:
		return err
	case <-b.ctx.Done():
		return context.Cause(b.ctx)
	case <-bound.C:
		err := fmt.Errorf("guest %s: no answer to %v within %v", b.g.name, q, b.g.limits.Answer)
		b.fail(err)
		return err
	}
}

// tell queues an item for the guest.
func (b *Backend) tell(i item) {
	if !b.in.put(i) {
		b.fail(fmt.Errorf("guest %s: %d events wait for it; it does not keep up", b.g.name, maxWaiting))
	}
}

// AddRegion lets the guest read the region, and then the peers map it.
func (b *Backend) AddRegion(r *sdk.Region) error {
	b.mu.Lock()
	b.regions[r.ID] = &region{bytes: r.Bytes}
	b.mu.Unlock()
	err := b.ask(question{"RegionAdd", r.ID}, &contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
		Region: r.ID, Kind: r.Kind, Size: r.Size, NoCanary: true,
	}}})
	if err == nil {
		return b.share.AddRegion(r)
	}
	b.forgetRegion(r.ID)
	return err
}

// RemoveRegion revokes the region before the guest hears of it. The guest's answer comes from the loop, on which
// copies run, so no copy runs when it is there.
func (b *Backend) RemoveRegion(r *sdk.Region) {
	b.mu.Lock()
	if known := b.regions[r.ID]; known != nil {
		known.revoked = true
	}
	b.mu.Unlock()
	_ = b.ask(question{"RegionRemove", r.ID}, &contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: r.ID}}})
	b.share.RemoveRegion(r)
	if b.ctx.Err() != nil {
		<-b.looped // the guest may be in a copy; it is being cut short
	}
	b.forgetRegion(r.ID)
}

func (b *Backend) forgetRegion(id uint64) {
	b.mu.Lock()
	delete(b.regions, id)
	b.mu.Unlock()
}

// AddPeer connects to the peer's share, and asks the guest.
func (b *Backend) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	remote, err := b.share.Dial(p)
	if err != nil {
		return 0, err
	}
	b.mu.Lock()
	b.peers[p.Handle] = &peer{remote: remote, targets: map[uint64][]*target{}}
	b.mu.Unlock()
	err = b.ask(question{"PeerAdd", uint64(p.Handle)}, &contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
		Peer: p.Handle, Node: p.Node, Incarnation: p.Incarnation, Epoch: p.Epoch, SameHost: p.SameHost, RequireLane: p.RequireLane,
	}}})
	if err != nil {
		b.forgetPeer(p.Handle)
		return 0, err
	}
	return contract.Lane_LANE_SHM, nil
}

// RemovePeer tells the guest, and lets go of the peer's memory.
func (b *Backend) RemovePeer(p *sdk.Peer) {
	b.mu.Lock()
	if known := b.peers[p.Handle]; known != nil {
		known.revoked = true
	}
	b.mu.Unlock()
	_ = b.ask(question{"PeerRemove", uint64(p.Handle)}, &contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: p.Handle}}})
	b.forgetPeer(p.Handle)
}

func (b *Backend) forgetPeer(handle uint32) {
	b.mu.Lock()
	known := b.peers[handle]
	delete(b.peers, handle)
	b.mu.Unlock()
	if known != nil {
		known.remote.Close()
	}
}

// Accept admits a writer; its host moves the bytes, so the guest need not know.
func (b *Backend) Accept(p *sdk.Peer) error { return b.share.Accept(p) }

// Unaccept dismisses it.
func (b *Backend) Unaccept(p *sdk.Peer) { b.share.Unaccept(p) }

// Geometry hands pools and plans to the guest.
func (b *Backend) Geometry(e *contract.HostEvent) { b.tell(item{event: e}) }

// Transfer maps what the op writes to and gives the op to the guest, which ends it.
func (b *Backend) Transfer(op *sdk.Op) {
	o, err := b.open(op)
	if err != nil {
		if op.Context().Err() != nil {
			op.Aborted(true)
			return
		}
		cause := contract.Cause_CAUSE_TRANSPORT
		var typed *sdk.Error
		if errors.As(err, &typed) {
			cause = typed.Cause
		}
		op.Fail(cause, true, "%v", err)
		return
	}
	op.Async()
	o.unwatch = context.AfterFunc(op.Context(), func() { b.in.abort(o) })
	b.tell(item{event: o.submit(), op: o})
}

// Counters are the share's and those of the guest.
func (b *Backend) Counters() map[string]uint64 {
	all := b.share.Counters()
	b.mu.Lock()
	defer b.mu.Unlock()
	all["guest.turns"], all["guest.accesses_refused"] = b.counts.turns, b.counts.refused
	all["guest.bytes_copied"] = b.g.copied.Load()
	return all
}

// Close ends the loop, lets go of all memory and drops the instance.
func (b *Backend) Close() error {
	if b.looped == nil {
		return errors.Join(b.share.Close(), b.g.close())
	}
	b.cancel(sdk.ErrSessionOver)
	select {
	case <-b.looped:
	case <-time.After(b.g.limits.Call + time.Second):
		return fmt.Errorf("guest %s: a call does not end", b.g.name)
	}
	b.in.close()
	for _, o := range b.ops {
		o.release()
	}
	return errors.Join(b.share.Close(), b.g.close())
}

var (
	_ sdk.Backend       = (*Backend)(nil)
	_ sdk.Accepter      = (*Backend)(nil)
	_ sdk.Planner       = (*Backend)(nil)
	_ sdk.StatsReporter = (*Backend)(nil)
	_ sink              = (*Backend)(nil)
)
