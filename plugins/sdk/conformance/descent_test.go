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
	if os.Getenv(strayEnv) == "maps" { // what it is handed as descriptor 3
		if _, err := unix.Mmap(3, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
			panic(err)
		}
		fmt.Println("mapped")
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

// TestMappedByAnybody: a process that maps a region is found though nothing else tells that it is of a plugin.
func TestMappedByAnybody(t *testing.T) {
	n := harness(t)
	r := n.NewMemory(4096)
	if got := mappedBy(processes(), []*Region{r}); got != "" {
		t.Error(got)
	}
	stray := exec.Command("/proc/self/exe")
	stray.Env = []string{strayEnv + "=maps"}
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
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has mapped the region
		t.Fatal(err)
	}
	if got := mappedBy(processes(), []*Region{r}); !strings.Contains(got, fmt.Sprintf("process %d ", stray.Process.Pid)) {
		t.Errorf("got %q, want process %d", got, stray.Process.Pid)
	}
}
