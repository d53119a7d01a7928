package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// maxUnreaped bounds the epochs of one plugin whose processes do not die (uninterruptible sleep in a
// driver). Beyond it the plugin stays down.
const maxUnreaped = 3

// run supervises the plugin: spawn, watch, end, wait, again, until Stop.
func (p *Plugin) run() {
	defer close(p.done)
	defer p.h.forget(p)
	budget := budget{cfg: &p.h.cfg}
	var next *epoch // to begin with in place of a spawn
	for {
		began := time.Now()
		request, err := p.cycle(next)
		next = nil
		select {
		case <-p.stop:
			p.stopped(err)
			return
		default:
		}
		if request != nil {
			budget.reset()
			close(request.done)
			continue
		}
		if time.Since(began) > p.h.cfg.RestartWindow {
			budget.reset()
		}
		back := p.goBack(err)
		if back != nil {
			err = back
			budget.reset()
		}
		delay, ok := budget.next(time.Now())
		giveUp := true
		switch {
		case errors.Is(err, ErrRefused) && back == nil, p.h.cfg.Once:
		case p.tooManyUnreaped():
			err = fmt.Errorf("%w: processes of %d epochs do not die: %w", ErrBudget, maxUnreaped, err)
		case !ok:
			err = fmt.Errorf("%w (%d in %s): %w", ErrBudget, p.h.cfg.RestartBudget, p.h.cfg.RestartWindow, err)
		default:
			giveUp = false
		}
		if giveUp {
			delay = 0
			p.log.Error("plugin is down", "error", err)
			p.down(err)
		} else {
			p.log.Warn("plugin is restarted", "error", err, "in", delay)
			p.setState(StateBackoff, err)
		}
		restarted, adopted, stopped := p.wait(delay)
		if stopped {
			p.stopped(ErrStopped)
			return
		}
		if next = adopted; restarted || adopted != nil {
			budget.reset()
		}
	}
}

// Probation is how long a program that took over (Adopt) must have lived before it is what a restart brings
// back. If it dies earlier, the program that it took over from is started again.
const Probation = 60 * time.Second

// predecessor is the program that was handed over from.
type predecessor struct {
	spec  *Spec
	until time.Time // of the probation of the one that took over
}

// goBack makes the previous program the plugin's own again if the one that died was on probation. It returns the
// cause with that said; nil when nothing has changed.
func (p *Plugin) goBack(cause error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.before
	p.before = nil
	if b == nil || time.Now().After(b.until) {
		return nil
	}
	p.spec = b.spec
	return fmt.Errorf("the program of epoch %d died within %v of its hand-over, the previous one is started again: %w", p.epoch.n, Probation, cause)
}

// cycle runs one epoch, e or the next spawn, to its reap. It returns the request that ended it, if one did,
// and why it ended. An epoch that is adopted meanwhile takes its place.
func (p *Plugin) cycle(e *epoch) (*restart, error) {
	if e == nil {
		var err error
		if e, err = p.spawn(); err != nil {
			return nil, err
		}
	}
	var request *restart
	for waiting := true; waiting; {
		select {
		case <-e.lost:
			waiting = false
		case <-p.stop:
			p.retire(e, p.stopCtx)
			waiting = false
		case r := <-p.restart:
			request = &r
			p.retire(e, r.ctx)
			waiting = false
		case a := <-p.adopt:
			if next := p.take(a, e); next != nil {
				e = next
			}
		}
	}
	err := e.explain()
	p.setState(StateStopping, err)
	e.deliver.Lock()
	p.emit(Event{Kind: Lost, Epoch: e.n, Err: err})
	e.deliver.Unlock()
	if e.end(errors.Is(err, ErrStopped)) {
		p.emit(Event{Kind: Reaped, Epoch: e.n})
	} else {
		p.abandon(e)
	}
	return request, err
}

// spawn starts the next epoch.
func (p *Plugin) spawn() (*epoch, error) {
	p.setState(StateStarting, nil)
	e, err := p.newEpoch(p.spec)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.epoch = e
	p.spawns++
	p.mu.Unlock()

	if err := e.start(p.stop); err != nil {
		e.fail(err)
		p.setState(StateStopping, err)
		if !e.end(false) {
			p.abandon(e)
		}
		return nil, err
	}
	e.isUp.Store(true)
	p.emit(Event{Kind: Up, Epoch: e.n, Handshake: e.hello, Spec: *e.spec})
	p.setState(StateUp, nil)
	p.log.Info("plugin is up", "epoch", e.n, "pid", e.proc.pid(), "version", e.hello.PluginVersion)
	e.serve()
	return e, nil
}

// stopped is down, once the epochs beside the last one have ended, too.
func (p *Plugin) stopped(err error) {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.asides.Wait()
	p.down(err)
}

// retire ends an epoch that nothing is wrong with.
func (p *Plugin) retire(e *epoch, ctx context.Context) {
	p.setState(StateStopping, nil)
	e.drain(ctx)
	e.fail(ErrStopped)
}

// abandon leaves an epoch whose processes do not die to a goroutine that reaps it when they do. The
// next epoch starts beside it: the only case where its Reaped comes out of order.
func (p *Plugin) abandon(e *epoch) {
	p.log.Error("processes of the plugin do not die; see dmesg for hung tasks", "epoch", e.n)
	p.mu.Lock()
	p.unreaped++
	p.mu.Unlock()
	go func() {
		for !e.reap(time.Second) {
			select {
			case <-p.h.closing:
				return
			default:
			}
		}
		e.release()
		p.mu.Lock()
		p.unreaped--
		p.mu.Unlock()
		if e.isUp.Load() {
			p.emit(Event{Kind: Reaped, Epoch: e.n})
		}
	}()
}

func (p *Plugin) tooManyUnreaped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unreaped >= maxUnreaped
}

// down reports that nothing comes any more, once.
func (p *Plugin) down(err error) {
	p.mu.Lock()
	already := p.state == StateDown
	p.mu.Unlock()
	p.setState(StateDown, err)
	if !already {
		p.emit(Event{Kind: Down, Err: err})
	}
}

// wait waits for the delay (0: for ever), a restart, an epoch to adopt, or the stop.
func (p *Plugin) wait(delay time.Duration) (restarted bool, adopted *epoch, stopped bool) {
	var timer <-chan time.Time
	if delay > 0 {
		timer = time.After(delay)
	}
	for {
		select {
		case <-timer:
			return false, nil, false
		case r := <-p.restart:
			close(r.done)
			return true, nil, false
		case a := <-p.adopt:
			if e := p.take(a, nil); e != nil {
				return false, e, false
			}
		case <-p.stop:
			return false, nil, true
		}
	}
}

// budget decides when to restart and when to give up. It is half-open: the back-off starts anew only
// after an epoch that lasted longer than the window.
type budget struct {
	cfg    *Config
	starts []time.Time // within the window
	delay  time.Duration
}

func (b *budget) reset() { b.starts, b.delay = nil, 0 }

// next takes one restart out of the budget and returns the delay before it.
func (b *budget) next(now time.Time) (time.Duration, bool) {
	for len(b.starts) > 0 && now.Sub(b.starts[0]) > b.cfg.RestartWindow {
		b.starts = b.starts[1:]
	}
	if len(b.starts) >= b.cfg.RestartBudget {
		return 0, false
	}
	b.starts = append(b.starts, now)
	b.delay = min(max(2*b.delay, b.cfg.BackoffMin), b.cfg.BackoffMax)
	return b.delay, true
}
