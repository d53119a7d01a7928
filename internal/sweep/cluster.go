package sweep

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/tail"
)

// Bounds of a cluster.
const (
	upBound   = 15 * time.Second // from the start of a process until it serves
	idleBound = 12 * time.Second // from the end of a play until nothing is held
	askEvery  = 3 * time.Millisecond
	tombstone = 6 * time.Second // clocks.tombstone of the engines
)

// cluster is two engines on this host, each with the built-in backend in a process of its own and one worker.
type cluster struct {
	o       *Options
	lane    string
	mode    Mode
	dir     string
	engines [2]*engine
	workers [2]*workerProcess
	plugins [2]pluginProcess
	events  chan event
	room    int64 // the next play's first
	worn    [2]int
	base    map[Kind]holdings // what each process holds at rest
	entries []string          // below the runtime directory, at rest
}

// mutantFile and a name is the file in a cluster's directory by which its processes know which bug they have to have.
const mutantFile = "mutant-"

type pluginProcess struct {
	pid   int
	epoch uint32
}

// event is something that a worker said, or the end of a worker's process.
type event struct {
	side   int
	worker *workerProcess
	report report
	gone   bool
}

type engine struct {
	node, config, worker string
	admin                *admin.Client
	cmd                  *exec.Cmd
	done                 chan struct{} // closed when it is reaped
	said                 *tail.Writer
}

type workerProcess struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	done chan struct{} // closed when it is reaped and its output read
	said *tail.Writer
	node uint64 // the incarnation of the engine that it is with
}

// brokenError is a broken promise without that anything had been done.
type brokenError struct{ faults []string }

func (e *brokenError) Error() string {
	return "a play without a fault: " + strings.Join(e.faults, "; ")
}

// newCluster starts one and plays once, so that everything that is made at the first use is there.
func newCluster(ctx context.Context, o *Options, lane string, mode Mode) (c *cluster, err error) {
	c = &cluster{o: o, lane: lane, mode: mode, events: make(chan event, 16*roomsOfPlay), room: 1, base: map[Kind]holdings{}}
	if c.dir, err = os.MkdirTemp("/tmp", "sweep"); err != nil { // /tmp: the path of a unix socket has 107 bytes
		return nil, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, c.lastWords())
			c.close()
			c = nil
		}
	}()
	if o.Mutant != "" {
		if err := os.WriteFile(filepath.Join(c.dir, mutantFile+o.Mutant), nil, 0o600); err != nil {
			return c, err
		}
	}
	for side := range sides {
		if c.engines[side], err = newEngine(c, side); err != nil {
			return c, err
		}
		if err := c.startEngine(side); err != nil {
			return c, err
		}
	}
	if err := c.awaitEngines(ctx); err != nil {
		return c, err
	}
	for side := range sides {
		if err := c.startWorker(side); err != nil {
			return c, err
		}
	}
	if err := c.awaitWorkers(ctx); err != nil {
		return c, err
	}
	t := newTrial(c, Pair{}, "")
	t.run(ctx, nil)
	if t.settle(ctx); len(t.out.Faults) > 0 {
		return c, &brokenError{t.out.Faults}
	}
	for _, k := range kinds {
		c.base[k] = holdingsOf(c.pid(k))
	}
	c.entries = entriesOf(filepath.Join(c.dir, "r"))
	return c, nil
}

func newEngine(c *cluster, side int) (*engine, error) {
	node := sides[side]
	e := &engine{node: node, config: filepath.Join(c.dir, node+".yaml"), worker: filepath.Join(c.dir, "r", node, "worker.sock"), said: &tail.Writer{}}
	e.admin = admin.NewClient(filepath.Join(c.dir, "r", node, "admin.sock"))
	var b strings.Builder
	fmt.Fprintf(&b, "node: %s\nruntime_dir: %q\nstate_dir: %q\npeers: {driver: local}\nlog: {level: warn}\ndrain: {budget: 1s}\n", node, filepath.Join(c.dir, "r"), filepath.Join(c.dir, "s"))
	fmt.Fprintf(&b, "plugins: {tcp: {options: {shm: %v}}}\n", c.lane == "shm")
	if c.mode == Freeze {
		fmt.Fprintf(&b, "clocks: {tombstone: %s, bootstrap: 3s, register: 3s, input: 3s, queue: 3s, peer_queued: 3s, peer_suspect: 1s, peer_dead: 2s, verdict: 3s}\n", tombstone)
	} else {
		fmt.Fprintf(&b, "clocks: {tombstone: %s}\n", tombstone)
	}
	return e, os.WriteFile(e.config, []byte(b.String()), 0o600)
}

// child is a process of the cluster: its working directory says so, also of what it starts itself.
func (c *cluster) child(said *tail.Writer, argv ...string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.Stderr, cmd.WaitDelay = c.dir, said, 3*time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.dir, "GORACE=atexit_sleep_ms=0"}
	return cmd
}

func (c *cluster) startEngine(side int) error {
	e := c.engines[side]
	e.done, c.worn[side] = make(chan struct{}), 0
	e.cmd = c.child(e.said, c.o.Engine, "run", "-c", e.config)
	if err := e.cmd.Start(); err != nil {
		return fmt.Errorf("engine %s: %w", e.node, err)
	}
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait() // how it ended is known or in what it said
		close(done)
	}(e.cmd, e.done)
	return nil
}

func (c *cluster) startWorker(side int) error {
	w := &workerProcess{done: make(chan struct{}), said: &tail.Writer{}}
	argv := []string{c.o.Worker, "-socket", c.engines[side].worker, "-side", strconv.Itoa(side)}
	if c.mode == Freeze {
		argv = append(argv, "-lost", "3s")
	}
	w.cmd = c.child(w.said, append(argv, c.o.WorkerArgs...)...)
	var err error
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := w.cmd.Start(); err != nil {
		return fmt.Errorf("worker of %s: %w", sides[side], err)
	}
	c.workers[side] = w
	go func() {
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var r report
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				r = report{T: "over", Faults: []string{fmt.Sprintf("%s worker wrote %.80q", sides[side], lines.Text())}}
			}
			c.events <- event{side: side, worker: w, report: r}
		}
		_ = w.cmd.Wait()
		close(w.done)
		c.events <- event{side: side, worker: w, gone: true}
	}()
	return nil
}

// tell hands an order to a worker. One that is dead, or stopped with a full pipe, does not get it.
func (w *workerProcess) tell(o order) {
	b, _ := json.Marshal(o)
	if f, ok := w.in.(*os.File); ok {
		_ = f.SetWriteDeadline(time.Now().Add(time.Second))
	}
	_, _ = w.in.Write(append(b, '\n'))
}

// pid is the process of a kind, 0 while there is none.
func (c *cluster) pid(k Kind) int {
	switch k.of() {
	case "engine":
		return c.engines[k.side()].cmd.Process.Pid
	case "plugin":
		return c.plugins[k.side()].pid
	}
	return c.workers[k.side()].cmd.Process.Pid
}

// await asks until ok says nothing, and returns what it said last.
func await(ctx context.Context, bound time.Duration, ok func(context.Context) string) error {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	last := "no answer"
	for {
		why := ok(ctx)
		if why == "" {
			return nil
		}
		if ctx.Err() == nil { // else it says no more than that
			last = why
		}
		if pause(ctx, askEvery) != nil {
			return fmt.Errorf("not within %v: %s", bound, last)
		}
	}
}

// awaitEngines waits until both engines serve and know each other, each with a plugin that is not the one known to be
// dead.
func (c *cluster) awaitEngines(ctx context.Context) error {
	for side, e := range c.engines {
		err := await(ctx, upBound, func(ctx context.Context) string {
			select {
			case <-e.done:
				return "it has ended"
			default:
			}
			return c.serves(ctx, side)
		})
		if err != nil {
			return fmt.Errorf("engine %s: %w", e.node, err)
		}
	}
	return nil
}

// serves says why an engine does not, and takes notice of its plugin.
func (c *cluster) serves(ctx context.Context, side int) string {
	e := c.engines[side]
	ps, err := e.admin.Plugins(ctx)
	if err != nil {
		return err.Error()
	}
	if len(ps) != 1 || ps[0].State != "up" || len(ps[0].Epochs) == 0 || ps[0].Epochs[0].State != "ready" {
		return fmt.Sprintf("its plugin: %+v", ps)
	}
	p := pluginProcess{ps[0].Epochs[0].PID, ps[0].Epochs[0].Epoch}
	if s := stateOf(p.pid); s == "" || s == "Z" || s == "X" {
		return fmt.Sprintf("its plugin, process %d, is dead", p.pid)
	}
	if old := c.plugins[side]; old.pid != p.pid && old.pid != 0 && stateOf(old.pid) != "" {
		return fmt.Sprintf("its plugin is process %d, and process %d is still there", p.pid, old.pid)
	}
	c.plugins[side] = p
	if r, err := e.admin.Ready(ctx); err != nil || !r.Ready {
		return fmt.Sprintf("not ready: %v %v", r.Reasons, err)
	}
	peers, err := e.admin.Peers(ctx)
	if err != nil {
		return err.Error()
	}
	if len(peers) != 1 || peers[0].State != "ready" {
		return fmt.Sprintf("its peer: %+v", peers)
	}
	return ""
}

// awaitWorkers waits until both workers are with the engines that live now, and these know the other side's group.
func (c *cluster) awaitWorkers(ctx context.Context) error {
	bound := time.After(upBound)
	for side, e := range c.engines {
		st, err := e.admin.Status(ctx)
		if err != nil {
			return err
		}
		for c.workers[side].node != st.Incarnation {
			select {
			case ev := <-c.events:
				switch {
				case ev.worker != c.workers[ev.side]:
				case ev.gone:
					return fmt.Errorf("the %s worker has ended: %s", sides[ev.side], ev.worker.said)
				case ev.report.T == "ready", ev.report.T == "back":
					ev.worker.node = ev.report.Node
				case len(ev.report.Faults) > 0:
					return errors.New(strings.Join(ev.report.Faults, "; "))
				}
			case <-bound:
				return fmt.Errorf("the %s worker is not with its engine after %v; %s", sides[side], upBound, c.workers[side].said)
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	for _, e := range c.engines {
		err := await(ctx, upBound, func(ctx context.Context) string {
			gs, err := e.admin.Groups(ctx)
			if err != nil {
				return err.Error()
			}
			complete := 0
			for _, g := range gs {
				if g.Complete && g.Detail == "" {
					complete++
				}
			}
			if complete != 2 {
				return fmt.Sprintf("its groups: %+v", gs)
			}
			return ""
		})
		if err != nil {
			return fmt.Errorf("engine %s: %w", e.node, err)
		}
	}
	return nil
}

// lastWords is the end of what the processes wrote to their standard errors.
func (c *cluster) lastWords() string {
	var b strings.Builder
	for side, e := range c.engines {
		if e != nil {
			fmt.Fprintf(&b, "engine %s: %s\n", e.node, e.said)
		}
		if w := c.workers[side]; w != nil {
			fmt.Fprintf(&b, "%s worker: %s\n", sides[side], w.said)
		}
	}
	return b.String()
}

// finish stops a cluster as an operator would, and returns what is left of it that must not be.
func (c *cluster) finish(ctx context.Context) (faults []string) {
	defer c.close()
	for _, e := range c.engines {
		// Tombstones go by their clock.
		err := await(ctx, tombstone+idleBound, func(ctx context.Context) string {
			rooms, err := e.admin.Rooms(ctx, admin.RoomFilter{Limit: 3})
			if err != nil {
				return err.Error()
			}
			if len(rooms) > 0 {
				return fmt.Sprintf("rooms are listed still: %+v", rooms)
			}
			return ""
		})
		if err != nil {
			faults = append(faults, fmt.Sprintf("engine %s: %v", e.node, err))
		}
	}
	for _, w := range c.workers {
		w.in.Close()
	}
	for _, e := range c.engines {
		_ = e.cmd.Process.Signal(syscall.SIGTERM)
	}
	for _, e := range c.engines {
		select {
		case <-e.done:
			if code := e.cmd.ProcessState.ExitCode(); code != 0 {
				faults = append(faults, fmt.Sprintf("engine %s ended with %v", e.node, e.cmd.ProcessState))
			}
		case <-time.After(idleBound):
			faults = append(faults, fmt.Sprintf("engine %s does not end", e.node))
		}
	}
	if err := await(ctx, idleBound, func(context.Context) string {
		if left := processesIn(c.dir); len(left) > 0 {
			return fmt.Sprintf("processes %v are left", left)
		}
		return ""
	}); err != nil {
		faults = append(faults, err.Error())
	}
	return faults
}

// close ends what is left of a cluster.
func (c *cluster) close() {
	for _, pid := range processesIn(c.dir) {
		killPid(pid)
	}
	for side, e := range c.engines {
		if e != nil && e.cmd != nil && e.cmd.Process != nil {
			<-e.done // bounded by WaitDelay
			e.admin.Close()
		}
		if w := c.workers[side]; w != nil {
			for closed := false; !closed; {
				select {
				case <-w.done:
					closed = true
				case <-c.events:
				}
			}
		}
	}
	// The last words of workers' readers.
	for len(c.events) > 0 {
		<-c.events
	}
	os.RemoveAll(c.dir)
}
