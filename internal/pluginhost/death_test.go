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

// TestStopBounded: Stop comes back whatever the plugin does.
func TestStopBounded(t *testing.T) {
	for _, m := range []string{"mute", "no-answer", "stopped", "never-drains", "slow-exit", "busy", "crash-at-start"} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, func(cfg *Config) {
				cfg.DrainTimeout, cfg.Grace = 300*time.Millisecond, 300*time.Millisecond
				cfg.RestartBudget = 1000
			})
			p := start(t, h, mode(m))
			var pid int
			switch m {
			case "mute", "no-answer":
				eventually(t, "a process", func() bool { pid = p.Status().PID; return pid != 0 })
			case "crash-at-start":
				eventually(t, "restarts", func() bool { return p.Status().Restarts > 2 })
			default:
				ready(t, p)
				pid = p.Status().PID
			}
			if m == "stopped" {
				if err := p.Send(1, submit(1)); err != nil {
					t.Fatal(err)
				}
				eventually(t, "stopped process", func() bool {
					b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
					return strings.Contains(string(b), ") T ")
				})
			}
			began := time.Now()
			within(t, "Stop", func() {
				if err := p.Stop(context.Background()); err != nil {
					t.Error(err)
				}
			})
			t.Logf("stopped after %s", time.Since(began))
			if pid != 0 && !processGone(pid) {
				t.Error("the process is still there")
			}
			if s := p.Status(); s.State != StateDown {
				t.Errorf("state %s", s.State)
			}
			rec.waitKind(t, Down, 0)
		})
	}
}

// hostMain is an engine that starts a plugin, prints its pid, and waits to be killed.
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
	fmt.Println(p.Status().PID)
	time.Sleep(time.Minute)
}

// startHost starts an engine process with one plugin and returns both.
func startHost(t *testing.T, mode, dir string) (host *exec.Cmd, plugin int) {
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
	plugin, err = strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return cmd, plugin
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
	host, plugin := startHost(t, "echo", dir)
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

// TestHostKilled: a plugin ends with its host; one that does not is killed by the next host, which
// also removes what the dead one left.
func TestHostKilled(t *testing.T) {
	for _, m := range []string{"echo", "sdk", "ignores-host-death"} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "t")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			cmd, pid := startHost(t, m, dir)
			defer syscall.Kill(pid, syscall.SIGKILL)
			if _, err := New(testConfig(dir, func(Event) {})); err == nil || !strings.Contains(err.Error(), "used by another engine") {
				t.Errorf("a second host: %v", err)
			}
			cmd.Process.Kill()
			cmd.Wait()
			if m != "ignores-host-death" {
				eventually(t, "plugin exits with its host", func() bool { return !running(pid) })
			} else if time.Sleep(300 * time.Millisecond); !running(pid) {
				t.Fatal("the plugin was to survive")
			}
			if _, err := os.Stat(filepath.Join(dir, "plugins", "test.1")); err != nil {
				t.Errorf("the dead host left nothing to clean up: %v", err)
			}
			h, err := New(testConfig(dir, func(Event) {}))
			if err != nil {
				t.Fatal(err)
			}
			if running(pid) {
				t.Error("the left-over plugin runs")
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

// BenchmarkSubmit measures Send → plugin process → Frame, with ops in flight.
func BenchmarkSubmit(b *testing.B) {
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		b.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for _, inflight := range []int{1, 64, 4096} {
		b.Run(fmt.Sprint("inflight=", inflight), func(b *testing.B) {
			done := make(chan int, 1<<16)
			h, err := New(testConfig(dir, func(ev Event) {
				if ev.Kind == Frame {
					done <- len(ev.Frame.Events) / 2
				}
			}))
			if err != nil {
				b.Fatal(err)
			}
			defer h.Close(context.Background())
			p, err := h.Start(mode("echo"))
			if err != nil {
				b.Fatal(err)
			}
			if err := p.Ready(context.Background()); err != nil {
				b.Fatal(err)
			}
			sent, ended := 0, 0
			for b.Loop() {
				if sent-ended == inflight {
					ended += <-done
				}
				sent++
				if err := p.Send(1, submit(uint64(sent))); err != nil {
					b.Fatal(err)
				}
			}
			for ended < sent {
				ended += <-done
			}
		})
	}
}
