package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/tail"
)

// Bounds of a cluster.
const (
	clusterReady = 60 * time.Second // from a start until an engine serves
	clusterStop  = 10 * time.Second // from SIGTERM to SIGKILL
	clusterAsk   = 5 * time.Second  // for one answer of an admin API, or of a worker's session
	clusterLook  = 5 * time.Millisecond
)

// The engines, and with them the sides of a room.
const (
	prefill = 0
	decode  = 1
)

var (
	nodeNames = [2]string{"prefill-0", "decode-0"}
	roles     = [2]client.Role{client.Source, client.Destination}
)

// cluster is two engines on this host, started as `engine run -c` starts them, with the built-in backend
// and otherwise the defaults.
type cluster struct{ engines [2]*engine }

// engine is one of them.
type engine struct {
	name, binary, config, worker, admin string

	cmd  *exec.Cmd
	pid  int
	done chan struct{} // closed when it is reaped
	said *tail.Writer
}

// startCluster starts both engines and waits until they serve and know each other.
func startCluster(ctx context.Context, o Options) (_ *cluster, err error) {
	c := &cluster{}
	defer func() {
		if err != nil {
			c.stop()
		}
	}()
	for i, name := range nodeNames {
		e, err := newEngine(o, name)
		if err != nil {
			return c, err
		}
		if err := e.start(); err != nil {
			return c, err
		}
		c.engines[i] = e
	}
	return c, c.waitReady(ctx)
}

func (c *cluster) waitReady(ctx context.Context) error {
	for i, e := range c.engines {
		if err := e.waitReady(ctx, nodeNames[1-i]); err != nil {
			return err
		}
	}
	return nil
}

// newEngine writes the configuration of a node.
func newEngine(o Options, name string) (*engine, error) {
	run := filepath.Join(o.Dir, "r")
	e := &engine{
		name: name, binary: o.Engine, config: filepath.Join(o.Dir, name+".yaml"), said: &tail.Writer{}, done: make(chan struct{}),
		worker: filepath.Join(run, name, "worker.sock"), admin: filepath.Join(run, name, "admin.sock"),
	}
	text := fmt.Sprintf("node: %s\nruntime_dir: %q\nstate_dir: %q\npeers: {driver: local}\ntransfer: {backend: tcp}\nlog: {level: warn}\ndrain: {budget: 1s}\n",
		name, run, filepath.Join(o.Dir, "s"))
	if err := os.WriteFile(e.config, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("write the configuration of %s: %w", name, err)
	}
	return e, nil
}

// stop ends both engines, drained where they can be, and returns when they are reaped.
func (c *cluster) stop() {
	for _, e := range c.engines {
		if e != nil {
			_ = e.cmd.Process.Signal(syscall.SIGTERM)
		}
	}
	for _, e := range c.engines {
		if e == nil {
			continue
		}
		select {
		case <-e.done:
		case <-time.After(clusterStop):
			e.kill()
		}
	}
}

func (e *engine) start() error {
	e.said, e.done = &tail.Writer{}, make(chan struct{})
	e.cmd = exec.Command(e.binary, "run", "-c", e.config)
	e.cmd.Stderr = e.said
	e.cmd.WaitDelay = 3 * time.Second
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := e.cmd.Start(); err != nil {
		return fmt.Errorf("start engine %s: %w", e.name, err)
	}
	e.pid = e.cmd.Process.Pid
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait() // how it ended is in what it said
		close(done)
	}(e.cmd, e.done)
	return nil
}

// kill is kill -9; it returns when the process is reaped. Its plugins end by themselves.
func (e *engine) kill() {
	_ = e.cmd.Process.Kill()
	<-e.done // bounded by WaitDelay
}

// waitReady waits until the engine is ready and has a live stream to peer.
func (e *engine) waitReady(ctx context.Context, peer string) error {
	ctx, cancel := context.WithTimeout(ctx, clusterReady)
	defer cancel()
	last := errors.New("no answer")
	err := until(ctx, func() bool {
		select {
		case <-e.done:
			cancel()
		default:
		}
		last = e.ready(ctx, peer)
		return last == nil
	})
	if err != nil {
		return fmt.Errorf("engine %s is not ready: %w; it said: %s", e.name, errors.Join(err, last), cmp.Or(e.said.String(), "nothing"))
	}
	return nil
}

func (e *engine) ready(ctx context.Context, peer string) error {
	ctx, cancel := context.WithTimeout(ctx, clusterAsk)
	defer cancel()
	c := admin.NewClient(e.admin)
	defer c.Close()
	r, err := c.Ready(ctx)
	if err != nil {
		return err
	}
	if !r.Ready {
		return errors.New(strings.Join(r.Reasons, "; "))
	}
	peers, err := c.Peers(ctx)
	if err != nil {
		return err
	}
	for _, p := range peers {
		if p.Node == peer && p.State == "ready" {
			return nil
		}
	}
	return fmt.Errorf("no stream to %s", peer)
}

// plugin asks for the process of the engine's transfer plugin that is up.
func (e *engine) plugin(ctx context.Context) (pid int, epoch uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, clusterAsk)
	defer cancel()
	c := admin.NewClient(e.admin)
	defer c.Close()
	plugins, err := c.Plugins(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, p := range plugins {
		if p.State == "up" && len(p.Epochs) > 0 && p.Epochs[0].PID > 0 {
			return p.Epochs[0].PID, p.Epochs[0].Epoch, nil
		}
	}
	return 0, 0, fmt.Errorf("engine %s: no plugin is up", e.name)
}

// until looks at ok until it is true or ctx ends.
func until(ctx context.Context, ok func() bool) error {
	t := time.NewTicker(clusterLook)
	defer t.Stop()
	for !ok() {
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// live asks an engine how many of its rooms have not ended.
func (e *engine) live(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, clusterAsk)
	defer cancel()
	c := admin.NewClient(e.admin)
	defer c.Close()
	s, err := c.Status(ctx)
	return s.Rooms, err
}

// wantIdle fails when a room has not ended, although all workers have seen the end of theirs.
func (c *cluster) wantIdle(ctx context.Context) error {
	for _, e := range c.engines {
		n := 0
		ctx, cancel := context.WithTimeout(ctx, clusterReady)
		err := until(ctx, func() bool {
			var err error
			n, err = e.live(ctx)
			return err == nil && n == 0
		})
		cancel()
		if err != nil {
			return fmt.Errorf("engine %s: %d rooms did not end: %w", e.name, n, err)
		}
	}
	return nil
}

// processCPU is the processor time that a process has used so far, its threads together.
func processCPU(pid int) (time.Duration, error) {
	var t unix.Timespec
	// The clock of a process: its id inverted, 3 bits of kind (2: what the scheduler counted).
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// KV of the workers: a page is one K and one V of kvTensor bytes.
const (
	kvTensor    = 4 << 10
	kvPageBytes = 2 * kvTensor
)

var kvLayout = client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 128, PageTokens: 16, Kind: "mha"}

// groupOf is the name of a side's group of a pair.
func groupOf(pair string, side int) string { return pair + "-" + nodeNames[side] }

// worker is one inference process's session with its engine; it lives in this process.
type worker struct {
	*client.Client
	peer   string // group
	region *client.Region
	pool   int
	k, v   []byte // of page i: [i*kvTensor, +kvTensor)
}

// close ends the session and gives the memory back.
func (w *worker) close() error { return errors.Join(w.Close(), w.region.Close()) }

// dial makes the worker of one side of a pair of groups, with memory of so many pages.
func (c *cluster) dial(ctx context.Context, pair string, side, slots, pages int) (*worker, error) {
	w, err := client.Dial(ctx, client.Options{
		Socket: c.engines[side].worker, Group: groupOf(pair, side), Role: roles[side], Size: 1, Layout: kvLayout,
		Slots: slots, Window: 4096, Notify: true,
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 6*clusterAsk)
	defer cancel()
	half := int64(pages) * kvTensor
	region, err := w.CreateRegion(ctx, 2*half+64) // the canary stands behind the pages
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	pool, err := w.AddPool(ctx, client.Pool{Pages: pages, Tensors: []client.Tensor{
		{Region: region, PageBytes: kvTensor}, {Region: region, Offset: half, PageBytes: kvTensor},
	}})
	if err != nil {
		return nil, errors.Join(err, w.Close(), region.Close())
	}
	return &worker{Client: w, peer: groupOf(pair, 1-side), region: region, pool: pool, k: region.Bytes()[:half], v: region.Bytes()[half : 2*half]}, nil
}
