package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// epoch is one spawn of a plugin: one process, one connection, two streams.
type epoch struct {
	p          *Plugin
	n          uint32
	spec       *Spec
	dir        *epochDir
	proc       *process
	ctrl       *ctrl
	client     *goplugin.Client
	session    *queue
	control    *queue
	streams    [2]stream          // Session and Control, set by start
	endSession context.CancelFunc // of the Session alone, set by start
	ctx        context.Context    // of the streams
	cancel     context.CancelFunc
	workers    sync.WaitGroup // readers, writers, beats

	lost      chan struct{} // closed by the first fail
	drained   chan struct{} // closed by the first Drained
	drainOnce sync.Once
	over      atomic.Bool // nothing of this epoch is accepted any more
	isUp      atomic.Bool
	deliver   sync.Mutex // held while the sink is called, so that no Frame follows Lost

	mu    sync.Mutex
	cause error           // of the first fail
	dials error           // of the last dial that failed
	fault *contract.Fault // to tell the plugin before it is killed
	began time.Time       // when its streams were open
	beat  time.Time       // of the last beat, moved on by pauses of our own
	busy  []*contract.Busy
	hello *contract.HandshakeResponse
	left  []string // sockets that the plugin left in its directory

	logMu  sync.Mutex
	logged logLimit
}

// newEpoch makes the directory, the control socket and the process object; nothing runs yet.
func (p *Plugin) newEpoch(spec *Spec) (*epoch, error) {
	n := p.h.nextEpoch(spec.Name)
	prog, err := spec.open()
	if err != nil {
		return nil, err
	}
	dir, err := newEpochDir(p.h.root, spec.Name, n)
	if err != nil {
		prog.close()
		return nil, err
	}
	ctl, child, err := newCtrl()
	if err != nil {
		prog.close()
		return nil, errors.Join(err, dir.remove())
	}
	e := &epoch{
		p:       p,
		n:       n,
		spec:    spec,
		dir:     dir,
		ctrl:    ctl,
		session: newQueue(p.h.cfg.QueueEvents, p.h.cfg.QueueBytes),
		control: newQueue(p.h.cfg.QueueEvents, p.h.cfg.QueueBytes),
		lost:    make(chan struct{}),
		drained: make(chan struct{}),
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	env := append(spec.environment(), tokenEnv+"="+dir.token)
	e.proc = newProcess(spec.Name, prog, env, dir.path, child, p.log)
	e.proc.spawned = p.h.cfg.Spawned
	if p.h.cfg.Linger > 0 {
		e.proc.forOrphans, e.proc.token = orphanWait, dir.token
	}
	e.client = goplugin.NewClient(e.clientConfig())
	return e, nil
}

func (e *epoch) clientConfig() *goplugin.ClientConfig {
	return &goplugin.ClientConfig{
		HandshakeConfig:  sdk.HandshakeConfig,
		Plugins:          sdk.HostPlugins(),
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC},
		// start has the timeout; this one only backs it up.
		StartTimeout: e.p.h.cfg.HandshakeTimeout + time.Second,
		RunnerFunc: func(_ hclog.Logger, cmd *exec.Cmd, _ string) (runner.Runner, error) {
			e.proc.prepare(cmd.Env)
			return e.proc, nil
		},
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: e.dir.path},
		SkipHostEnv:      true,
		AutoMTLS:         e.spec.MTLS,
		SyncStdout:       &e.proc.stdout,
		SyncStderr:       &e.proc.stderr,
		Logger:           hclog.NewNullLogger(), // what it would log is in our errors
		// The last dialer counts: ours in place of go-plugin's.
		GRPCDialOptions: append(sdk.HostDialOptions(), grpc.WithContextDialer(e.dial), grpc.WithStatsHandler(frameSizes{})),
	}
}

// dial connects to the plugin's socket and makes sure that a process of the plugin's group serves it.
func (e *epoch) dial(ctx context.Context, _ string) (net.Conn, error) {
	addr := e.proc.address()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", addr)
	if err != nil {
		e.mu.Lock()
		e.dials = err
		e.mu.Unlock()
		return nil, err
	}
	if err := e.proc.serves(conn.(*net.UnixConn)); err != nil {
		conn.Close()
		return nil, fmt.Errorf("plugin socket %s: %w", addr, err)
	}
	return conn, nil
}

// start spawns the process and brings it to where its streams are open: within HandshakeTimeout, or
// until stop is closed. After an error the caller still calls end.
func (e *epoch) start(stop <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(e.ctx, e.p.h.cfg.HandshakeTimeout)
	defer cancel()
	e.workers.Go(func() {
		if e.ctrl.read() {
			e.fail(symptom("the plugin closed its control socket"))
		}
	})
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		select {
		case <-stop:
			cancel()
		case <-e.proc.exited:
			cancel()
		case <-stopped:
		}
	}()

	err := e.connect(ctx)
	select {
	case <-stop:
		return ErrStopped
	default:
	}
	if err == nil || errors.Is(err, ErrRefused) {
		return err
	}
	timedOut := ctx.Err() == context.DeadlineExceeded || status.Code(err) == codes.DeadlineExceeded
	e.awaitExit()
	ended, pollution := e.proc.ended(), e.proc.pollution()
	e.mu.Lock()
	dials := e.dials
	e.mu.Unlock()
	switch {
	case pollution != "":
		err = errors.New(pollution)
	case timedOut && e.proc.address() == "":
		err = fmt.Errorf("no handshake within %s: it runs, and prints nothing on stdout; is it a plugin of this engine?", e.p.h.cfg.HandshakeTimeout)
	case timedOut:
		err = fmt.Errorf("no handshake within %s: it listens, and does not answer", e.p.h.cfg.HandshakeTimeout)
	case ended != "" && e.proc.stderr.written() == 0:
		err = fmt.Errorf("process ended before its handshake: %s; it wrote nothing to stderr", ended)
	case ended != "":
		err = fmt.Errorf("process ended before its handshake: %s", ended)
	case dials != nil && status.Code(err) == codes.Unavailable:
		err = fmt.Errorf("nobody answers at the socket that it named: %w", dials)
	case strings.HasPrefix(err.Error(), "incompatible "): // of go-plugin's line
		err = fmt.Errorf("%w; take the release of the plugin that was built for this engine", err)
	}
	return fmt.Errorf("start: %w%s", err, e.proc.said(""))
}

func (e *epoch) connect(ctx context.Context) error {
	type result struct {
		client goplugin.ClientProtocol
		err    error
	}
	results := make(chan result, 1)
	go func() {
		client, err := e.client.Client()
		results <- result{client, err}
	}()
	var r result
	select {
	case r = <-results:
	case <-ctx.Done():
		// Without the process go-plugin gives up, too; it has no other way to be interrupted.
		e.proc.kill()
		<-results
		return ctx.Err()
	}
	if r.err != nil {
		return firstLine{r.err}
	}
	dispensed, err := r.client.Dispense(sdk.PluginName)
	if err != nil {
		return err
	}
	plugin := dispensed.(contract.PluginClient)
	cfg := &e.p.h.cfg
	request := &contract.HandshakeRequest{
		Versions:      contractVersions,
		EngineVersion: cfg.EngineVersion,
		Node:          cfg.Node,
		Incarnation:   cfg.Incarnation,
		Epoch:         e.n,
		ConfigJson:    e.spec.Options,
		RuntimeDir:    e.dir.path,
		HostId:        cfg.HostID,
		Features:      cfg.Features,
	}
	if cfg.Asking != nil {
		cfg.Asking(request)
	}
	hello, err := plugin.Handshake(ctx, request)
	if err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	if cfg.Answered != nil {
		cfg.Answered(hello)
	}
	e.mu.Lock()
	e.hello = hello // also of a plugin that is refused: it says what it is
	e.mu.Unlock()
	if err := checkHandshake(hello, cfg.Features); err != nil {
		return err
	}
	sessionCtx, endSession := context.WithCancel(e.ctx)
	e.endSession = endSession
	session, err := plugin.Session(context.WithValue(sessionCtx, sizeKey{}, new(int)))
	if err != nil {
		return fmt.Errorf("session stream: %w", err)
	}
	control, err := plugin.Control(context.WithValue(e.ctx, sizeKey{}, new(int)))
	if err != nil {
		return fmt.Errorf("control stream: %w", err)
	}
	e.mu.Lock()
	e.began = time.Now()
	e.beat = e.began
	e.mu.Unlock()
	e.streams = [2]stream{session, control}
	return nil
}

// fail ends the epoch: from here nothing of it is accepted. The first cause counts.
func (e *epoch) fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cause != nil {
		return
	}
	e.cause = err
	e.over.Store(true)
	close(e.lost)
}

// violate is fail for a breach of the contract; the plugin is told before it is killed.
func (e *epoch) violate(f *contract.Fault) {
	e.p.count(&e.p.violations, 1)
	e.mu.Lock()
	if e.fault == nil {
		e.fault = f
	}
	e.mu.Unlock()
	e.fail(faultError(f))
}

// confess is fail for a plugin that says itself what is wrong with it. That explains what was seen of it
// before: the end of its Control stream may arrive first.
func (e *epoch) confess(f *contract.Fault) {
	what := f.Detail
	if f.Rule != "backend" { // that of an SDK, for what the author's code says
		what = describe(f)
	}
	err := fmt.Errorf("the plugin gave up: %s", what)
	e.mu.Lock()
	if _, ok := e.cause.(symptom); ok {
		e.cause = err
	}
	e.mu.Unlock()
	e.fail(err)
}

func (e *epoch) live() bool { return e.isUp.Load() && !e.over.Load() }

// exitWait is how long the end of a stream waits for the exit that explains it. A plugin of the SDK takes
// 100 ms of it to find out whether its host is gone.
const exitWait = 500 * time.Millisecond

// awaitExit waits a moment for the process to have exited and its last output to be read.
func (e *epoch) awaitExit() {
	select {
	case <-e.proc.exited:
	case <-time.After(exitWait):
		return
	}
	select {
	case <-e.proc.done:
	case <-time.After(2 * pipeGrace):
	}
}

// symptom is a cause that the exit of the process explains better.
type symptom string

func (s symptom) Error() string { return string(s) }

// explain returns why the epoch was lost, with what its process left to say.
func (e *epoch) explain() error {
	e.mu.Lock()
	cause := e.cause
	e.mu.Unlock()
	if errors.Is(cause, ErrStopped) {
		return cause
	}
	if _, ok := cause.(symptom); ok {
		e.awaitExit()
		e.mu.Lock()
		cause = e.cause // it may have confessed
		e.mu.Unlock()
	}
	if _, ok := cause.(symptom); ok {
		if ended := e.proc.ended(); ended != "" {
			cause = fmt.Errorf("process ended: %s", ended)
		}
	}
	return fmt.Errorf("epoch %d: %w%s", e.n, cause, e.proc.said(cause.Error()))
}

// drain asks the plugin to finish what is open, and waits.
func (e *epoch) drain(ctx context.Context) {
	bound := e.p.h.cfg.DrainTimeout
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	if deadline, ok := ctx.Deadline(); ok {
		bound = max(time.Until(deadline), time.Millisecond)
	}
	err := e.session.push([]*contract.HostEvent{{Event: &contract.HostEvent_Drain{
		Drain: &contract.Drain{DeadlineNs: uint64(bound)}}}})
	if err != nil {
		e.p.log.Warn("plugin is stopped without a drain", "epoch", e.n, "error", err)
		return
	}
	select {
	case <-e.drained:
	case <-e.lost:
	case <-ctx.Done():
		e.p.log.Warn("plugin did not drain in time", "epoch", e.n, "bound", bound)
	}
}

const (
	orphanWait   = time.Second            // for children to follow a plugin that is watched closely (Config.Linger)
	faultGrace   = 200 * time.Millisecond // for the plugin to read the Fault and say something
	reapTimeout  = 10 * time.Second
	killTimeout  = 2 * time.Second // go-plugin's own cleanup, once the process is gone
	stuckTimeout = 5 * time.Second // for whoever handles the last events
)

// end brings the process down, gently if asked, and takes away all that belongs to the epoch. It
// returns false if a process is still there after reapTimeout; then reap and release are left to do.
func (e *epoch) end(gently bool) (reaped bool) {
	e.mu.Lock()
	fault := e.fault
	e.mu.Unlock()
	switch {
	case fault != nil:
		e.session.last(&contract.HostEvent{Event: &contract.HostEvent_Fault{Fault: fault}})
		e.awaitFor(faultGrace)
	case gently:
		// go-plugin's Kill asks the plugin to shut down; it has no bound of its own.
		go e.client.Kill()
		e.awaitFor(e.p.h.cfg.Grace)
	case e.isUp.Load():
		e.awaitFor(e.p.h.cfg.Linger)
	}
	e.proc.kill()
	e.cancel()
	e.session.close()
	e.control.close()
	if !e.reap(reapTimeout) {
		return false
	}
	e.release()
	return true
}

func (e *epoch) awaitFor(d time.Duration) {
	select {
	case <-e.proc.exited:
	case <-time.After(d):
	}
}

// reap waits until every process of the epoch is gone: its leader is reaped, its group is empty,
// nobody holds the plugin's end of the control socket, and no process carries the epoch's token.
func (e *epoch) reap(bound time.Duration) bool {
	if !e.proc.begun() {
		return true
	}
	deadline := time.Now().Add(bound)
	select {
	case <-e.proc.exited:
	case <-time.After(bound):
		return false
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		if e.proc.groupGone() && e.dir.gone() {
			select {
			case <-e.ctrl.gone:
				return true
			case <-time.After(pause):
			}
		} else {
			time.Sleep(pause)
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// release frees what the host holds of an epoch whose processes are gone.
func (e *epoch) release() {
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		e.client.Kill() // closes the connection, ends go-plugin's goroutines
	}()
	select {
	case <-killed:
	case <-time.After(killTimeout):
		e.p.log.Warn("go-plugin does not let go of a dead plugin", "epoch", e.n)
	}
	e.ctrl.close()
	e.workers.Wait()
	e.proc.release()
	left := e.dir.leftovers()
	e.mu.Lock()
	e.left = left
	e.mu.Unlock()
	if err := e.dir.remove(); err != nil {
		e.p.log.Warn("cannot remove the directory of a plugin", "epoch", e.n, "error", err)
	}
}

func (e *epoch) status(s *Status) {
	e.mu.Lock()
	s.Epoch = e.n
	s.Handshake = e.hello
	s.Busy = e.busy
	s.Leftovers = e.left
	if !e.beat.IsZero() && !e.over.Load() {
		s.BeatAge = time.Since(e.beat)
	}
	e.mu.Unlock()
	s.PID = e.proc.pid()
	s.Exit = e.proc.ended()
	s.Orphans = e.proc.leftOrphans()
	s.RuntimeDir = e.dir.path
	s.Queued = e.session.len()
	s.Stdout = e.proc.stdout.String()
	s.Stderr = e.proc.stderr.String()
	s.Written = e.proc.stderr.written()
}
