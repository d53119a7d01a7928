package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Bounds of a child process.
const (
	stopGrace  = 10 * time.Second // from SIGTERM to SIGKILL
	inGrace    = 10 * time.Second // from writing to the standard input until the process has read enough of it
	killGrace  = 3 * time.Second  // from SIGKILL until its pipes are given up
	tailLines  = 30               // of standard error that are kept
	maxOutLine = 1 << 20
	stopSignal = syscall.SIGTERM
)

// process is a child in a process group of its own.
type process struct {
	name string
	cmd  *exec.Cmd
	done chan struct{} // closed when it is reaped and its output read
	err  error         // of Wait; valid after done
	in   *os.File      // the process's standard input

	mu   sync.Mutex
	tail []string // last lines of standard error
}

// startProcess starts argv, with a pipe as standard input. Lines of standard output go to line (nil: they join standard error's), from
// one goroutine. The child dies with this process.
func startProcess(name string, argv []string, env []string, line func([]byte)) (*process, error) {
	p := &process{name: name, cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{})}
	p.cmd.Env = env
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.cmd.WaitDelay = killGrace // a grandchild that holds the pipes does not hold us
	inR, inW, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer inR.Close()
	p.cmd.Stdin, p.in = inR, inW
	outR, outW := io.Pipe()
	errR, errW := io.Pipe()
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	if line == nil {
		line = p.keep
	}
	if err := p.cmd.Start(); err != nil {
		inW.Close()
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	var readers sync.WaitGroup
	readers.Go(func() { readLines(outR, line) })
	readers.Go(func() { readLines(errR, p.keep) })
	go func() {
		p.err = p.cmd.Wait()
		inW.Close()
		outW.Close()
		errW.Close()
		readers.Wait()
		close(p.done)
	}()
	return p, nil
}

// readLines hands on every line; of a line that is too long what fits.
func readLines(r io.Reader, line func([]byte)) {
	br := bufio.NewReaderSize(r, maxOutLine)
	for {
		text, err := br.ReadSlice('\n')
		if len(text) > 0 {
			line(text)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

func (p *process) keep(text []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.tail) == tailLines {
		p.tail = append(p.tail[:0], p.tail[1:]...)
	}
	p.tail = append(p.tail, strings.TrimRight(string(text[:min(len(text), 1000)]), "\r\n"))
}

// lastWords is the end of what the process wrote to standard error.
func (p *process) lastWords() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.tail) == 0 {
		return "  (" + p.name + " wrote nothing to standard error)\n"
	}
	return "  last lines of " + p.name + ":\n    " + strings.Join(p.tail, "\n    ") + "\n"
}

func (p *process) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// write hands the process a line of standard input. It waits, when the process is behind with what it was
// handed before, for inGrace.
func (p *process) write(line []byte) error {
	if err := p.in.SetWriteDeadline(time.Now().Add(inGrace)); err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	if _, err := p.in.Write(line); err != nil {
		return fmt.Errorf("tell %s: %w", p.name, err)
	}
	return nil
}

// signal reaches the process only, kill its whole group.
func (p *process) signal(s syscall.Signal) {
	if !p.exited() {
		_ = p.cmd.Process.Signal(s)
	}
}

func (p *process) kill() {
	if !p.exited() {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	}
}

// stop asks the process to end, kills it after a grace, and returns when it is reaped.
func (p *process) stop(grace time.Duration) {
	p.signal(stopSignal)
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	select {
	case <-p.done:
	case <-ctx.Done():
		p.kill()
		<-p.done // bounded by WaitDelay
	}
}

// obituary says how the process ended; valid after done.
func (p *process) obituary() error {
	if p.err == nil {
		return fmt.Errorf("%s ended before it was told to", p.name)
	}
	return fmt.Errorf("%s ended: %w", p.name, p.err)
}

// cpu is the processor time of the process and of the children it has reaped; valid after done.
func (p *process) cpu() time.Duration {
	if s := p.cmd.ProcessState; s != nil {
		return s.UserTime() + s.SystemTime()
	}
	return 0
}
