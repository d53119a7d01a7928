package pluginhost

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// patience bounds every wait of a test; nothing should come near it.
const patience = 30 * time.Second

type recorder struct {
	mu     sync.Mutex
	events []Event
	times  []time.Time // of the events
	grew   chan struct{}
}

func newRecorder() *recorder { return &recorder{grew: make(chan struct{})} }

func (r *recorder) sink(ev Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events, r.times = append(r.events, ev), append(r.times, time.Now())
	close(r.grew)
	r.grew = make(chan struct{})
}

// wait returns the first event that fits.
func (r *recorder) wait(t *testing.T, what string, fits func(Event) bool) Event {
	t.Helper()
	timeout := time.After(patience)
	for {
		r.mu.Lock()
		i := slices.IndexFunc(r.events, fits)
		var ev Event
		if i >= 0 {
			ev = r.events[i]
		}
		grew, kinds := r.grew, r.kindsLocked()
		r.mu.Unlock()
		if i >= 0 {
			return ev
		}
		select {
		case <-grew:
		case <-timeout:
			t.Fatalf("no event %s; seen: %s", what, kinds)
		}
	}
}

func (r *recorder) waitKind(t *testing.T, kind Kind, epoch uint32) Event {
	t.Helper()
	return r.wait(t, fmt.Sprintf("%s of epoch %d", kind, epoch), func(ev Event) bool { return ev.Kind == kind && ev.Epoch == epoch })
}

func (r *recorder) kinds() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kindsLocked()
}

// kindsLocked is the sequence of events without frames, "up1 lost1 reaped1 up2".
func (r *recorder) kindsLocked() string {
	var s []string
	for _, ev := range r.events {
		if ev.Kind != Frame {
			s = append(s, fmt.Sprintf("%s%d", ev.Kind, ev.Epoch))
		}
	}
	return strings.Join(s, " ")
}

func testConfig(dir string, sink func(Event)) Config {
	return Config{
		Node: "n0", Incarnation: 7, HostID: "boot", EngineVersion: "test", RuntimeDir: dir,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Sink: sink,
		BackoffMin: time.Millisecond, BackoffMax: 10 * time.Millisecond,
	}
}

func newTestHost(t *testing.T, change func(*Config)) (*Host, *recorder) {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	rec := newRecorder()
	cfg := testConfig(dir, rec.sink)
	if change != nil {
		change(&cfg)
	}
	h, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := h.Close(ctx); err != nil {
			t.Error(err)
		}
		entries, _ := os.ReadDir(filepath.Join(dir, "plugins"))
		for _, entry := range entries {
			if entry.Name() != "lock" {
				t.Errorf("left behind: %s", entry.Name())
			}
		}
		os.RemoveAll(dir)
	})
	return h, rec
}

func mode(m string) Spec { return Spec{Name: "test", Args: []string{"plugin", m}} }

func start(t *testing.T, h *Host, spec Spec) *Plugin {
	t.Helper()
	p, err := h.Start(spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func ready(t *testing.T, p *Plugin) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := p.Ready(ctx); err != nil {
		t.Fatal(err)
	}
}

func submit(op uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{Op: op, Seq: op}}}
}

// within runs f and fails when it takes longer than patience.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s blocks", what)
	}
}

func wantText(t *testing.T, err error, texts ...string) {
	t.Helper()
	t.Logf("error: %v", err)
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v\ndoes not say %q", err, text)
		}
	}
}

func processGone(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not reached: %s", what)
		}
	}
}

func TestEcho(t *testing.T) {
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("echo"))
	ready(t, p)
	const ops = 2000
	for op := uint64(1); op <= ops; op++ {
		if err := p.Send(1, submit(op)); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.SendControl(1, &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: 1}}}); err != nil {
		t.Error(err)
	}
	next, accepted := uint64(1), false
	rec.wait(t, "of the last op", func(ev Event) bool { return ev.Kind == Frame && lastDone(ev.Frame) == ops })
	rec.mu.Lock()
	for _, ev := range rec.events {
		if ev.Kind != Frame {
			continue
		}
		for _, e := range ev.Frame.Events {
			switch {
			case e.GetAccepted().GetOp() == next && !accepted:
				accepted = true
			case e.GetDone().GetOp() == next && accepted:
				accepted = false
				next++
			default:
				t.Fatalf("event %v, want op %d", e, next)
			}
		}
	}
	rec.mu.Unlock()

	s := p.Status()
	if s.State != StateUp || s.PID == 0 || s.Epoch != 1 || s.Restarts != 0 || s.Handshake.GetName() != "test" || s.LastError != nil {
		t.Errorf("status %+v", s)
	}
	if err := p.Send(2, submit(1)); !errors.Is(err, ErrEpoch) {
		t.Errorf("send to a wrong epoch: %v", err)
	}
	if _, err := h.Start(mode("echo")); err == nil {
		t.Error("the same plugin started twice")
	}
	within(t, "Stop", func() {
		if err := p.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if !processGone(s.PID) {
		t.Error("the process is still there")
	}
	if got := rec.kinds(); got != "up1 lost1 reaped1 down0" {
		t.Errorf("events %s", got)
	}
	if err := p.Send(1, submit(1)); !errors.Is(err, ErrEpoch) {
		t.Errorf("send after stop: %v", err)
	}
	// The epoch goes on counting for a plugin of the same name.
	p = start(t, h, mode("echo"))
	ready(t, p)
	if e := p.Status().Epoch; e != 2 {
		t.Errorf("epoch %d after a new start, want 2", e)
	}
}

func lastDone(f *contract.PluginFrame) uint64 { return f.Events[len(f.Events)-1].GetDone().GetOp() }

func TestRegion(t *testing.T) {
	for _, m := range []string{"echo", "sdk"} {
		t.Run(m, func(t *testing.T) { testRegion(t, m) })
	}
}

func testRegion(t *testing.T, m string) {
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode(m))
	ready(t, p)
	const size, offset, canary = 1 << 20, 4096, 0x1122334455667788
	fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	binary.LittleEndian.PutUint64(mem[offset:], canary)
	lease, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(lease[0])

	if err := p.SendRegion(1, 42, fd, lease[1]); err != nil {
		t.Fatal(err)
	}
	unix.Close(lease[1]) // ours; the plugin has its own
	add := &contract.RegionAdd{Region: 42, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: size, CanaryOffset: offset, Canary: canary}
	if err := p.Send(1, &contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: add}}); err != nil {
		t.Fatal(err)
	}
	ev := rec.wait(t, "about the region", func(ev Event) bool { return ev.Kind == Frame })
	if ev.Frame.Events[0].GetRegionReady().GetRegion() != 42 {
		t.Fatalf("got %v", ev.Frame)
	}
	if got, want := binary.LittleEndian.Uint64(mem[offset:]), ^uint64(canary); got != want {
		t.Errorf("canary %x, want %x", got, want)
	}
	if err := p.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
	// Reaped means that the plugin's end of the lease is gone.
	if n, err := unix.Read(lease[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("lease: %d, %v; want EOF", n, err)
	}
}

// TestLoss: whatever ends an epoch, Lost says why, Reaped follows, then comes the next epoch.
func TestLoss(t *testing.T) {
	for _, c := range []struct {
		mode string
		says []string
		is   error
	}{
		{"crash", []string{"exit status 9", "segmentation violation in libnothing"}, nil},
		{"gives-up", []string{"gave up", "fell off the bus"}, nil},
		{"gives-up-last", []string{`epoch 1: the plugin gave up: fell off the bus; stderr ends with "test: loading"`}, nil},
		{"ends-session", []string{"ended its session stream"}, nil},
		{"closes-control", []string{"closed its control socket"}, nil},
		{"grandchild-holds-stderr", []string{"signal: killed", "grandchild"}, nil},
		{"grandchild-escapes", []string{"signal: killed", "grandchild"}, nil},
		{"frame-of-2-mebibytes", []string{"rule frame", "PluginFrame", "1048576"}, ErrViolation},
		{"frame-of-17-mebibytes", []string{"rule frame", "PluginFrame", "16777216"}, ErrViolation},
		{"enum-zero", []string{"rule frame", "Failed.cause"}, ErrViolation},
		{"enum-unknown", []string{"rule frame", "Failed.cause"}, ErrViolation},
		{"stopped", []string{"no beat for"}, nil},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, func(cfg *Config) {
				if c.mode == "stopped" {
					cfg.BeatTimeout = 700 * time.Millisecond
				}
			})
			p := start(t, h, mode(c.mode))
			ready(t, p)
			pid := p.Status().PID
			if err := p.Send(1, submit(1)); err != nil {
				t.Fatal(err)
			}
			lost := rec.waitKind(t, Lost, 1)
			wantText(t, lost.Err, c.says...)
			if c.is != nil && !errors.Is(lost.Err, c.is) {
				t.Errorf("%v is not %v", lost.Err, c.is)
			}
			rec.waitKind(t, Reaped, 1)
			if !processGone(pid) {
				t.Error("reaped, but the process is there")
			}
			if m := regexp.MustCompile(`grandchild (\d+)`).FindStringSubmatch(lost.Err.Error()); m != nil {
				child, _ := strconv.Atoi(m[1])
				if running(child) {
					t.Error("reaped, but the grandchild runs")
				}
			}
			rec.waitKind(t, Up, 2)
			if got := rec.kinds(); got != "up1 lost1 reaped1 up2" {
				t.Errorf("events %s", got)
			}
			s := p.Status()
			if s.Epoch != 2 || s.Restarts != 1 || s.LastError == nil || (c.is == nil) != (s.Violations == 0) {
				t.Errorf("status %+v", s)
			}
		})
	}
}

func TestKilled(t *testing.T) {
	h, rec := newTestHost(t, nil)
	p := start(t, h, mode("echo"))
	ready(t, p)
	began := time.Now()
	unix.Kill(p.Status().PID, unix.SIGKILL)
	wantText(t, rec.waitKind(t, Lost, 1).Err, "signal: killed")
	t.Logf("lost after %s", time.Since(began))
	rec.waitKind(t, Reaped, 1)
	t.Logf("reaped after %s", time.Since(began))
	rec.waitKind(t, Up, 2)
	t.Logf("up again after %s", time.Since(began))
	if err := p.Send(2, submit(1)); err != nil {
		t.Error(err)
	}
	rec.wait(t, "of epoch 2", func(ev Event) bool { return ev.Kind == Frame && ev.Epoch == 2 })
}

// TestNotUp: spawns that never come up use up the budget, or are refused at once.
func TestNotUp(t *testing.T) {
	for _, c := range []struct {
		mode     string
		says     []string
		is       error
		restarts uint64
	}{
		{"crash-at-start", []string{"exit status 7", "cannot find the frobnicator"}, ErrBudget, 2},
		{"mute", []string{"no handshake within"}, ErrBudget, 2},
		{"stopped-at-start", []string{"no handshake within"}, ErrBudget, 2},
		{"no-answer", []string{"no handshake within"}, ErrBudget, 2},
		{"pollute", []string{"Welcome to my plugin!", "stdout"}, ErrBudget, 2},
		{"pollute-endless", []string{"xxxx", "stdout"}, ErrBudget, 2},
		{"tcp", []string{"listens on tcp 127.0.0.1:9", "PLUGIN_UNIX_SOCKET_DIR"}, ErrBudget, 2},
		{"elsewhere", []string{"/tmp/elsewhere.sock", "PLUGIN_UNIX_SOCKET_DIR"}, ErrBudget, 2},
		{"refuses", []string{`unknown transport "foo"`}, ErrRefused, 0},
		{"new-version", []string{"contract version 9"}, ErrRefused, 0},
		{"needs-feature", []string{"telepathy"}, ErrRefused, 0},
		{"kind-zero", []string{"HandshakeResponse.kinds[1]"}, ErrRefused, 0},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			h, rec := newTestHost(t, func(cfg *Config) {
				cfg.RestartBudget = 2
				switch c.mode {
				case "mute", "stopped-at-start", "no-answer":
					cfg.HandshakeTimeout = 600 * time.Millisecond
				}
			})
			p := start(t, h, mode(c.mode))
			down := rec.waitKind(t, Down, 0)
			wantText(t, down.Err, c.says...)
			if !errors.Is(down.Err, c.is) {
				t.Errorf("%v is not %v", down.Err, c.is)
			}
			s := p.Status()
			if s.State != StateDown || s.PID != 0 || s.Restarts != c.restarts {
				t.Errorf("status %+v", s)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			wantText(t, p.Ready(ctx), c.says...)
			if got := rec.kinds(); got != "down0" {
				t.Errorf("events %s", got)
			}
		})
	}
}

func TestFault(t *testing.T) {
	h, rec := newTestHost(t, func(cfg *Config) { cfg.BackoffMin, cfg.BackoffMax = time.Hour, time.Hour })
	p := start(t, h, mode("echo"))
	ready(t, p)
	if err := p.Fault(1, &contract.Fault{Rule: "R8", Field: "Done.op", Detail: "op 5 was never submitted"}); err != nil {
		t.Fatal(err)
	}
	err := rec.waitKind(t, Lost, 1).Err
	wantText(t, err, "rule R8", "Done.op", "never submitted")
	if !errors.Is(err, ErrViolation) {
		t.Error(err)
	}
	if err := p.Fault(1, &contract.Fault{}); !errors.Is(err, ErrEpoch) {
		t.Error(err)
	}
	rec.waitKind(t, Reaped, 1)
	eventually(t, "the plugin was told", func() bool { return strings.Contains(p.Status().Stderr, "told: R8 Done.op") })
	eventually(t, "back-off", func() bool { return p.Status().State == StateBackoff })
}

func TestEnvironment(t *testing.T) {
	t.Setenv("SECRET_OF_THE_ENGINE", "1")
	t.Setenv("UCX_TLS", "tcp")
	t.Setenv("LANG", "host")
	h, rec := newTestHost(t, nil)
	spec := mode("environment")
	spec.Args = append(spec.Args, "more")
	spec.Env = map[string]string{"LANG": "mine", "OTHER": "x=y"}
	spec.Options = []byte(`{"a":1}`)
	start(t, h, spec)
	env := strings.Split(string(rec.waitKind(t, Up, 1).Handshake.Endpoint), "\n")
	for _, want := range []string{"UCX_TLS=tcp", "LANG=mine", "OTHER=x=y", "ENGINE_CTRL_FD=3", `config={"a":1}`} {
		if !slices.Contains(env, want) {
			t.Errorf("no %s in %q", want, env)
		}
	}
	for _, kv := range env {
		if strings.HasPrefix(kv, "SECRET") || kv == "LANG=host" {
			t.Errorf("inherited %s", kv)
		}
		if args, ok := strings.CutPrefix(kv, "args="); ok && !strings.HasSuffix(args, "plugin environment more") {
			t.Errorf("args %s", args)
		}
	}
}

func TestMTLS(t *testing.T) {
	h, rec := newTestHost(t, nil)
	spec := mode("echo")
	spec.MTLS = true
	p := start(t, h, spec)
	rec.waitKind(t, Up, 1)
	if err := p.Send(1, submit(1)); err != nil {
		t.Fatal(err)
	}
	rec.wait(t, "by TLS", func(ev Event) bool { return ev.Kind == Frame })

	// Another process of this user that finds the socket gets no answer: it has no certificate.
	socket := h.Plugins()[0].epoch.proc.address()
	for name, creds := range map[string]credentials.TransportCredentials{
		"in the clear": insecure.NewCredentials(), "without a certificate": credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}),
	} {
		conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		answer, err := contract.NewPluginClient(conn).Handshake(ctx, &contract.HandshakeRequest{Versions: []uint32{1}})
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s: answered %v, %v", name, answer, err)
		}
		cancel()
		conn.Close()
	}
}

// TestSDK: the real SDK at the other end, with its schema check.
func TestSDK(t *testing.T) {
	h, rec := newTestHost(t, nil)
	spec := mode("sdk")
	spec.Options = []byte(`{"dpeth": 3}`)
	p := start(t, h, spec)
	down := rec.waitKind(t, Down, 0)
	wantText(t, down.Err, "dpeth")
	if !errors.Is(down.Err, ErrRefused) {
		t.Error(down.Err)
	}
	if err := p.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
	spec.Options = []byte(`{"depth": 3}`)
	p = start(t, h, spec)
	hello := rec.waitKind(t, Up, 2).Handshake
	if want := fmt.Sprintf("n0 7 2 %s/test.2", h.root); string(hello.Endpoint) != want {
		t.Errorf("endpoint %s, want %s", hello.Endpoint, want)
	}
	eventually(t, "a beat", func() bool { s := p.Status(); return s.BeatAge > 0 && s.BeatAge < time.Second })
	if err := p.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := rec.kinds(); got != "down0 up2 lost2 reaped2 down0" {
		t.Errorf("events %s", got)
	}
}
