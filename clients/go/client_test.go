package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/core"
	sm "github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var layout = client.Layout{DType: "bf16", Layers: 4, KVHeads: 8, HeadDim: 128, PageTokens: 16, Kind: "mha"}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func dial(t testing.TB, e *workertest.Engine, o client.Options) *client.Client {
	t.Helper()
	o.Socket, o.Group, o.Size, o.Layout = e.Config.Socket, "g", max(o.Size, 1), layout
	if o.Role == "" {
		o.Role = client.Source
	}
	c, err := client.Dial(within(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// pool gives a client a region of 8 pages of 4 KiB.
func pool(t testing.TB, c *client.Client) (*client.Region, int) {
	t.Helper()
	r, err := c.CreateRegion(within(t), 8*4096+8)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	n, err := c.AddPool(within(t), client.Pool{Pages: 8, Tensors: []client.Tensor{{Region: r, PageBytes: 4096}}})
	if err != nil {
		t.Fatal(err)
	}
	return r, n
}

func open(t testing.TB, c *client.Client, room int64) *client.Room {
	t.Helper()
	r, err := c.Open(within(t), client.OpenOptions{Room: room, PeerGroup: "g"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRoom(t *testing.T) {
	for _, notify := range []bool{false, true} {
		t.Run(fmt.Sprint("notify=", notify), func(t *testing.T) {
			e := workertest.Start(t, &workertest.Engine{})
			ctx := within(t)
			src := dial(t, e, client.Options{Notify: notify, Slots: 4})
			dst := dial(t, e, client.Options{Role: client.Destination, Notify: notify, Slots: 4})
			if src.Node() != "node-a" || src.Incarnation() != 7 || src.Slots() != 4 || src.Limits().AuxBytes != 1<<20 {
				t.Errorf("hello: %q %d %d %+v", src.Node(), src.Incarnation(), src.Slots(), src.Limits())
			}
			region, sp := pool(t, src)
			_, dp := pool(t, dst)
			if !bytes.Equal(region.Bytes(), make([]byte, len(region.Bytes()))) {
				t.Error("the canary was left in the region")
			}
			s, d := open(t, src, 7), open(t, dst, 7)
			if s.Poll() != client.Bootstrapping || s.Residency() != client.NoPages {
				st, res := s.State()
				t.Errorf("opened: %v %v", st, res)
			}
			if err := d.Register(ctx, client.RegisterPart{Pool: dp, Pages: []int32{3, 4, 5}, Prefix: 1}); err != nil {
				t.Fatal(err)
			}
			if err := s.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: sp, Pages: []int32{0, 2}}}}); err != nil {
				t.Fatal(err)
			}
			if st, res := s.State(); st != client.Transferring || res != client.Armed {
				t.Errorf("sent: %v %v", st, res)
			}
			if err := s.Release(ctx); !errors.Is(err, client.ErrNotReusable) {
				t.Errorf("release while armed: %v", err)
			}
			short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			if err := s.WaitReusable(short); !errors.Is(err, client.ErrNotReusable) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("waiting for armed pages: %v", err)
			}
			cancel()
			f, err := s.Failure(ctx)
			if err != nil || f.Reason != "none" || f.Status != client.Transferring || f.Residency != client.Armed {
				t.Errorf("failure while alive: %+v %v", f, err)
			}
			if err := s.Send(ctx, client.Chunk{Layers: [2]int{0, 4}, Last: true, Aux: []byte("aux")}); err != nil {
				t.Fatal(err)
			}
			go e.Succeed(2, d.Slot(), []byte("aux"))
			for _, r := range []*client.Room{s, d} {
				if st, err := r.WaitTerminal(ctx); st != client.Success || err != nil {
					t.Errorf("%v %v", st, err)
				}
				if err := r.WaitReusable(ctx); err != nil {
					t.Error(err)
				}
			}
			if aux, err := d.Aux(ctx); string(aux) != "aux" || err != nil {
				t.Errorf("aux %q %v", aux, err)
			}
			var ended *client.EndedError
			if err := s.Send(ctx, client.Chunk{Last: true}); !errors.As(err, &ended) || ended.Reason != "success" {
				t.Errorf("send on an ended room: %v", err)
			}
			if err := s.Abort(ctx); err != nil {
				t.Errorf("abort of an ended room: %v", err)
			}
			if err := s.Release(ctx); err != nil {
				t.Error(err)
			}
			if st, res := s.State(); st != client.Success || res != client.Released {
				t.Errorf("released: %v %v", st, res)
			}
			again := open(t, src, 8)
			if again.Slot() != s.Slot() || s.Poll() != client.Success || again.Poll() != client.Bootstrapping {
				t.Errorf("the slot's next room: slots %d %d, %v %v", again.Slot(), s.Slot(), s.Poll(), again.Poll())
			}
			if err := again.Abort(ctx); err != nil || again.Poll() != client.Failed {
				t.Errorf("abort: %v %v", err, again.Poll())
			}
			if f, err := again.Failure(ctx); err != nil || f.Reason != "aborted" || f.Doc == "" {
				t.Errorf("failure: %+v %v", f, err)
			}
			if _, err := src.Open(ctx, client.OpenOptions{Room: workertest.EndedRoom}); !errors.As(err, &ended) || ended.Reason != "peer_aborted" {
				t.Errorf("an attempt that has ended: %v", err)
			}
			var refused *client.Error
			if _, err := src.Open(ctx, client.OpenOptions{Room: -1}); !errors.As(err, &refused) || refused.Field != "room" || refused.Rule != "W3" {
				t.Errorf("a bad room: %v", err)
			}
		})
	}
}

func TestForeignTagReadsNotYet(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 4})
	r := open(t, c, 1)
	e.Do(func(x *core.Effects) {
		x.Words = append(x.Words, core.WordEffect{Session: 1, Slot: r.Slot(), Status: sm.Failed, Opener: sm.Opener{Inc: 7, Seq: 999}})
	})
	if st := r.Poll(); st != client.Bootstrapping {
		t.Errorf("a word of another opener reads %v", st)
	}
}

// Whatever the engine writes and however late the reader comes, it ends up knowing every room's last
// state: by the ring, or by the plane where the ring was overrun.
func TestChangesLoseNothing(t *testing.T) {
	for _, slots := range []int{3, 64, 1000} {
		for _, notify := range []bool{false, true} {
			t.Run(fmt.Sprintf("slots=%d,notify=%v", slots, notify), func(t *testing.T) {
				e := workertest.Start(t, &workertest.Engine{})
				c := dial(t, e, client.Options{Slots: slots, Notify: notify})
				var rooms []*client.Room
				for i := range slots {
					rooms = append(rooms, open(t, c, int64(i)))
				}
				seen := map[*client.Room]client.Change{}
				stop := make(chan struct{})
				wrote := make(chan struct{})
				go func() {
					defer close(wrote)
					rng := rand.New(rand.NewPCG(1, uint64(slots)))
					for i := 0; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						e.Do(func(x *core.Effects) {
							for range 1 + rng.IntN(200) {
								k := rng.IntN(slots)
								x.Words = append(x.Words, core.WordEffect{
									Session: 1, Slot: rooms[k].Slot(), Status: sm.KVPoll(1 + rng.IntN(3)), Residency: sm.Residency(rng.IntN(5)),
									Opener: sm.Opener{Inc: 7, Seq: uint64(k + 1)},
								})
							}
						})
					}
				}()
				take := func() {
					c.Changes(func(ch client.Change) { seen[ch.Room] = ch })
				}
				deadline := time.Now().Add(300 * time.Millisecond)
				for i := 0; time.Now().Before(deadline); i++ {
					if err := c.Wait(within(t)); err != nil {
						t.Fatal(err)
					}
					take()
					if i%7 == 0 {
						time.Sleep(3 * time.Millisecond) // be overrun
					}
				}
				close(stop)
				<-wrote
				take()
				for i, r := range rooms {
					st, res := r.State()
					if got := seen[r]; got.Status != st || got.Residency != res {
						t.Fatalf("room %d: delivered %v %v, it is %v %v", i, got.Status, got.Residency, st, res)
					}
				}
				if n := c.Changes(func(client.Change) {}); n != 0 {
					t.Errorf("%d changes at rest", n)
				}
				short, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
				defer cancel()
				if err := c.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Wait at rest: %v", err)
				}
			})
		}
	}
}

func TestPipelined(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 256, Notify: true, Window: 64})
	_, p := pool(t, c)
	ctx := within(t)
	var wg sync.WaitGroup
	start := time.Now()
	const each = 500
	for g := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for base := 0; base < each; base += 50 {
				var opens []*client.PendingRoom
				for i := range 50 {
					o, err := c.StartOpen(ctx, client.OpenOptions{Room: int64(g*each + base + i)})
					if err != nil {
						t.Error(err)
						return
					}
					opens = append(opens, o)
				}
				var answers []*client.Pending
				var rooms []*client.Room
				for _, o := range opens {
					r, err := o.Room(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					rooms = append(rooms, r)
					for _, ch := range []client.Chunk{{Parts: []client.Part{{Pool: p, Pages: []int32{1, 2, 3}}}}, {Last: true}} {
						a, err := r.StartSend(ctx, ch)
						if err != nil {
							t.Error(err)
							return
						}
						answers = append(answers, a)
					}
				}
				for _, r := range rooms {
					if st, err := r.WaitTerminal(ctx); st != client.Success {
						t.Errorf("%v %v", st, err)
						return
					}
					a, err := r.StartRelease(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					answers = append(answers, a)
				}
				for _, a := range answers {
					if err := a.Wait(ctx); err != nil {
						t.Error(err)
						return
					}
				}
			}
		}()
	}
	wg.Wait()
	t.Logf("%.0f rooms/s (4 requests each)", 4*each/time.Since(start).Seconds())
}

func TestEngineLost(t *testing.T) {
	for _, notify := range []bool{false, true} {
		e := workertest.Start(t, &workertest.Engine{})
		c := dial(t, e, client.Options{Slots: 4, Notify: notify})
		region, p := pool(t, c)
		ctx := within(t)
		armed, done, fresh := open(t, c, 1), open(t, c, 2), open(t, c, 3)
		for _, r := range []*client.Room{armed, done} {
			if err := r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}, Last: r == done}); err != nil {
				t.Fatal(err)
			}
		}
		ctxClose, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		if err := e.Server.Close(ctxClose); err != nil { // the fake still holds the memory
			t.Fatal(err)
		}
		cancel()
		if st, err := armed.WaitTerminal(ctx); st != client.Failed || err != nil {
			t.Fatalf("armed: %v %v", st, err)
		}
		if st := done.Poll(); st != client.Success {
			t.Errorf("a room that had ended: %v", st)
		}
		if st, res := fresh.State(); st != client.Failed || res != client.NoPages {
			t.Errorf("a room without pages: %v %v", st, res)
		}
		<-c.Done()
		if err := c.Err(); !errors.Is(err, client.ErrEngineLost) {
			t.Errorf("Err: %v", err)
		}
		if f, err := armed.Failure(ctx); f.Reason != client.ReasonEngineLost || err != nil {
			t.Errorf("failure: %+v %v", f, err)
		}
		changed := 0
		for c.Wait(ctx) == nil {
			changed += c.Changes(func(client.Change) {})
		}
		if changed != 3 {
			t.Errorf("%d changes were delivered, want 3", changed)
		}
		if err := client.LeaseProof(); err != nil {
			t.Skip(err)
		}
		if armed.Residency() != client.Quarantined || armed.Reusable() || region.Reusable() {
			t.Errorf("a writer is left: %v %v %v", armed.Residency(), armed.Reusable(), region.Reusable())
		}
		if err := armed.Release(ctx); !errors.Is(err, client.ErrNotReusable) {
			t.Errorf("release: %v", err)
		}
		time.AfterFunc(20*time.Millisecond, e.CloseMemory)
		if err := armed.WaitReusable(ctx); err != nil || armed.Residency() != client.Fenced {
			t.Errorf("after the last writer: %v %v", err, armed.Residency())
		}
		if err := armed.Release(ctx); err != nil {
			t.Errorf("release: %v", err)
		}
		if _, err := c.Open(ctx, client.OpenOptions{Room: 9}); !errors.Is(err, client.ErrEngineLost) {
			t.Errorf("open: %v", err)
		}
		// The next engine gets the same memory.
		e2 := workertest.Start(t, &workertest.Engine{})
		c2 := dial(t, e2, client.Options{Slots: 4})
		region.Bytes()[0] = 42
		if err := c2.AddRegion(ctx, region); err != nil || region.Bytes()[0] != 42 {
			t.Errorf("the region with the next engine: %v", err)
		}
		if err := c2.AddRegion(ctx, region); !errors.Is(err, client.ErrNotReusable) {
			t.Errorf("the region twice: %v", err)
		}
	}
}

func TestFrozenBeat(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Alive: func() bool { return false }}})
	o := client.Options{Slots: 4, SuspectAfter: 300 * time.Millisecond, LostAfter: time.Second}
	c := dial(t, e, o)
	r := open(t, c, 1)
	if c.Unresponsive() {
		t.Error("unresponsive at once")
	}
	workertest.WaitFor(t, "unresponsive", c.Unresponsive)
	if st := r.Poll(); st != client.Bootstrapping && c.Err() == nil {
		t.Errorf("unresponsive is not lost: %v", st)
	}
	if st, err := r.WaitTerminal(within(t)); st != client.Failed || err != nil {
		t.Errorf("%v %v", st, err)
	}
	if !errors.Is(c.Err(), client.ErrEngineLost) || !strings.Contains(c.Err().Error(), "beat") {
		t.Errorf("Err: %v", c.Err())
	}
	workertest.WaitFor(t, "the engine to see the closed socket", func() bool { return len(e.Events(core.SessionDown)) == 1 })
}

func TestDialFails(t *testing.T) {
	if _, err := client.Dial(within(t), client.Options{Socket: "/nonexistent/s"}); err == nil || !strings.Contains(err.Error(), "is the engine running") {
		t.Errorf("no engine: %v", err)
	}
	e := workertest.Start(t, &workertest.Engine{Refuse: errors.New("rank 0 of group g is taken")})
	var refused *client.Error
	o := client.Options{Socket: e.Config.Socket, Group: "g", Role: client.Source, Size: 1, Layout: layout}
	if _, err := client.Dial(within(t), o); !errors.As(err, &refused) || !strings.Contains(err.Error(), "is taken") {
		t.Errorf("refused: %v", err)
	}
	// Something that accepts and never answers.
	l, err := net.Listen("unix", e.Config.Socket+"2")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	o.Socket += "2"
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := client.Dial(short, o); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}

func TestClose(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 4, Notify: true})
	r := open(t, c, 1)
	c.Close()
	if !errors.Is(c.Err(), client.ErrClosed) || r.Poll() != client.Failed {
		t.Errorf("%v %v", c.Err(), r.Poll())
	}
	if err := r.Abort(within(t)); !errors.Is(err, client.ErrClosed) {
		t.Errorf("abort: %v", err)
	}
}

func TestRegionRefusals(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Silent: true})
	c := dial(t, e, client.Options{Slots: 4})
	if _, err := c.CreateRegion(within(t), 4096); err == nil || !strings.Contains(err.Error(), "private") {
		t.Errorf("an engine that does not see the memory: %v", err)
	}
	if _, err := c.CreateRegion(within(t), 4); err == nil {
		t.Error("a region of 4 bytes")
	}
	e2 := workertest.Start(t, &workertest.Engine{Unready: errors.New("backend tcp refused it")})
	c2 := dial(t, e2, client.Options{Slots: 4})
	if _, err := c2.CreateRegion(within(t), 4096); err == nil || !strings.Contains(err.Error(), "backend tcp") {
		t.Errorf("a backend that refuses: %v", err)
	}
}

func TestStaging(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 4})
	k, v := make([]byte, 10*128), make([]byte, 10*64)
	for i := range k {
		k[i] = byte(i / 128)
	}
	s, err := c.NewStaging(within(t), 4, []client.StagedTensor{{Mem: k, PageBytes: 100, PageStride: 128}, {Mem: v, PageBytes: 64, Layer: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Region().Close()
	ids, err := s.Get(3)
	if err != nil || s.Free() != 1 {
		t.Fatal(err, s.Free())
	}
	if _, err := s.Get(2); !errors.Is(err, client.ErrNoPages) {
		t.Errorf("more than there are: %v", err)
	}
	if err := s.CopyIn(ids, []int32{9, 0, 5}); err != nil {
		t.Fatal(err)
	}
	clear(k)
	if err := s.CopyOut([]int32{1, 2, 3}, ids); err != nil {
		t.Fatal(err)
	}
	if k[128] != 9 || k[128+99] != 9 || k[128+100] != 0 || k[2*128+5] != 0 || k[3*128] != 5 {
		t.Errorf("pages came back as %v", k[128:4*128])
	}
	for name, err := range map[string]error{
		"lengths":       s.CopyIn(ids, []int32{1}),
		"user page":     s.CopyIn(ids[:1], []int32{10}),
		"negative page": s.CopyOut([]int32{-1}, ids[:1]),
		"staging page":  s.CopyIn([]int32{4}, []int32{0}),
		"never taken":   s.Put([]int32{9}),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := s.Put(ids); err != nil || s.Free() != 4 {
		t.Error(err, s.Free())
	}
	if err := s.Put(ids[:1]); err == nil {
		t.Error("a page was given back twice")
	}
}

func BenchmarkPoll(b *testing.B) {
	for _, n := range []int{1, 1024} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			e := workertest.Start(b, &workertest.Engine{})
			c := dial(b, e, client.Options{Slots: n})
			var rooms []*client.Room
			for i := range n {
				rooms = append(rooms, open(b, c, int64(i)))
			}
			for b.Loop() {
				for _, r := range rooms {
					if r.Poll() == client.Failed {
						b.Fatal("failed")
					}
				}
			}
		})
	}
}

// A pass over 1,024 rooms of which a share changed since the last.
func BenchmarkChanges(b *testing.B) {
	for _, changed := range []int{0, 10, 102} {
		b.Run(fmt.Sprint(changed, " of 1024"), func(b *testing.B) {
			e := workertest.Start(b, &workertest.Engine{})
			c := dial(b, e, client.Options{Slots: 1024})
			var rooms []*client.Room
			for i := range 1024 {
				rooms = append(rooms, open(b, c, int64(i)))
			}
			c.Changes(func(client.Change) {})
			var spent time.Duration
			passes := 0
			for b.Loop() {
				if changed > 0 {
					e.Do(func(x *core.Effects) {
						for k := range changed {
							k *= 1024 / changed
							x.Words = append(x.Words, core.WordEffect{Session: 1, Slot: rooms[k].Slot(), Status: sm.KVPoll(2 + passes%2), Opener: sm.Opener{Inc: 7, Seq: uint64(k + 1)}})
						}
					})
				}
				start := time.Now()
				n := c.Changes(func(client.Change) {})
				spent += time.Since(start)
				passes++
				if n != changed {
					b.Fatalf("%d changes, want %d", n, changed)
				}
			}
			b.ReportMetric(float64(spent.Nanoseconds())/float64(passes), "ns/pass")
		})
	}
}

func BenchmarkOpenSendRelease(b *testing.B) {
	e := workertest.Start(b, &workertest.Engine{})
	c := dial(b, e, client.Options{Slots: 64, Notify: true})
	_, p := pool(b, c)
	ctx := context.Background()
	for b.Loop() {
		r, err := c.Open(ctx, client.OpenOptions{Room: 1})
		if err == nil {
			err = r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1, 2}}}, Last: true})
		}
		if err == nil {
			_, err = r.WaitTerminal(ctx)
		}
		if err == nil {
			err = r.Release(ctx)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
