package peer

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// shortListener has no memory for its first accepts.
type shortListener struct {
	net.Listener
	fails int
}

func (l *shortListener) Accept() (net.Conn, error) {
	if l.fails > 0 {
		l.fails--
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.ENOBUFS)}
	}
	return l.Listener.Accept()
}

// The listener outlives errors that pass, and its Close does not wait for one to pass.
func TestListenerOutlivesErrors(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	short := &shortListener{inner, 3}
	ln := newBounded(short, time.Second, slog.New(slog.DiscardHandler))
	out, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := ln.Accept()
	if err != nil {
		t.Fatalf("after errors that pass: %v", err)
	}
	in.Close()
	short.fails = 1 << 30
	time.AfterFunc(50*time.Millisecond, func() { ln.Close() })
	if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestConfig(t *testing.T) {
	base := fast("a", 1, "unix:/tmp/x")
	base.Sink = func(Event) {}
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Node = "" }, "node name"},
		{func(c *Config) { c.Incarnation = 0 }, "incarnation"},
		{func(c *Config) { c.Sink = nil }, "sink"},
		{func(c *Config) { c.Listen = "0.0.0.0:7000" }, InsecureWords},
		{func(c *Config) { c.Listen = ":7000" }, InsecureWords},
		{func(c *Config) { c.Listen = "example.com:7000" }, InsecureWords},
		{func(c *Config) { c.Listen = "0.0.0.0:7000"; c.InsecureListen = "yes" }, "exactly"},
		{func(c *Config) { c.Listen = "nonsense" }, "host:port"},
		{func(c *Config) { c.Listen = "unix:/" + strings.Repeat("x", 120) }, "107"},
		{func(c *Config) { c.Listen = "127.0.0.1:0"; c.TLS = &TLS{"/no/cert", "/no/key", "/no/ca"} }, "/no/cert"},
		{func(c *Config) { c.QueueBytes = 1 }, "queue"},
		{func(c *Config) { c.Silence = time.Millisecond }, "silence"},
	} {
		cfg := base
		c.change(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
	cfg := base
	cfg.Listen, cfg.InsecureListen = "0.0.0.0:0", InsecureWords
	start(t, cfg)
	// The socket of a dead predecessor is replaced, that of a living one is not, a file never.
	listen := socket(t)
	start(t, fast("a", 1, listen))
	cfg = base
	cfg.Listen = listen
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a living socket: %v", err)
	}
	cfg.Listen = socket(t)
	if err := os.WriteFile(strings.TrimPrefix(cfg.Listen, "unix:"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file: %v", err)
	}
	cfg.Listen = socket(t)
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: strings.TrimPrefix(cfg.Listen, "unix:"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	start(t, cfg)
}

func TestConnectionBound(t *testing.T) {
	ln, err := listen("127.0.0.1:0", time.Second, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	b := ln.(*boundedListener)
	b.open.Store(maxConns)
	got := make(chan net.Conn)
	go func() {
		c, _ := ln.Accept()
		got <- c
	}()
	over, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	over.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := over.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Fatalf("one connection too many: %v", err)
	}
	b.open.Add(-1)
	next, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	c := <-got
	c.Close()
	c.Close()
	if n := b.open.Load(); n != maxConns-1 {
		t.Errorf("%d open", n)
	}
}
