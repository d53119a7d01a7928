package pluginhost

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hostMain is an engine that starts a plugin, prints its pid and its endpoint (where the modes with a
// child have the child's pid), and waits to be killed.
func hostMain(mode, dir string) {
	rec := newRecorder()
	cfg := testConfig(dir, rec.sink)
	cfg.BeatTimeout = time.Second
	h, err := New(cfg)
	if err != nil {
		panic(err)
	}
	p, err := h.Start(Spec{Name: "test", Args: []string{"plugin", mode}})
	if err != nil {
		panic(err)
	}
	if err := p.Ready(context.Background()); err != nil {
		panic(err)
	}
	fmt.Printf("%d %s\n", p.Status().PID, p.Status().Handshake.Endpoint)
	time.Sleep(time.Minute)
}

// startHost starts an engine process with one plugin and returns both, and the plugin's child or 0.
func startHost(t *testing.T, mode, dir string) (host *exec.Cmd, plugin, child int) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "host", mode, dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, endpoint, _ := strings.Cut(strings.TrimSpace(line), " ")
	if plugin, err = strconv.Atoi(pid); err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(mode, "sdk-with-") {
		if child, err = strconv.Atoi(endpoint); err != nil {
			t.Fatal(err)
		}
	}
	return cmd, plugin, child
}

// stopped tells whether every thread of a process stands still.
func stopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		if b, err := os.ReadFile(thread); err == nil && !strings.Contains(string(b), ") T ") {
			return false
		}
	}
	return len(threads) > 0
}

// running tells a process from a zombie that nobody has reaped.
func running(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && len(b) > 0
}

// TestHostPaused: an engine that was stopped for longer than the beat bound does not blame the plugin.
func TestHostPaused(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	host, plugin, _ := startHost(t, "echo", dir)
	host.Process.Signal(syscall.SIGSTOP)
	time.Sleep(1800 * time.Millisecond)
	host.Process.Signal(syscall.SIGCONT)
	time.Sleep(500 * time.Millisecond)
	if !running(plugin) {
		t.Error("the plugin was ended")
	}
	if _, err := os.Stat(filepath.Join(dir, "plugins", "test.1")); err != nil {
		t.Error(err)
	}
}

// TestHostKilled: a plugin ends with its host and takes its children along; what does not end, because
// it is stopped, ignores the lease or left the process group, is killed by the next host, which also
// removes what the dead one left.
func TestHostKilled(t *testing.T) {
	for _, c := range []struct {
		mode          string
		stop          bool // the plugin stands still when its host dies
		plugin, child bool // still there before the next host
	}{
		{mode: "echo"},
		{mode: "sdk"},
		{mode: "sdk-with-child"},
		{mode: "sdk-with-child-and-a-lot-to-say"}, // to a pipe that nobody reads
		{mode: "sdk-with-daemon", child: true},
		{mode: "ignores-host-death", plugin: true},
		{mode: "ignores-host-death", stop: true, plugin: true},
		{mode: "sdk-with-child", stop: true}, // the kernel sends SIGHUP to a stopped group without a parent
	} {
		t.Run(fmt.Sprintf("%s,stopped=%t", c.mode, c.stop), func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "t")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			cmd, plugin, child := startHost(t, c.mode, dir)
			for _, pid := range []int{plugin, child} {
				if pid != 0 {
					defer syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			if c.stop {
				syscall.Kill(plugin, syscall.SIGSTOP)
				// The kernel looks at whether the group stands still when the host dies, not later.
				eventually(t, "stopped plugin", func() bool { return stopped(plugin) })
			}
			cmd.Process.Kill()
			cmd.Wait()
			check := func(what string, pid int, stays bool) {
				switch {
				case pid == 0:
				case !stays:
					eventually(t, what+" ends with the host", func() bool { return !running(pid) })
				case !running(pid):
					t.Errorf("the %s was to survive its host", what)
				}
			}
			check("plugin", plugin, c.plugin)
			time.Sleep(100 * time.Millisecond) // for what is to stay
			check("child", child, c.child)
			if _, err := os.Stat(filepath.Join(dir, "plugins", "test.1")); err != nil {
				t.Errorf("the dead host left nothing to clean up: %v", err)
			}
			h, err := New(testConfig(dir, func(Event) {}))
			if err != nil {
				t.Fatal(err)
			}
			if running(plugin) || child != 0 && running(child) {
				t.Error("left-over processes run")
			}
			if entries, _ := os.ReadDir(filepath.Join(dir, "plugins")); len(entries) != 1 {
				t.Errorf("left: %v", entries)
			}
			if err := h.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestLiveHost: nobody cleans up after an engine that lives, neither a second one that was given the
// same directory by mistake nor one that starts in the directory of a dead neighbour.
func TestLiveHost(t *testing.T) {
	t.Parallel()
	dirs := make([]string, 2)
	for i := range dirs {
		var err error
		if dirs[i], err = os.MkdirTemp("", "t"); err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dirs[i])
	}
	_, live, child := startHost(t, "sdk-with-child", dirs[0])
	dead, left, _ := startHost(t, "ignores-host-death", dirs[1])
	defer syscall.Kill(left, syscall.SIGKILL)

	_, err := New(testConfig(dirs[0], func(Event) {}))
	wantText(t, err, "used by another engine", dirs[0], "its own")

	dead.Process.Kill()
	dead.Wait()
	h, err := New(testConfig(dirs[1], func(Event) {}))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close(context.Background())
	if running(left) {
		t.Error("the left-over plugin runs")
	}
	if !running(live) || !running(child) {
		t.Error("processes of a live engine were ended")
	}
	if _, err := os.Stat(filepath.Join(dirs[0], "plugins", "test.1")); err != nil {
		t.Error(err)
	}
}
