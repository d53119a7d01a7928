package peer

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestHalfOpenInboundIsEnded: a connection whose other host acknowledges nothing stayed at the engine that had accepted
// it: gRPC ends none by itself.
func TestHalfOpenInboundIsEnded(t *testing.T) {
	t.Parallel()
	const silent = time.Second
	ln, err := listen("127.0.0.1:0", silent, slog.New(slog.DiscardHandler))
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
	raw, err := out.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K} // every packet, before TCP sees it
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop})
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	began := time.Now()
	if _, err := in.Write(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() {
		_, err := in.Read(make([]byte, 1))
		over <- err
	}()
	select {
	case err := <-over:
		if took := time.Since(began); err == nil || took < silent/2 {
			t.Errorf("%v after %v", err, took)
		}
	case <-time.After(10 * silent):
		t.Error("the connection is still there")
	}
}
