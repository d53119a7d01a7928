package tcp

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// rawWriter speaks the protocol by hand.
type rawWriter struct {
	t   testing.TB
	c   net.Conn
	r   *bufio.Reader
	err error // of the handshake
}

var rawConns uint64

func dialRaw(t testing.TB, b *Backend, h *sdktest.Host, node string, token []byte) *rawWriter {
	t.Helper()
	ep, id, err := decodeEndpoint(h.Response.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	if id != b.self {
		t.Fatal("the endpoint names another instance")
	}
	c, err := net.Dial("tcp", ep.TCP[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	rawConns++
	w := &rawWriter{t: t, c: c, r: bufio.NewReader(c)}
	w.err = introduce(c, hello{target: id, incarnation: 1, epoch: 1, conn: rawConns, node: node}, token, nil, 5*time.Second)
	if w.err != nil {
		c.Close()
	}
	c.SetDeadline(time.Now().Add(sdktest.Wait))
	return w
}

func (w *rawWriter) send(b []byte) {
	w.t.Helper()
	if _, err := w.c.Write(b); err != nil {
		w.t.Fatal(err)
	}
}

// answer returns the next frame that is no acknowledgement.
func (w *rawWriter) answer() (header, []byte) {
	w.t.Helper()
	for {
		b := make([]byte, headerLen)
		if _, err := io.ReadFull(w.r, b); err != nil {
			w.t.Fatalf("the receiver closed the connection: %v", err)
		}
		h, err := readHeader(b, false)
		if err != nil {
			w.t.Fatal(err)
		}
		body := make([]byte, h.size)
		io.ReadFull(w.r, body)
		if h.kind != frameAck {
			return h, body
		}
	}
}

func (w *rawWriter) wantClosed() {
	w.t.Helper()
	if b, err := io.ReadAll(w.r); err != nil || len(b) != 0 {
		if ne, ok := err.(net.Error); ok && ne.Timeout() {
			w.t.Fatal("the connection is still open")
		}
	}
}

// rawTarget is a receiver with a region of 16 pages of 4096 bytes.
func rawTarget(t testing.TB, opts options) (*Backend, *sdktest.Host, *sdktest.Region, uint64) {
	b := New()
	h := sdktest.New(t, b, sdktest.WithConfig(opts))
	r := h.AddRegion(1<<16 + 64)
	pool := h.AddPool(16, r.Tensor(0, 4096))
	if err := b.Accept(&sdk.Peer{Node: "writer", Incarnation: 1, Epoch: 1, Token: make([]byte, tokenLen)}); err != nil {
		t.Fatal(err)
	}
	return b, h, r, pool
}

var generation = sdk.Generation{Source: sdktest.Source, Destination: sdktest.Destination}

func data(id uint64, bytes []byte, pieces ...piece) []byte {
	b := putHeader(nil, header{kind: frameData, id: id, count: len(pieces), size: len(pieces)*pieceLen + len(bytes)})
	for _, p := range pieces {
		b = putPiece(b, p)
	}
	return append(b, bytes...)
}

// TestBrokenFrames: each ends the connection that sent it, is counted, and harms nobody else.
func TestBrokenFrames(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{})
	h.Grant(sdktest.Destination, pool, sdktest.Pages(0, 16)...)
	healthy := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	begin := putBegin(nil, 1, generation, 4096, 8<<20)
	page := make([]byte, 4096)
	huge := putHeader(nil, header{kind: frameData, id: 1, count: 1, size: 1<<31 - 1})
	for name, frames := range map[string][]byte{
		"kind of the receiver":  putNumber(nil, frameDone, 1, 1),
		"unknown kind":          putHeader(nil, header{kind: 40}),
		"kind zero":             make([]byte, headerLen),
		"huge":                  huge,
		"op that did not begin": data(1, page, piece{r.ID, 0, 4096}),
		"op number skipped":     putBegin(nil, 2, generation, 4096, 8<<20),
		"op number again":       append(append([]byte{}, begin...), begin...),
		"pieces too short":      append(append([]byte{}, begin...), data(1, page, piece{r.ID, 0, 4095})...),
		"pieces too long":       append(append([]byte{}, begin...), data(1, page, piece{r.ID, 0, 1 << 63})...),
		"empty piece":           append(append([]byte{}, begin...), data(1, page, piece{r.ID, 0, 0}, piece{r.ID, 0, 4096})...),
		"region without fds":    putNumber(nil, frameRegion, 3, 4096),
	} {
		t.Run(name, func(t *testing.T) {
			before := b.count.badFrames.Load()
			w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
			if w.err != nil {
				t.Fatal(w.err)
			}
			w.send(frames)
			w.wantClosed()
			eventually(t, "the bad frame is counted", func() bool { return b.count.badFrames.Load() == before+1 })
		})
	}
	healthy.send(begin)
	healthy.send(data(1, page, piece{r.ID, 0, 4096}))
	if a, _ := healthy.answer(); a.kind != frameDone {
		t.Fatalf("answer %+v, want done", a)
	}
}

// TestOpRefusals: each ends the op and not the connection.
func TestOpRefusals(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{})
	h.Grant(sdktest.Destination, pool, sdktest.Pages(2, 4)...)
	w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	page := bytes.Repeat([]byte{0xEE}, 4096)
	id := uint64(0)
	for _, c := range []struct {
		name  string
		total uint64
		piece piece
		cause contract.Cause
	}{
		{"page before", 4096, piece{r.ID, 4096, 4096}, contract.Cause_CAUSE_BOUNDS},
		{"page behind", 4096, piece{r.ID, 6 * 4096, 4096}, contract.Cause_CAUSE_BOUNDS},
		{"one byte before", 4096, piece{r.ID, 2*4096 - 1, 4096}, contract.Cause_CAUSE_BOUNDS},
		{"one byte behind", 4096, piece{r.ID, 5*4096 + 1, 4096}, contract.Cause_CAUSE_BOUNDS},
		{"offset overflow", 4096, piece{r.ID, 1<<64 - 4096, 4096}, contract.Cause_CAUSE_BOUNDS},
		{"other region", 4096, piece{r.ID + 1, 2 * 4096, 4096}, contract.Cause_CAUSE_BOUNDS},
		{"more than announced", 4095, piece{r.ID, 2 * 4096, 4096}, contract.Cause_CAUSE_PROTOCOL},
		{"empty op", 0, piece{r.ID, 2 * 4096, 4096}, contract.Cause_CAUSE_LIMIT},
		{"huge op", maxOpBytes + 1, piece{r.ID, 2 * 4096, 4096}, contract.Cause_CAUSE_LIMIT},
	} {
		id++
		w.send(putBegin(nil, id, generation, c.total, 8<<20))
		w.send(data(id, page, c.piece))
		a, _ := w.answer()
		if a.kind != frameFailed || a.id != id || contract.Cause(a.count) != c.cause {
			t.Fatalf("%s: answer %+v (%v), want %v", c.name, a, contract.Cause(a.count), c.cause)
		}
	}
	// A descriptor of a region that was never handed over asks for another lane.
	id++
	w.send(putBegin(nil, id, generation, 4096, 8<<20))
	w.send(putDesc(putHeader(nil, header{kind: frameDesc, id: id, count: 1, size: descLen}), desc{9, 0, r.ID, 2 * 4096, 4096}))
	if a, _ := w.answer(); a.kind != frameNoSource {
		t.Fatalf("answer %+v", a)
	}
	if !bytes.Equal(r.Bytes, make([]byte, len(r.Bytes))) {
		t.Fatal("a refused byte landed")
	}
	// A cancel of an ended op is not answered; the connection still works.
	w.send(putHeader(nil, header{kind: frameCancel, id: id}))
	id++
	w.send(putBegin(nil, id, generation, 4096, 8<<20))
	w.send(data(id, page, piece{r.ID, 2 * 4096, 2048}, piece{r.ID, 3 * 4096, 2048}))
	if a, _ := w.answer(); a.kind != frameDone || a.id != id {
		t.Fatalf("answer %+v, want done", a)
	}
}

// TestGrantOfAnotherPeer: a hostile admitted writer that knows a live opener, its pages and their place cannot write
// there, because the grant names another node. What it says is counted, and the room's own writer is not disturbed.
func TestGrantOfAnotherPeer(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{})
	token := bytes.Repeat([]byte{3}, tokenLen)
	if err := b.Accept(&sdk.Peer{Node: "hostile", Incarnation: 1, Epoch: 1, Token: token}); err != nil {
		t.Fatal(err)
	}
	h.GrantTo([]string{"writer"}, sdktest.Destination, pool, sdktest.Pages(0, 8)...)
	page := bytes.Repeat([]byte{0xEE}, 4096)
	hostile := dialRaw(t, b, h, "hostile", token)
	attack := func(id uint64, off uint64) {
		t.Helper()
		hostile.send(putBegin(nil, id, generation, 4096, 8<<20))
		hostile.send(data(id, page, piece{r.ID, off, 4096}))
		a, why := hostile.answer()
		if a.kind != frameFailed || a.id != id || contract.Cause(a.count) != contract.Cause_CAUSE_REFUSED && contract.Cause(a.count) != contract.Cause_CAUSE_BOUNDS {
			t.Fatalf("op %d of another peer: answer %+v %s, want a refusal", id, a, why)
		}
	}
	attack(1, 0)
	if n := b.Counters()["late_refused"]; n != 1 {
		t.Errorf("late_refused is %d, want 1", n)
	}
	// One page of the same opener is its own: that opens no other.
	h.GrantTo([]string{"hostile"}, sdktest.Destination, pool, sdktest.Pages(9, 1)...)
	attack(2, 0)
	if !bytes.Equal(r.Bytes, make([]byte, len(r.Bytes))) {
		t.Fatal("bytes of another peer landed")
	}
	w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	w.send(putBegin(nil, 1, generation, 4096, 8<<20))
	w.send(data(1, page, piece{r.ID, 0, 4096}))
	if a, why := w.answer(); a.kind != frameDone {
		t.Fatalf("the named writer: answer %+v %s, want done", a, why)
	}
}

// TestHalfSlice: a slice whose sender stalls in the middle holds nothing open. Revoke returns quiet and
// the rest changes no page.
func TestHalfSlice(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{})
	g := h.Grant(sdktest.Destination, pool, sdktest.Pages(0, 16)...)
	w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	frame := data(1, bytes.Repeat([]byte{0xEE}, 1<<15), piece{r.ID, 0, 1 << 15})
	w.send(putBegin(nil, 1, generation, 1<<16, 8<<20))
	w.send(frame)
	eventually(t, "first slice", func() bool { return b.count.bytesIn.Load() == 1<<15 })
	w.send(frame[:len(frame)/2])
	if !h.Revoke(g, sdktest.Destination) {
		t.Fatal("Revoke is not quiet")
	}
	clear(r.Bytes)
	w.send(frame[len(frame)/2:])
	a, _ := w.answer()
	if a.kind != frameFailed || contract.Cause(a.count) != contract.Cause_CAUSE_REFUSED {
		t.Fatalf("answer %+v", a)
	}
	if !bytes.Equal(r.Bytes, make([]byte, len(r.Bytes))) {
		t.Fatal("bytes landed after Revoke")
	}
}

// TestFault: memory that cannot be touched ends the op, not the process.
func TestFault(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{})
	f, err := os.Create(filepath.Join(t.TempDir(), "hole"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 16); err != nil {
		t.Fatal(err)
	}
	hole, err := unix.Mmap(int(f.Fd()), 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(hole)
	f.Truncate(0)
	b.mu.Lock()
	b.regions[r.ID].bytes = hole
	b.mu.Unlock()
	h.Grant(sdktest.Destination, pool, sdktest.Pages(0, 16)...)
	w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	w.send(putBegin(nil, 1, generation, 4096, 8<<20))
	w.send(data(1, make([]byte, 4096), piece{r.ID, 0, 4096}))
	a, text := w.answer()
	if a.kind != frameFailed || contract.Cause(a.count) != contract.Cause_CAUSE_INTERNAL {
		t.Fatalf("answer %+v %s", a, text)
	}
	if !b.recvGatesFree() {
		t.Fatal("the fault left a gate held")
	}
}

func (b *Backend) recvGatesFree() bool {
	b.recv.mu.Lock()
	defer b.recv.mu.Unlock()
	for in := range b.recv.conns {
		if !in.gate.TryLock() {
			return false
		}
		in.gate.Unlock()
	}
	return true
}

// TestGarbage: strangers on either listener are cut off in bounded time and number.
func TestGarbage(t *testing.T) {
	b, h, _, _ := rawTarget(t, options{"handshake_timeout_ms": 100, "max_connections": 8})
	ep, _, _ := decodeEndpoint(h.Response.Endpoint)
	for _, addr := range [][2]string{{"tcp", ep.TCP[0]}, {"unix", ep.Unix}} {
		for _, say := range []string{"", "T", "GET / HTTP/1.1\r\nHost: x\r\n\r\n                                                                 ", magic + "\x09                                                                              "} {
			c, err := net.Dial(addr[0], addr[1])
			if err != nil {
				t.Fatal(err)
			}
			io.WriteString(c, say)
			c.SetDeadline(time.Now().Add(sdktest.Wait))
			if _, err := io.ReadAll(c); err != nil {
				if ne, ok := err.(net.Error); ok && ne.Timeout() {
					t.Fatalf("%q over %s: still open", say, addr[0])
				}
			}
			c.Close()
		}
	}
	var idle []net.Conn
	for range 20 {
		c, err := net.Dial("tcp", ep.TCP[0])
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, c)
	}
	eventually(t, "connections beyond the limit are refused", func() bool { return b.count.connectionsRefused.Load() >= 1 })
	for _, c := range idle {
		c.Close()
	}
	eventually(t, "a good writer gets in", func() bool {
		return dialRaw(t, b, h, "writer", make([]byte, tokenLen)).err == nil
	})
	if n := b.count.handshakesRefused.Load(); n < 8 {
		t.Errorf("handshakes_refused %d, want at least 8", n)
	}
}

// TestCovers compares the check with the plain one of the SDK.
func TestCovers(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		g := &sdk.Grant{Destination: sdktest.Destination}
		for range 1 + r.IntN(2) {
			pool := &sdk.Pool{Pages: uint32(1 + r.IntN(12))}
			for range 1 + r.IntN(4) {
				size := uint64(1 + r.IntN(8))
				pool.Tensors = append(pool.Tensors, sdk.Tensor{
					RegionID: 1 + r.Uint64N(2), Offset: r.Uint64N(40), PageBytes: size, PageStride: size + r.Uint64N(3),
				})
			}
			var runs []sdk.Run
			for range r.IntN(4) {
				start := uint32(r.IntN(int(pool.Pages)))
				runs = append(runs, sdk.Run{Start: start, Count: 1 + uint32(r.IntN(int(pool.Pages-start))), Stride: 1})
			}
			g.Parts = append(g.Parts, sdk.GrantPart{Pool: pool, Pages: sdk.NewPageSet(runs...)})
		}
		var table openers
		if err := table.grant(g); err != nil {
			t.Fatal(err)
		}
		o, hint := table.find(sdktest.Destination), r.IntN(9)
		for range 200 {
			region, off, n := 1+r.Uint64N(3), r.Uint64N(150), 1+r.Uint64N(30)
			if got, want := o.covers("writer", region, off, n, &hint), g.Covers(region, off, n); got != want {
				t.Fatalf("covers(%d, %d, %d) = %v, want %v: %+v", region, off, n, got, want, g.Parts)
			}
		}
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*Config)
		ok   bool
	}{
		{"defaults", func(*Config) {}, true},
		{"wildcard", func(c *Config) { c.Listen = ":7000" }, false},
		{"wildcard with advertise", func(c *Config) { c.Listen, c.Advertise = "0.0.0.0:0", []string{"10.0.0.1:0"} }, true},
		{"no port", func(c *Config) { c.Listen = "10.0.0.1" }, false},
		{"connections", func(c *Config) { c.Connections = 17 }, false},
		{"slice", func(c *Config) { c.Slice = 1 << 17 }, false},
		{"window", func(c *Config) { c.Window = 1 }, false},
		{"zero timeout", func(c *Config) { c.ConnectTimeout = 0 }, false},
		{"advertise", func(c *Config) { c.Advertise = []string{"x"} }, false},
	} {
		cfg := DefaultConfig()
		c.set(&cfg)
		if err := cfg.check(); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestLockIsProof(t *testing.T) {
	l, err := takeLock(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	e := endpoint{Lock: l.f.Name(), LockDev: l.dev, LockIno: l.ino}
	w := watchLock(e)
	if w == nil || w.dead() {
		t.Fatal("a held lock reads as dead")
	}
	defer w.Close()
	if _, err := takeLock(filepath.Dir(l.f.Name())); err == nil {
		t.Fatal("the lock was taken twice")
	}
	other := e
	other.LockIno++
	if watchLock(other) != nil {
		t.Fatal("another file was taken for the lock")
	}
	l.Close()
	if !w.dead() {
		t.Fatal("a free lock reads as alive")
	}
}

func FuzzEndpoint(f *testing.F) {
	good, _ := endpoint{Version: 1, Instance: "00112233445566778899aabbccddeeff", TCP: []string{"127.0.0.1:1"}}.encode()
	f.Add(good)
	f.Add([]byte(`{"v":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, _, err := decodeEndpoint(b); err == nil {
			if _, err := e.encode(); err != nil && len(b) < maxEndpoint/6 {
				t.Fatal(err)
			}
		}
	})
}

func FuzzHello(f *testing.F) {
	h := hello{node: "n", conn: 1}
	f.Add(h.append(nil))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, raw, err := readHello(bytes.NewReader(b))
		if err == nil && !bytes.Equal(h.append(nil), raw) {
			t.Fatal("hello does not read back")
		}
	})
}

// FuzzInbound feeds frames to a connection. Pages outside the grant never change.
func FuzzInbound(f *testing.F) {
	b := New()
	b.recv = newReceiver(b)
	b.start.Logf = func(contract.Log_Level, string, ...any) {}
	mem := make([]byte, 1<<16)
	b.regions[1] = &region{id: 1, bytes: mem}
	pool := &sdk.Pool{ID: 1, Pages: 16, Tensors: []sdk.Tensor{{RegionID: 1, PageStride: 4096, PageBytes: 4096}}}
	if err := b.table.grant(&sdk.Grant{Destination: sdktest.Destination, Parts: []sdk.GrantPart{
		{Pool: pool, Pages: sdk.NewPageSet(sdk.Run{Start: 4, Count: 2, Stride: 1})},
	}}); err != nil {
		f.Fatal(err)
	}
	begin := putBegin(nil, 1, generation, 8192, 8<<20)
	f.Add(append(append([]byte{}, begin...), data(1, bytes.Repeat([]byte{1}, 8192), piece{1, 4 * 4096, 8192})...))
	f.Add(append(append([]byte{}, begin...), data(1, bytes.Repeat([]byte{1}, 64), piece{1, 3 * 4096, 32}, piece{1, 1<<64 - 1, 32})...))
	f.Add(putHeader(begin, header{kind: frameCancel, id: 1}))
	f.Add(putDesc(putHeader(begin, header{kind: frameDesc, id: 1, count: 1, size: descLen}), desc{9, 0, 1, 4 * 4096, 64}))
	f.Fuzz(func(t *testing.T, frames []byte) {
		left, right := net.Pipe()
		w := &writer{conns: map[uint64]*inbound{}, sources: map[uint64]*source{}}
		in := newInbound(b, w, 1, right)
		w.sources[9] = &source{bytes: make([]byte, 4096), refs: 2}
		in.sources[9] = w.sources[9]
		go io.Copy(io.Discard, left)
		ended := make(chan struct{})
		go func() {
			in.serve()
			close(ended)
		}()
		left.SetDeadline(time.Now().Add(5 * time.Second))
		left.Write(frames)
		left.Close()
		<-ended
		for i, v := range mem {
			if v != 0 && i/4096 != 4 && i/4096 != 5 {
				t.Fatalf("byte %d was written outside the grant", i)
			}
		}
	})
}

// FuzzAnswers feeds a receiver's frames to a writer's connection.
func FuzzAnswers(f *testing.F) {
	f.Add(putNumber(nil, frameAck, 1, 10))
	f.Add(putFailed(nil, 1, contract.Cause_CAUSE_REFUSED, "no"))
	f.Add(putHeader(nil, header{kind: frameCancelled, id: 2}))
	b := New()
	f.Fuzz(func(t *testing.T, frames []byte) {
		left, right := net.Pipe()
		p := &peer{b: b, lost: map[uint64][]*xfer{}, slots: make([]*outbound, 1)}
		c := newOutbound(p, 1, right, contract.Lane_LANE_TCP)
		ended := make(chan error, 1)
		go func() { ended <- c.read() }()
		left.SetDeadline(time.Now().Add(5 * time.Second))
		left.Write(frames)
		left.Close()
		right.SetDeadline(time.Now().Add(5 * time.Second))
		if <-ended == nil {
			t.Fatal("reading ended without an error")
		}
		right.Close()
	})
}
