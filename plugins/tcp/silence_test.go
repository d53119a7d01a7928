package tcp

import (
	"bytes"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// deafen makes this end of a connection deaf and dumb, as if its host had lost power: every packet that
// comes is dropped before TCP sees it, so nothing is acknowledged either.
func deafen(t *testing.T, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
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

// reset ends a connection by RST.
func reset(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestSilentHost: the receiver's host vanishes without a word. Its ops fail in bounded time, not quiet,
// for nobody knows what landed; they become quiet when the host is back and says that the connection is over.
func TestSilentHost(t *testing.T) {
	const pages, size = 256, 128 << 10
	f := newFakeReceiver(t)
	a := sdktest.New(t, New(), sdktest.WithConfig(options{"connections": 1, "silence_timeout_ms": 1000}))
	peer := f.peer(a, pages, size)
	op := peer.submit(sdktest.Pages(0, pages))
	f.waitConns(1)
	f.mu.Lock()
	deafen(t, f.conns[0])
	f.mu.Unlock()
	end := op.End()
	wantFailed(t, end, contract.Cause_CAUSE_TRANSPORT)
	if end.Quiet {
		t.Fatal("quiet, although the bytes may be on their way")
	}
	op.Quiet()
	a.CheckOrder()
}

// TestSilentWriter: a writer's host vanishes in the middle of a slice. The receiver gives the connection
// up in bounded time and nothing of the slice has landed.
func TestSilentWriter(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{"silence_timeout_ms": 1000})
	h.Grant(sdktest.Destination, pool, sdktest.Pages(0, 16)...)
	w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	frame := data(1, bytes.Repeat([]byte{0xEE}, 1<<15), piece{r.ID, 0, 1 << 15})
	w.send(putBegin(nil, 1, generation, 1<<16, 8<<20))
	w.send(frame[:len(frame)/2])
	eventually(t, "the connection is there", func() bool { return b.recv.connections() == 1 })
	deafen(t, w.c)
	eventually(t, "the receiver gives the connection up", func() bool { return b.recv.connections() == 0 })
	if !bytes.Equal(r.Bytes, make([]byte, len(r.Bytes))) {
		t.Fatal("half a slice has landed")
	}
}

// TestResetMidSlice: the connection is reset in the middle of a slice, once by either end.
func TestResetMidSlice(t *testing.T) {
	t.Run("by the writer", func(t *testing.T) {
		b, h, r, pool := rawTarget(t, options{})
		h.Grant(sdktest.Destination, pool, sdktest.Pages(0, 16)...)
		w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
		frame := data(1, bytes.Repeat([]byte{0xEE}, 1<<15), piece{r.ID, 0, 1 << 15})
		w.send(putBegin(nil, 1, generation, 1<<16, 8<<20))
		w.send(frame[:len(frame)-1])
		eventually(t, "the connection is there", func() bool { return b.recv.connections() == 1 })
		reset(t, w.c)
		eventually(t, "the connection is gone", func() bool { return b.recv.connections() == 0 })
		if !bytes.Equal(r.Bytes, make([]byte, len(r.Bytes))) {
			t.Fatal("an incomplete slice has landed")
		}
		if n := b.count.badFrames.Load(); n != 0 {
			t.Errorf("%d bad frames were counted", n)
		}
	})
	t.Run("by the receiver", func(t *testing.T) {
		const pages, size = 256, 128 << 10
		f := newFakeReceiver(t)
		a := sdktest.New(t, New(), sdktest.WithConfig(options{"connections": 1}))
		peer := f.peer(a, pages, size)
		op := peer.submit(sdktest.Pages(0, pages))
		f.waitConns(1)
		f.mu.Lock()
		c := f.conns[0]
		f.mu.Unlock()
		if _, err := io.ReadFull(c, make([]byte, headerLen+beginLen+headerLen+pieceLen+1000)); err != nil {
			t.Fatal(err)
		}
		reset(t, c)
		end := op.End()
		wantFailed(t, end, contract.Cause_CAUSE_TRANSPORT)
		if end.Quiet {
			t.Fatal("quiet, although a byte may have landed")
		}
		op.Quiet()
		a.CheckOrder()
	})
}

// TestHostComesBackLate: a receiver that answers again long after the settle timeout is still asked about
// the ops of the lost connection, without a new op.
func TestHostComesBackLate(t *testing.T) {
	const pages, size = 16, 128 << 10
	f := newFakeReceiver(t)
	b := New()
	a := sdktest.New(t, b, sdktest.WithConfig(options{"connections": 1, "settle_timeout_ms": 1}))
	peer := f.peer(a, pages, size)
	op := peer.submit(sdktest.Pages(0, pages))
	f.waitConns(1)
	if _, err := io.ReadFull(f.conns[0], make([]byte, headerLen)); err != nil { // the op has begun
		t.Fatal(err)
	}
	addr := f.l.Addr().String()
	f.l.Close() // the host is away
	f.cut()
	if end := op.End(); end.Quiet {
		t.Fatalf("end %+v", end)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	f.l = l
	f.wg.Go(f.serve)
	t.Cleanup(func() { l.Close() })
	op.Quiet()
	a.CheckOrder()
}

// TestSubmitFlood: more ops than one peer may have are refused at once, quiet; the others stay, and end
// with the peer.
func TestSubmitFlood(t *testing.T) {
	const pages, size, extra = 4, 4096, 300
	f := newFakeReceiver(t)
	a := sdktest.New(t, New(), sdktest.WithConfig(options{"connections": 1}))
	peer := f.peer(a, pages, size)
	var ops []*sdktest.Pending
	for range maxOpsPerPeer + extra {
		ops = append(ops, peer.submit(sdktest.Pages(0, pages)))
	}
	refused := func() (n int) {
		for _, e := range a.Events() {
			if m := e.GetFailed(); m != nil {
				if n++; m.Cause != contract.Cause_CAUSE_LIMIT || !m.Quiet {
					t.Fatalf("%v, want quiet and CAUSE_LIMIT", m)
				}
			}
		}
		return n
	}
	eventually(t, "all ops beyond the limit are refused", func() bool { return refused() >= extra })
	a.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: peer.handle}}})
	limit := 0
	for _, op := range ops { // which ones came first is not said
		end := op.Quiet()
		if end.Cause == contract.Cause_CAUSE_LIMIT {
			limit++
			continue
		}
		wantFailed(t, end, contract.Cause_CAUSE_PEER_UNREACHABLE)
	}
	if limit != extra {
		t.Errorf("%d ops were refused, want %d", limit, extra)
	}
	a.CheckOrder()
}
