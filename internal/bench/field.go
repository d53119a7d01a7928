package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// field is rooms that stand open on both sides, bound, with nothing sent: what a fault hits. Two workers of
// this process hold them and read their status pages.
type field struct {
	cluster *cluster
	workers [2]*worker
	first   int64                      // id of room 0; the next field's ids are others
	rooms   [2][]*client.Room          // by index
	ends    [2][]atomic.Pointer[sight] // by index: the last end that its worker has read, maybe of an older room
	changed chan struct{}              // 1
	wg      sync.WaitGroup
	quit    context.CancelFunc
}

// openField makes n rooms and waits until both workers read that all are bound.
func openField(ctx context.Context, c *cluster, pair string, first int64, n int) (_ *field, err error) {
	f := &field{cluster: c, first: first, changed: make(chan struct{}, 1)}
	watching, quit := context.WithCancel(context.WithoutCancel(ctx))
	f.quit = quit
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	for side := range f.workers {
		if f.workers[side], err = c.dial(ctx, pair, side, min(n+n/4+64, 65536), n); err != nil {
			return f, fmt.Errorf("worker of %s: %w", nodeNames[side], err)
		}
		f.rooms[side] = make([]*client.Room, n)
		f.ends[side] = make([]atomic.Pointer[sight], n)
	}
	for side, w := range f.workers {
		f.wg.Go(func() { f.watch(watching, side, w.Client) })
	}
	return f, f.open(ctx, f.all()...)
}

// all is every index.
func (f *field) all() []int {
	out := make([]int, len(f.rooms[prefill]))
	for i := range out {
		out[i] = i
	}
	return out
}

// close ends both sessions, and with them every room.
func (f *field) close() error {
	f.quit()
	f.wg.Wait()
	var err error
	for _, w := range f.workers {
		if w != nil {
			err = errors.Join(err, w.close())
		}
	}
	return err
}

// watch notes when rooms end, until the session is over.
func (f *field) watch(ctx context.Context, side int, c *client.Client) {
	told := make([]*client.Room, len(f.rooms[side])) // by index: the last whose end is noted
	for c.Wait(ctx) == nil {
		c.Changes(func(ch client.Change) {
			i := ch.Room.ID() - f.first
			if i < 0 || !ch.Status.Terminal() { // below first: a room that follow tried
				return
			}
			if i %= int64(len(told)); told[i] != ch.Room {
				told[i] = ch.Room
				f.ends[side][i].Store(&sight{ch.Room.ID(), ch.Status, time.Now()})
			}
		})
		select {
		case f.changed <- struct{}{}:
		default:
		}
	}
}

// open opens and registers the rooms with these indices, anew where they have ended and were released, and
// waits until they are bound. Room ids are not used twice.
func (f *field) open(ctx context.Context, which ...int) error {
	ctx, cancel := context.WithTimeout(ctx, fieldBound)
	defer cancel()
	n := len(f.rooms[prefill])
	var opening [2][]*client.PendingRoom
	for _, i := range which {
		id := f.first + int64(i)
		if old := f.rooms[prefill][i]; old != nil {
			id = old.ID() + int64(n)
		}
		for side, w := range f.workers {
			p, err := w.StartOpen(ctx, client.OpenOptions{Room: id, PeerGroup: w.peer})
			if err != nil {
				return err
			}
			opening[side] = append(opening[side], p)
		}
	}
	registering := make([]*client.Pending, len(which))
	for k, i := range which {
		for side, w := range f.workers {
			r, err := opening[side][k].Room(ctx)
			if err != nil {
				return err
			}
			f.rooms[side][i] = r
			if side != decode {
				continue
			}
			if registering[k], err = r.StartRegister(ctx, client.RegisterPart{Pool: w.pool, Pages: []int32{int32(i)}}); err != nil {
				return err
			}
		}
	}
	for k, i := range which {
		if err := registering[k].Wait(ctx); err != nil {
			return fmt.Errorf("register room %d: %w", f.rooms[decode][i].ID(), err)
		}
	}
	return f.await(ctx, func() bool {
		for _, i := range which {
			for side := range f.rooms {
				if f.rooms[side][i].Poll() != client.WaitingForInput {
					return false
				}
			}
		}
		return true
	}, "bound", which)
}

// await waits until ok; it looks whenever a status page has changed.
func (f *field) await(ctx context.Context, ok func() bool, what string, which []int) error {
	again := time.NewTicker(10 * time.Millisecond) // after the end of a session nobody wakes us
	defer again.Stop()
	for !ok() {
		select {
		case <-f.changed:
		case <-again.C:
		case <-ctx.Done():
			i := which[0]
			return fmt.Errorf("%d rooms are not %s: %w; room %d reads %s and %s", len(which), what, ctx.Err(),
				f.rooms[prefill][i].ID(), f.rooms[prefill][i].Poll(), f.rooms[decode][i].Poll())
		}
	}
	return nil
}

// ended waits until the worker of each of these sides has read the end of the rooms, and returns how long
// after since the last of them did, for each room.
func (f *field) ended(ctx context.Context, since time.Time, sides []int, which ...int) (latencies, error) {
	ctx, cancel := context.WithTimeout(ctx, fieldBound)
	defer cancel()
	out := make(latencies, len(which))
	done := 0 // of which: these have ended
	err := f.await(ctx, func() bool {
		for ; done < len(which); done++ {
			i := which[done]
			for _, side := range sides {
				end := f.ends[side][i].Load()
				if end == nil || end.room != f.rooms[side][i].ID() {
					return false
				}
				out[done] = max(out[done], end.at.Sub(since))
			}
		}
		return true
	}, "terminal", which)
	return out, err
}

// release gives the rooms back when their pages are their workers' own again.
func (f *field) release(ctx context.Context, sides []int, which ...int) error {
	ctx, cancel := context.WithTimeout(ctx, fieldBound)
	defer cancel()
	err := f.await(ctx, func() bool {
		for _, i := range which {
			for _, side := range sides {
				if !f.rooms[side][i].Reusable() {
					return false
				}
			}
		}
		return true
	}, "reusable", which)
	if err != nil {
		return err
	}
	var released []*client.Pending
	for _, i := range which {
		for _, side := range sides {
			p, err := f.rooms[side][i].StartRelease(ctx)
			if err != nil {
				return err
			}
			released = append(released, p)
		}
	}
	for _, p := range released {
		err = errors.Join(err, p.Wait(ctx))
	}
	return err
}
