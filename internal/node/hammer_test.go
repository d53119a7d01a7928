package node_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
)

// TestHammer: two engines, four workers of several goroutines each, every room on its own way: handed
// over, aborted by either side or an operator at any moment, or left by a worker that dies; under
// pollers, an operator who looks at everything, and a plugin that is killed. Every room ends (R1), a
// source's Success is the destination's (R11), its bytes are right, and at idle nothing is left.
func TestHammer(t *testing.T) {
	const (
		lanes   = 6 // rooms at a time between one pair of workers; each has pages of its own
		perLane = 4
		least   = time.Second // each half
	)
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, lanes*perLane), dial(t, de, client.Destination, "decode", 0, 1, lanes*perLane)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	stop := make(chan struct{})
	var wg sync.WaitGroup
	run := func(id uint64, do func(rnd *rand.Rand)) {
		rnd := rand.New(rand.NewPCG(seed, id))
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if t.Failed() {
					return
				}
				do(rnd)
			}
		})
	}
	var rooms, succeeded atomic.Int64
	for lane := range lanes {
		pages := make([]int32, perLane)
		for i := range pages {
			pages[i] = int32(lane*perLane + i)
		}
		run(uint64(lane), func(rnd *rand.Rand) {
			room := rooms.Add(1)
			if hammerRoom(t, rnd, p, d, pe, room, pages) {
				succeeded.Add(1)
			}
		})
	}
	var left, visits atomic.Int64
	for i, e := range []*engine{pe, de} {
		// A worker that comes, opens, and dies with what it has.
		run(uint64(100+i), func(rnd *rand.Rand) {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			o := client.Options{Socket: e.cfg.Worker.Socket, Group: fmt.Sprint("passing-", visits.Add(1)), Role: client.Source, Size: 1, Slots: 8,
				Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"}}
			c, err := client.Dial(ctx, o)
			if err != nil {
				t.Errorf("dial: %v", err)
				return
			}
			defer c.Close()
			for range rnd.IntN(6) {
				if _, err := c.Open(ctx, client.OpenOptions{Room: 1<<40 + left.Add(1)}); err != nil {
					t.Errorf("open: %v", err)
				}
			}
		})
		// An operator, and a poller.
		run(uint64(200+i), func(rnd *rand.Rand) {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			_, err := e.admin.Rooms(ctx, admin.RoomFilter{Limit: 100})
			if err == nil {
				_, err = e.admin.Status(ctx)
			}
			if err == nil {
				_, err = e.admin.Peers(ctx)
			}
			if err != nil {
				t.Errorf("operator: %v", err)
			}
			time.Sleep(time.Duration(rnd.IntN(5)) * time.Millisecond)
		})
	}
	for i, w := range []*worker{p, d} {
		run(uint64(300+i), func(*rand.Rand) {
			w.Changes(func(client.Change) {})
			time.Sleep(50 * time.Microsecond)
		})
	}
	// A busy machine takes longer to get somewhere.
	enough := func(failures, successes int64) {
		began := time.Now()
		eventually(t, "enough rooms", func() bool {
			return t.Failed() || time.Since(began) > least && succeeded.Load() >= successes && rooms.Load()-succeeded.Load() >= failures
		})
	}
	enough(3, 3)
	if ps, err := de.admin.Plugins(short(t)); err == nil && len(ps) > 0 && len(ps[0].Epochs) > 0 {
		unix.Kill(ps[0].Epochs[0].PID, unix.SIGKILL)
	}
	enough(rooms.Load()-succeeded.Load()+3, succeeded.Load()+3)
	close(stop)
	wg.Wait()
	t.Logf("%d rooms, %d with success; %d left by workers that died", rooms.Load(), succeeded.Load(), left.Load())
	for _, e := range []*engine{pe, de} {
		eventually(t, e.cfg.Node+" is idle", func() bool {
			st, err := e.admin.Status(context.Background())
			return err == nil && st.Rooms == 0 && st.Held == 0 && st.Sessions == 1
		})
	}
	// And both still serve.
	handOver(t, p, d, 99_999_999, []int32{0, 1, 2, 3}, []int32{3, 2, 1, 0})
}

// hammerRoom takes one room from open to release and reports whether it succeeded.
func hammerRoom(t *testing.T, rnd *rand.Rand, p, d *worker, pe *engine, id int64, pages []int32) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	// What may go wrong for a room that somebody ends at the wrong moment.
	ok := func(what string, err error) bool {
		var ended *client.EndedError
		if err != nil && !errors.As(err, &ended) {
			t.Errorf("room %d: %s: %v", id, what, err)
		}
		return err == nil
	}
	nap := func() {
		if rnd.IntN(2) == 0 {
			time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
		}
	}
	fill(p, id, pages)
	var rs, rd *client.Room
	var err error
	opens := []func() bool{
		func() bool { rs, err = p.Open(ctx, client.OpenOptions{Room: id}); return ok("open source", err) },
		func() bool {
			if rd, err = d.Open(ctx, client.OpenOptions{Room: id, PeerGroup: "prefill"}); !ok("open destination", err) {
				return false
			}
			nap()
			return ok("register", rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: pages}))
		},
	}
	if rnd.IntN(2) == 0 {
		opens[0], opens[1] = opens[1], opens[0]
	}
	for _, open := range opens {
		open()
		nap()
	}
	if rs == nil || rd == nil {
		return false
	}
	var spoilt sync.WaitGroup
	if how, wait := rnd.IntN(6), time.Duration(rnd.IntN(4000))*time.Microsecond; how < 3 {
		spoilt.Go(func() {
			time.Sleep(wait)
			switch how {
			case 0:
				ok("abort source", rs.Abort(ctx))
			case 1:
				ok("abort destination", rd.Abort(ctx))
			case 2:
				if _, err := pe.admin.AbortRoom(ctx, id, ""); err != nil {
					t.Errorf("room %d: operator's abort: %v", id, err)
				}
			}
		})
	}
	half := len(pages) / 2
	ok("send", rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: pages[:half]}}}))
	nap()
	ok("send last", rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: pages[half:]}}, Last: true, Aux: []byte("aux")}))
	var status [2]client.Status
	for i, r := range []*client.Room{rs, rd} {
		if status[i], err = r.WaitTerminal(ctx); err != nil {
			t.Errorf("room %d does not end (R1): %v\n%s", id, err, explain(id))
			return false
		}
		if err := r.WaitReusable(ctx); err != nil {
			t.Errorf("room %d: %v\n%s", id, err, explain(id))
			return false
		}
	}
	spoilt.Wait()
	if status[0] == client.Success && status[1] != client.Success {
		t.Errorf("room %d: source Success, destination %v (R11)", id, status[1])
	}
	if status[1] == client.Success {
		check(t, d, id, pages)
	}
	for _, r := range []*client.Room{rs, rd} {
		if got := r.Poll(); !got.Terminal() {
			t.Errorf("room %d went back to %v (R2)", id, got)
		}
		ok("release", r.Release(ctx))
	}
	return status[0] == client.Success
}
