package pluginhost

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// The hazards of a plugin process and the tests that make one happen are listed in
// docs/supervision.md.

// TestEndlessLines: a plugin that fills stdout and stderr without a newline and without an end is read
// all the time, serves on, and costs no memory.
func TestEndlessLines(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("endless-lines"))
	ready(t, p)
	for op := uint64(1); op <= 20; op++ {
		if err := p.Send(1, submit(op)); err != nil {
			t.Fatal(err)
		}
		rec.wait(t, "amid the lines", func(ev Event) bool { return ev.Kind == Frame && lastDone(ev.Frame) == op })
	}
	eventually(t, "tail of stderr", func() bool {
		s := p.Status().Stderr
		return strings.HasPrefix(s, "…zzz") && len(s) < 20<<10
	})
	if n := len(p.epoch.proc.stdout.String()); n > 5<<10 {
		t.Errorf("%d bytes of stdout are kept", n)
	}
}

// TestBusyExtendsBeat: beats that end after a declared long call are waited for as long as such a call
// may take, and no longer.
func TestBusyExtendsBeat(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, func(cfg *Config) { cfg.BeatTimeout, cfg.BusyTimeout = 300*time.Millisecond, time.Second })
	p := start(t, h, mode("busy"))
	ready(t, p)
	began := time.Now()
	eventually(t, "busy", func() bool { return len(p.Status().Busy) == 1 || p.Status().Epoch > 1 })
	wantText(t, rec.waitKind(t, Lost, 1).Err, "no beat", "bound 1s")
	if d := time.Since(began); d < 900*time.Millisecond {
		t.Errorf("lost after %s", d)
	}
}

// TestRegistersForAMinute: a library that stops the whole process while it pins memory, for six times
// the beat bound (60 s to 10 s, here to scale), costs nothing when the call was declared. Silence for
// the same time without a word is a loss.
func TestRegistersForAMinute(t *testing.T) {
	t.Parallel()
	const beats = 400 * time.Millisecond
	h, rec := newTestHost(t, func(cfg *Config) { cfg.BeatTimeout, cfg.BusyTimeout = beats, 12*beats })
	spec := mode("freezes-registering")
	spec.Env = map[string]string{"FREEZE": (6 * beats).String()}
	p := start(t, h, spec)
	ready(t, p)
	began := time.Now()
	if err := p.Send(1, submit(1)); err != nil {
		t.Fatal(err)
	}
	rec.wait(t, "after the long call, or a loss", func(ev Event) bool { return ev.Kind == Frame || ev.Kind == Lost })
	if got := rec.kinds(); got != "up1" {
		t.Fatalf("events %s: %v", got, p.Status().LastError)
	}
	if d := time.Since(began); d < 6*beats {
		t.Fatalf("it was to stand still for %s, answered after %s", 6*beats, d)
	}
	eventually(t, "beats without the call", func() bool { s := p.Status(); return len(s.Busy) == 0 && s.BeatAge < beats })
	if err := p.Send(1, submit(2)); err != nil {
		t.Fatal(err)
	}
	wantText(t, rec.waitKind(t, Lost, 1).Err, "no beat", "bound 400ms")
}

// TestUnmarkedDescendant: a descendant that left the process group and threw away its environment is
// nobody's to find; what it holds of the plugin, the pipe to our stderr reader, delays nothing.
func TestUnmarkedDescendant(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("grandchild-escapes-unmarked"))
	ready(t, p)
	e := p.epoch
	if err := p.Send(1, submit(1)); err != nil {
		t.Fatal(err)
	}
	err := rec.waitKind(t, Lost, 1).Err
	wantText(t, err, "signal: killed", "grandchild")
	m := regexp.MustCompile(`grandchild (\d+)`).FindStringSubmatch(err.Error())
	child, _ := strconv.Atoi(m[1])
	defer unix.Kill(child, unix.SIGKILL)
	rec.waitKind(t, Reaped, 1)
	rec.waitKind(t, Up, 2)
	select {
	case <-e.proc.done:
	case <-time.After(patience):
		t.Error("the output of epoch 1 is still read")
	}
	if !running(child) {
		t.Error("the descendant was to live")
	}
}

// TestFrameToPlugin: what the host sends stays within the frame limit, whatever piles up; an event that
// cannot is refused alone. (The plugin exits when it gets a larger frame.)
func TestFrameToPlugin(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("echo"))
	ready(t, p)
	if err := p.Send(1, submit(1), sizedEvent(sdk.MaxFrame)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("an event of more than a frame: %v", err)
	}
	for range 5 {
		if err := p.Send(1, sizedEvent(sdk.MaxFrame-100), sizedEvent(300<<10), sizedEvent(300<<10), sizedEvent(300<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Send(1, submit(99)); err != nil {
		t.Fatal(err)
	}
	rec.wait(t, "of the last op", func(ev Event) bool { return ev.Kind == Frame && lastDone(ev.Frame) == 99 })
	if got := rec.kinds(); got != "up1" {
		t.Errorf("events %s: %v", got, p.Status().LastError)
	}
}

// TestNoFrameAfterLost: what an epoch that is lost still has to say is not heard, however much it is.
func TestNoFrameAfterLost(t *testing.T) {
	t.Parallel()
	h, rec := newTestHost(t, func(cfg *Config) { cfg.RestartBudget = 1000 })
	p := start(t, h, mode("floods"))
	for epoch := uint32(1); epoch <= 5; epoch++ {
		rec.waitKind(t, Up, epoch)
		ready(t, p)
		if err := p.Send(epoch, submit(1)); err != nil {
			t.Fatal(err)
		}
		rec.wait(t, "of the flood", func(ev Event) bool { return ev.Kind == Frame && ev.Epoch == epoch })
		if err := p.Fault(epoch, &contract.Fault{Rule: "R8"}); err != nil {
			t.Fatal(err)
		}
		rec.waitKind(t, Reaped, epoch)
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	lost := uint32(0)
	for _, ev := range rec.events {
		switch {
		case ev.Kind == Lost:
			lost = ev.Epoch
		case ev.Kind == Frame && ev.Epoch <= lost:
			t.Fatalf("a frame of epoch %d after it was lost", ev.Epoch)
		}
	}
}

// TestForeignServer: a plugin whose socket is served by a process outside its group is refused, and
// that process is not asked anything.
func TestForeignServer(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	asked := new(countingPlugin)
	contract.RegisterPluginServer(server, asked)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer func() { server.Stop(); <-served }()

	h, rec := newTestHost(t, func(cfg *Config) { cfg.RestartBudget, cfg.HandshakeTimeout = 1, 2*time.Second })
	spec := mode("foreign")
	spec.Env = map[string]string{"FOREIGN_SOCKET": path}
	start(t, h, spec)
	wantText(t, rec.waitKind(t, Down, 0).Err, strconv.Itoa(os.Getpid()), "not of the plugin's process group")
	if n := asked.handshakes.Load(); n != 0 {
		t.Errorf("the stranger got %d handshakes", n)
	}
}

// TestReplacedFile: what was hashed is what runs, whatever happens to the file meanwhile.
func TestReplacedFile(t *testing.T) {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	write := func(t *testing.T, path string, text []byte) {
		if err := os.WriteFile(path, text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// The replacement starts as well as the original, so that only the check can tell.
	other := append(self[:len(self):len(self)], "changed"...)
	rename := func(t *testing.T, path string) {
		write(t, path+".new", other)
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	pinned := func(t *testing.T) (string, Spec) {
		path := filepath.Join(t.TempDir(), "plugin")
		write(t, path, self)
		spec := mode("echo")
		spec.Exec, spec.SHA256 = path, fileSum(t, path)
		return path, spec
	}
	for _, c := range []struct {
		name    string
		replace func(t *testing.T, path string)
		refused string
	}{
		{"renamed over between check and exec", rename, ""},
		{"removed between check and exec", func(t *testing.T, path string) { os.Remove(path) }, ""},
		{"overwritten between check and exec", func(t *testing.T, path string) {
			time.Sleep(20 * time.Millisecond) // a tick of the file system's clock
			write(t, path, other)
		}, "was overwritten after it was checked"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path, spec := pinned(t)
			h, _ := newTestHost(t, nil)
			p := newPlugin(h, spec)
			e, err := p.newEpoch(p.spec) // the check
			if err != nil {
				t.Fatal(err)
			}
			c.replace(t, path)
			err = e.start(nil)
			defer e.end(false)
			if c.refused != "" {
				wantText(t, err, path, c.refused)
				if !errors.Is(err, ErrRefused) {
					t.Errorf("%v is not %v", err, ErrRefused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			running, err := os.ReadFile("/proc/" + e.proc.ID() + "/exe")
			if err != nil || len(running) != len(self) {
				t.Errorf("%d bytes run, %v; the %d that were checked are to", len(running), err, len(self))
			}
		})
	}
	t.Run("renamed over before a restart", func(t *testing.T) {
		path, spec := pinned(t)
		h, rec := newTestHost(t, nil)
		p := start(t, h, spec)
		ready(t, p)
		rename(t, path)
		if err := unix.Kill(p.Status().PID, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		err := rec.waitKind(t, Down, 0).Err
		wantText(t, err, spec.SHA256, fileSum(t, path), "change the pin")
		if !errors.Is(err, ErrRefused) {
			t.Errorf("%v is not %v", err, ErrRefused)
		}
	})
}

// countingPlugin counts who asks it.
type countingPlugin struct {
	contract.UnimplementedPluginServer
	handshakes atomic.Int32
}

func (p *countingPlugin) Handshake(context.Context, *contract.HandshakeRequest) (*contract.HandshakeResponse, error) {
	p.handshakes.Add(1)
	return &contract.HandshakeResponse{Version: 1, Name: "test", Kinds: []contract.Kind{contract.Kind_KIND_TRANSFER}}, nil
}
