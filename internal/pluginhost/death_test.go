package pluginhost

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestStopBounded: Stop comes back whatever the plugin does.
func TestStopBounded(t *testing.T) {
	for _, m := range []string{"mute", "stopped-at-start", "no-answer", "stopped", "never-drains", "slow-exit", "busy", "crash-at-start"} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, func(cfg *Config) {
				cfg.DrainTimeout, cfg.Grace = 300*time.Millisecond, 300*time.Millisecond
				cfg.RestartBudget = 1000
			})
			p := start(t, h, mode(m))
			var pid int
			switch m {
			case "mute", "stopped-at-start", "no-answer":
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
			// Far above the grace, and below the handshake's bound, which must not matter here.
			if d := time.Since(began); d > 10*time.Second {
				t.Errorf("stopped after %s", d)
			}
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

// TestStopTakesChildren: a host killed the plugin alone and then waited without a bound, since a child of the
// plugin held its output (mcpd#310). Here Stop comes back, and the children are gone.
func TestStopTakesChildren(t *testing.T) {
	for _, m := range []string{"sdk-with-child", "sdk-with-heir", "sdk-with-daemon"} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, nil)
			p := start(t, h, mode(m))
			ready(t, p)
			child, err := strconv.Atoi(string(p.Status().Handshake.Endpoint))
			if err != nil || !running(child) {
				t.Fatalf("child %d: %v", child, err)
			}
			began := time.Now()
			within(t, "Stop", func() {
				if err := p.Stop(context.Background()); err != nil {
					t.Error(err)
				}
			})
			if d := time.Since(began); d > 10*time.Second {
				t.Errorf("stopped after %s", d)
			}
			rec.waitKind(t, Down, 0)
			eventually(t, "the child is gone", func() bool { return !running(child) })
		})
	}
}
