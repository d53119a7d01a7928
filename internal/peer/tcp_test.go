package peer

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestHalfOpenInboundIsEnded: the kernel was never told to end a connection whose other host acknowledges nothing, at
// neither end: gRPC knows only a bare *net.TCPConn, and only keepalive of its own makes it say so.
func TestHalfOpenInboundIsEnded(t *testing.T) {
	ln, err := listen("127.0.0.1:0", 3*time.Second, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	out, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	raw, err := in.(*countedConn).NetConn().(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		for _, o := range []struct{ option, want int }{{unix.TCP_USER_TIMEOUT, 3000}, {unix.TCP_KEEPIDLE, 2}, {unix.TCP_KEEPINTVL, 1}, {unix.TCP_KEEPCNT, 2}} {
			if got, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, o.option); err != nil || got != o.want {
				t.Errorf("option %d is %d, %v; want %d", o.option, got, err, o.want)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}
