package sweep

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Bounds of strace.
const (
	attachBound = 10 * time.Second
	detachBound = 10 * time.Second
)

// passed is what is not swept, because the runtime of a process calls it whenever it likes and what it does is to wait:
// a process that stands there can be killed at any time between two others.
const passed = "!futex,epoll_pwait,epoll_wait,epoll_ctl,nanosleep,clock_nanosleep,sched_yield,madvise,rt_sigaction,rt_sigprocmask,rt_sigreturn,sigaltstack,tgkill,getpid,gettid,restart_syscall,exit,exit_group"

// maxNth is how many calls of one syscall are swept.
const maxNth = 200

// Tracer is the program that injects the faults.
const tracerProgram = "strace"

// Available says why this machine cannot run a sweep, or returns nil: strace is missing, or may not trace.
func Available() error {
	path, err := exec.LookPath(tracerProgram)
	if err != nil {
		return fmt.Errorf("%w; on Debian install it with: apt-get install strace", err)
	}
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		return err
	}
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	t, err := attach(path, child.Process.Pid, "trace=getpid")
	if err != nil {
		return fmt.Errorf("a process cannot be traced here (ptrace): %w", err)
	}
	t.detach()
	return nil
}

// tracer is an strace that is attached to all threads of a process.
type tracer struct {
	cmd     *exec.Cmd
	said    chan string // what it says that is no syscall; never full: see read
	stopped chan struct{}
	killed  chan struct{}
	done    chan struct{} // closed when it has ended and all that it wrote is read

	mu    sync.Mutex
	calls map[string]int  // "thread syscall" → so many began since attach
	last  map[string]call // by thread
	most  map[string]int  // syscall → of the thread with the most
}

// call is a syscall that a thread began last.
type call struct {
	name string
	nth  int
	at   int64 // Unix time in ns
}

var (
	lineOf    = regexp.MustCompile(`^(?:\[pid +(\d+)\] )?(\d+)\.(\d{6}) (.*)$`)
	callOf    = regexp.MustCompile(`^([a-z_0-9]+)\(`)
	attaching = regexp.MustCompile(`strace: Process \d+ attached( with \d+ threads)?$`)
)

// attach returns when all threads of pid are traced. expressions are what strace takes with -e.
func attach(program string, pid int, expressions ...string) (*tracer, error) {
	args := []string{"-f", "-p", strconv.Itoa(pid), "-ttt", "-e", "raw=all", "-e", "signal=SIGKILL,SIGSTOP"}
	for _, e := range expressions {
		args = append(args, "-e", e)
	}
	t := &tracer{
		cmd: exec.Command(program, args...), said: make(chan string, 64), calls: map[string]int{}, last: map[string]call{}, most: map[string]int{},
		stopped: make(chan struct{}), killed: make(chan struct{}), done: make(chan struct{}),
	}
	// It dies with the sweep, however that ends: a tracer that is left behind would keep its process from being reaped.
	t.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := t.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := t.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	go func() {
		t.read(out)
		_ = t.cmd.Wait() // how the traced process ended is read above
		close(t.done)
	}()
	bound := time.After(attachBound)
	for said := ""; ; {
		select {
		case said = <-t.said:
			if attaching.MatchString(said) {
				return t, nil
			}
		case <-t.done:
			return nil, fmt.Errorf("%s -p %d ended: %s", program, pid, said)
		case <-bound:
			t.detach()
			return nil, fmt.Errorf("strace does not attach to process %d (%s); it said %q", pid, stateOf(pid), said)
		}
	}
}

func (t *tracer) read(out io.Reader) {
	var stopped, killed bool
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		text := lines.Text()
		m := lineOf.FindStringSubmatch(text)
		if m == nil {
			select {
			case t.said <- text:
			default:
			}
			continue
		}
		thread, what := m[1], m[4]
		if c := callOf.FindStringSubmatch(what); c != nil {
			sec, _ := strconv.ParseInt(m[2], 10, 64)
			micro, _ := strconv.ParseInt(m[3], 10, 64)
			t.began(thread, c[1], sec*1e9+micro*1e3)
			continue
		}
		switch {
		case strings.HasPrefix(what, "--- stopped by SIGSTOP") && !stopped:
			stopped = true
			close(t.stopped)
		case strings.HasPrefix(what, "+++ killed by SIGKILL") && !killed:
			killed = true
			close(t.killed)
		}
	}
}

func (t *tracer) began(thread, name string, at int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := thread + " " + name
	t.calls[key]++
	n := t.calls[key]
	t.last[thread] = call{name, n, at}
	t.most[name] = max(t.most[name], n)
}

// struck returns when a thread began its nth call of a syscall, the last that it made.
func (t *tracer) struck(name string, nth int) (at int64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.last {
		if c.name == name && c.nth == nth {
			return c.at, true
		}
	}
	return 0, false
}

// detach ends the tracer; the process goes on as it is, running or stopped.
func (t *tracer) detach() {
	_ = t.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-t.done:
	case <-time.After(detachBound):
		_ = t.cmd.Process.Kill()
		<-t.done
	}
}

// leaveStopped ends the tracer of a process that it has stopped. strace lets some of them go on when it goes: a second
// signal that waits stops those again at once.
func (t *tracer) leaveStopped(pid int) {
	_ = syscall.Kill(pid, syscall.SIGSTOP)
	t.detach()
}

// syscalls returns the syscalls that the process made since attach, each with the calls of the thread that made most.
func (t *tracer) syscalls() map[string]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[string]int{}
	for name, n := range t.most {
		out[name] = min(n, maxNth)
	}
	return out
}
