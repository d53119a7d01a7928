package peer

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// bytesCodec sends what it is given.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (bytesCodec) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(b)
	return nil
}
func (bytesCodec) Name() string { return "proto" }

var _ encoding.Codec = bytesCodec{}

// Whatever connects and talks nonsense is turned away within the handshake bound; a healthy peer does
// not notice.
func TestGarbage(t *testing.T) {
	t.Parallel()
	for name, listen := range map[string]func() string{"unix": func() string { return socket(t) }, "tcp": func() string { return "127.0.0.1:0" }} {
		t.Run(name, func(t *testing.T) {
			cfg := fast("a", 1, listen())
			cfg.Handshake = 300 * time.Millisecond
			a, b := start(t, cfg), start(t, fast("b", 1, socket(t)))
			a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b"}}})
			b.SetPeers([]membership.Peer{a.as()})
			a.awaitUp("b", 1)
			conn := a.find(Hello)[0].Conn

			network, address := "tcp", a.Addr()
			if path, ok := strings.CutPrefix(address, "unix:"); ok {
				network, address = "unix", path
			}
			for _, text := range []string{"", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("\x00", 1<<16), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 100)} {
				c, err := net.Dial(network, address)
				if err != nil {
					t.Fatal(err)
				}
				c.Write([]byte(text))
				c.SetReadDeadline(time.Now().Add(20 * time.Second))
				for buf := make([]byte, 4096); ; {
					if _, err := c.Read(buf); err != nil {
						if ne, ok := err.(net.Error); ok && ne.Timeout() {
							t.Errorf("%.20q: the connection stayed open", text)
						}
						break
					}
				}
				c.Close()
			}

			room, err := encodeRoom(frame(1))
			if err != nil {
				t.Fatal(err)
			}
			hello := func(change func(*wire.Hello)) *wire.Frame {
				h := &wire.Hello{Versions: []uint32{1}, Node: "c", Incarnation: 1, Attempt: 1, To: "a"}
				change(h)
				return &wire.Frame{Frame: &wire.Frame_Hello{Hello: h}}
			}
			for _, c := range []struct {
				name string
				say  []*wire.Frame
				code RefusalCode // 0: no answer but the end
			}{
				{"nothing", nil, 0},
				{"a frame before Hello", []*wire.Frame{room}, 0},
				{"an empty frame", []*wire.Frame{{}}, 0},
				{"version 2", []*wire.Frame{hello(func(h *wire.Hello) { h.Versions = []uint32{2} })}, RefusedVersion},
				{"a stranger", []*wire.Frame{hello(func(h *wire.Hello) {})}, RefusedUnknown},
				{"ourselves", []*wire.Frame{hello(func(h *wire.Hello) { h.Node = "a" })}, RefusedSelf},
				{"somebody else", []*wire.Frame{hello(func(h *wire.Hello) { h.To = "z" })}, RefusedNode},
				{"attempt 0", []*wire.Frame{hello(func(h *wire.Hello) { h.Node, h.Attempt = "b", 0 })}, RefusedHello},
				{"incarnation 0", []*wire.Frame{hello(func(h *wire.Hello) { h.Incarnation = 0 })}, RefusedHello},
			} {
				r := rawDial(t, a.Addr())
				if c.say != nil {
					r.send(c.say...)
				}
				if c.code != 0 {
					r.wantRefused(c.code)
				}
				r.wantEnd()
			}
			rawBytes(t, a.Addr(), []byte{0xff, 0xff, 0xff})
			rawBytes(t, a.Addr(), make([]byte, maxMessage+1))
			rawBytes(t, a.Addr(), nil)

			if !b.Send("a", 0, frame(9), false) {
				t.Fatal("b's link suffered")
			}
			a.await("b's frame", func() bool { return len(a.find(Frame)) == 1 })
			if got := a.find(Hello); len(got) != 1 || got[0].Conn != conn {
				t.Errorf("b's link suffered: %+v", got)
			}
			if a.Status().Rejected == 0 {
				t.Error("nothing was counted")
			}
		})
	}
}

// rawBytes sends one message that need not be protobuf, and waits for the end of the stream.
func rawBytes(t *testing.T, address string, b []byte) {
	t.Helper()
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		address = "unix://" + path
	}
	cc, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	st, err := cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, wire.Peer_Link_FullMethodName, grpc.ForceCodec(bytesCodec{}))
	if err != nil {
		t.Fatal(err)
	}
	st.SendMsg(&b)
	for {
		var got []byte
		if err := st.RecvMsg(&got); err != nil {
			if ctx.Err() != nil {
				t.Error("the stream did not end")
			}
			return
		}
	}
}

// A bad frame harms its own room only; bytes that are no batch end the stream.
func TestBadFramesOnALink(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	f := fakeEngine(t, "b", 3)
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: f.address}}})
	a.awaitUp("b", 3)
	pool, _ := encodePool(Pool{ID: 5, Group: "g", Role: statemachine.Destination, Pages: 10, Layers: 1, Tensors: []Tensor{{Region: 1, PageBytes: 1, PageStride: 1}}})
	register := func(room int64, pool uint64, last int32) *wire.Frame {
		w, err := encodeRoom(core.Frame{Kind: core.FrameRegister, Room: room, D: opD, Group: "g", Backend: "tcp", Epoch: 1,
			Ranks: []core.RankPages{{Parts: []core.PartPages{{Pool: pool, Runs: []layout.Run{{Start: last, Count: 1, Stride: 1}}}}}}})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	noOpener, _ := encodeRoom(frame(3))
	noOpener.GetRoom().Destination.Sequence = 0
	noRoom, _ := encodeRoom(frame(4))
	noRoom.GetRoom().Room = 1 << 63
	group, _ := encodeGroup(testGroup())
	group.GetGroup().Fingerprint[0]++
	good, _ := encodeRoom(frame(6))
	f.send(register(1, 5, 0), pool, register(2, 5, 10), noOpener, noRoom, group,
		&wire.Frame{}, &wire.Frame{Frame: &wire.Frame_Room{Room: &wire.Room{Room: 5}}},
		&wire.Frame{Frame: &wire.Frame_Room{Room: &wire.Room{Room: 7, Kind: &wire.Room_Ready{Ready: &wire.Ready{}}}}},
		&wire.Frame{Frame: &wire.Frame_Lost{Lost: &wire.Lost{}}},
		&wire.Frame{Frame: &wire.Frame_PoolGone{PoolGone: &wire.PoolGone{Pool: 5}}}, register(8, 5, 0), good)
	a.await("the good frame", func() bool { return len(a.find(Frame)) == 1 })
	var got []string
	for _, e := range a.find(BadFrame) {
		field, _, _ := strings.Cut(e.Detail, ":")
		got = append(got, fmt.Sprintf("room %d kind %d %s", e.Frame.Room, e.Frame.Kind, field))
	}
	want := []string{
		"room 1 kind 2 pages.pool",  // not announced yet
		"room 2 kind 2 pages",       // page 10 of 10
		"room 3 kind 5 destination", // sequence 0
		"room 7 kind 10 destination",
		"room 8 kind 2 pages.pool", // gone
	}
	if !slices.Equal(got, want) {
		t.Errorf("bad frames\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	p := a.peer("b")
	if p.Counters.Bad != 8 || p.Counters.Unknown != 2 || p.State != "up" {
		t.Errorf("%+v", p)
	}
	if len(p.Refusals) != 1 || p.Refusals[0].Code != RefusedFingerprint || p.Refusals[0].Field != "group.fingerprint" || p.Refusals[0].ByPeer {
		t.Errorf("refusals %+v", p.Refusals)
	}
	until(t, "the refusal to be sent", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return slices.ContainsFunc(f.heard, func(w *wire.Frame) bool { return w.GetRefused().GetPeerGroup() == "decode" })
	})
	for i, frames := range [][]*wire.Frame{nil, {{Frame: &wire.Frame_Hello{Hello: f.hello}}}} {
		f.hello = proto.Clone(f.hello).(*wire.Hello)
		f.send(frames...)
		a.await("down", func() bool { return len(a.find(Down)) == i+1 })
		if d := a.find(Down)[i].Detail; !strings.Contains(d, "framing") {
			t.Errorf("down because %q", d)
		}
		a.awaitUp("b", 3)
	}
	checkOrder(t, a.all())
}

// The engine behind an address is not the one that membership named.
func TestWrongEngine(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	for name, f := range map[string]*fake{"b": fakeEngine(t, "x", 3), "c": fakeEngine(t, "c", 2), "d": fakeEngine(t, "d", 1), "e": fakeEngine(t, "e", 1)} {
		switch name {
		case "d":
			f.hello.Versions = []uint32{2, 3}
		case "e":
			f.hello.Incarnation = 0
		}
		// Membership knows that incarnation 5 of each is alive.
		p := membership.Peer{Record: membership.Record{Node: name, Address: f.address}, Incarnation: 5}
		a.SetPeers([]membership.Peer{p})
		want := map[string]RefusalCode{"b": RefusedNode, "c": RefusedStale, "d": RefusedVersion, "e": RefusedHello}[name]
		a.await("refused "+name, func() bool {
			s := a.peer(name)
			return s.State == "refused" && len(s.Refusals) == 1 && s.Refusals[0].Code == want && !s.Refusals[0].ByPeer
		})
		until(t, "the refusal to be sent", func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return slices.ContainsFunc(f.heard, func(w *wire.Frame) bool { return w.GetRefused().GetCode() == wire.RefusalCode(want) })
		})
		if r := a.find(Refused); len(r) == 0 || r[len(r)-1].Refusal.Code != want {
			t.Errorf("%s: events %+v", name, r)
		}
	}
	if h := a.find(Hello); len(h) != 0 {
		t.Errorf("a stream came up: %+v", h)
	}
}

// TestOrdering: whatever breaks and restarts, the sink sees streams one after the other, frames of one
// stream in the order of sending without a gap, and the link always comes back.
func TestOrdering(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		la, lb := socket(t), socket(t)
		incB := uint64(1)
		mk := func(name string, inc uint64, listen string) *node {
			cfg := fast(name, inc, listen)
			cfg.RedialMin = time.Duration(rapid.IntRange(1, 2000).Draw(rt, "redial")) * time.Microsecond
			n := &node{t: t}
			cfg.Sink = n.sink
			var err error
			if n.Links, err = New(cfg); err != nil {
				rt.Fatalf("%v", err)
			}
			return n
		}
		a, b := mk("a", 1, la), mk("b", incB, lb)
		defer func() { a.close(); b.close() }()
		meetBoth(a, b)
		var wg sync.WaitGroup
		stop := make(chan struct{})
		wg.Go(func() {
			for seq := uint64(1); ; seq++ {
				select {
				case <-stop:
					return
				default:
				}
				a.Send("b", 0, frame(seq), false)
				if seq%64 == 0 {
					time.Sleep(time.Millisecond)
				}
			}
		})
		var sinks []*node
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"break a", "break b", "both", "restart b", "wait"}).Draw(rt, "step") {
			case "break a":
				breakLink(a, "b")
			case "break b":
				breakLink(b, "a")
			case "both":
				breakLink(a, "b")
				breakLink(b, "a")
			case "restart b":
				b.close()
				sinks = append(sinks, b)
				incB++
				b = mk("b", incB, lb)
				meetBoth(a, b)
			case "wait":
				time.Sleep(2 * time.Millisecond)
			}
		}
		until(t, "the link to come back", func() bool {
			return a.peer("b").State == "up" && a.peer("b").Incarnation == incB && b.peer("a").State == "up"
		})
		n := len(b.find(Frame))
		until(t, "frames to flow again", func() bool { return len(b.find(Frame)) > n })
		close(stop)
		wg.Wait()
		checkOrder(rt, a.all())
		for _, s := range append(sinks, b) {
			checkOrder(rt, s.all())
			last, conn := int64(0), uint64(0)
			for _, e := range s.find(Frame) {
				// A gap may be where the stream changed, and nowhere else.
				if e.Frame.Room <= last || e.Conn == conn && e.Frame.Room != last+1 {
					rt.Fatalf("frame %d after %d (stream %d after %d)", e.Frame.Room, last, e.Conn, conn)
				}
				last, conn = e.Frame.Room, e.Conn
			}
		}
	})
}

func breakLink(n *node, peer string) {
	if k := n.lookupAny(peer); k != nil {
		if c := k.current(); c != nil {
			c.end("broken by the test")
		}
	}
}
