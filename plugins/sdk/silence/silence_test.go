package silence

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a connection by way of TCP on this host.
func pair(t *testing.T) (here, there *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	out, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	in, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close(); in.Close() })
	return out.(*net.TCPConn), in.(*net.TCPConn)
}

// deafen drops every packet that comes for this end before TCP sees it, so nothing is acknowledged either: as if
// its host had lost power.
func deafen(t *testing.T, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop})
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
}

// TestDeafHostEndsTheConnection: whether something waits for an acknowledgement or nothing is said, the connection ends
// after the time of silence and not before, for its reader as for its writer.
func TestDeafHostEndsTheConnection(t *testing.T) {
	const quiet = 2 * time.Second
	for name, write := range map[string]int{"bytes wait": 1, "the buffer is full": 64 << 20, "nothing waits": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			here, there := pair(t)
			if err := Bound(here, quiet); err != nil {
				t.Fatal(err)
			}
			deafen(t, there)
			began := time.Now()
			wrote := make(chan error, 1)
			go func() {
				_, err := here.Write(make([]byte, write))
				wrote <- err
			}()
			_, err := here.Read(make([]byte, 1))
			took := time.Since(began)
			t.Logf("%v after %v", err, took)
			if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, unix.ETIMEDOUT) {
				t.Errorf("read: %v", err)
			}
			if took < quiet-quiet/8 || took > 3*quiet {
				t.Errorf("the connection ended after %v, want %v", took, quiet)
			}
			if err := <-wrote; (err != nil) != (write > 1) {
				t.Errorf("write of %d bytes: %v", write, err)
			}
		})
	}
}

// TestSlowReaderIsHeard: the program at the other end read nothing for a while, and the connection was over, although
// its host answered whenever the kernel asked for room: once a second, which was the time of silence.
func TestSlowReaderIsHeard(t *testing.T) {
	t.Parallel()
	const quiet, size = time.Second, 32 << 20
	here, there := pair(t)
	if err := Bound(here, quiet); err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := here.Write(make([]byte, size))
		wrote <- err
	}()
	time.Sleep(4 * quiet)
	if err := there.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, there, size); err != nil {
		t.Error(err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
}
