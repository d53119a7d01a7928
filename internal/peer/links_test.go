package peer

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

func TestThreeEngines(t *testing.T) {
	for name, listen := range map[string]func() string{
		"unix": func() string { return socket(t) },
		"tcp":  func() string { return "127.0.0.1:0" },
	} {
		t.Run(name, func(t *testing.T) {
			var ns []*node
			for _, name := range []string{"a", "b", "c"} {
				cfg := fast(name, 1, listen())
				cfg.Backends = []Backend{{Name: "tcp", Epoch: 2}}
				cfg.Features = []string{"x"}
				ns = append(ns, start(t, cfg))
			}
			a, b := ns[0], ns[1]
			meet(ns...)
			for _, x := range ns {
				for _, y := range ns {
					if x != y {
						x.awaitUp(y.cfg.Node, 1)
					}
				}
			}
			h := a.find(Hello)[0]
			if h.HostID != "host" || !slices.Equal(h.Backends, []Backend{{Name: "tcp", Epoch: 2}}) || !slices.Equal(h.Features, []string{"x"}) || h.Conn == 0 {
				t.Errorf("hello %+v", h)
			}
			for i := range uint64(1000) {
				if !a.Send("b", 0, frame(i+1), false) {
					t.Fatal("not queued")
				}
			}
			b.await("1000 frames", func() bool { return len(b.find(Frame)) == 1000 })
			for i, e := range b.find(Frame) {
				if e.Frame.Room != int64(i+1) || e.Node != "a" || e.Incarnation != 1 {
					t.Fatalf("frame %d is %+v", i, e)
				}
			}
			b.await("beats", func() bool { return len(b.find(Heard)) > 2 })
			p := a.peer("b")
			if !p.SameHost || p.Version != 1 || (name == "unix") != strings.HasPrefix(p.Credentials, "uid ") || p.Counters.Sent < 1000 || !p.Named {
				t.Errorf("status %+v", p)
			}
			if _, err := json.Marshal(a.Status()); err != nil {
				t.Error(err)
			}
			if a.Send("nobody", 0, frame(1), false) {
				t.Error("a frame for nobody was queued")
			}
			if a.Send("b", 999, frame(1), false) {
				t.Error("a frame for another stream was queued")
			}
		})
	}
}

// Announcements come after each Hello, in order, before what the sink sends in reaction to it.
func TestAnnouncements(t *testing.T) {
	a := start(t, fast("a", 7, socket(t)))
	listen := socket(t)
	if err := a.AnnouncePool(testPool()); err != nil {
		t.Fatal(err)
	}
	if err := a.AnnounceEndpoint(testEndpoint()); err != nil {
		t.Fatal(err)
	}
	if err := a.AnnounceGroup(testGroup()); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	a.on = func(ev Event) {
		if ev.Kind == Hello {
			a.Send("b", ev.Conn, roomFrames()["bound"], true)
		}
	}
	a.mu.Unlock()
	b := start(t, fast("b", 1, listen))
	meet(a, b)
	kinds := func(n *node) []EventKind {
		var out []EventKind
		for _, e := range n.all() {
			if e.Kind != Heard {
				out = append(out, e.Kind)
			}
		}
		return out
	}
	b.await("announcements", func() bool { return slices.Equal(kinds(b), []EventKind{Hello, GroupUp, PoolUp, EndpointUp, Frame}) })
	ep := b.find(EndpointUp)[0].Endpoint
	if string(ep.Token) != string(PairToken(testEndpoint().Secret, "b", 1)) || ep.Secret != nil || string(ep.Blob) != "where to dial" {
		t.Errorf("endpoint %+v", ep)
	}
	if p := b.find(PoolUp)[0].Pool; p.ID != testPool().ID || len(p.Tensors) != 2 {
		t.Errorf("pool %+v", p)
	}

	// While up, changes are told at once; what is announced twice is not repeated.
	g := testGroup()
	g.Ranks = []int32{0, 1, 2, 3}
	for range 2 {
		if err := a.AnnounceGroup(g); err != nil {
			t.Fatal(err)
		}
	}
	a.AnnounceLost("tcp", 3)
	a.AnnounceLost("tcp", 3)
	a.AnnounceDraining()
	a.RemovePool(testPool().ID)
	a.RemovePool(testPool().ID)
	a.RemoveGroup(g.Name, g.Role)
	b.await("changes", func() bool {
		return slices.Equal(kinds(b)[5:], []EventKind{GroupUp, Lost, Draining, PoolGone, GroupGone})
	})

	// A new incarnation of b learns what is still true.
	if err := a.AnnounceGroup(g); err != nil {
		t.Fatal(err)
	}
	b.await("group", func() bool { return len(kinds(b)) == 11 })
	b.close()
	b2 := start(t, fast("b", 2, listen))
	meet(a, b2)
	b2.await("announcements", func() bool { return slices.Equal(kinds(b2), []EventKind{Hello, GroupUp, Lost, Draining, Frame}) })
	if err := a.AnnouncePool(testPool()); err != nil {
		t.Fatal(err)
	}
	if err := a.AnnouncePool(testPool()); err == nil {
		t.Error("a pool id was reused")
	}
	for _, err := range []error{a.AnnounceGroup(Group{}), a.AnnouncePool(Pool{}), a.AnnounceEndpoint(Endpoint{})} {
		if err == nil {
			t.Error("an empty announcement was accepted")
		}
	}
}

// What went while the link was down is reported gone when the same incarnation is back.
func TestGoneWhileDown(t *testing.T) {
	a, b := start(t, fast("a", 7, socket(t))), start(t, fast("b", 1, socket(t)))
	g, p := testGroup(), testPool()
	stays, other := g, p
	stays.Name, other.ID = "stays", 6
	for _, err := range []error{a.AnnounceGroup(g), a.AnnounceGroup(stays), a.AnnouncePool(p), a.AnnouncePool(other)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	meet(a, b)
	b.await("pools", func() bool { return len(b.find(PoolUp)) == 2 })
	a.SetPeers(nil) // no redial
	breakLink(a, "b")
	b.await("down", func() bool { return len(b.find(Down)) == 1 })
	a.RemovePool(p.ID)
	a.RemoveGroup(g.Name, g.Role)
	meet(a, b)
	b.await("gone", func() bool { return len(b.find(GroupGone)) == 1 })
	if gone := b.find(PoolGone); len(gone) != 1 || gone[0].Pool.ID != p.ID || b.find(GroupGone)[0].Group.Name != g.Name {
		t.Errorf("%+v, %+v", gone, b.find(GroupGone))
	}
	checkOrder(t, b.all())
}

// The larger name may be the only one that can dial.
func TestOneSided(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	b := start(t, fast("b", 1, socket(t)))
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b"}}})
	if s := a.peer("b").State; s != "waiting" {
		t.Errorf("state %q", s)
	}
	b.SetPeers([]membership.Peer{a.as()})
	if p := a.awaitUp("b", 1); p.Dialled {
		t.Error("a dialled")
	}
}

// An engine that is no longer named keeps its stream, and is not redialled when it ends.
func TestUnnamed(t *testing.T) {
	a, b := start(t, fast("a", 1, socket(t))), start(t, fast("b", 1, socket(t)))
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b"}}})
	b.SetPeers([]membership.Peer{a.as()})
	a.awaitUp("b", 1)
	b.awaitUp("a", 1)
	a.SetPeers(nil)
	if !a.Send("b", 0, frame(5), false) {
		t.Fatal("the stream went")
	}
	b.await("frame", func() bool { return len(b.find(Frame)) == 1 })
	a.lookupAny("b").current().end("test")
	b.await("refusal", func() bool {
		p := b.peer("a")
		return p.State == "connecting" && len(p.Refusals) == 1 && p.Refusals[0].Code == RefusedUnknown && p.Refusals[0].ByPeer
	})
	a.await("forgotten", func() bool { return len(a.Status().Peers) == 0 })
	meet(a, b)
	b.awaitUp("a", 1)
	if r := b.peer("a").Refusals; len(r) != 0 {
		t.Errorf("refusals after Hello: %+v", r)
	}
}

// TestNamesOfStreamsAreBounded: every name that once had a stream was kept, without a bound. Beyond it a new name is
// refused, whoever dials, and one that was met is welcome for ever.
func TestNamesOfStreamsAreBounded(t *testing.T) {
	a := start(t, fast("m", 1, socket(t)))
	a.mu.Lock()
	a.maxMet = 2
	a.mu.Unlock()
	listen := socket(t)
	b, c := start(t, fast("b", 1, listen)), start(t, fast("c", 1, socket(t)))
	meet(a, b, c)
	a.awaitUp("b", 1)
	a.awaitUp("c", 1)
	b.close()
	for _, name := range []string{"d", "z"} { // one that dials, one that is dialled
		d := start(t, fast(name, 1, socket(t)))
		meet(a, c, d)
		a.await("the refusal", func() bool {
			r := a.peer(name).Refusals
			return len(r) == 1 && r[0].Code == RefusedUnknown && strings.Contains(r[0].Detail, "2 other engines") && !r[0].ByPeer
		})
		if a.peer(name).State == "up" || a.peer(name).Counters.Hellos != 0 {
			t.Errorf("%s: %+v", name, a.peer(name))
		}
		meet(a, c)
		a.await("it is forgotten", func() bool { return a.lookupAny(name) == nil })
	}
	for _, ev := range a.find(Hello) {
		if ev.Node != "b" && ev.Node != "c" {
			t.Errorf("a stream with %s", ev.Node)
		}
	}
	again := start(t, fast("b", 2, listen))
	meet(a, again, c)
	a.awaitUp("b", 2)
	if a.peer("c").Counters.Hellos != 1 {
		t.Error("the stream with c did not live on")
	}
}

// TestDialBeforeItsName: who dials before membership names it is not refused if it does so soon, and has membership
// looked at. One that is never named is refused, and does not have it looked at all the time.
func TestDialBeforeItsName(t *testing.T) {
	var looks atomic.Int64
	cfg := fast("a", 1, socket(t))
	cfg.NameWait = 2 * time.Second
	cfg.Look = func() { looks.Add(1) }
	a := start(t, cfg)
	b, c := start(t, fast("b", 1, socket(t))), start(t, fast("c", 1, socket(t)))
	b.SetPeers([]membership.Peer{a.as()})
	a.await("looks", func() bool { return looks.Load() == 1 })
	c.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}})
	a.SetPeers([]membership.Peer{c.as()}) // another one is named meanwhile
	a.awaitUp("c", 1)
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b"}}, c.as()})
	b.awaitUp("a", 1)
	if p := b.peer("a"); p.Counters.Hellos != 1 || len(p.Refusals) != 0 || len(b.find(Refused)) != 0 {
		t.Errorf("it was refused: %+v, %+v", p, b.find(Refused))
	}
	if n := a.Status().Rejected; n != 0 {
		t.Errorf("%d streams were refused", n)
	}

	cfg = fast("d", 1, socket(t))
	cfg.NameWait = 20 * time.Millisecond
	cfg.Look = func() { looks.Add(1) }
	d := start(t, cfg)
	looks.Store(0)
	began := time.Now()
	b.SetPeers([]membership.Peer{d.as()})
	d.await("refusals", func() bool { return d.Status().Rejected >= 8 })
	if n, most := looks.Load(), 1+int64(time.Since(began)/lookEvery); n < 1 || n > most {
		t.Errorf("%d looks for %d refusals, at most %d", n, d.Status().Rejected, most)
	}
}

func (l *Links) lookupAny(node string) *link {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.links[node]
}

func TestRestart(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	listen := socket(t)
	var last *node
	for inc := uint64(1); inc <= 3; inc++ {
		b := start(t, fast("b", inc, listen))
		meet(a, b)
		a.awaitUp("b", inc)
		b.awaitUp("a", 1)
		if last = b; inc < 3 {
			b.close()
			a.await("down", func() bool { return len(a.find(Down)) == int(inc) })
		}
	}
	checkOrder(t, a.all())
	if r := a.find(Refused); len(r) == 0 || r[0].Refusal.Code != RefusedClosing {
		t.Errorf("the closing engine said %+v", r)
	}
	// An engine of an older incarnation is refused by the living one, and says so.
	last.close()
	old := start(t, fast("b", 2, listen))
	meetBoth(a, old)
	old.await("stale", func() bool {
		p := old.peer("a")
		return slices.ContainsFunc(p.Refusals, func(r Refusal) bool { return r.Code == RefusedStale && r.ByPeer })
	})
}

// A link whose packets vanish is noticed by silence, and comes back.
func TestHalfOpen(t *testing.T) {
	t.Parallel()
	ca, cb := fast("a", 1, "127.0.0.1:0"), fast("b", 1, "127.0.0.1:0")
	ca.Silence, cb.Silence, ca.Handshake = 500*time.Millisecond, 500*time.Millisecond, 500*time.Millisecond
	a, b := start(t, ca), start(t, cb)
	p := newProxy(t, b.Addr())
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b", Address: p.ln.Addr().String()}}})
	b.SetPeers([]membership.Peer{{Record: membership.Record{Node: "a"}}})
	a.awaitUp("b", 1)
	b.awaitUp("a", 1)
	p.setMute(true)
	for _, n := range []*node{a, b} {
		n.await("silence noticed", func() bool {
			d := n.find(Down)
			return len(d) > 0 && strings.Contains(d[0].Detail, "nothing heard")
		})
	}
	p.setMute(false)
	p.cut()
	a.awaitUp("b", 1)
	b.awaitUp("a", 1)
	checkOrder(t, a.all())
	checkOrder(t, b.all())
}

// A peer that does not read costs its own link and nobody else's; the caller never waits.
func TestSlowReader(t *testing.T) {
	ca := fast("a", 1, socket(t))
	ca.QueueFrames = 200
	a := start(t, ca)
	slow, good := start(t, fast("slow", 1, socket(t))), start(t, fast("good", 1, socket(t)))
	meet(a, slow, good)
	for _, n := range []*node{slow, good} {
		a.awaitUp(n.cfg.Node, 1)
		n.awaitUp("a", 1)
	}
	block := make(chan struct{})
	slow.mu.Lock()
	slow.block = block
	slow.mu.Unlock()
	big := roomFrames()["rank_end"]
	big.Aux = make([]byte, 128<<10)
	full := false
	for i := 0; i < 2000 && !full; i++ {
		began := time.Now()
		full = !a.Send("slow", 0, big, false)
		if d := time.Since(began); d > 5*time.Second {
			t.Fatalf("Send took %v", d)
		}
	}
	if !full || a.peer("slow").Counters.Overflows == 0 {
		t.Fatal("no overflow")
	}
	a.await("down", func() bool { return len(a.find(Down)) > 0 })
	for i := range uint64(100) {
		for !a.Send("good", 0, frame(i+1), false) {
			t.Fatal("the other link suffered")
		}
	}
	good.await("frames", func() bool { return len(good.find(Frame)) == 100 })
	slow.mu.Lock()
	slow.block = nil
	slow.mu.Unlock()
	close(block)
	a.awaitUp("slow", 1)
	slow.awaitUp("a", 1)
	checkOrder(t, slow.all())
}

func TestRefuseGroup(t *testing.T) {
	a, b := start(t, fast("a", 1, socket(t))), start(t, fast("b", 1, socket(t)))
	meet(a, b)
	a.awaitUp("b", 1)
	b.awaitUp("a", 1)
	for range 3 {
		a.Refuse("b", Refusal{Group: "decode", PeerGroup: "prefill", Field: "dtype", Detail: "bf16 is not fp8"})
	}
	b.await("refusal", func() bool { return len(b.find(Refused)) == 1 })
	want := Refusal{Code: RefusedFingerprint, Group: "decode", PeerGroup: "prefill", Field: "dtype", Detail: "bf16 is not fp8", ByPeer: true}
	if r := b.find(Refused)[0].Refusal; r != want || !slices.Contains(b.peer("a").Refusals, want) {
		t.Errorf("%+v, %+v", r, b.peer("a").Refusals)
	}
	if p := b.peer("a"); p.State != "up" {
		t.Errorf("the link went %s", p.State)
	}
}

// BenchmarkFrames measures small frames from one engine's Send to the other's sink, over a unix socket.
func BenchmarkFrames(b *testing.B) {
	t := &testing.T{}
	dir := b.TempDir()
	var got atomic.Int64
	mk := func(name string) *Links {
		cfg := fast(name, 1, "unix:"+filepath.Join(dir, name))
		cfg.Sink = func(e Event) {
			if e.Kind == Frame {
				got.Add(1)
			}
		}
		cfg.QueueFrames = 1 << 20
		l, err := New(cfg)
		if err != nil {
			b.Fatal(err)
		}
		return l
	}
	x, y := mk("x"), mk("y")
	nx, ny := &node{Links: x, t: t}, &node{Links: y, t: t}
	meet(nx, ny)
	nx.awaitUp("y", 1)
	b.ResetTimer()
	for i := range b.N {
		for got.Load() < int64(i)-4096 {
			runtime.Gosched()
		}
		if !x.Send("y", 0, frame(uint64(i)), false) {
			b.Fatal("not queued")
		}
	}
	for got.Load() < int64(b.N) {
		runtime.Gosched()
	}
	b.StopTimer()
	x.Close(context.Background())
	y.Close(context.Background())
}

// A peer whose stream was down, or never up, read as heard of just now.
func TestHeardAgoOutlivesTheStream(t *testing.T) {
	a := start(t, fast("a", 1, "127.0.0.1:0"))
	b := start(t, fast("b", 1, "127.0.0.1:0"))
	a.SetPeers([]membership.Peer{b.as()})
	if p := a.peer("b"); p.State != "connecting" || p.HeardAgo != 0 {
		t.Errorf("never up: %s, heard %v ago", p.State, p.HeardAgo)
	}
	b.SetPeers([]membership.Peer{a.as()})
	if p := a.awaitUp("b", 1); p.HeardAgo == 0 {
		t.Error("up and never heard")
	}
	b.close()
	a.await("b is down", func() bool { return a.peer("b").State != "up" })
	time.Sleep(20 * time.Millisecond)
	if p := a.peer("b"); p.HeardAgo < 20*time.Millisecond {
		t.Errorf("down: heard %v ago", p.HeardAgo)
	}
}

// Names that membership lists and drops again, as the pods of a fleet do, leave nothing behind when no stream came of
// them: each used to keep a link and its goroutine.
func TestChurnedNames(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	round := func(i int) {
		var peers []membership.Peer
		for j := range 100 {
			name := fmt.Sprintf("pod-%d-%d", i, j)
			peers = append(peers, membership.Peer{Record: membership.Record{Node: name, Address: "unix:/nonexistent/" + name}})
		}
		a.SetPeers(peers)
	}
	links := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.links)
	}
	settled := func() int { // goroutines, when those of dropped names have ended
		a.SetPeers(nil)
		last := 0
		until(t, "goroutines to end", func() bool {
			was := last
			last = runtime.NumGoroutine()
			return was == last
		})
		return last
	}
	round(0)
	before := settled()
	for i := range 100 {
		round(i)
		if n := links(); n > 100 {
			t.Fatalf("%d links after %d rounds of 100 names", n, i+1)
		}
	}
	until(t, "no goroutine more than before", func() bool { return settled() <= before })
	if n := links(); n != 0 {
		t.Errorf("%d links of nobody", n)
	}
	// One that comes back is dialled, and one that had a stream is kept: an older incarnation of it stays refused.
	b := start(t, fast("b", 2, socket(t)))
	meet(a, b)
	a.awaitUp("b", 2)
	a.SetPeers(nil)
	if n := links(); n != 1 {
		t.Errorf("%d links, want that of b", n)
	}
}

// A peer that names an attempt near 2^64 is refused by name: this engine could never dial with a greater one.
func TestAbsurdAttempt(t *testing.T) {
	a := start(t, fast("a", 1, socket(t)))
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b"}}})
	say := func(attempt uint64) *raw {
		r := rawDial(t, a.Addr())
		r.say(&wire.Hello{Versions: []uint32{1}, Node: "b", Incarnation: 3, Attempt: attempt, To: "a"})
		return r
	}
	for _, n := range []uint64{math.MaxUint64, math.MaxUint64 - 1, maxAttemptJump + 1} {
		say(n).wantRefused(RefusedHello)
	}
	say(maxAttemptJump).wantHello()
	say(maxAttemptJump + 1).wantHello()
}
