package peer

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/membership"
)

// as65534 runs f on a thread of another user, for what the kernel then says of its sockets.
func as65534(t *testing.T, f func()) {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("only root can become somebody else, and CI tests everything")
		}
		t.Skip("only root can become somebody else")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0))
		f()
	}()
	<-done
}

// TestForeignUser: on one host an engine neither answers a process of another user nor says its Hello to one that
// listens in the place of a peer, even where the files let it.
func TestForeignUser(t *testing.T) {
	open := func(address string) string {
		path := strings.TrimPrefix(address, "unix:")
		if err := os.Chmod(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a := start(t, fast("a", 1, socket(t)))
	path := open(a.Addr())
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	as65534(t, func() {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")) // a client's preface and settings
		if n, err := c.Read(make([]byte, 100)); n != 0 || err == nil || os.IsTimeout(err) {
			t.Errorf("user 65534 was answered: %d bytes, %v", n, err)
		}
	})

	theirs := open(socket(t))
	var ln net.Listener
	as65534(t, func() {
		var err error
		if ln, err = net.Listen("unix", theirs); err != nil {
			t.Error(err)
		}
	})
	if ln == nil {
		t.FailNow()
	}
	defer ln.Close()
	heard := make(chan int, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			heard <- -1
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		n, _ := c.Read(make([]byte, 100))
		heard <- n
	}()
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: "unix:" + theirs}}})
	if n := <-heard; n != 0 {
		t.Errorf("a process of user 65534 in the place of a peer heard %d bytes", n)
	}
	a.await("the reason in Status", func() bool { return strings.Contains(a.peer("b").LastError, "user 65534") })
}

// TestTLSOfAUnixListener: an engine that has certificates dials TCP with them, though it listens on a unix socket
// itself: peers.tls never means a connection in the clear.
func TestTLSOfAUnixListener(t *testing.T) {
	later := time.Now().Add(time.Hour)
	good := newCA(t)
	cfg := fast("a", 1, socket(t))
	cfg.TLS = good.issue(t.TempDir(), later, "a")
	a := start(t, cfg)
	plain := start(t, fast("b", 1, "127.0.0.1:0"))
	safe := tlsNode(t, "c", good.issue(t.TempDir(), later, "c"))
	plain.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}})
	safe.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}})
	a.SetPeers([]membership.Peer{plain.as(), safe.as()})
	a.awaitUp("c", 1)
	a.await("an attempt at the plain one", func() bool { return a.peer("b").Attempts > 1 })
	if p := a.peer("b"); p.State == "up" || len(plain.find(Hello)) != 0 {
		t.Errorf("Hello went over TCP in the clear: %+v", p)
	}
}
