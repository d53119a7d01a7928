package node_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
)

// command runs this binary again as something else.
func command(t *testing.T, args ...string) *exec.Cmd {
	self, err := os.Executable()
	must(t, err)
	cmd := exec.Command(self, args...)
	// A race-built process otherwise sleeps a second before it exits.
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	if os.Getenv("TERMINUS_TEST_LOG") != "" {
		cmd.Stderr = os.Stderr
	}
	return cmd
}

// spawn launches an engine in a process of its own, to be killed or stopped, and waits until it is ready.
func spawn(t *testing.T, dir, name string, set ...string) *engine {
	t.Helper()
	flags := flagsOf(dir, name, set)
	cfg, err := config.Load(config.LoadOptions{Flags: flags})
	must(t, err)
	e := &engine{cfg: cfg, admin: admin.NewClient(cfg.Admin.Socket), cmd: command(t, append([]string{"engine"}, flags...)...)}
	must(t, e.cmd.Start())
	e.register(t, func() { e.kill(); e.admin.Close() })
	e.awaitReady(t)
	return e
}

func engineMain(flags []string) {
	level := slog.LevelError
	if os.Getenv("TERMINUS_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	cfg, err := config.Load(config.LoadOptions{Flags: flags})
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		err = node.Run(ctx, cfg, node.Options{Log: log.With("node", cfg.Node), Version: "test"})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (e *engine) kill() {
	e.cmd.Process.Kill()
	e.cmd.Wait()
}

func (e *engine) signal(t *testing.T, s os.Signal) {
	t.Helper()
	must(t, e.cmd.Process.Signal(s))
	if s == unix.SIGSTOP {
		eventually(t, "every thread of "+e.cfg.Node+" to stand still", func() bool { return standsStill(e.cmd.Process.Pid) })
	}
}

// standsStill tells whether every thread of a process is stopped. One that runs on another CPU hears of a SIGSTOP some
// milliseconds late on a busy machine: long enough for an engine to finish sixteen rooms.
func standsStill(pid int) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		_, state, ok := strings.Cut(string(b), ") ") // behind the name, which may hold anything but this
		if err == nil && !(ok && strings.HasPrefix(state, "T")) {
			return false
		}
	}
	return len(tasks) > 0
}

// pause stops the process for d.
func (e *engine) pause(t *testing.T, d time.Duration) {
	t.Helper()
	e.signal(t, unix.SIGSTOP)
	time.Sleep(d)
	e.signal(t, unix.SIGCONT)
}

// freeze stops a process that nobody here waits for, and returns when all its threads stand still: the kernel wakes
// and ends a stopped group whose parent dies only if it stands by then. It is killed at the end of the test, if it
// is still there: by a descriptor, since its number may be another's by then.
func freeze(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	must(t, err)
	t.Cleanup(func() {
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
			t.Error(err)
		}
		unix.Close(fd)
	})
	must(t, unix.PidfdSendSignal(fd, unix.SIGSTOP, nil, 0))
	eventually(t, "a process that stands still", func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, thread := range threads {
			if b, err := os.ReadFile(thread); err == nil && !strings.Contains(string(b), ") T ") {
				return false
			}
		}
		return len(threads) > 0
	})
}

// TestEngineKilledBesideAStoppedPlugin left that plugin behind, stopped, when it failed.
func TestFrozenProcessIsNotLeftBehind(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "60")
	must(t, cmd.Start())
	defer cmd.Process.Kill()
	t.Run("freezes", func(t *testing.T) { freeze(t, cmd.Process.Pid) })
	err := cmd.Wait()
	if s := cmd.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() || s.Signal() != unix.SIGKILL {
		t.Errorf("%v", err)
	}
}

// plugin returns the process id of the live epoch of the engine's first backend, and its number.
func (e *engine) plugin(t *testing.T) (pid int, epoch uint32) {
	t.Helper()
	ps, err := e.admin.Plugins(short(t))
	must(t, err)
	return ps[0].Epochs[0].PID, ps[0].Epochs[0].Epoch
}

// workerProcess is a destination worker in a process of its own that has registered pages of room 1.
type workerProcess struct {
	*exec.Cmd
	in io.Closer
}

// spawnWorker returns when the room is registered.
func spawnWorker(t *testing.T, e *engine) *workerProcess {
	t.Helper()
	w := &workerProcess{Cmd: command(t, "worker", e.cfg.Worker.Socket)}
	in, err := w.StdinPipe()
	must(t, err)
	out, err := w.StdoutPipe()
	must(t, err)
	w.in = in
	must(t, w.Start())
	t.Cleanup(w.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "registered\n" {
		t.Fatalf("the worker said %q, %v", line, err)
	}
	return w
}

func (w *workerProcess) kill() {
	w.Process.Kill()
	w.Wait()
}

// memory opens the region of the worker, as it was before any engine saw it.
func (w *workerProcess) memory(t *testing.T) *os.File {
	t.Helper()
	fds := fmt.Sprintf("/proc/%d/fd/", w.Process.Pid)
	entries, err := os.ReadDir(fds)
	must(t, err)
	for _, e := range entries {
		if to, err := os.Readlink(fds + e.Name()); err == nil && strings.HasPrefix(to, "/memfd:terminus-region") {
			f, err := os.OpenFile(fds+e.Name(), os.O_RDWR, 0)
			must(t, err)
			t.Cleanup(func() { f.Close() })
			return f
		}
	}
	t.Fatal("the worker has no region")
	return nil
}

func workerMain(socket string) {
	fail := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	w, err := newWorker(ctx, socket, client.Destination, "decode", 0, 1, 16)
	fail(err)
	room, err := w.Open(ctx, client.OpenOptions{Room: 1, PeerGroup: "prefill"})
	fail(err)
	fail(room.Register(ctx, client.RegisterPart{Pool: w.pool, Pages: []int32{1, 2}}))
	fmt.Println("registered")
	io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}
