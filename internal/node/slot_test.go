package node_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	client "github.com/terminus-kv/terminus/clients/go"
)

// TestVerdictOutlivesItsSlot (R2): a room that was released keeps its status for whoever polls it, also
// while its one slot goes from room to room under the pollers.
func TestVerdictOutlivesItsSlot(t *testing.T) {
	e := start(t, tempDir(t), "one")
	ctx := short(t)
	w, err := client.Dial(ctx, client.Options{
		Socket: e.cfg.Worker.Socket, Group: "prefill", Role: client.Source, Size: 1, Slots: 1,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	must(t, err)
	defer w.Close()

	var ended atomic.Pointer[client.Room] // was seen Failed
	stop, stopped := context.WithCancel(ctx)
	polled := make(chan int, 1)
	go func() {
		n := 0
		for stop.Err() == nil {
			if r := ended.Load(); r != nil {
				n++
				if st := r.Poll(); st != client.Failed {
					t.Errorf("room %d went from Failed to %v", r.ID(), st)
					break
				}
			}
		}
		polled <- n
	}()
	// open takes the slot in the moment in which it is free.
	open := func(room int64) *client.Room {
		for {
			r, err := w.Open(ctx, client.OpenOptions{Room: room})
			var full *client.Error
			if errors.As(err, &full) && full.Field == "slots" {
				continue
			}
			must(t, err)
			return r
		}
	}
	r := open(0)
	for room := int64(1); room < 300 && !t.Failed(); room++ {
		must(t, r.Abort(ctx))
		if st := r.Poll(); st != client.Failed {
			t.Fatalf("room %d is %v after its abort", r.ID(), st)
		}
		ended.Store(r)
		next := make(chan *client.Room, 1)
		go func() { next <- open(room) }()
		must(t, r.Release(ctx))
		old := r
		r = <-next
		if st, res := old.State(); st != client.Failed || res != client.Released {
			t.Errorf("room %d is %v, %v after its release", old.ID(), st, res)
		}
	}
	stopped()
	t.Logf("%d polls", <-polled)
}

// TestOperatorAbortIsDoneWhenAnswered: who is told that an operator's abort was carried out finds the room
// ended, and may open it anew.
func TestOperatorAbortIsDoneWhenAnswered(t *testing.T) {
	e := start(t, tempDir(t), "one")
	ctx := short(t)
	w, err := client.Dial(ctx, client.Options{
		Socket: e.cfg.Worker.Socket, Group: "prefill", Role: client.Source, Size: 1, Slots: 300,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	must(t, err)
	defer w.Close()
	for i := range int64(200) {
		r, err := w.Open(ctx, client.OpenOptions{Room: 7, Attempt: i})
		must(t, err)
		res, err := e.admin.AbortRoom(ctx, 7, "")
		must(t, err)
		if st := r.Poll(); res.Ended != 1 || st != client.Failed {
			t.Fatalf("attempt %d: %d ended, the room is %v", i, res.Ended, st)
		}
	}
}

// TestReleasedRoomTouchesNobody: calls on a room that was released do not reach the next attempt, which
// got the same slot.
func TestReleasedRoomTouchesNobody(t *testing.T) {
	e := start(t, tempDir(t), "one")
	ctx := short(t)
	w, err := client.Dial(ctx, client.Options{
		Socket: e.cfg.Worker.Socket, Group: "prefill", Role: client.Source, Size: 1, Slots: 1,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	must(t, err)
	defer w.Close()
	old, err := w.Open(ctx, client.OpenOptions{Room: 7})
	must(t, err)
	must(t, old.Abort(ctx))
	must(t, old.Release(ctx))
	next, err := w.Open(ctx, client.OpenOptions{Room: 7, Attempt: 1})
	must(t, err)
	must(t, old.Abort(ctx)) // of a room that has ended: no error
	if err := old.Send(ctx, client.Chunk{Last: true}); !errors.Is(err, client.ErrReleased) {
		t.Errorf("send: %v", err)
	}
	if _, err := old.Failure(ctx); !errors.Is(err, client.ErrReleased) {
		t.Errorf("failure: %v", err)
	}
	if err := old.Release(ctx); !errors.Is(err, client.ErrReleased) {
		t.Errorf("release: %v", err)
	}
	f, err := next.Failure(ctx)
	must(t, err)
	if next.Poll() != client.Bootstrapping || f.Reason != "none" || old.Poll() != client.Failed {
		t.Errorf("the next attempt is %v (%s), the old one %v", next.Poll(), f.Reason, old.Poll())
	}
}
