package tcp

import (
	"bytes"
	"context"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func cutAll(r *receiver) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for in := range r.conns {
		in.conn.Close()
	}
}

// TestConnectionCut: what was on the connection fails as not quiet and becomes quiet once the receiver,
// asked again, says that the connection is over.
func TestConnectionCut(t *testing.T) {
	const pages, size = 512, 128 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			p := newPair(t, l.opts, pages, size)
			p.grantAll(pages)
			cut := 0
			for range 20 {
				var ops []*sdktest.Pending
				at := p.bb.count.bytesIn.Load()
				for range 3 {
					ops = append(ops, p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages)))
				}
				eventually(t, "first bytes", func() bool { return p.bb.count.bytesIn.Load() > at })
				cutAll(p.bb.recv)
				for _, op := range ops {
					if end := op.Quiet(); end.Kind != "done" {
						wantFailed(t, end, contract.Cause_CAUSE_TRANSPORT)
						cut++
					}
				}
				if cut > 0 {
					break
				}
			}
			if cut == 0 {
				t.Error("no connection was cut in time")
			}
			wantDone(t, p.submit(sdktest.Pages(0, 1), sdktest.Pages(0, 1)).End(), l.lane)
			p.a.CheckOrder()
		})
	}
}

// TestUnacceptMidTransfer: the receiver drops the writer; nothing lands any more and the writer learns
// that its ops are quiet although it cannot connect again.
func TestUnacceptMidTransfer(t *testing.T) {
	const pages, size = 512, 128 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			opts := options{"connect_timeout_ms": 300}
			for k, v := range l.opts {
				opts[k] = v
			}
			p := newPair(t, opts, pages, size)
			p.grantAll(pages)
			op := p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages))
			eventually(t, "first bytes", func() bool { return p.bb.count.bytesIn.Load() > 0 })
			node, inc, epoch := p.a.Node()
			p.bb.Unaccept(&sdk.Peer{Node: node, Incarnation: inc, Epoch: epoch})
			clear(p.dst.Bytes)
			op.Quiet()
			wantFailed(t, p.submit(sdktest.Pages(0, 1), sdktest.Pages(0, 1)).End(), contract.Cause_CAUSE_PEER_UNREACHABLE)
			if !bytes.Equal(p.dst.Bytes, make([]byte, len(p.dst.Bytes))) {
				t.Fatal("a byte landed after Unaccept")
			}
			p.a.CheckOrder()
		})
	}
}

// TestRemovePeerAfterCut: a removed peer is still asked about the ops of a lost connection.
func TestRemovePeerAfterCut(t *testing.T) {
	f := newFakeReceiver(t)
	a := sdktest.New(t, New(), sdktest.WithConfig(options{"shm": false, "abort_timeout_ms": 20, "connections": 1}))
	peer := f.peer(a, 4, 4096)
	op := peer.submit(sdktest.Pages(0, 4))
	f.waitConns(1)
	if _, err := io.ReadFull(f.conns[0], make([]byte, 1)); err != nil { // the op has begun
		t.Fatal(err)
	}
	a.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: peer.handle}}})
	end := op.End()
	if end.Quiet {
		t.Fatalf("end %+v is quiet although the receiver never answered", end)
	}
	wantFailed(t, end, contract.Cause_CAUSE_PEER_UNREACHABLE)
	op.Quiet() // the fake receiver welcomes the connection that gives the first one up
	a.CheckOrder()
}

// TestFencedWriterIsToldWhy: it used to read that the receiver had no connection left.
func TestFencedWriterIsToldWhy(t *testing.T) {
	p := newPair(t, options{"connect_timeout_ms": 100}, 8, 4096)
	p.grantAll(8)
	if r := p.b.Fence(p.a.Node()); r != contract.FenceResult_FENCE_RESULT_QUIET {
		t.Fatalf("fence: %v", r)
	}
	end := p.submit(sdktest.Pages(0, 8), sdktest.Pages(0, 8)).End()
	wantFailed(t, end, contract.Cause_CAUSE_PEER_UNREACHABLE)
	if !strings.Contains(end.Detail, "fenced") {
		t.Errorf("the detail %q does not say so", end.Detail)
	}
}

// TestFence refuses a writer epoch for good, and not its successor.
func TestFence(t *testing.T) {
	const pages, size = 512, 128 << 10
	p := newPair(t, options{}, pages, size)
	p.grantAll(pages)
	op := p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages))
	eventually(t, "first bytes", func() bool { return p.bb.count.bytesIn.Load() > 0 })
	node, inc, epoch := p.a.Node()
	if r := p.b.Fence(node, inc, epoch); r != contract.FenceResult_FENCE_RESULT_QUIET {
		t.Fatalf("fence: %v", r)
	}
	clear(p.dst.Bytes)
	op.End()
	if !bytes.Equal(p.dst.Bytes, make([]byte, len(p.dst.Bytes))) {
		t.Fatal("a byte landed after the fence")
	}
	sp := &sdk.Peer{Node: node, Incarnation: inc, Epoch: epoch, Token: make([]byte, tokenLen)}
	p.bb.Unaccept(sp)
	for _, c := range []struct {
		inc   uint64
		epoch uint32
		ok    bool
	}{{inc, epoch, false}, {inc - 1, epoch + 5, false}, {inc, epoch + 1, true}, {inc + 1, 1, true}} {
		sp.Incarnation, sp.Epoch = c.inc, c.epoch
		if err := p.bb.Accept(sp); (err == nil) != c.ok {
			t.Errorf("accept of incarnation %d epoch %d: %v", c.inc, c.epoch, err)
		}
	}
	if r := p.b.Fence(node, inc+1, 0); r != contract.FenceResult_FENCE_RESULT_QUIET {
		t.Fatalf("fence: %v", r)
	}
	sp.Incarnation, sp.Epoch = inc+1, 77
	if err := p.bb.Accept(sp); err == nil {
		t.Error("an epoch of a fenced incarnation was accepted")
	}
}

// TestShmFallsBack: a receiver that cannot map the source gets the bytes by TCP, unless the lane is
// demanded.
func TestShmFallsBack(t *testing.T) {
	const pages, size = 64, 4096
	for _, demand := range []contract.Lane{contract.Lane_LANE_ANY, contract.Lane_LANE_SHM} {
		t.Run(demand.String(), func(t *testing.T) {
			p := newPair(t, options{}, pages, size)
			p.grantAll(pages)
			if demand != contract.Lane_LANE_ANY {
				p.peer.Remove()
				var err error
				if p.peer, err = sdktest.Dial(p.a, p.b, demand); err != nil {
					t.Fatal(err)
				}
				p.plan = p.peer.IdentityPlan(p.srcPool, p.dstPool)
			}
			r := p.bb.recv
			r.mu.Lock()
			for _, w := range r.writers {
				for i := range uint64(maxSources) {
					w.sources[1<<40+i] = &source{}
				}
			}
			r.mu.Unlock()
			var ops []*sdktest.Pending
			for range 8 {
				ops = append(ops, p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages)))
			}
			for _, op := range ops {
				if demand == contract.Lane_LANE_ANY {
					wantDone(t, op.End(), contract.Lane_LANE_TCP)
				} else {
					wantFailed(t, op.End(), contract.Cause_CAUSE_LANE)
				}
			}
			if demand == contract.Lane_LANE_ANY && !bytes.Equal(p.dst.Bytes[:pages*size], p.src.Bytes[:pages*size]) {
				t.Fatal("the bytes differ")
			}
			p.a.CheckOrder()
		})
	}
}

// fakeReceiver does the handshake as its owner wants and then reads nothing.
type fakeReceiver struct {
	t     testing.TB
	l     net.Listener
	token []byte
	id    instance
	wg    sync.WaitGroup

	mu      sync.Mutex
	conns   []net.Conn
	givenUp []uint64
}

func newFakeReceiver(t testing.TB) *fakeReceiver {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeReceiver{t: t, l: l, token: bytes.Repeat([]byte{7}, tokenLen)}
	f.wg.Go(f.serve)
	t.Cleanup(func() {
		l.Close()
		f.cut()
		f.wg.Wait()
	})
	return f
}

func (f *fakeReceiver) serve() {
	for {
		c, err := f.l.Accept()
		if err != nil {
			return
		}
		_, givenUp, err := examine(c, 5*time.Second, func(hello) ([]byte, status) { return f.token, statusOK })
		if err != nil {
			c.Close()
			continue
		}
		f.mu.Lock()
		f.conns = append(f.conns, c)
		f.givenUp = append(f.givenUp, givenUp...)
		f.mu.Unlock()
		c.Write([]byte{byte(statusOK)})
	}
}

func (f *fakeReceiver) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
}

func (f *fakeReceiver) waitConns(n int) {
	f.t.Helper()
	eventually(f.t, "connections", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.conns) >= n
	})
}

// fakePeer is a peer of a at the fake receiver.
type fakePeer struct {
	a            *sdktest.Host
	handle       uint32
	plan         uint64
	bytesPerPage uint64
}

func (f *fakeReceiver) peer(a *sdktest.Host, pages uint32, size uint64) *fakePeer {
	f.t.Helper()
	ep, err := endpoint{
		Version: endpointVersion, Instance: hex.EncodeToString(f.id[:]), Host: "elsewhere", TCP: []string{f.l.Addr().String()},
	}.encode()
	if err != nil {
		f.t.Fatal(err)
	}
	r := a.AddRegion(int(uint64(pages)*size) + 64)
	return addRemote(f.t, a, &contract.PeerAdd{
		Peer: 900, Node: "fake", Incarnation: 1, Epoch: 1, Endpoint: ep, RequireLane: contract.Lane_LANE_ANY, Token: f.token,
	}, a.AddPool(pages, r.Tensor(0, size)), &contract.PoolAdd{
		Pool: 5000, Pages: pages, Tensors: []*contract.Tensor{{Region: 6000, PageStride: size, PageBytes: size}},
	})
}

// addRemote adds a peer that is no sdktest.Host, its pool, and an identity plan to it.
func addRemote(t testing.TB, a *sdktest.Host, add *contract.PeerAdd, srcPool uint64, pool *contract.PoolAdd) *fakePeer {
	t.Helper()
	p := &fakePeer{a: a, handle: add.Peer, plan: 7000, bytesPerPage: pool.Tensors[0].PageBytes}
	a.Send(
		&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: add}},
	)
	a.Until("PeerReady", func(e *contract.PluginEvent) bool { return e.GetPeerReady().GetPeer() == add.Peer })
	a.Send(
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: add.Peer, Pool: pool}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
			Plan: p.plan, SrcPool: srcPool, Peer: add.Peer, DstPool: pool.Pool, SrcPages: 1, DstPages: 1,
			Slices: []*contract.Slice{{Len: p.bytesPerPage, Count: 1}},
		}}},
	)
	return p
}

func (p *fakePeer) submit(runs []sdk.Run) *sdktest.Pending {
	var n uint64
	for _, r := range runs {
		n += uint64(r.Count)
	}
	return p.a.SubmitRaw(&contract.Submit{
		Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 2, Sequence: 2}},
		Direction:  contract.Direction_DIRECTION_WRITE, Peer: p.handle, Plan: p.plan,
		Source: sdktest.Runs(runs), Destination: sdktest.Runs(runs), LayerTo: 1 << 31, Bytes: n * p.bytesPerPage,
	})
}

// TestStalledPeer: a receiver that reads nothing costs the others nothing; an abort of its ops is
// answered in bounded time as not quiet, and quiet follows when the connection is known to be over.
func TestStalledPeer(t *testing.T) {
	const pages, size = 256, 128 << 10
	opts := options{"shm": false, "abort_timeout_ms": 50, "connections": 1, "window": 32 << 20}
	p := newPair(t, opts, pages, size)
	p.grantAll(pages)
	f := newFakeReceiver(t)
	slow := f.peer(p.a, pages, size)
	var stuck []*sdktest.Pending
	for range 4 {
		stuck = append(stuck, slow.submit(sdktest.Pages(0, pages)))
	}
	f.waitConns(1)
	for range 4 {
		wantDone(t, p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages)).End(), contract.Lane_LANE_TCP)
	}
	for _, op := range stuck {
		if n := op.Progress(); n != 0 {
			t.Fatalf("progress %d without an acknowledgement", n)
		}
		op.Abort()
	}
	unquiet := 0
	for _, op := range stuck {
		end := op.End()
		if end.Kind != "aborted" {
			t.Fatalf("end %+v, want aborted", end)
		}
		if !end.Quiet {
			unquiet++
		}
	}
	if unquiet == 0 {
		t.Fatal("an op whose bytes may be on the way was called quiet")
	}
	// Another connection has taken the place of the retired one; the latter breaks.
	last := slow.submit(sdktest.Pages(0, 1))
	f.waitConns(2)
	f.mu.Lock()
	f.conns[0].Close()
	f.mu.Unlock()
	for _, op := range stuck {
		op.Quiet()
	}
	last.Abort()
	last.End()
	f.mu.Lock()
	if len(f.givenUp) == 0 {
		t.Error("no connection was given up in a handshake")
	}
	f.mu.Unlock()
	p.a.CheckOrder()
}

// TestNobodyThere: ops to an address where nobody listens fail in bounded time.
func TestNobodyThere(t *testing.T) {
	f := newFakeReceiver(t)
	f.l.Close()
	a := sdktest.New(t, New(), sdktest.WithConfig(options{"connect_timeout_ms": 200}))
	peer := f.peer(a, 4, 4096)
	end := peer.submit(sdktest.Pages(0, 4)).End()
	wantFailed(t, end, contract.Cause_CAUSE_PEER_UNREACHABLE)
	if !end.Quiet {
		t.Fatal("nothing was sent, so it is quiet")
	}
	op := peer.submit(sdktest.Pages(0, 4))
	op.Abort()
	if end := op.End(); !end.Quiet || end.Kind == "done" {
		t.Fatalf("end %+v", end)
	}
}

// TestWrongToken: neither end gets further than the handshake.
func TestWrongToken(t *testing.T) {
	f := newFakeReceiver(t)
	a := sdktest.New(t, New(), sdktest.WithConfig(options{"connect_timeout_ms": 200}))
	peer := f.peer(a, 4, 4096)
	f.token = bytes.Repeat([]byte{8}, tokenLen)
	wantFailed(t, peer.submit(sdktest.Pages(0, 4)).End(), contract.Cause_CAUSE_PEER_UNREACHABLE)

	b := New()
	h := sdktest.New(t, b)
	w := dialRaw(t, b, h, "writer", nil)
	if w.err == nil {
		t.Fatal("a writer that nobody admitted was welcomed")
	}
	if err := b.Accept(&sdk.Peer{Node: "writer", Incarnation: 1, Epoch: 1, Token: make([]byte, tokenLen)}); err != nil {
		t.Fatal(err)
	}
	if w := dialRaw(t, b, h, "writer", bytes.Repeat([]byte{1}, tokenLen)); w.err == nil {
		t.Fatal("a wrong token was welcomed")
	}
	// A writer that does not care what the receiver proves.
	ep, id, err := decodeEndpoint(h.Response.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", ep.TCP[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(sdktest.Wait))
	greeting := hello{target: id, incarnation: 1, epoch: 1, conn: 1, node: "writer"}
	c.Write(greeting.append(nil))
	if _, err := io.ReadFull(c, make([]byte, challengeLen)); err != nil {
		t.Fatal(err)
	}
	c.Write(make([]byte, 2+macLen))
	if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
		t.Fatalf("a false proof was answered with %x, %v", b, err)
	}
	if w := dialRaw(t, b, h, "writer", make([]byte, tokenLen)); w.err != nil {
		t.Fatal(w.err)
	}
	eventually(t, "three refused handshakes", func() bool { return b.Counters()["handshakes_refused"] == 3 })
}

// TestChaos mixes ops, aborts, cuts and revokes: every op ends, becomes quiet, and nothing is left over.
func TestChaos(t *testing.T) {
	const pages, size = 128, 32 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 1))
			opts := options{"window": 256 << 10, "connections": 1 + r.IntN(3), "abort_timeout_ms": 10 + 500*r.IntN(2)}
			for k, v := range l.opts {
				opts[k] = v
			}
			p := newPair(t, opts, pages, size)
			ends := map[string]int{}
			var ops []*sdktest.Pending
			for round := range 12 {
				d := sdk.Opener{Incarnation: 2, Sequence: uint64(10 + round)}
				g := p.b.Grant(d, p.dstPool, sdktest.Pages(0, pages)...)
				for range 24 {
					n := uint32(1 + r.IntN(pages))
					op := p.peer.Submit(sdktest.Op{Plan: p.plan, Src: sdktest.Pages(0, n), Dst: sdktest.Pages(pages-n, n), Destination: d})
					if ops = append(ops, op); r.IntN(4) == 0 {
						ops[r.IntN(len(ops))].Abort()
					}
				}
				switch r.IntN(3) {
				case 0:
					cutAll(p.bb.recv)
				case 1:
					p.b.Revoke(g, d)
				}
			}
			for _, op := range ops {
				ends[op.Quiet().Kind]++
			}
			t.Log(ends)
			if ends["done"] == 0 {
				t.Error("no op was done")
			}
			p.a.CheckOrder()
			p.idle()
		})
	}
}

// TestPeerRemovedAsHandshakeFails: the watch that closes a connection when its peer is removed used to run
// into the nil that a failed handshake leaves behind, and the process ended.
func TestPeerRemovedAsHandshakeFails(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused, served := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close() // no challenge: the handshake fails
			refused <- struct{}{}
		}
	}()
	defer func() { <-served }()
	defer l.Close()
	b := New()
	for i := range 1000 {
		p := &peer{b: b, sdk: &sdk.Peer{Node: "b", Token: make([]byte, tokenLen)}, ep: endpoint{TCP: []string{l.Addr().String()}}}
		p.ctx, p.cancel = context.WithCancel(b.ctx)
		removed := make(chan struct{})
		go func() {
			defer close(removed)
			<-refused
			for range i % 100 * 10 {
				runtime.Gosched()
			}
			p.cancel()
		}()
		if c, _, err := p.connect(uint64(i+1), nil); err == nil {
			c.Close()
			t.Fatal("a handshake without a challenge was taken for good")
		}
		<-removed
	}
}
