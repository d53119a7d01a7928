package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func dial(t *testing.T, s *Share) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: s.path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetReadDeadline(time.Now().Add(sdktest.Wait))
	return c
}

func greeting() []byte {
	h := hello{incarnation: 1, epoch: 1}
	copy(h.token[:], token)
	return h.encode()
}

// greeted is a raw connection of the admitted writer.
func greeted(t *testing.T, s *Share) *net.UnixConn {
	t.Helper()
	c := dial(t, s)
	if err := send(c, greeting()); err != nil {
		t.Fatal(err)
	}
	if r := next(t, c); r.kind != kindWelcome || r.code != codeOK {
		t.Fatalf("welcome: %+v", r)
	}
	return c
}

// next reads a record and closes its descriptors.
func next(t *testing.T, c *net.UnixConn) record {
	t.Helper()
	b := make([]byte, recordSize+1)
	n, fds, err := receive(c, b)
	closeAll(fds)
	if err != nil {
		t.Fatal(err)
	}
	r, err := decodeRecord(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The wire of version 1, byte for byte: whoever speaks it in another language depends on it.
func TestWireBytes(t *testing.T) {
	h := hello{incarnation: 0x0102030405060708, epoch: 0x11121314}
	copy(h.token[:], token)
	want := "TSHM1\x00\x00\x00" + "\x08\x07\x06\x05\x04\x03\x02\x01" + "\x14\x13\x12\x11" + "\x00\x00\x00\x00" + string(token)
	if got := string(h.encode()); got != want {
		t.Errorf("hello %q", got)
	}
	r := record{kind: kindMapped, code: codeUnknown, region: 0x0102, size: 1 << 32}
	want = "\x03\x00\x00\x00" + "\x01\x00\x00\x00" + "\x02\x01\x00\x00\x00\x00\x00\x00" + "\x00\x00\x00\x00\x01\x00\x00\x00"
	if got := string(r.encode()); got != want {
		t.Errorf("record %q", got)
	}
	if back, err := decodeRecord(r.encode()); err != nil || back != r {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if back, err := decodeHello(h.encode()); err != nil || back != h {
		t.Errorf("decoded %+v, %v", back, err)
	}
}

func FuzzRecords(f *testing.F) {
	f.Add(greeting())
	f.Add(record{kind: kindMapped, size: 1}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := decodeHello(b); err == nil && string(h.encode()) != string(b) {
			t.Errorf("hello %q", b)
		}
		if r, err := decodeRecord(b); err == nil && string(r.encode()) != string(b) {
			t.Errorf("record %q", b)
		}
	})
}

// What an owner does not understand ends that connection, and no other.
func TestHostileWriter(t *testing.T) {
	s := share(t, 2)
	s.admit = 50 * time.Millisecond
	region(t, s, 1, page)
	_ = s.Accept(writerPeer(7))
	good := greeted(t, s)
	mapIt := record{kind: kindMap, region: 1}.encode()
	other := greeting()
	other[30]++ // the token
	badMagic, reserved := greeting(), greeting()
	badMagic[0], reserved[20] = 'X', 1
	for _, c := range []struct {
		name    string
		greet   bool
		records [][]byte
	}{
		{"says nothing", false, nil},
		{"magic", false, [][]byte{badMagic}},
		{"reserved field", false, [][]byte{reserved}},
		{"short hello", false, [][]byte{greeting()[:40]}},
		{"long hello", false, [][]byte{append(greeting(), 0)}},
		{"another token", false, [][]byte{other}},
		{"short record", true, [][]byte{mapIt[:23]}},
		{"long record", true, [][]byte{append(mapIt[:24:24], 0)}},
		{"kind 0", true, [][]byte{record{region: 1}.encode()}},
		{"an owner's record", true, [][]byte{record{kind: kindMapped, region: 1}.encode()}},
		{"MAP twice", true, [][]byte{mapIt, mapIt}},
		{"UNMAPPED of nothing", true, [][]byte{record{kind: kindUnmapped, region: 1}.encode()}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := dial(t, s)
			if c.greet {
				conn = greeted(t, s)
			}
			for _, b := range c.records {
				if err := send(conn, b); err != nil {
					t.Fatal(err)
				}
			}
			b := make([]byte, 64)
			for {
				_, fds, err := receive(conn, b)
				closeAll(fds)
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			conn.Close()
		})
	}
	if err := send(good, mapIt); err != nil {
		t.Fatal(err)
	}
	if r := next(t, good); r.kind != kindMapped || r.code != codeOK || r.size != page {
		t.Errorf("the other connection got %+v", r)
	}
	if n := s.Counters()["shm.broken"]; n < 9 {
		t.Errorf("counters %v", s.Counters())
	}
}

// A writer that breaks the protocol while it maps a region has not let go of it.
func TestBrokenWriterStillMaps(t *testing.T) {
	s := share(t, 2)
	_, reg := region(t, s, 1, page)
	_ = s.Accept(writerPeer(7))
	c := greeted(t, s)
	_ = send(c, record{kind: kindMap, region: 1}.encode())
	next(t, c)
	_ = send(c, []byte("nonsense"))
	eventually(t, "the owner counts it", func() bool { return s.Counters()["shm.broken"] == 1 })
	withdrawn := make(chan error, 1)
	go func() { withdrawn <- s.Withdraw(reg) }()
	select {
	case err := <-withdrawn:
		t.Errorf("Withdraw: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	c.Close()
	if err := <-withdrawn; err != nil {
		t.Error(err)
	}
}

// Descriptors that a writer sends are closed, not kept.
func TestWriterSendsDescriptors(t *testing.T) {
	s := share(t, 2)
	_ = s.Accept(writerPeer(7))
	c := greeted(t, s)
	before := descriptors(t)
	for range 20 {
		if err := send(c, record{kind: kindMap, region: 9}.encode(), 0, 1, 2); err != nil {
			t.Fatal(err)
		}
		next(t, c)
	}
	if after := descriptors(t); after > before+1 {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func TestCrowd(t *testing.T) {
	s := share(t, 2)
	s.admit = sdktest.Wait
	_ = s.Accept(writerPeer(7))
	for range maxOfWriter {
		greeted(t, s)
	}
	c := dial(t, s)
	_ = send(c, greeting())
	if r := next(t, c); r.code != codeCrowded {
		t.Errorf("one connection of a writer too many: %+v", r)
	}
	c.Close()
	eventually(t, "it is forgotten", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.waiting == 0
	})
	for range maxWaiting {
		dial(t, s)
	}
	if r := next(t, dial(t, s)); r.kind != kindWelcome || r.code != codeCrowded {
		t.Errorf("one silent connection too many: %+v", r)
	}
}

// A writer protects itself from an owner that breaks the protocol.
func TestHostileOwner(t *testing.T) {
	memfd := func(size int64, seals int) int {
		fd, err := unix.MemfdCreate("terminus-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := errors.Join(unix.Ftruncate(fd, size)); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	good, open := memfd(page, sealed), memfd(page, unix.F_SEAL_GROW)
	welcome := func(c *net.UnixConn) { _ = send(c, record{kind: kindWelcome}.encode()) }
	mapped := func(region, size uint64, fds ...int) func(*net.UnixConn) {
		return func(c *net.UnixConn) {
			welcome(c)
			_, _, _ = receive(c, make([]byte, 64))
			_ = send(c, record{kind: kindMapped, region: region, size: size}.encode(), fds...)
		}
	}
	for _, c := range []struct {
		name string
		do   func(*net.UnixConn)
		says string
	}{
		{"closes", func(c *net.UnixConn) { c.Close() }, "ended"},
		{"closes after the welcome", func(c *net.UnixConn) { welcome(c); c.Close() }, "ended"},
		{"welcomes twice", func(c *net.UnixConn) { welcome(c); welcome(c) }, "second WELCOME"},
		{"refuses", func(c *net.UnixConn) { _ = send(c, record{kind: kindWelcome, code: 99}.encode()) }, "code 99"},
		{"short record", func(c *net.UnixConn) { _ = send(c, []byte("x")) }, "1 bytes"},
		{"unknown kind", func(c *net.UnixConn) { _ = send(c, record{kind: 77}.encode()) }, "kind 77"},
		{"maps unasked", func(c *net.UnixConn) { _ = send(c, record{kind: kindMapped}.encode(), good, good) }, "not asked"},
		{"maps another region", mapped(2, page, good, good), "not asked"},
		{"no descriptors", mapped(1, page), "0 descriptors"},
		{"three descriptors", mapped(1, page, good, good, good), "3 descriptors"},
		{"size 0", mapped(1, 0, good, good), "0 bytes"},
		{"size 2^63", mapped(1, 1<<63, good, good), "region of"},
		{"size beyond the file", mapped(1, 2*page, good, good), "has 4096 bytes"},
		{"not sealed", mapped(1, page, open, good), "seals"},
		{"no memfd", mapped(1, page, 0, good), "memfd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			over := make(chan struct{})
			served := make(chan struct{})
			go func() { // all connections: a writer that sees the end early makes another
				defer close(served)
				var conns sync.WaitGroup
				defer conns.Wait()
				for {
					conn, err := l.AcceptUnix()
					if err != nil {
						return
					}
					conns.Go(func() {
						_, _, _ = receive(conn, make([]byte, 64))
						c.do(conn)
						<-over
						conn.Close()
					})
				}
			}()
			w := share(t, 1)
			before := descriptors(t)
			r, err := w.Dial(&sdk.Peer{Node: "owner", Endpoint: []byte(scheme + path), SameHost: true, Token: token})
			if err != nil {
				t.Fatal(err)
			}
			err = r.Write(context.Background(), 1, 0, []byte("x"))
			var e *sdk.Error
			if !errors.As(err, &e) || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
			close(over)
			l.Close()
			<-served
			r.Close()
			eventually(t, "all descriptors are closed", func() bool { return descriptors(t) <= before })
			if n := mappings(t); n != 0 {
				t.Errorf("%d mappings", n)
			}
		})
	}
}

// An owner that never answers costs an op answerBound, or its abort.
func TestSilentOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	w := share(t, 1)
	r, err := w.Dial(&sdk.Peer{Node: "owner", Endpoint: []byte(scheme + path), SameHost: true, Token: token})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(20*time.Millisecond, func() { cancel(sdk.ErrAborted) })
	if err := r.Write(ctx, 1, 0, []byte("x")); !errors.Is(err, sdk.ErrAborted) {
		t.Errorf("got %v", err)
	}
}

// stranger is a process that listens until its stdin ends.
func stranger(path string) int {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err == nil {
		err = os.Chmod(path, 0o777)
	}
	fmt.Println(err)
	if err != nil {
		return 1
	}
	defer l.Close()
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// An owner of another user is refused before it is told the token.
func TestOwnerOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("only root can start a process of another user, and CI tests everything")
		}
		t.Skip("only root can start a process of another user")
	}
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	self := filepath.Join(dir, "stranger") // where that user can reach it
	if err := os.WriteFile(self, program, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "SHM_TEST_STRANGER="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); _ = cmd.Wait() })
	b := make([]byte, 100)
	if n, err := out.Read(b); err != nil || string(b[:n]) != "<nil>\n" {
		t.Fatalf("the stranger says %q, %v", b[:n], err)
	}
	w := share(t, 1)
	_, err = w.Dial(&sdk.Peer{Node: "owner", Endpoint: []byte(scheme + path), SameHost: true, Token: token})
	if err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("got %v", err)
	}
}
