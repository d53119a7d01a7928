package demo

import (
	"context"
	"sync"
	"time"
)

// aborter aborts a room once, from a goroutine of its own, if this worker is to do that.
type aborter struct {
	w       *worker
	r       *Room
	room    kvRoom
	done    chan struct{} // closed when it is over; nil: never started
	release chan struct{} // closed when the room has ended: no need to wait longer
	once    sync.Once
	asked   bool
}

func newAborter(w *worker, r *Room, room kvRoom) *aborter {
	return &aborter{w: w, r: r, room: room, release: make(chan struct{})}
}

// after starts the abort, delay from now; only rooms that this worker is to abort have one.
func (a *aborter) after(ctx context.Context, delay time.Duration) {
	if !a.w.aborts(a.r) || a.done != nil {
		return
	}
	a.done = make(chan struct{})
	go func() {
		defer close(a.done)
		t := time.NewTimer(delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-a.release:
			return
		case <-ctx.Done():
			return
		}
		a.asked = a.room.Abort(ctx) == nil
	}()
}

// wait ends the abort if it has not begun, and reports whether it was asked for.
func (a *aborter) wait() bool {
	a.once.Do(func() { close(a.release) })
	if a.done == nil {
		return false
	}
	<-a.done
	return a.asked
}
