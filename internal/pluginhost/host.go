// Package pluginhost spawns and supervises the engine's plugin processes. It speaks the plugin
// contract (plugins/sdk/contract) over hashicorp/go-plugin with a runner of its own, and reports what
// happens as events, in an order that the core can build proofs on.
//
// One Plugin is one entry of the configuration and survives restarts; each spawn of it is an epoch.
// The events of one plugin come in this order, and each epoch's are complete before the next begins:
//
//	(Up Frame* Lost Reaped)* Down
//
// An epoch that is started beside another (Plugin.Beside) has its events among those of the other; its own are
// in this order, too. (A process that cannot be killed, asleep in a driver, delays its Reaped beyond the next Up; and
// Restart begins anew after Down.) A spawn that never answers its handshake produces no event by itself; it shows in Status and, when
// the restart budget is used up, as Down.
package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sort"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Errors that callers branch on.
var (
	// ErrFull: the plugin does not take what it was sent fast enough. Nothing of the call was queued;
	// the caller ends the operation locally.
	ErrFull = errors.New("plugin queue is full")
	// ErrEpoch: the epoch named in the call is not the live one. Nothing was sent.
	ErrEpoch = errors.New("plugin epoch is over")
	// ErrTooLarge: one event does not fit into a frame.
	ErrTooLarge = errors.New("event exceeds the frame limit of 1 MiB")
	// ErrStopped: the epoch or the plugin was ended by Stop, Restart or Host.Close.
	ErrStopped = errors.New("stopped by the engine")
	// ErrRefused: the plugin cannot serve here (bad option, wrong version, checksum mismatch). It is
	// not restarted, since the next try would end the same way. An error that is ErrRefused by errors.Is has
	// the reason as its text.
	ErrRefused = errors.New("plugin refused")
	// ErrViolation: the plugin broke the contract; the text names rule and field.
	ErrViolation = errors.New("plugin broke the contract")
	// ErrBudget: the plugin was restarted too often in too short a time.
	ErrBudget = errors.New("restart budget used up")
)

// Config is what the engine tells the host. Durations of zero take the default in brackets.
type Config struct {
	Node          string
	Incarnation   uint64
	HostID        string // identity of this machine, equal on two engines that can share memory
	EngineVersion string
	Features      []string // that the host is able to use
	// RuntimeDir is a directory of this engine. The host owns RuntimeDir/plugins: it takes a lock on
	// it, removes what a dead predecessor left there, and puts one private directory an epoch into it.
	RuntimeDir string
	Log        *slog.Logger
	// Sink receives every event. It is called from goroutines of the host, one event at a time for one
	// epoch, and must not block or call back into the Plugin's Stop or Restart.
	Sink func(Event)
	// Tap, if set, sees every frame as the plugin sent it, beats and logs included, before it is checked.
	// It is called from the reader of the stream, must not keep the frame, and holds the stream up as
	// long as it does not return. For the conformance suite.
	Tap func(epoch uint32, control bool, frame *contract.PluginFrame)
	// Asking, if set, changes the request of each handshake before it is sent, and Answered sees what came
	// back before it is judged. Called from the plugin's supervisor; for the conformance suite.
	Asking   func(*contract.HandshakeRequest)
	Answered func(*contract.HandshakeResponse)
	// Spawned, if set, is told the id of each process as soon as it runs. For the conformance suite.
	Spawned func(pid int)
	// Once: a plugin whose start fails, or that is lost, is down, without a restart. For the conformance
	// suite, one spawn of which is one launch.
	Once bool
	// FirstEpoch is the number of a plugin's first spawn [1].
	FirstEpoch uint32
	// Linger is how long an epoch that is lost may take to exit by itself before it is killed [0]. For the
	// conformance suite, which wants to see that it does.
	Linger time.Duration

	HandshakeTimeout time.Duration // from spawn to the handshake's answer [15 s]
	BeatTimeout      time.Duration // without a beat [10 s]
	BusyTimeout      time.Duration // without a beat after the plugin declared a long call [120 s]
	DrainTimeout     time.Duration // Stop and Restart wait so long for Drained [5 s]
	Grace            time.Duration // from asking the process to exit to SIGKILL of its group [2 s]
	BackoffMin       time.Duration // before the first restart [100 ms]
	BackoffMax       time.Duration // doubling up to [10 s]
	RestartBudget    int           // restarts within RestartWindow [5]
	RestartWindow    time.Duration // [60 s]
	QueueEvents      int           // events waiting for one stream of one plugin [16384]
	QueueBytes       int           // encoded bytes waiting for one stream of one plugin [16 MiB]
}

// Kind is the kind of an Event.
type Kind uint8

const (
	// Up: the epoch answered its handshake, its streams are open, Send works. Handshake is set.
	Up Kind = iota + 1
	// Frame: events of the plugin, checked for enum 0 and size. Beats and logs have been taken out.
	Frame
	// Lost: no frame of this epoch comes any more and none will be accepted (R6). Err says why, with
	// the exit status and the tail of its stderr where there is one.
	Lost
	// Reaped: every process of the epoch is gone and its control socket has no holder. With the host's
	// region leases this is the evidence for rung 5 (docs/protocol.md); until it comes the epoch may
	// still write.
	Reaped
	// Down: no epoch lives and none comes until Restart. Err says why.
	Down
)

// String returns the lower-case name.
func (k Kind) String() string {
	switch k {
	case Up:
		return "up"
	case Frame:
		return "frame"
	case Lost:
		return "lost"
	case Reaped:
		return "reaped"
	case Down:
		return "down"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Event is something that happened to a plugin.
type Event struct {
	Kind      Kind
	Plugin    string // Spec.Name
	Epoch     uint32 // 0 for Down
	Beside    bool   // Up: it is not the plugin's own (Plugin.Beside)
	Spec      Spec   // Up: what it was started by
	Handshake *contract.HandshakeResponse
	Frame     *contract.PluginFrame // owned by the receiver
	Err       error
}

// Host owns the plugins of one engine.
type Host struct {
	cfg  Config
	root string   // RuntimeDir/plugins
	lock *os.File // flock on root/lock

	closing chan struct{} // closed by Close when the plugins are stopped

	mu      sync.Mutex
	closed  bool
	plugins map[string]*Plugin
	epochs  map[string]uint32 // last epoch of each name, survives Stop
}

// New takes the lock on cfg.RuntimeDir/plugins, kills and removes what a dead predecessor left there,
// and returns a host without plugins. An error names the directory and the fix.
func New(cfg Config) (*Host, error) {
	if cfg.Sink == nil || cfg.Log == nil || cfg.Node == "" || cfg.RuntimeDir == "" {
		return nil, errors.New("pluginhost: Node, RuntimeDir, Log and Sink are required")
	}
	cfg.setDefaults()
	root, lock, err := openRoot(cfg.RuntimeDir, cfg.Log)
	if err != nil {
		return nil, err
	}
	return &Host{cfg: cfg, root: root, lock: lock, closing: make(chan struct{}),
		plugins: make(map[string]*Plugin), epochs: make(map[string]uint32)}, nil
}

func (c *Config) setDefaults() {
	duration := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	number := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	duration(&c.HandshakeTimeout, 15*time.Second)
	duration(&c.BeatTimeout, 10*time.Second)
	duration(&c.BusyTimeout, 120*time.Second)
	duration(&c.DrainTimeout, 5*time.Second)
	duration(&c.Grace, 2*time.Second)
	duration(&c.BackoffMin, 100*time.Millisecond)
	duration(&c.BackoffMax, 10*time.Second)
	duration(&c.RestartWindow, 60*time.Second)
	number(&c.RestartBudget, 5)
	number(&c.QueueEvents, 16384)
	number(&c.QueueBytes, 16<<20)
}

// Start checks the spec (name, options, environment, program, checksum, length of socket paths) and
// begins to supervise the plugin. It does not wait for the handshake: see Plugin.Ready and Up.
func (h *Host) Start(spec Spec) (*Plugin, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	if err := checkSocketPath(h.root, spec.Name); err != nil {
		return nil, fmt.Errorf("plugin %s: %w", spec.Name, err)
	}
	prog, err := spec.open()
	if err != nil {
		return nil, fmt.Errorf("plugin %s: %w", spec.Name, err)
	}
	prog.close()

	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fmt.Errorf("plugin %s: host is closed", spec.Name)
	}
	if _, dup := h.plugins[spec.Name]; dup {
		return nil, fmt.Errorf("plugin %s: already started; stop it first", spec.Name)
	}
	p := newPlugin(h, spec)
	h.plugins[spec.Name] = p
	go p.run()
	return p, nil
}

// Plugins returns the started plugins, sorted by name.
func (h *Host) Plugins() []*Plugin {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]*Plugin, 0, len(h.plugins))
	for _, p := range h.plugins {
		list = append(list, p)
	}
	sort.Slice(list, func(i, j int) bool { return list[i].name < list[j].name })
	return list
}

// Close stops every plugin at once, as Stop does, and releases the runtime directory.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	h.mu.Unlock()

	list := h.Plugins()
	errs := make([]error, len(list), len(list)+1)
	var wg sync.WaitGroup
	for i, p := range list {
		wg.Go(func() { errs[i] = p.Stop(ctx) })
	}
	wg.Wait()
	close(h.closing)
	return errors.Join(append(errs, h.lock.Close())...)
}

func (h *Host) nextEpoch(name string) uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.epochs[name] = max(h.epochs[name]+1, h.cfg.FirstEpoch)
	return h.epochs[name]
}

func (h *Host) forget(p *Plugin) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.plugins[p.name] == p {
		delete(h.plugins, p.name)
	}
}
