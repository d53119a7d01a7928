package conformance

import (
	"context"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Carrier starts the plugin under test: as a process (Exec, Wasm, FromSpec) or in this one (Memory).
type Carrier interface {
	// String describes it for people and for the line that reproduces a failure: "exec:bin/p".
	String() string
	// Launch starts one epoch and returns when its handshake is done and its streams are open. Events
	// go to sink, one call at a time, until Lost; a sink that does not return holds up the plugin's
	// stream. An error means that the plugin never became ready; it says why in one line.
	Launch(ctx context.Context, id Identity, sink func(Arrival)) (Plugin, error)
}

// Identity is whom the suite plays: one engine.
type Identity struct {
	Node        string
	Incarnation uint64
	// Epoch is the number of the spawn, from 1.
	Epoch uint32
	// HostID: equal ones are on one machine.
	HostID string
	// HandshakeTimeout is from the spawn to the handshake's answer; 0 means the contract's 15 s.
	HandshakeTimeout time.Duration
	// Asking, if set, changes the handshake's request before it is sent; Answered, if set, sees what came
	// back, also when it is a refusal, which ends the launch.
	Asking   func(*contract.HandshakeRequest)
	Answered func(*contract.HandshakeResponse)
}

// Arrival is what a plugin sent, or that it is gone.
type Arrival struct {
	Frame   *contract.PluginFrame // nil: see Lost and Reaped
	Control bool                  // the Control stream carried it
	Lost    error                 // no frame comes any more, and why
	Reaped  bool                  // every process of the epoch is gone
}

// Plugin is one running epoch.
type Plugin interface {
	Hello() *contract.HandshakeResponse
	Epoch() uint32
	// Send and SendControl queue one frame's events, in order, without blocking for long.
	Send(events ...*contract.HostEvent) error
	SendControl(events ...*contract.HostEvent) error
	// SendRegion hands descriptors over; the caller keeps its own. memory is -1 for memory with a handle.
	SendRegion(region uint64, memory, lease int) error
	// Close ends the epoch in good order, or in haste once ctx is over, and waits until it is gone.
	Close(ctx context.Context) error
	// Process is nil for a plugin in this process.
	Process() ProcessControl
}

// ProcessControl is what only a process has.
type ProcessControl interface {
	PID() int
	// Kill sends SIGKILL to the plugin itself (not its group); Stop and Continue are SIGSTOP and SIGCONT.
	Kill() error
	Stop() error
	Continue() error
	// Signal sends another signal to the plugin itself.
	Signal(unix.Signal) error
	// EndSession ends the Session stream, and nothing else.
	EndSession() error
	// HangUp closes the host's end of the control socketpair, and nothing else: what the plugin sees when
	// its host dies. It has lingerBound to exit by itself after either.
	HangUp() error
	// Stdout and Stderr are the tails of what the plugin wrote, Written counts the bytes of the latter.
	Stdout() string
	Stderr() string
	Written() uint64
	// Exit says how the process ended by itself: "exit status 0"; "" while it runs or when the host killed it.
	Exit() string
	// Orphans tells whether descendants outlived it, until the host killed them.
	Orphans() bool
	// RuntimeDir is the private directory of the epoch, TempDir its $TMPDIR: "" if the plugin has none of its own.
	RuntimeDir() string
	TempDir() string
	// Leftovers names, once the plugin is closed, the sockets that it left in RuntimeDir, what it left in TempDir, and
	// the files of /dev/shm that it made, held to the last and left.
	Leftovers() []string
}

// Commander is a carrier that can run its program by hand. A command that it cannot make is an error.
type Commander interface {
	Command(ctx context.Context, args ...string) (*exec.Cmd, error)
}
