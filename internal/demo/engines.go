package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
)

// Bounds of bringing an engine up.
const (
	readyTimeout = 30 * time.Second
	readyPoll    = 50 * time.Millisecond
	askTimeout   = 5 * time.Second
)

// engine is one `engine run` of the demo.
type engine struct {
	node   string
	config string // path of its YAML
	worker string // socket of the worker API
	admin  string // socket of the admin API
	proc   *process
	used   time.Duration // processor time of earlier processes
}

// peerSocket is where an engine of driver local listens for others.
func peerSocket(dir, node string) string { return filepath.Join(dir, "run", node, "peer.sock") }

// newEngine writes the configuration of a node below dir. plugin is the entry of its backend; empty: the built-in
// one. peers is that of its membership.
func newEngine(dir, node, plugin, peers string) (*engine, error) {
	run := filepath.Join(dir, "run")
	e := &engine{
		node:   node,
		config: filepath.Join(dir, node+".yaml"),
		worker: filepath.Join(run, node, "worker.sock"),
		admin:  filepath.Join(run, node, "admin.sock"),
	}
	if err := os.WriteFile(e.config, []byte(engineConfig(dir, node, plugin, peers)), 0o600); err != nil {
		return nil, fmt.Errorf("write the configuration of %s: %w", node, err)
	}
	return e, nil
}

// engineConfig is what a user would write: everything else is the default. The clocks are short enough
// for whoever watches.
func engineConfig(dir, node, plugin, peers string) string {
	var b strings.Builder
	q := strconv.Quote
	fmt.Fprintf(&b, "node: %s\n", node)
	fmt.Fprintf(&b, "runtime_dir: %s\n", q(filepath.Join(dir, "run")))
	fmt.Fprintf(&b, "state_dir: %s\n", q(filepath.Join(dir, "state")))
	fmt.Fprintf(&b, "peers: %s\n", peers)
	fmt.Fprintf(&b, "clocks: {bootstrap: 45s, register: 45s, input: 45s}\n")
	fmt.Fprintf(&b, "drain: {budget: 5s}\n")
	fmt.Fprintf(&b, "admin: {enable_mutations: true}\n") // for --upgrade; the socket is in a directory of the demo's
	if plugin == "" {
		fmt.Fprintf(&b, "transfer: {backend: tcp}\n")
		return b.String()
	}
	fmt.Fprintf(&b, "transfer: {backend: custom}\n")
	fmt.Fprintf(&b, "plugins:\n  custom: %s\n", plugin)
	return b.String()
}

// start runs the engine as a user would, and returns at once. It may be called again when the process
// has ended.
func (e *engine) start(binary string, env []string) (err error) {
	if e.proc != nil {
		e.used += e.proc.cpu()
	}
	e.proc, err = startProcess("engine "+e.node, []string{binary, "run", "-c", e.config}, env, nil)
	return err
}

// cpu is the processor time of the engine, its plugins included; valid once it has ended.
func (e *engine) cpu() time.Duration { return e.used + e.proc.cpu() }

// plugin asks the engine for the process of its transfer plugin: its id, epoch and state.
func (e *engine) plugin(ctx context.Context) (name string, p admin.PluginEpoch, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := admin.NewClient(e.admin)
	defer c.Close()
	plugins, err := c.Plugins(ctx)
	if err != nil {
		return "", p, err
	}
	for _, p := range plugins {
		if p.State == "up" && len(p.Epochs) > 0 && p.Epochs[0].PID > 0 {
			return p.Name, p.Epochs[0], nil
		}
	}
	return "", p, fmt.Errorf("no plugin of %s is up", e.node)
}

// upgrade is `engine plugins upgrade`: the same program in a new process beside that of the old epoch, which
// finishes what it has. It returns when the old one is gone.
func (e *engine) upgrade(ctx context.Context, name string, old uint32) error {
	c := admin.NewClient(e.admin)
	defer c.Close()
	if err := c.UpgradePlugin(ctx, name, admin.Upgrade{}, func(admin.UpgradeStep) {}); err != nil {
		return fmt.Errorf("upgrade the %s plugin of %s: %w", name, e.node, err)
	}
	if _, p, err := e.plugin(ctx); err != nil || p.Epoch <= old {
		return fmt.Errorf("upgrade the %s plugin of %s: epoch %d follows %d: %w", name, e.node, p.Epoch, old, err)
	}
	return nil
}

// errBackendDown: the engine has given its backend up.
var errBackendDown = errors.New("the backend is down")

// waitReady waits until the engine says that it is ready. It fails at once when the engine's process
// has ended, or when the engine says that its backend is down.
func (e *engine) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %v", readyTimeout))
	defer cancel()
	var last error
	proc := e.proc
	for {
		if last = e.ready(ctx); last == nil || errors.Is(last, errBackendDown) {
			return last
		}
		select {
		case <-proc.done:
			return fmt.Errorf("before it was ready: %w", proc.obituary())
		case <-ctx.Done():
			return fmt.Errorf("engine %s: %w; last answer: %w", e.node, context.Cause(ctx), last)
		case <-time.After(readyPoll):
		}
	}
}

// ready asks the engine's admin API.
func (e *engine) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := admin.NewClient(e.admin)
	defer c.Close()
	r, err := c.Ready(ctx)
	if err != nil {
		return err
	}
	if r.Ready {
		return nil
	}
	plugins, err := c.Plugins(ctx)
	if err != nil {
		return err
	}
	for _, p := range plugins {
		if p.State == "down" {
			return fmt.Errorf("%w at %s: plugin %s (%s): %s", errBackendDown, e.node, p.Name, p.Exec, p.Detail)
		}
	}
	return errors.New(strings.Join(r.Reasons, "; "))
}

// why asks the engine about a room, as `engine rooms why` does.
func (e *engine) why(ctx context.Context, room int64) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := admin.NewClient(e.admin)
	defer c.Close()
	return c.Why(ctx, room)
}
