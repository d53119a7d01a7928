package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// State is where a plugin stands.
type State uint8

const (
	StateStarting State = iota + 1 // spawned, not yet Up
	StateUp
	StateStopping // draining, or lost and not yet reaped
	StateBackoff  // waiting for the next spawn
	StateDown
)

// String returns the lower-case name.
func (s State) String() string {
	switch s {
	case StateStarting:
		return "starting"
	case StateUp:
		return "up"
	case StateStopping:
		return "stopping"
	case StateBackoff:
		return "backoff"
	case StateDown:
		return "down"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Status is a snapshot for `plugins list`, metrics and health.
type Status struct {
	Name       string
	State      State
	Since      time.Time // of State
	Epoch      uint32    // of the live or the last spawn
	PID        int       // 0 when there is no process
	Restarts   uint64    // spawns after the first
	Violations uint64    // contract violations, all epochs
	Unknown    uint64    // events of unknown type, counted and ignored, all epochs
	LastError  error     // why the last epoch or spawn ended
	BeatAge    time.Duration
	Busy       []*contract.Busy
	Queued     int      // events that wait for the Session stream
	Exit       string   // how the live or last spawn's process ended, "" while it runs or when it was killed from here
	Orphans    bool     // with Config.Linger: descendants outlived it, until they were killed
	RuntimeDir string   // of the live or last spawn; gone after Reaped
	Stdout     string   // tail of the live or last spawn's stdout, its handshake line included
	Stderr     string   // tail of its stderr
	Written    uint64   // bytes that it wrote to stderr so far
	Leftovers  []string // the sockets that it left in RuntimeDir, once it is reaped
	Handshake  *contract.HandshakeResponse
}

// Plugin is one plugin of the configuration, across its restarts. Its methods may be called from any
// goroutine.
type Plugin struct {
	h    *Host
	name string
	spec *Spec // the supervisor's
	log  *slog.Logger

	stop     chan struct{} // closed by the first Stop
	stopOnce sync.Once
	stopCtx  context.Context // of the first Stop; its end cuts the drain short
	restart  chan restart
	adopt    chan adoption
	asides   sync.WaitGroup // epochs beside the plugin's own
	done     chan struct{}  // closed when the supervisor has ended

	mu         sync.Mutex
	epoch      *epoch           // the live or last spawn, nil before the first
	sides      map[uint32]*side // those beside it
	before     *predecessor     // nil: nothing was handed over, or too long ago
	closed     bool             // no other one is started
	state      State
	since      time.Time
	changed    chan struct{} // closed and renewed at every change of state
	spawns     uint64
	violations uint64
	unknown    uint64
	lastErr    error
	unreaped   int // epochs whose processes could not be reaped in time
}

type restart struct {
	ctx  context.Context
	done chan struct{}
}

func newPlugin(h *Host, spec Spec) *Plugin {
	return &Plugin{
		h:       h,
		name:    spec.Name,
		spec:    &spec,
		log:     h.cfg.Log.With("plugin", spec.Name),
		stop:    make(chan struct{}),
		restart: make(chan restart),
		adopt:   make(chan adoption),
		sides:   map[uint32]*side{},
		done:    make(chan struct{}),
		state:   StateStarting,
		since:   time.Now(),
		changed: make(chan struct{}),
	}
}

// Name returns Spec.Name.
func (p *Plugin) Name() string { return p.name }

// Ready waits until an epoch is up. It fails when the plugin goes down, with the reason, or when ctx
// ends, with the last error if there is one.
func (p *Plugin) Ready(ctx context.Context) error {
	for {
		p.mu.Lock()
		state, changed, last := p.state, p.changed, p.lastErr
		p.mu.Unlock()
		switch state {
		case StateUp:
			return nil
		case StateDown:
			return fmt.Errorf("plugin %s is down: %w", p.name, last)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("plugin %s is not up: %w", p.name, errors.Join(ctx.Err(), last))
		}
	}
}

// Send queues events for the Session stream of the given epoch, all or none, in the order of the
// calls, and never blocks. The events belong to the host from then on. The error is ErrEpoch, ErrFull
// or ErrTooLarge (wrapped); then nothing was sent and the caller ends the operation itself.
func (p *Plugin) Send(epoch uint32, events ...*contract.HostEvent) error {
	e, err := p.live(epoch)
	if err != nil {
		return err
	}
	return p.named(e.session.push(events))
}

// SendControl is Send for the Control stream: AbortOp. (The host sends the beats itself.)
func (p *Plugin) SendControl(epoch uint32, events ...*contract.HostEvent) error {
	e, err := p.live(epoch)
	if err != nil {
		return err
	}
	return p.named(e.control.push(events))
}

// SendRegion hands a region's descriptors over on the control socketpair; RegionAdd goes by Send,
// before or after. The kernel duplicates the descriptors: the caller keeps its own. mem is -1 for memory that
// is opened by RegionAdd.handle. It never blocks; a socket buffer that is full is ErrFull.
func (p *Plugin) SendRegion(epoch uint32, region uint64, mem, lease int) error {
	e, err := p.live(epoch)
	if err != nil {
		return err
	}
	return p.named(e.ctrl.sendRegion(region, mem, lease))
}

// Fault ends the epoch because the plugin broke the contract in a way that only the caller can see
// (an end for an op that it was never given, R8). The plugin is told, then killed; Lost follows.
func (p *Plugin) Fault(epoch uint32, f *contract.Fault) error {
	e, err := p.live(epoch)
	if err != nil {
		return err
	}
	e.violate(f)
	return nil
}

// Stop ends the plugin for good: Drain, wait for Drained (at most Config.DrainTimeout, or until ctx
// ends), ask the process to exit, SIGKILL what is left of its group after Config.Grace. It returns
// when the processes are gone and the directory is removed, at the latest reapTimeout after that. A Sink or
// Tap that does not return holds an epoch up: then Stop gives up stuckTimeout later, with an error.
func (p *Plugin) Stop(ctx context.Context) error {
	p.stopOnce.Do(func() {
		p.stopCtx = ctx
		close(p.stop)
	})
	cfg := &p.h.cfg
	bound := cfg.DrainTimeout + cfg.Grace + cfg.Linger + reapTimeout + killTimeout + stuckTimeout
	select {
	case <-p.done:
	case <-time.After(bound):
		return p.named(fmt.Errorf("not stopped within %s; something that the host calls (Sink, Tap) does not return", bound))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unreaped > 0 {
		return fmt.Errorf("plugin %s: %d epochs have processes that do not die; see dmesg for hung tasks", p.name, p.unreaped)
	}
	return nil
}

// Restart ends the live epoch as Stop does, clears the restart budget and spawns the next one at once.
// It brings a plugin back that is down. It returns when the old epoch has ended; Ready waits for the
// new one.
func (p *Plugin) Restart(ctx context.Context) error {
	r := restart{ctx: ctx, done: make(chan struct{})}
	select {
	case p.restart <- r:
	case <-p.done:
		return p.named(ErrStopped)
	case <-ctx.Done():
		return p.named(ctx.Err())
	}
	select {
	case <-r.done:
		return nil
	case <-p.done:
		return p.named(ErrStopped)
	}
}

// Status returns a snapshot.
func (p *Plugin) Status() Status {
	p.mu.Lock()
	s := Status{
		Name:       p.name,
		State:      p.state,
		Since:      p.since,
		Violations: p.violations,
		Unknown:    p.unknown,
		LastError:  p.lastErr,
	}
	if p.spawns > 0 {
		s.Restarts = p.spawns - 1
	}
	e := p.epoch
	p.mu.Unlock()
	if e != nil {
		e.status(&s)
	}
	return s
}

// live returns the epoch if it is a live one.
func (p *Plugin) live(n uint32) (*epoch, error) {
	p.mu.Lock()
	e := p.epoch
	if e == nil || e.n != n {
		e = nil
		if s := p.sides[n]; s != nil {
			e = s.epoch
		}
	}
	p.mu.Unlock()
	if e == nil || !e.live() {
		return nil, p.named(fmt.Errorf("epoch %d: %w", n, ErrEpoch))
	}
	return e, nil
}

func (p *Plugin) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("plugin %s: %w", p.name, err)
}

func (p *Plugin) setState(s State, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.lastErr = err
	}
	if p.state == s {
		return
	}
	p.state, p.since = s, time.Now()
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Plugin) count(counter *uint64, n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*counter += n
}

func (p *Plugin) emit(ev Event) {
	ev.Plugin = p.name
	p.h.cfg.Sink(ev)
}
