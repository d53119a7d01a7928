package conformance

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// untidyEnv makes this test binary a plugin that leaves something behind, in one of its ways; strayEnv makes it
// what such a plugin leaves.
const (
	untidyEnv = "TEST_UNTIDY"
	strayEnv  = "TEST_STRAY"
)

func init() {
	switch os.Getenv(strayEnv) { // what it is handed as descriptor 3
	case "maps":
		if _, err := unix.Mmap(3, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
			panic(err)
		}
		unix.Close(3)
		fmt.Println("maps")
	case "has open":
		fmt.Println("has open")
	}
	if os.Getenv(strayEnv) != "" {
		time.Sleep(time.Minute)
		os.Exit(0)
	}
	if mode := os.Getenv(untidyEnv); mode != "" {
		sdk.Main(&untidy{Backend: tcp.New(), mode: mode})
	}
}

type untidy struct {
	*tcp.Backend
	mode string
	held []*os.File
}

func (b *untidy) Start(ctx context.Context, s sdk.Start) ([]byte, error) {
	b.leave("start")
	return b.Backend.Start(ctx, s)
}

func (b *untidy) Transfer(op *sdk.Op) {
	b.leave("op")
	b.Backend.Transfer(op)
}

func (b *untidy) RemoveRegion(r *sdk.Region) {
	if b.mode == "late write" {
		fd, err := hide(r.FD)
		if err != nil {
			panic(err)
		}
		time.AfterFunc(400*time.Millisecond, func() {
			f := fd()
			_, _ = unix.Pwrite(f, []byte("late"), 0)
			unix.Close(f)
		})
	}
	b.Backend.RemoveRegion(r)
}

// hide puts a copy of a descriptor where /proc does not show it, under way between two sockets, and returns what takes
// it out again.
func hide(fd int) (take func() int, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return func() int {
		control := make([]byte, unix.CmsgSpace(4))
		_, n, _, _, _ := unix.Recvmsg(pair[1], make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC)
		unix.Close(pair[0])
		unix.Close(pair[1])
		messages, _ := unix.ParseSocketControlMessage(control[:n])
		if len(messages) == 0 {
			return -1
		}
		fds, _ := unix.ParseUnixRights(&messages[0])
		return fds[0]
	}, unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0)
}

func (b *untidy) Close() error {
	b.leave("close")
	return b.Backend.Close()
}

// leave does what the mode says to do at a moment.
func (b *untidy) leave(when string) {
	what, ok := strings.CutSuffix(b.mode, " at "+when)
	if !ok {
		return
	}
	var err error
	switch what {
	case "daemon": // of another session, with an environment of its own
		stray := exec.Command("/proc/self/exe")
		stray.Env = []string{strayEnv + "=daemon"}
		stray.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		err = stray.Start()
	case "session":
		stray := exec.Command("/proc/self/exe")
		stray.Env = append(os.Environ(), strayEnv+"=session")
		stray.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		err = stray.Start()
	case "shared memory", "memory":
		flags, n := unix.MAP_ANON|unix.MAP_PRIVATE, 20<<10
		if what == "shared memory" {
			flags, n = unix.MAP_ANON|unix.MAP_SHARED, 64<<10
		}
		_, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_POPULATE)
	case "tmp":
		for range slack + 1 {
			_, err = os.CreateTemp("", "untidy")
		}
	case "shm":
		for range slack + 1 {
			var f *os.File
			f, err = os.CreateTemp(sharedDir, "untidy-")
			b.held = append(b.held, f)
		}
	}
	if err != nil {
		panic(err)
	}
}

// TestLeftovers: what a plugin leaves outside of its process group and its runtime directory is found, and what
// can be taken away is.
func TestLeftovers(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ mode, id, says string }{
		{"nothing", "transfer/one-page", ""},
		{"nothing", "shutdown/clean", ""},
		{"nothing", "leftover/nothing-after-close", ""},
		{"daemon at op", "transfer/one-page", "2 processes, 1 before"},
		{"session at op", "transfer/one-page", "2 processes, 1 before"},
		{"daemon at start", "leftover/nothing-after-close", "lived on"},
		{"daemon at close", "leftover/nothing-after-close", "lived on"},
		{"session at start", "leftover/nothing-after-close", "lived on"},
		{"tmp at op", "transfer/one-page", "files in the runtime directory and $TMPDIR"},
		{"tmp at close", "shutdown/clean", "$TMPDIR/untidy"},
		{"shm at op", "transfer/one-page", "files of /dev/shm open or mapped"},
		{"shm at start", "shutdown/clean", sharedDir + "untidy-"},
		{"shared memory at op", "leak/plans", "KiB of memory"},
		{"memory at op", "leak/plans", "KiB of memory"},
	} {
		t.Run(strings.ReplaceAll(c.mode, " ", "-")+"/"+c.id, func(t *testing.T) {
			res, err := Run(t.Context(), Config{
				Carrier: FromSpec("untidy", pluginhost.Spec{Name: "under-test", Exec: self, Env: map[string]string{untidyEnv: c.mode}}),
				Run:     []string{c.id}, Seed: 1, Scale: 0.25, HandshakeTimeout: 15 * time.Second,
			})
			left, _ := filepath.Glob(sharedDir + "untidy-*")
			for _, name := range left {
				os.Remove(name)
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range res.Cases {
				switch {
				case r.Case.ID != c.id:
				case c.says == "" && r.Outcome != Passed, c.says != "" && (r.Outcome != Failed || !strings.Contains(r.Why(), c.says)):
					t.Errorf("%s, want %q:\n%s", r.Outcome, c.says, r.Text("untidy"))
				}
			}
			if pids := strays(); len(pids) > 0 {
				t.Errorf("the run left %s", procNames(pids))
			}
		})
	}
}

// strays are the processes that this test binary is as a stray.
func strays() []int {
	return slices.DeleteFunc(processes(), func(pid int) bool {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		return err != nil || !strings.Contains("\x00"+string(env), "\x00"+strayEnv+"=")
	})
}

// TestHeldByAnybody: a process that has a region open or maps it is found though nothing else tells that it is of a
// plugin, in the case itself and when the run ends.
func TestHeldByAnybody(t *testing.T) {
	for _, does := range []string{"maps", "has open"} {
		t.Run(does, func(t *testing.T) {
			n := harness(t)
			r := n.NewMemory(4096)
			if got := heldBy(processes(), []*Region{r}); got != "" {
				t.Error(got)
			}
			stray := exec.Command("/proc/self/exe")
			stray.Env = []string{strayEnv + "=" + does}
			stray.ExtraFiles = []*os.File{os.NewFile(uintptr(r.mem), "memory")}
			r.mem = -1
			out, err := stray.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := stray.Start(); err != nil {
				t.Fatal(err)
			}
			stray.ExtraFiles[0].Close()
			defer stray.Wait()
			defer stray.Process.Kill()
			if _, err := out.Read(make([]byte, 1)); err != nil { // it has what it was handed
				t.Fatal(err)
			}
			want := fmt.Sprintf("process %s %s region", procNames([]int{stray.Process.Pid}), does)
			if got := heldBy(processes(), []*Region{r}); !strings.HasPrefix(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			var p past
			passed := &Result{Outcome: Passed}
			p.keep(r, passed)
			n.t.run.regions = nil // the past frees it
			defer p.free()
			if changed := p.look(true); len(changed) != 1 || passed.Outcome != Failed || !strings.Contains(passed.Why(), want) {
				t.Errorf("%s: %q, want %q", passed.Outcome, passed.Why(), want)
			}
		})
	}
}

// TestMarkStays: a descendant of a plugin cannot lift its mark.
func TestMarkStays(t *testing.T) {
	stray := exec.Command("/proc/self/exe")
	stray.Env = []string{strayEnv + "=marked"}
	if err := stray.Start(); err != nil {
		t.Fatal(err)
	}
	defer stray.Wait()
	defer stray.Process.Kill()
	setMark(stray.Process.Pid)
	var limit unix.Rlimit
	if err := unix.Prlimit(stray.Process.Pid, unix.RLIMIT_LOCKS, nil, &limit); err != nil {
		t.Fatal(err)
	}
	if !marked(stray.Process.Pid, stray.Process.Pid) || limit.Max != limit.Cur {
		t.Errorf("the limit is %d of %d", limit.Cur, limit.Max)
	}
}

// TestWrittenAfterRemoval: what is written to memory that was given back fails the case that it was of, though that
// has ended; and memory that nobody writes fails nothing.
func TestWrittenAfterRemoval(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[string]Outcome{"nothing": Passed, "late write": Failed} {
		t.Run(mode, func(t *testing.T) {
			var told []string
			res, err := Run(t.Context(), Config{
				Carrier: FromSpec("untidy", pluginhost.Spec{Name: "under-test", Exec: self, Env: map[string]string{untidyEnv: mode}}),
				Run:     []string{"transfer/one-page", "quiesce/stays-quiet"}, Seed: 1,
				OnResult: func(r *Result) {
					if r.Case.ID == "transfer/one-page" {
						told = append(told, r.Outcome.String())
					}
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(res.Cases, func(r *Result) bool { return r.Case.ID == "transfer/one-page" })
			if r := res.Cases[i]; r.Outcome != want || want == Failed && !strings.Contains(r.Why(), "after RegionRemoved") {
				t.Errorf("%s, want %s:\n%s", r.Outcome, want, r.Text("untidy"))
			}
			if want == Failed && !slices.Equal(told, []string{"passed", "failed"}) {
				t.Errorf("OnResult was told %q", told)
			}
		})
	}
}
