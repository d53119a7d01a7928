// Package sdktest is an in-memory host for tests of backends: it speaks the contract to one SDK session
// through pipes, with real memfds as worker memory, and waits for events with a bound.
//
//	a, b := sdktest.New(t, newBackend()), sdktest.New(t, newBackend())
//	src, dst := a.AddRegion(1<<20), b.AddRegion(1<<20)
//	peer := sdktest.Connect(a, b)
//	plan := peer.IdentityPlan(a.AddPool(16, src.Tensor(0, 4096)), b.AddPool(16, dst.Tensor(0, 4096)))
//	end := peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, 16), Dst: sdktest.Pages(0, 16)}).End()
package sdktest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Wait bounds every wait of the harness.
const Wait = 20 * time.Second

// Host drives one session. Its methods fail the test when the backend does not answer as it must.
type Host struct {
	Session  *sdk.Session
	Response *contract.HandshakeResponse

	t           testing.TB
	node        string
	machine     string
	incarnation uint64
	epoch       uint32
	session     *sdk.Pipe
	control     *sdk.Pipe
	done        sync.WaitGroup

	mu            sync.Mutex
	changed       chan struct{} // closed and replaced at every event
	events        []*contract.PluginEvent
	beats         int
	beat          *contract.Beat
	regions       map[uint64]*Region
	pools         map[uint64]*contract.PoolAdd
	remote        map[remoteKey]bool
	remoteRegions map[remoteKey]bool
	plans         map[uint64]planInfo
	ids           uint64
	seq           uint64
	handles       uint32
}

type remoteKey struct {
	peer uint32
	id   uint64
}

type planInfo struct {
	src      *contract.PoolAdd
	srcPages uint32 // of a group
	slices   []*contract.Slice
}

// Option changes the handshake.
type Option func(*contract.HandshakeRequest)

// WithConfig sets the options of the backend (any value that encodes to a JSON object).
func WithConfig(options any) Option {
	return func(r *contract.HandshakeRequest) {
		b, err := json.Marshal(options)
		if err != nil {
			panic(err)
		}
		r.ConfigJson = b
	}
}

// WithNode names the engine; the default is unique for each Host.
func WithNode(node string, incarnation uint64, epoch uint32) Option {
	return func(r *contract.HandshakeRequest) { r.Node, r.Incarnation, r.Epoch = node, incarnation, epoch }
}

// WithHostID sets the machine; hosts are on one machine by default.
func WithHostID(id string) Option {
	return func(r *contract.HandshakeRequest) { r.HostId = id }
}

var hosts struct {
	sync.Mutex
	n uint64
}

// New starts a session around b and closes it at the end of the test.
func New(t testing.TB, b sdk.Backend, options ...Option) *Host {
	t.Helper()
	h := Start(t, b, options...)
	if h.Response.Error != "" {
		t.Fatalf("handshake: %s", h.Response.Error)
	}
	h.serve()
	return h
}

// Start does the handshake only, for tests of what it refuses; look at Response.
func Start(t testing.TB, b sdk.Backend, options ...Option) *Host {
	t.Helper()
	hosts.Lock()
	hosts.n++
	n := hosts.n
	hosts.Unlock()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	req := &contract.HandshakeRequest{
		Versions: []uint32{sdk.ContractVersion}, EngineVersion: "test", Node: fmt.Sprintf("node-%d", n),
		Incarnation: 1000 + n, Epoch: 1, RuntimeDir: dir, HostId: "this-machine",
		Features: []string{sdk.FeatureReceiverChecked, sdk.FeatureByteProgress, sdk.FeatureFencePeer, sdk.FeatureStrided, sdk.FeatureLayerRange, sdk.FeatureRepage},
	}
	for _, o := range options {
		o(req)
	}
	h := &Host{
		Session: sdk.NewSession(b), t: t, node: req.Node, machine: req.HostId, incarnation: req.Incarnation, epoch: req.Epoch,
		session: sdk.NewPipe(), control: sdk.NewPipe(), changed: make(chan struct{}),
		regions: map[uint64]*Region{}, pools: map[uint64]*contract.PoolAdd{}, remote: map[remoteKey]bool{}, remoteRegions: map[remoteKey]bool{}, plans: map[uint64]planInfo{},
	}
	t.Cleanup(func() {
		h.Close()
		os.RemoveAll(dir)
	})
	if h.Response, err = h.Session.Handshake(context.Background(), req); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *Host) serve() {
	h.done.Go(func() { _ = h.Session.ServeSession(h.session) })
	h.done.Go(func() { _ = h.Session.ServeControl(h.control) })
	h.done.Go(func() { h.receive(h.session) })
	h.done.Go(func() { h.receive(h.control) })
}

func (h *Host) receive(p *sdk.Pipe) {
	for {
		frame, err := p.HostRecv()
		if err != nil {
			return
		}
		h.mu.Lock()
		for _, e := range frame.GetEvents() {
			switch e := e.GetEvent().(type) {
			case *contract.PluginEvent_Beat:
				h.beats++
				h.beat = e.Beat
			case *contract.PluginEvent_Log:
				h.t.Logf("%s: %v: %s", h.node, e.Log.Level, e.Log.Message)
			}
			if e.GetBeat() == nil {
				h.events = append(h.events, e)
			}
		}
		close(h.changed)
		h.changed = make(chan struct{})
		h.mu.Unlock()
	}
}

// Close ends the session as an engine does: the streams end, the plugin closes. It reports calls of
// the backend that do not return. Called by the test's cleanup; calling it earlier is harmless.
func (h *Host) Close() {
	h.mu.Lock()
	regions := h.regions
	h.regions = map[uint64]*Region{}
	h.mu.Unlock()
	h.session.Close()
	h.control.Close()
	if err := h.Session.Close(); err != nil {
		h.t.Errorf("%s: %v", h.node, err)
	}
	h.done.Wait()
	for _, r := range regions {
		r.Free()
	}
}

// Send sends events on the Session stream, as one frame.
func (h *Host) Send(events ...*contract.HostEvent) {
	h.t.Helper()
	if err := h.session.HostSend(&contract.HostFrame{Events: events}); err != nil {
		h.t.Fatalf("%s: the session is over: %v", h.node, err)
	}
}

// SendControl sends events on the Control stream.
func (h *Host) SendControl(events ...*contract.HostEvent) {
	h.t.Helper()
	if err := h.control.HostSend(&contract.HostFrame{Events: events}); err != nil {
		h.t.Fatalf("%s: the session is over: %v", h.node, err)
	}
}

// Events returns all events so far, beats excluded.
func (h *Host) Events() []*contract.PluginEvent {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]*contract.PluginEvent(nil), h.events...)
}

// Beats returns the number of beats so far.
func (h *Host) Beats() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.beats
}

// LastBeat returns the last beat, nil before the first.
func (h *Host) LastBeat() *contract.Beat {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.beat
}

// Until waits until some event, past or coming, satisfies match, and returns the first one.
func (h *Host) Until(what string, match func(*contract.PluginEvent) bool) *contract.PluginEvent {
	h.t.Helper()
	timeout := time.After(Wait)
	seen := 0
	for {
		h.mu.Lock()
		fresh, changed := h.events[seen:], h.changed
		seen = len(h.events)
		h.mu.Unlock()
		for _, e := range fresh {
			if match(e) {
				return e
			}
		}
		select {
		case <-changed:
		case <-timeout:
			h.t.Fatalf("%s: no %s within %v; the last events: %v", h.node, what, Wait, tail(h.Events()))
		}
	}
}

func tail(events []*contract.PluginEvent) []*contract.PluginEvent {
	return events[max(0, len(events)-8):]
}

func (h *Host) id() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ids++
	return h.ids
}

// Drain asks the plugin to finish and returns the number of ops left.
func (h *Host) Drain(bound time.Duration) uint32 {
	h.t.Helper()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{DeadlineNs: uint64(bound)}}})
	e := h.Until("Drained", func(e *contract.PluginEvent) bool { return e.GetDrained() != nil })
	return e.GetDrained().GetOpenOps()
}

// Stats asks for a report: a barrier behind everything sent before on the Session stream.
func (h *Host) Stats() *contract.Stats {
	h.t.Helper()
	id := h.id()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_Stats{Stats: &contract.StatsRequest{Id: id}}})
	return h.Until("Stats", func(e *contract.PluginEvent) bool { return e.GetStats().GetId() == id }).GetStats()
}

// Fence asks whether every writer of that peer epoch is gone for good. epoch 0: all of the incarnation.
func (h *Host) Fence(node string, incarnation uint64, epoch uint32) contract.FenceResult {
	h.t.Helper()
	id := h.id()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_FencePeer{FencePeer: &contract.FencePeer{
		Fence: id, Node: node, Incarnation: incarnation, Epoch: epoch,
	}}})
	return h.Until("Fenced", func(e *contract.PluginEvent) bool { return e.GetFenced().GetFence() == id }).GetFenced().GetResult()
}

// Node returns (node, incarnation, epoch) of the session.
func (h *Host) Node() (node string, incarnation uint64, epoch uint32) {
	return h.node, h.incarnation, h.epoch
}
