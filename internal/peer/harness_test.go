package peer

import (
	"bytes"
	"context"
	"flag"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

func TestMain(m *testing.M) {
	flag.Set("rapid.checks", "25") // each brings engines up and down; the command line overrides it
	goleak.VerifyTestMain(m)
}

// node is an engine's links with a sink that remembers.
type node struct {
	*Links
	t *testing.T

	mu     sync.Mutex
	events []Event
	block  chan struct{} // non-nil: the sink waits for it
	on     func(Event)
}

func (n *node) sink(ev Event) {
	n.mu.Lock()
	n.events = append(n.events, ev)
	block, on := n.block, n.on
	n.mu.Unlock()
	if on != nil {
		on(ev)
	}
	if block != nil {
		<-block
	}
}

func (n *node) all() []Event {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.events)
}

// find returns the events of a kind, in order.
func (n *node) find(kind EventKind) []Event {
	return slices.DeleteFunc(n.all(), func(e Event) bool { return e.Kind != kind })
}

func (n *node) await(what string, ok func() bool) {
	n.t.Helper()
	until(n.t, n.cfg.Node+": "+what, ok)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timeout: %s", what)
		}
	}
}

func (n *node) peer(name string) PeerStatus {
	for _, p := range n.Status().Peers {
		if p.Node == name {
			return p
		}
	}
	return PeerStatus{}
}

func (n *node) awaitUp(name string, incarnation uint64) PeerStatus {
	n.t.Helper()
	var p PeerStatus
	n.await("peer "+name+" up", func() bool {
		p = n.peer(name)
		return p.State == "up" && p.Incarnation == incarnation
	})
	return p
}

func (n *node) close() {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		n.t.Error(err)
	}
}

// fast are timings for tests: short, but with room for a machine that is busy.
func fast(name string, incarnation uint64, listen string) Config {
	return Config{
		Node: name, Incarnation: incarnation, HostID: "host", Listen: listen,
		Beat: 50 * time.Millisecond, Silence: 3 * time.Second, Handshake: 3 * time.Second, NameWait: 100 * time.Millisecond,
		RedialMin: 5 * time.Millisecond, RedialMax: 50 * time.Millisecond, RefusedWait: 100 * time.Millisecond,
	}
}

func start(t *testing.T, cfg Config) *node {
	t.Helper()
	n := &node{t: t}
	cfg.Sink = n.sink
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n.Links = l
	t.Cleanup(n.close)
	return n
}

func (n *node) as() membership.Peer {
	return membership.Peer{Record: membership.Record{Node: n.cfg.Node, Address: n.Addr()}}
}

// meet lets the smaller name of each pair dial, so that no stream is replaced by another's.
func meet(nodes ...*node) {
	for _, n := range nodes {
		var peers []membership.Peer
		for _, m := range nodes {
			p := m.as()
			if m.cfg.Node < n.cfg.Node {
				p.Address = ""
			}
			peers = append(peers, p)
		}
		n.SetPeers(peers)
	}
}

// meetBoth lets both sides of each pair dial.
func meetBoth(nodes ...*node) {
	var peers []membership.Peer
	for _, n := range nodes {
		peers = append(peers, n.as())
	}
	for _, n := range nodes {
		n.SetPeers(peers)
	}
}

func socket(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return "unix:" + filepath.Join(dir, "s")
}

func frame(seq uint64) core.Frame {
	return core.Frame{Kind: core.FrameProgress, Room: int64(seq), S: opS, D: opD, Bytes: int64(seq)}
}

func abort(seq uint64) core.Frame {
	return core.Frame{Kind: core.FrameAbort, Room: int64(seq), S: opS, D: opD}
}

// checkOrder asserts what Sink promises for each peer: Hello, anything, Down, Hello; conn ids and
// incarnations of one stream only; and never an older incarnation.
func checkOrder(t interface {
	Helper()
	Fatalf(string, ...any)
}, events []Event) {
	t.Helper()
	up, newest := map[string]Event{}, map[string]uint64{}
	for i, e := range events {
		if e.Kind == Refused && e.Conn == 0 {
			continue
		}
		cur, ok := up[e.Node]
		switch {
		case e.Kind == Hello && ok:
			t.Fatalf("event %d: Hello of %s without Down", i, e.Node)
		case e.Kind == Hello && e.Incarnation < newest[e.Node]:
			t.Fatalf("event %d: Hello of an older incarnation of %s", i, e.Node)
		case e.Kind == Hello:
			up[e.Node], newest[e.Node] = e, e.Incarnation
		case !ok:
			t.Fatalf("event %d: kind %d of %s without Hello", i, e.Kind, e.Node)
		case e.Conn != cur.Conn || e.Incarnation != cur.Incarnation:
			t.Fatalf("event %d: kind %d of stream %d while %d is up", i, e.Kind, e.Conn, cur.Conn)
		case e.Kind == Down:
			delete(up, e.Node)
		}
	}
}

// proxy forwards TCP and can be told to cut, to swallow, or to hold what the target says.
type proxy struct {
	ln     net.Listener
	target string
	mu     sync.Mutex
	conns  []net.Conn
	mute   bool
	held   *bytes.Buffer // non-nil: what the target says, and that it ended, is kept here
	left   int           // connections that the client has closed
	wg     sync.WaitGroup
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{ln: ln, target: target}
	p.wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", p.target)
			if err != nil {
				in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			p.wg.Go(func() {
				p.copy(in, out, false)
				p.mu.Lock()
				p.left++
				p.mu.Unlock()
			})
			p.wg.Go(func() { p.copy(out, in, true) })
		}
	})
	t.Cleanup(func() { ln.Close(); p.cut(); p.wg.Wait() })
	return p
}

func (p *proxy) copy(from, to net.Conn, target bool) {
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		pass := !p.muted() && !(target && p.keep(buf[:n]))
		if err != nil {
			if pass {
				to.Close()
			}
			return
		}
		if pass {
			to.Write(buf[:n])
		}
	}
}

func (p *proxy) muted() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.mute }

func (p *proxy) hold() { p.mu.Lock(); defer p.mu.Unlock(); p.held = &bytes.Buffer{} }

func (p *proxy) keep(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		return false
	}
	p.held.Write(b)
	return true
}

// holds reports whether f, as it is on the wire, is among what is held.
func (p *proxy) holds(f *wire.Frame) bool {
	b, err := proto.Marshal(f)
	p.mu.Lock()
	defer p.mu.Unlock()
	return err == nil && p.held != nil && bytes.Contains(p.held.Bytes(), b)
}

// cutTarget breaks the target's side of the only connection; the client does not notice while it is held.
func (p *proxy) cutTarget() { p.mu.Lock(); defer p.mu.Unlock(); p.conns[1].Close() }

// release lets the client of the only connection have what was held.
func (p *proxy) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held.WriteTo(p.conns[0])
	p.held = nil
}

func (p *proxy) setMute(m bool) { p.mu.Lock(); defer p.mu.Unlock(); p.mute = m }

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}

// raw is a peer played by the test over the real transport.
type raw struct {
	t      *testing.T
	stream stream
}

func rawDial(t *testing.T, address string) *raw {
	t.Helper()
	target := address
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		target = "unix://" + path
	}
	cc, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(func() { cancel(); cc.Close() })
	st, err := wire.NewPeerClient(cc).Link(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &raw{t: t, stream: st}
}

func (r *raw) send(f ...*wire.Frame) error { return r.stream.Send(&wire.Batch{Frames: f}) }

func (r *raw) say(h *wire.Hello) { r.send(&wire.Frame{Frame: &wire.Frame_Hello{Hello: h}}) }

func (r *raw) recv() (*wire.Frame, error) {
	b, err := r.stream.Recv()
	if err != nil {
		return nil, err
	}
	return b.Frames[0], nil
}

func (r *raw) wantHello() {
	r.t.Helper()
	if f, err := r.recv(); f.GetHello() == nil {
		r.t.Fatalf("got %v, %v, want a Hello", f, err)
	}
}

func (r *raw) wantRefused(code RefusalCode) {
	r.t.Helper()
	f, err := r.recv()
	if f.GetRefused().GetCode() != wire.RefusalCode(code) {
		r.t.Fatalf("got %v, %v, want refusal %s", f, err, code)
	}
}

func (r *raw) wantEnd() {
	r.t.Helper()
	for {
		if _, err := r.recv(); err != nil {
			if strings.Contains(err.Error(), "DeadlineExceeded") {
				r.t.Fatal("the stream did not end")
			}
			return
		}
	}
}

// fake is an engine played by the test that answers one Hello and then says what it is told.
type fake struct {
	wire.UnimplementedPeerServer
	address string
	hello   *wire.Hello
	mu      sync.Mutex
	cur     wire.Peer_LinkServer
	heard   []*wire.Frame
}

func fakeEngine(t *testing.T, node string, incarnation uint64) *fake {
	t.Helper()
	f := &fake{address: socket(t), hello: &wire.Hello{Versions: []uint32{1}, Node: node, Incarnation: incarnation}}
	ln, err := net.Listen("unix", strings.TrimPrefix(f.address, "unix:"))
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	wire.RegisterPeerServer(s, f)
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(ln) })
	t.Cleanup(func() { s.Stop(); wg.Wait() })
	return f
}

func (f *fake) Link(st wire.Peer_LinkServer) error {
	first, err := st.Recv()
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.cur, f.heard = st, append(f.heard, first.GetFrames()...)
	st.Send(&wire.Batch{Frames: []*wire.Frame{{Frame: &wire.Frame_Hello{Hello: f.hello}}}})
	f.mu.Unlock()
	for {
		b, err := st.Recv()
		if err != nil {
			return err
		}
		f.mu.Lock()
		f.heard = append(f.heard, b.GetFrames()...)
		f.mu.Unlock()
	}
}

// attempts lists what the Hellos said.
func (f *fake) attempts() (got []uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.heard {
		if h := w.GetHello(); h != nil {
			got = append(got, h.GetAttempt())
		}
	}
	return got
}

func (f *fake) send(frames ...*wire.Frame) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cur != nil {
		f.cur.Send(&wire.Batch{Frames: frames})
	}
}
