package pluginhost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-plugin/runner"
	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
)

// process runs one plugin process for go-plugin. In contrast to the stock runner, nothing in it can
// wait for something that the plugin or its children decide: stdout and stderr are drained whatever
// they carry, exit is seen although a grandchild holds the pipes, and kill takes the whole group.
type process struct {
	name string
	prog *program
	env  []string // before go-plugin's variables
	dir  string   // of the epoch, for its sockets
	ctrl *os.File // plugin's end of the control socketpair; closed by Start
	log  *slog.Logger

	// forOrphans is how long descendants may outlive the leader before they are killed [0].
	forOrphans time.Duration
	token      string        // in the environment of those that left the group
	spawned    func(pid int) // Config.Spawned

	cmd    *exec.Cmd
	exited chan struct{} // closed when the leader has exited and is reaped
	done   chan struct{} // closed when its output is read, too
	err    error         // of cmd.Wait; valid after exited

	stdout, stderr         tail
	stdoutPipe, stderrPipe *os.File
	pipes                  sync.WaitGroup // the two drains
	// What go-plugin reads in place of the pipes: one handshake line, and nothing.
	handshakeR, noLogsR *io.PipeReader
	handshakeW, noLogsW *io.PipeWriter

	mu       sync.Mutex
	started  bool
	killed   bool   // by us; before Start: do not start any more
	orphans  bool   // descendants outlived the leader by more than forOrphans, if that is set
	freed    bool   // the leader is reaped: its number may name a stranger
	polluted string // the first line of stdout if it is not a handshake
	unended  bool   // it would be one if it ended
	addr     string // socket of the plugin
}

var _ runner.Runner = (*process)(nil)

func newProcess(name string, prog *program, env []string, dir string, ctrlEnd *os.File, log *slog.Logger) *process {
	p := &process{name: name, prog: prog, env: env, dir: dir, ctrl: ctrlEnd, log: log,
		exited: make(chan struct{}), done: make(chan struct{})}
	p.stdout.max, p.stderr.max = 4<<10, 16<<10
	p.handshakeR, p.handshakeW = io.Pipe()
	p.noLogsR, p.noLogsW = io.Pipe()
	return p
}

// ctrlFD is the number of the control socket in the plugin: the first of ExtraFiles.
const ctrlFD = 3

// prepare builds the command; handshakeEnv are go-plugin's variables.
func (p *process) prepare(handshakeEnv []string) {
	p.cmd = &exec.Cmd{
		Path:        p.prog.path(),
		Args:        p.prog.argv,
		ExtraFiles:  []*os.File{p.ctrl},
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	p.cmd.Env = append(p.cmd.Env, p.env...)
	p.cmd.Env = append(p.cmd.Env, handshakeEnv...)
	// Sockets directly in the epoch's directory: unix paths are short of room.
	p.cmd.Env = append(p.cmd.Env, "PLUGIN_UNIX_SOCKET_DIR="+p.dir, fmt.Sprintf("%s=%d", sdk.ControlFDEnv, ctrlFD))
}

// Start is called by go-plugin, once.
func (p *process) Start(context.Context) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.ctrl.Close()
	if p.killed {
		return ErrStopped
	}
	var stdoutW, stderrW *os.File
	if p.stdoutPipe, stdoutW, err = os.Pipe(); err != nil {
		return fmt.Errorf("stdout pipe: %w", err)
	}
	defer stdoutW.Close()
	if p.stderrPipe, stderrW, err = os.Pipe(); err != nil {
		p.stdoutPipe.Close()
		return fmt.Errorf("stderr pipe: %w", err)
	}
	defer stderrW.Close()
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		p.stdoutPipe.Close()
		p.stderrPipe.Close()
		return fmt.Errorf("stdin: %w", err)
	}
	defer stdin.Close()
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin, stdoutW, stderrW // *os.File: Wait does not wait for their EOF
	if err := p.prog.clear(int(max(stdin.Fd(), stdoutW.Fd(), stderrW.Fd(), p.ctrl.Fd()))); err != nil {
		p.stdoutPipe.Close()
		p.stderrPipe.Close()
		return err
	}
	p.cmd.Path = p.prog.path()
	if err := p.cmd.Start(); err != nil {
		p.stdoutPipe.Close()
		p.stderrPipe.Close()
		return p.prog.execError(err)
	}
	p.started = true
	if p.spawned != nil {
		p.spawned(p.cmd.Process.Pid)
	}
	p.pipes.Go(p.drainStdout)
	p.pipes.Go(p.drainStderr)
	go p.watch()
	if err := p.prog.unchanged(); err != nil {
		p.killed = true
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
		return err
	}
	return nil
}

// pipeGrace is how long output is still read after the exit; a descendant may hold the pipes open.
const pipeGrace = 200 * time.Millisecond

// watch notices the exit without reaping, so that the group's number is still ours when it is killed.
func (p *process) watch() {
	for {
		err := unix.Waitid(unix.P_PID, p.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			break
		}
	}
	if p.forOrphans > 0 {
		p.awaitOrphans()
	}
	p.signal(unix.SIGKILL)
	p.mu.Lock()
	p.err = p.cmd.Wait()
	p.freed = true
	p.mu.Unlock()
	close(p.exited)

	drained := make(chan struct{})
	go func() { p.pipes.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(pipeGrace):
	}
	p.stdoutPipe.Close()
	p.stderrPipe.Close()
	<-drained
	p.handshakeW.Close()
	p.noLogsW.Close()
	close(p.done)
}

// awaitOrphans lets the leader's descendants follow it, and notes whether they do.
func (p *process) awaitOrphans() {
	deadline := time.Now().Add(p.forOrphans)
	for pause := time.Millisecond; groupRuns(p.cmd.Process.Pid) || tokenRuns(p.token); pause = min(2*pause, 50*time.Millisecond) {
		if time.Now().After(deadline) {
			p.mu.Lock()
			p.orphans = true
			p.mu.Unlock()
			return
		}
		time.Sleep(pause)
	}
}

// handshakeRE is what go-plugin's first line looks like: core version, protocol version, network.
var handshakeRE = regexp.MustCompile(`^[0-9]+\|[0-9]+\|[a-z]+\|`)

func (p *process) drainStdout() {
	first := true
	drain(p.stdoutPipe, func(text []byte, complete bool) {
		p.stdout.Write(text)
		if complete {
			p.stdout.Write([]byte{'\n'})
		}
		if !first {
			return
		}
		first = false
		if complete && handshakeRE.Match(text) {
			p.handshakeW.Write(append(bytes.Clone(text), '\n'))
			return
		}
		p.mu.Lock()
		p.polluted = string(text[:min(len(text), 200)])
		p.unended = !complete && handshakeRE.Match(text)
		if p.polluted == "" {
			p.polluted = "\n"
		}
		p.mu.Unlock()
		p.handshakeW.Close() // go-plugin gives up
	})
}

func (p *process) drainStderr() {
	drain(p.stderrPipe, func(text []byte, complete bool) {
		p.stderr.Write(text)
		if complete {
			p.stderr.Write([]byte{'\n'})
		}
		if p.log.Enabled(context.Background(), slog.LevelDebug) {
			p.log.Debug("plugin stderr", "line", string(text))
		}
	})
}

// address is where the plugin listens, as it said in its handshake line.
func (p *process) address() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.addr
}

// serves makes sure that the process at the other end of a connection is of this group.
func (p *process) serves(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(ctlErr, err); err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	pgid, err := unix.Getpgid(int(cred.Pid))
	if err != nil || pgid != p.pid() {
		return fmt.Errorf("served by process %d, which is not of the plugin's process group %d", cred.Pid, p.pid())
	}
	return nil
}

// signal reaches every process of the group, stopped ones too. It does nothing when the leader is
// reaped: its number may then belong to a stranger.
func (p *process) signal(sig unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.started && !p.freed {
		_ = unix.Kill(-p.cmd.Process.Pid, sig)
	}
}

// kill ends the group, now or, before Start, as soon as Start is called.
func (p *process) kill() {
	p.mu.Lock()
	p.killed = p.killed || !p.freed
	p.mu.Unlock()
	p.signal(unix.SIGKILL)
}

// pid returns 0 when there is no process.
func (p *process) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.started || p.freed {
		return 0
	}
	return p.cmd.Process.Pid
}

// begun reports whether there was ever a process.
func (p *process) begun() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.started
}

// release closes the program. Without a process it also closes what Start would have closed.
func (p *process) release() {
	p.prog.close()
	p.ctrl.Close()
	p.handshakeW.Close()
	p.noLogsW.Close()
}

// groupGone reports whether no process of the group can run any more. The leader is reaped; an orphan
// that is dead but reaped by nobody (a container without an init) does not count.
func (p *process) groupGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.started {
		return true
	}
	if !p.freed {
		return false
	}
	pgid := p.cmd.Process.Pid
	return errors.Is(unix.Kill(-pgid, 0), unix.ESRCH) || !groupRuns(pgid)
}

// ended returns how the process ended by itself: not by us, and not at all is "".
func (p *process) ended() string {
	select {
	case <-p.exited:
	default:
		return ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed {
		return ""
	}
	return p.cmd.ProcessState.String()
}

// leftOrphans reports whether descendants outlived the leader (see forOrphans).
func (p *process) leftOrphans() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.orphans
}

// said returns the end of what the plugin wrote to stderr, as the end of an error message that begins with
// begin. A last line by which the plugin says the same, after a word or two of its own, is left out.
func (p *process) said(begin string) string {
	text := p.stderr.String()
	last := text[strings.LastIndexByte(text, '\n')+1:]
	for rest, more := last, last != ""; more; {
		if strings.HasSuffix(begin, ": "+rest) {
			text = strings.TrimSuffix(strings.TrimSuffix(text, last), "\n")
			break
		}
		_, rest, more = strings.Cut(rest, ": ")
	}
	if text == "" {
		return ""
	}
	return "; stderr ends with " + quote(text)
}

// pollution says what the plugin wrote to stdout in place of its handshake, "" for nothing.
func (p *process) pollution() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.polluted == "":
		return ""
	case p.unended:
		return fmt.Sprintf("it printed %s on stdout, and the line does not end; write a newline behind the handshake, and flush it", quote(p.polluted))
	}
	return fmt.Sprintf("it printed %s on stdout in place of its handshake; stdout belongs to the handshake, print to stderr", quote(p.polluted))
}

// quote cuts text to its last 1000 bytes for an error message.
func quote(text string) string {
	const most = 1000
	if len(text) > most {
		text = "…" + text[len(text)-most:]
	}
	return strconv.Quote(text)
}

// The rest of runner.Runner.

func (p *process) Stdout() io.ReadCloser           { return p.handshakeR }
func (p *process) Stderr() io.ReadCloser           { return p.noLogsR }
func (p *process) Name() string                    { return p.name }
func (p *process) Diagnose(context.Context) string { return "" }
func (p *process) Kill(context.Context) error      { p.kill(); return nil }

// ID stays after the exit: go-plugin cleans up only what has one.
func (p *process) ID() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.started {
		return ""
	}
	return strconv.Itoa(p.cmd.Process.Pid)
}

func (p *process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// PluginToHost admits only a unix socket in the epoch's own directory.
func (p *process) PluginToHost(network, addr string) (string, string, error) {
	if network != "unix" || !strings.HasPrefix(filepath.Clean(addr), p.dir+"/") {
		return "", "", fmt.Errorf("it listens on %s %s: want a unix socket in $PLUGIN_UNIX_SOCKET_DIR (%s)", network, addr, p.dir)
	}
	p.mu.Lock()
	p.addr = addr
	p.mu.Unlock()
	return network, addr, nil
}

func (p *process) HostToPlugin(network, addr string) (string, string, error) {
	return network, addr, nil
}
