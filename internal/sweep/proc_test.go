package sweep

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestWhatIsLeft: each look at what a cluster holds sees what it is there for.
func TestWhatIsLeft(t *testing.T) {
	base := holdingsOf(os.Getpid())
	fd, err := unix.MemfdCreate("left", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	more := strings.Join(holdingsOf(os.Getpid()).more(base), ", ")
	if !strings.Contains(more, "1 of kind memory instead of 0") || !strings.Contains(more, "1 of kind mapped memory instead of 0") {
		t.Errorf("%q", more)
	}
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	if more := holdingsOf(os.Getpid()).more(base); slices.ContainsFunc(more, func(s string) bool { return strings.Contains(s, "memory") }) {
		t.Errorf("%q", more)
	}

	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if pids := processesIn(dir); !slices.Equal(pids, []int{cmd.Process.Pid}) || len(zombiesOf(os.Getpid())) != 0 {
		t.Errorf("%v; zombies %v", pids, zombiesOf(os.Getpid()))
	}
	killPid(cmd.Process.Pid)
	for end := time.Now().Add(20 * time.Second); len(zombiesOf(os.Getpid())) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	if pids := zombiesOf(os.Getpid()); !slices.Equal(pids, []int{cmd.Process.Pid}) || len(processesIn(dir)) != 0 {
		t.Errorf("zombies %v; %v", pids, processesIn(dir))
	}
	_ = cmd.Wait() // killed

	for _, name := range []string{"socket", "flight.previous"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if names := entriesOf(dir); !slices.Equal(names, []string{"", "/socket"}) {
		t.Errorf("%q", names)
	}
}
