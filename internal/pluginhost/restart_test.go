package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// when returns the time of the first event of that kind and epoch.
func (r *recorder) when(t *testing.T, kind Kind, epoch uint32) time.Time {
	t.Helper()
	r.waitKind(t, kind, epoch)
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.times[slices.IndexFunc(r.events, func(ev Event) bool { return ev.Kind == kind && ev.Epoch == epoch })]
}

// TestCrashLoop: each crash is answered by a restart after a delay that doubles, until the budget is
// used up; then the plugin is down, and only Restart brings it back.
func TestCrashLoop(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, func(cfg *Config) {
		cfg.RestartBudget, cfg.BackoffMin, cfg.BackoffMax = 3, 50*time.Millisecond, 100*time.Millisecond
	})
	p := start(t, h, mode("crash"))
	crash := func(epoch uint32) {
		rec.waitKind(t, Up, epoch)
		if err := p.Send(epoch, submit(1)); err != nil {
			t.Fatal(err)
		}
		rec.waitKind(t, Reaped, epoch)
	}
	for i, delay := range []time.Duration{50, 100, 100} {
		epoch := uint32(i + 1)
		crash(epoch)
		if d := rec.when(t, Up, epoch+1).Sub(rec.when(t, Reaped, epoch)); d < delay*time.Millisecond {
			t.Errorf("restart %d came after %s, want at least %d ms", epoch, d, delay)
		}
	}
	crash(4)
	down := rec.waitKind(t, Down, 0)
	wantText(t, down.Err, "segmentation violation", "3 in 1m0s")
	if !errors.Is(down.Err, ErrBudget) {
		t.Error(down.Err)
	}
	if err := p.Send(4, submit(1)); !errors.Is(err, ErrEpoch) {
		t.Errorf("send to a plugin that is down: %v", err)
	}
	if err := p.Restart(context.Background()); err != nil {
		t.Fatal(err)
	}
	rec.waitKind(t, Up, 5)
}

// TestRestart: twenty restarts, half of them asked for and half after a kill, leave no descriptor and
// no goroutine behind, and every epoch's events are complete before the next one's.
func TestRestart(t *testing.T) {
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // finalizers would close what is leaked

	h, rec := newTestHost(t, func(cfg *Config) { cfg.RestartBudget = 1000 })
	p := start(t, h, mode("echo"))
	rec.waitKind(t, Up, 1)
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	var fds, goroutines int
	want := "up1"
	const restarts = 20
	for epoch := uint32(1); epoch <= restarts; epoch++ {
		killed := epoch%2 == 0
		if killed {
			if err := unix.Kill(p.Status().PID, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		} else {
			within(t, "Restart", func() {
				if err := p.Restart(context.Background()); err != nil {
					t.Error(err)
				}
			})
		}
		if err := rec.waitKind(t, Lost, epoch).Err; errors.Is(err, ErrStopped) == killed {
			t.Error(err)
		}
		rec.waitKind(t, Up, epoch+1)
		ready(t, p)
		want += fmt.Sprintf(" lost%d reaped%d up%d", epoch, epoch, epoch+1)
		if epoch <= 4 { // the most that a running epoch has: not all of it is there at once
			fds, goroutines = max(fds, descriptors()), max(goroutines, runtime.NumGoroutine())
		}
	}
	if got := rec.kinds(); got != want {
		t.Errorf("events %s\nwant   %s", got, want)
	}
	eventually(t, "as many descriptors as before", func() bool { return descriptors() <= fds })
	eventually(t, "as many goroutines as before", func() bool { return runtime.NumGoroutine() <= goroutines })
	if err := p.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	if err := p.Restart(context.Background()); !errors.Is(err, ErrStopped) {
		t.Errorf("restart after stop: %v", err)
	}
}
