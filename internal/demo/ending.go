package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// errTold is why a worker that was told to stop plays no more rooms.
var errTold = errors.New("told to stop")

// close ends the playing of new rooms; the first reason stays.
func (w *worker) close(why error) {
	if w.closed() == nil {
		w.why = why
		close(w.closing)
	}
}

// closed returns why no more rooms are played; nil while they are.
func (w *worker) closed() error {
	select {
	case <-w.closing:
		return w.why
	default:
		return nil
	}
}

func (w *worker) lost() error {
	return fmt.Errorf("this worker lost its engine when %d of %d rooms had ended: %w", w.ended.Load(), len(w.plan.Rooms), w.session.Err())
}

// waitsFor says what a worker waits for in whose rooms nothing happens.
func (w *worker) waitsFor(quiet time.Duration) string {
	other := map[string]string{RolePrefill: RoleDecode, RoleDecode: RolePrefill}[w.role]
	return fmt.Sprintf("%d rooms are open and nothing happened in them for %v: waiting for the %s worker or an engine. The engine's clocks end them; without a change this worker gives up after %v (--quiet)",
		len(w.live), w.waiting, other, quiet)
}

// abortAll ends all open rooms, and each that is opened from now on.
func (w *worker) abortAll(ctx context.Context) {
	w.mu.Lock()
	w.told = true
	rooms := slices.Collect(maps.Keys(w.rooms))
	w.mu.Unlock()
	for _, r := range rooms {
		_ = r.Abort(ctx) // it has ended, or the engine is lost: its verdict is read anyhow
	}
}

// opened keeps account of an open room until the returned function is called.
func (w *worker) opened(ctx context.Context, r kvRoom) (done func()) {
	w.mu.Lock()
	w.rooms[r] = struct{}{}
	told := w.told
	w.mu.Unlock()
	if told {
		_ = r.Abort(ctx) // as in abortAll
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.rooms, r)
	}
}

// sleepUntil waits for t, or until no more rooms are played: then what is left is done at once. The
// error is ctx's.
func (w *worker) sleepUntil(ctx context.Context, t time.Time) error {
	d := time.Until(t)
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-w.closing:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

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
	if a.r.Aborter != a.w.role || a.done != nil {
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
