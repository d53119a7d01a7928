package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// errTold is why a worker that was told to stop plays no more rooms.
var errTold = errors.New("told to stop")

// close ends the playing of new rooms; the first reason stays.
func (w *worker) close(why error) {
	w.once.Do(func() {
		w.why = why
		close(w.closing)
	})
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
	return fmt.Errorf("this worker lost its engine when %d of %d rooms had ended: %w", w.ended.Load(), len(w.plan.Rooms), w.current().session.Err())
}

func (w *worker) current() link {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.link
}

// connected waits, after the loss of an engine, for the next one. A worker that does not reconnect gets
// the old one.
func (w *worker) connected(ctx context.Context) (link, error) {
	for {
		w.mu.Lock()
		l, next := w.link, w.relinked
		w.mu.Unlock()
		if w.redial == nil || l.session.Err() == nil {
			return l, nil
		}
		select {
		case <-next:
		case <-w.closing:
			return link{}, w.why
		case <-ctx.Done():
			return link{}, context.Cause(ctx)
		}
	}
}

// reconnect waits for the next engine and hands it the worker's memory, which it takes only when nobody
// else can write to it any more.
func (w *worker) reconnect(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, redialTimeout, fmt.Errorf("no engine took this worker within %v", redialTimeout))
	defer cancel()
	l, err := w.redial(ctx)
	if err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.link = l
	close(w.relinked)
	w.relinked = make(chan struct{})
	return nil
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
	rooms := slices.Collect(maps.Values(w.rooms))
	w.mu.Unlock()
	for _, r := range rooms {
		_ = r.Abort(ctx) // it has ended, or the engine is lost: its verdict is read anyhow
	}
}

// opened keeps account of an open room until the returned function is called.
func (w *worker) opened(ctx context.Context, id attemptID, r kvRoom) (done func()) {
	w.mu.Lock()
	w.rooms[id] = r
	told := w.told || w.withdrawn[id]
	w.mu.Unlock()
	if told {
		_ = r.Abort(ctx) // as in abortAll
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.rooms, id)
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

// watch reports progress, and ends a worker whose engine is lost, that is told to stop, or in whose
// rooms nothing happens for too long.
func (w *worker) watch(ctx, told context.Context, stop context.CancelCauseFunc, quiet time.Duration) {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	last, since, said := w.moved.Load(), time.Now(), false
	lost, stopped := w.current().session.Done(), told.Done()
	var over <-chan time.Time
	var back chan error // of reconnect, while it runs
	patience, giveUp := context.WithCancel(ctx)
	defer func() {
		giveUp()
		if back != nil {
			<-back
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-lost:
			lost = nil
			if w.redial != nil && w.closed() == nil {
				w.reports.send(report{T: "lost", Detail: w.lost().Error() + "; waiting for the next one"})
				back = make(chan error, 1)
				go func() { back <- w.reconnect(patience) }()
			} else {
				w.close(w.lost())
				over = time.After(w.proof)
			}
		case err := <-back:
			back = nil
			if err == nil {
				lost = w.current().session.Done()
				w.moved.Add(1)
				w.reports.send(report{T: "back", Detail: "connected to the next engine, with the same memory"})
			} else {
				w.close(fmt.Errorf("%w; %w", w.lost(), err))
				over = time.After(w.proof)
			}
		case <-stopped:
			stopped = nil
			giveUp()
			if over == nil {
				w.close(fmt.Errorf("%w when %d of %d rooms had ended", errTold, w.ended.Load(), len(w.plan.Rooms)))
				over = time.After(abortTimeout)
				go w.abortAll(ctx)
			}
		case <-over:
			stop(fmt.Errorf("%w; the pages of some were not reusable in time", w.why))
			return
		case <-tick.C:
		}
		w.reports.send(w.progress())
		switch now := w.moved.Load(); {
		case now != last:
			last, since = now, time.Now()
		case time.Since(since) > quiet:
			stop(fmt.Errorf("nothing happened in any room for %v; %d of %d rooms had ended", quiet, w.ended.Load(), len(w.plan.Rooms)))
			return
		case time.Since(since) > w.waiting && !said && over == nil && len(w.live) > 0:
			said = true
			w.reports.send(report{T: "waiting", Detail: w.waitsFor(quiet)})
		}
	}
}
