package pluginhost

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func beside(t *testing.T, p *Plugin, spec Spec) uint32 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	epoch, err := p.Beside(ctx, spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	return epoch
}

func adopt(t *testing.T, p *Plugin, epoch uint32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := p.Adopt(ctx, p.Status().Epoch, epoch); err != nil {
		t.Fatal(err)
	}
}

// alive makes sure that an epoch answers.
func alive(t *testing.T, rec *recorder, p *Plugin, epoch uint32, op uint64) {
	t.Helper()
	if err := p.Send(epoch, submit(op)); err != nil {
		t.Fatal(err)
	}
	rec.wait(t, "the op's end", func(ev Event) bool { return ev.Kind == Frame && ev.Epoch == epoch && lastDone(ev.Frame) == op })
}

// TestBeside: two epochs serve at once; after the hand-over the old one goes on until it is ended, and the new
// one is what a restart brings back.
func TestBeside(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("echo"))
	rec.waitKind(t, Up, 1)
	next := mode("echo")
	next.Env = map[string]string{"MINE": "new"}
	if epoch := beside(t, p, next); epoch != 2 {
		t.Fatalf("epoch %d", epoch)
	}
	alive(t, rec, p, 1, 1)
	alive(t, rec, p, 2, 2)
	if s := p.Status(); s.Epoch != 1 {
		t.Errorf("before the hand-over Status shows epoch %d", s.Epoch)
	}
	if err := p.End(1); !errors.Is(err, ErrEpoch) {
		t.Errorf("End of the plugin's own epoch: %v", err)
	}
	adopt(t, p, 2)
	old, ok := p.EpochStatus(1)
	if s := p.Status(); !ok || s.Epoch != 2 || s.State != StateUp || s.PID == old.PID || old.PID == 0 {
		t.Errorf("%+v, %v %+v", s, ok, old)
	}
	alive(t, rec, p, 1, 3)
	alive(t, rec, p, 2, 4)
	if err := p.End(1); err != nil {
		t.Fatal(err)
	}
	if lost := rec.waitKind(t, Lost, 1); !errors.Is(lost.Err, ErrStopped) {
		t.Error(lost.Err)
	}
	rec.waitKind(t, Reaped, 1)
	if !processGone(old.PID) {
		t.Error("reaped, and its process is there")
	}
	if err := p.Send(1, submit(5)); !errors.Is(err, ErrEpoch) {
		t.Errorf("send to an epoch that was ended: %v", err)
	}
	alive(t, rec, p, 2, 6)
	p.mu.Lock()
	p.before = nil // its probation is over
	p.mu.Unlock()
	if err := unix.Kill(p.Status().PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	rec.waitKind(t, Up, 3)
	if p.spec.Env["MINE"] != "new" {
		t.Error("what was taken over is not what is restarted")
	}
}

// TestBesideFails: whatever is wrong with the next epoch, the present one goes on as if nothing had been.
func TestBesideFails(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, func(cfg *Config) { cfg.HandshakeTimeout = 2 * time.Second })
	p := start(t, h, mode("echo"))
	rec.waitKind(t, Up, 1)
	picky := func(*contract.HandshakeResponse) error { return errors.New("it has fewer features") }
	for _, c := range []struct {
		name   string
		spec   Spec
		accept func(*contract.HandshakeResponse) error
		says   string
	}{
		{"no program", Spec{Name: "test", Exec: "/nowhere/plugin"}, nil, "/nowhere/plugin"},
		{"another name", Spec{Name: "other"}, nil, "keeps its own"},
		{"pin", Spec{Name: "test", SHA256: strings.Repeat("0", 64)}, nil, "sha256"},
		{"crash", mode("crash-at-start"), nil, "ended before its handshake"},
		{"mute", mode("mute"), nil, "no handshake within"},
		{"refuses", mode("refuses"), nil, "unknown transport"},
		{"not accepted", mode("echo"), picky, "fewer features"},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		_, err := p.Beside(ctx, c.spec, c.accept)
		cancel()
		if err == nil || !strings.Contains(strings.ToLower(err.Error()), c.says) {
			t.Errorf("%s: %v; want %q", c.name, err, c.says)
		}
		alive(t, rec, p, 1, 1)
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(100*time.Millisecond, cancel)
	if _, err := p.Beside(ctx, mode("mute"), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if got := rec.kinds(); strings.Contains(strings.ReplaceAll(got, "up1", ""), "up") || strings.Contains(got, "lost") {
		t.Errorf("events %s", got)
	}
}

// TestBesideLost: an epoch that is lost before it takes over leaves the present one alone; one that is lost
// afterwards does, too, and is not restarted.
func TestBesideLost(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("echo"))
	rec.waitKind(t, Up, 1)
	kill := func(epoch uint32) {
		s, _ := p.EpochStatus(epoch)
		if err := unix.Kill(s.PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		rec.waitKind(t, Reaped, epoch)
	}
	kill(beside(t, p, mode("echo")))
	if err := p.Adopt(context.Background(), 1, 2); !errors.Is(err, ErrEpoch) {
		t.Errorf("an epoch that is lost took over: %v", err)
	}
	if err := p.Adopt(context.Background(), 7, 2); err == nil {
		t.Error("an epoch took over from one that is not there")
	}
	alive(t, rec, p, 1, 1)
	adopt(t, p, beside(t, p, mode("echo")))
	kill(1)
	alive(t, rec, p, 3, 2)
	if got, want := rec.kinds(), "up1 up2 lost2 reaped2 up3 lost1 reaped1"; got != want {
		t.Errorf("events %s\nwant   %s", got, want)
	}
}

// TestAdoptWhenDown: a plugin that is down, or waits for its restart, is taken over, too.
func TestAdoptWhenDown(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, func(cfg *Config) { cfg.RestartBudget = 1 })
	p := start(t, h, mode("crash-at-start"))
	rec.waitKind(t, Down, 0)
	epoch := beside(t, p, mode("echo"))
	adopt(t, p, epoch)
	ready(t, p)
	alive(t, rec, p, epoch, 1)
}

// TestStopBeside: Stop ends both epochs, and one that is about to start.
func TestStopBeside(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("echo"))
	rec.waitKind(t, Up, 1)
	adopt(t, p, beside(t, p, mode("echo")))
	failed := make(chan error, 1)
	go func() {
		_, err := p.Beside(context.Background(), mode("mute"), nil)
		failed <- err
	}()
	time.Sleep(50 * time.Millisecond)
	within(t, "Stop", func() {
		if err := p.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := <-failed; !errors.Is(err, ErrStopped) {
		t.Error(err)
	}
	rec.waitKind(t, Reaped, 1)
	rec.waitKind(t, Reaped, 2)
	rec.waitKind(t, Down, 0)
	if got := rec.kinds(); !strings.HasSuffix(got, "down0") {
		t.Errorf("events %s", got)
	}
	if _, err := p.Beside(context.Background(), mode("echo"), nil); !errors.Is(err, ErrStopped) {
		t.Errorf("beside a plugin that was stopped: %v", err)
	}
}

// TestProbation: a program that dies soon after it took over is not started again, but the one before it, even if
// its file is another one by now. What has lived for long enough is what comes back.
func TestProbation(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	old := mode("echo")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	old.Exec = filepath.Join(t.TempDir(), "plugin")
	put := func(program []byte) {
		next := old.Exec + ".new"
		if err := errors.Join(os.WriteFile(next, program, 0o755), os.Rename(next, old.Exec)); err != nil {
			t.Fatal(err)
		}
	}
	put(self)
	p := start(t, h, old)
	rec.waitKind(t, Up, 1)
	kill := func() {
		if err := unix.Kill(p.Status().PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	next := mode("echo")
	next.Env = map[string]string{"MINE": "new"}
	adopt(t, p, beside(t, p, next))
	put([]byte("no program"))
	kill()
	if up := rec.waitKind(t, Up, 3); up.Spec.Exec != old.Exec || up.Spec.Env["MINE"] != "" {
		t.Errorf("started again: %+v", up.Spec)
	}
	ready(t, p)
	alive(t, rec, p, 3, 1)
	if err := p.Status().LastError; err == nil || !strings.Contains(err.Error(), "the program of epoch 2 died within 1m0s of its hand-over, the previous one is started again: ") {
		t.Error(err)
	}
	if _, err := p.Beside(context.Background(), rec.waitKind(t, Up, 3).Spec.Fresh(), nil); err == nil {
		t.Error("an upgrade in place did not read the file anew")
	}
	kill() // it is on probation no more than at first
	if up := rec.waitKind(t, Up, 5); up.Spec.Exec != old.Exec {
		t.Errorf("started again: %+v", up.Spec)
	}
	ready(t, p)
	adopt(t, p, beside(t, p, next))
	p.mu.Lock()
	p.before.until = time.Now()
	p.mu.Unlock()
	kill()
	if up := rec.waitKind(t, Up, 7); up.Spec.Env["MINE"] != "new" {
		t.Errorf("started again: %+v", up.Spec)
	}
}

// TestDiscard: the channel is closed when no process of the epoch is left.
func TestDiscard(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, func(cfg *Config) { cfg.DrainTimeout, cfg.Grace = 100*time.Millisecond, 100*time.Millisecond })
	p := start(t, h, mode("echo"))
	rec.waitKind(t, Up, 1)
	s, ok := p.EpochStatus(beside(t, p, mode("echo")))
	if !ok {
		t.Fatal("it is not there")
	}
	if err := unix.Kill(s.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	within(t, "Discard", func() { <-p.Discard(s.Epoch) })
	if !processGone(s.PID) {
		t.Error("its process is there")
	}
	within(t, "Discard of nothing", func() { <-p.Discard(s.Epoch) })
}
