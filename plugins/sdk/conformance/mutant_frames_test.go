package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// mangled is a carrier whose frames pass through a mangler: for faults that the SDK makes impossible.
type mangled struct {
	Carrier
	fault func(*mangler)
}

// InProcess says that no case may look for a process.
func (mangled) InProcess() bool { return true }

// mangler stands between the suite and one epoch of a plugin. Its hooks are called one at a time; they may
// keep state in variables of the function that sets them. A nil hook passes everything on.
type mangler struct {
	in  func(control bool, e *contract.HostEvent) []*contract.HostEvent
	out func(control bool, e *contract.PluginEvent) []*contract.PluginEvent
	// memory sees the descriptor of a region; it does not own it.
	memory func(region uint64, fd int)
	// asked changes the request of the handshake, answered its answer.
	asked    func(*contract.HandshakeRequest)
	answered func(*contract.HandshakeResponse)

	Plugin
	mu     sync.Mutex                  // held while a hook runs
	seen   map[uint64]*contract.Submit // what was submitted, by op
	behind map[uint64]int              // how many events came behind it in its frame
	later  sync.WaitGroup
	dying  error // a hook wants the epoch to end

	passing sync.Mutex // held while the suite takes a frame; a case may make that last
	sink    func(Arrival)
	lost    bool
}

func (c mangled) Launch(ctx context.Context, id Identity, sink func(Arrival)) (Plugin, error) {
	m := &mangler{sink: sink, seen: map[uint64]*contract.Submit{}, behind: map[uint64]int{}}
	c.fault(m)
	ask, answer := id.Asking, id.Answered
	id.Asking = func(r *contract.HandshakeRequest) {
		for _, f := range []func(*contract.HandshakeRequest){ask, m.asked} {
			if f != nil {
				f(r)
			}
		}
	}
	id.Answered = func(r *contract.HandshakeResponse) {
		for _, f := range []func(*contract.HandshakeResponse){m.answered, answer} {
			if f != nil {
				f(r)
			}
		}
	}
	p, err := c.Carrier.Launch(ctx, id, m.arrive)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.Plugin = p
	m.mu.Unlock()
	return m, nil
}

func (m *mangler) arrive(a Arrival) {
	switch {
	case a.Frame == nil && a.Lost != nil:
		m.passing.Lock()
		m.lose(a.Lost)
		m.passing.Unlock()
	case a.Frame == nil || m.out == nil:
		m.passing.Lock()
		m.sink(a)
		m.passing.Unlock()
	default:
		var events []*contract.PluginEvent
		m.mu.Lock()
		for _, e := range a.Frame.Events {
			events = append(events, m.out(a.Control, e)...)
		}
		m.mu.Unlock()
		m.pass(a.Control, events...)
		m.bury()
	}
}

// pass hands events to the suite as a host would get them.
func (m *mangler) pass(control bool, events ...*contract.PluginEvent) {
	if len(events) == 0 {
		return
	}
	m.passing.Lock()
	defer m.passing.Unlock()
	if m.lost {
		return
	}
	frame := &contract.PluginFrame{Events: events}
	m.sink(Arrival{Frame: frame, Control: control})
	if f := pluginhost.CheckFrame(frame, proto.Size(frame), control); f != nil {
		m.lose(fmt.Errorf("%w: %s of %s: %s", pluginhost.ErrViolation, f.Rule, f.Field, f.Detail))
	}
}

// lose ends the epoch for the suite and, as a host would, the plugin. m.passing is held.
func (m *mangler) lose(err error) {
	if m.lost {
		return
	}
	m.lost = true
	m.sink(Arrival{Lost: err})
	m.later.Go(func() {
		m.mu.Lock()
		p := m.Plugin
		m.mu.Unlock()
		if p != nil {
			_ = p.Close(context.Background())
		}
	})
}

// say has the plugin send something of its own accord, d from now. For hooks.
func (m *mangler) say(d time.Duration, events ...*contract.PluginEvent) {
	m.later.Go(func() {
		time.Sleep(d)
		m.pass(false, events...)
	})
}

// die ends the epoch as soon as the event is passed on that the hook has. For hooks.
func (m *mangler) die(why string) { m.dying = errors.New(why) }

// bury ends the epoch if a hook wants that: before anything else comes from the plugin.
func (m *mangler) bury() {
	m.mu.Lock()
	dying := m.dying
	m.mu.Unlock()
	if dying != nil {
		m.passing.Lock()
		m.lose(dying)
		m.passing.Unlock()
	}
}

func (m *mangler) Send(events ...*contract.HostEvent) error {
	return m.send(false, events, m.Plugin.Send)
}

func (m *mangler) SendControl(events ...*contract.HostEvent) error {
	return m.send(true, events, m.Plugin.SendControl)
}

func (m *mangler) send(control bool, events []*contract.HostEvent, send func(...*contract.HostEvent) error) error {
	var changed []*contract.HostEvent
	m.mu.Lock()
	for i, e := range events {
		if s := e.GetSubmit(); s != nil {
			m.seen[s.Op], m.behind[s.Op] = s, len(events)-1-i
		}
		if m.in == nil {
			changed = append(changed, e)
			continue
		}
		changed = append(changed, m.in(control, clone(e))...)
	}
	m.mu.Unlock()
	m.bury()
	events = changed
	if len(events) == 0 {
		return nil
	}
	return send(events...)
}

func (m *mangler) SendRegion(region uint64, memory, lease int) error {
	if m.memory != nil {
		m.memory(region, memory)
	}
	return m.Plugin.SendRegion(region, memory, lease)
}

func (m *mangler) Close(ctx context.Context) error {
	m.later.Wait()
	return m.Plugin.Close(ctx)
}

// ends has f say what becomes of each end of an op; all else passes.
func (m *mangler) ends(f func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent) {
	m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
		id, end, ok := opEvent(e)
		if !ok || end == nil || m.seen[id] == nil {
			return []*contract.PluginEvent{e}
		}
		return f(m.seen[id], end, e)
	}
}

// stats has f change each Stats.
func (m *mangler) stats(f func(*contract.Stats)) {
	m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
		if s := e.GetStats(); s != nil {
			f(s)
		}
		return []*contract.PluginEvent{e}
	}
}

// The events that manglers make.

func aborted(op uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: op, Quiet: true}}}
}

func done(op, bytes uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Bytes: bytes, Quiet: true, Lane: contract.Lane_LANE_SHM}}}
}

func failed(op uint64, cause contract.Cause) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: op, Cause: cause, Quiet: true}}}
}

func progress(op, bytes uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: op, Bytes: bytes}}}
}

func quiesced(op uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Quiesced{Quiesced: &contract.Quiesced{Op: op}}}
}

func drained(open uint32) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Drained{Drained: &contract.Drained{OpenOps: open}}}
}

func regionReady(region uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: region}}}
}

func regionRemoved(region uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_RegionRemoved{RegionRemoved: &contract.RegionRemoved{Region: region}}}
}

func peerFailed(peer uint32, cause contract.Cause) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_PeerFailed{PeerFailed: &contract.PeerFailed{Peer: peer, Cause: cause}}}
}

func peerRemoved(peer uint32) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_PeerRemoved{PeerRemoved: &contract.PeerRemoved{Peer: peer}}}
}

func granted(grant uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Granted{Granted: &contract.Granted{Grant: grant}}}
}
