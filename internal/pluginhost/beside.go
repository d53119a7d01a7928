package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Beside starts the next epoch of the plugin while the present one goes on, so that its work can be handed
// over; spec may name another program, options or environment under the same name. It returns when the
// new epoch has answered its handshake: accept, if not nil, has judged it by then, and Up was emitted. After an error
// nothing has changed: the new process is gone, or about to go. What a plugin allocates for itself, and its
// registrations of the workers' memory, exist twice from here on.
//
// Both epochs are live for Send and the like. The new one is not restarted when it is lost, and the old one
// stays what Status shows, until Adopt; End ends either.
func (p *Plugin) Beside(ctx context.Context, spec Spec, accept func(*contract.HandshakeResponse) error) (uint32, error) {
	if spec.Name != p.name {
		return 0, p.named(fmt.Errorf("the next epoch has the name %q: a plugin keeps its own", spec.Name))
	}
	if err := spec.check(); err != nil {
		return 0, err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return 0, p.named(ErrStopped)
	}
	p.asides.Add(1) // run waits for it, and for what it starts
	p.mu.Unlock()
	defer p.asides.Done()

	e, err := p.newEpoch(&spec)
	if err != nil {
		return 0, p.named(err)
	}
	cancel := make(chan struct{})
	started := make(chan struct{})
	go func() {
		defer close(cancel)
		select {
		case <-ctx.Done():
		case <-p.stop:
		case <-started:
		}
	}()
	err = e.start(cancel)
	close(started)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err == nil && accept != nil {
		err = accept(e.hello)
	}
	if err != nil {
		e.fail(err)
		if !e.end(false) {
			p.abandon(e)
		}
		return 0, p.named(err)
	}
	e.isUp.Store(true)
	s := newSide(e)
	p.mu.Lock()
	p.sides[e.n] = s
	p.mu.Unlock()
	p.emit(Event{Kind: Up, Epoch: e.n, Beside: true, Handshake: e.hello, Spec: *e.spec})
	p.log.Info("plugin is up beside its present epoch", "epoch", e.n, "pid", e.proc.pid(), "version", e.hello.PluginVersion)
	e.serve()
	p.aside(s)
	return e.n, nil
}

// side is an epoch that is not the plugin's own: it is to take over, or was taken over from.
type side struct {
	epoch    *epoch
	promoted chan struct{} // closed when it becomes the plugin's own
	leave    chan struct{} // closed by End
	gone     chan struct{} // closed when it was reaped, or cannot be
	// Guarded by Plugin.mu.
	asked   bool // leave is closed
	unused  bool // it has nothing to drain
	leaving bool // it is being ended
}

func newSide(e *epoch) *side {
	return &side{epoch: e, promoted: make(chan struct{}), leave: make(chan struct{}), gone: make(chan struct{})}
}

// aside watches a side until it ends, or is adopted.
func (p *Plugin) aside(s *side) {
	e := s.epoch
	p.asides.Go(func() {
		ctx := context.Background()
		gently := false
		select {
		case <-s.promoted:
			return
		case <-e.lost:
		case <-s.leave:
			gently = true
		case <-p.stop:
			ctx, gently = p.stopCtx, true
		}
		p.mu.Lock()
		if p.sides[e.n] != s { // it was adopted at this very moment
			p.mu.Unlock()
			return
		}
		s.leaving = true
		unused := s.unused
		p.mu.Unlock()
		if gently {
			if !unused {
				e.drain(ctx)
			}
			e.fail(ErrStopped)
		}
		err := e.explain()
		e.deliver.Lock()
		p.emit(Event{Kind: Lost, Epoch: e.n, Err: err})
		e.deliver.Unlock()
		if e.end(errors.Is(err, ErrStopped)) {
			p.emit(Event{Kind: Reaped, Epoch: e.n})
		} else {
			p.abandon(e)
		}
		p.mu.Lock()
		delete(p.sides, e.n)
		close(s.gone)
		p.mu.Unlock()
	})
}

// Adopt makes an epoch that Beside started the plugin's own: it is what is restarted and what Status shows,
// with its spec, unless it dies on Probation: then the program that it took over from is started again. The one that was, from, goes on beside it until End. If another one than from is the plugin's
// own by now (it was lost and a restart came first), nothing changes.
func (p *Plugin) Adopt(ctx context.Context, from, epoch uint32) error {
	a := adoption{from: from, epoch: epoch, done: make(chan error, 1)}
	select {
	case p.adopt <- a:
	case <-p.done:
		return p.named(ErrStopped)
	case <-ctx.Done():
		return p.named(ctx.Err())
	}
	return p.named(<-a.done)
}

type adoption struct {
	from, epoch uint32
	done        chan error
}

// take carries out an adoption: it returns the epoch, or nil when that is lost, or ending. old, if not nil,
// goes on aside. It is called by the supervisor only.
func (p *Plugin) take(a adoption, old *epoch) *epoch {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.epoch != nil && p.epoch.n != a.from {
		a.done <- fmt.Errorf("epoch %d was restarted as epoch %d meanwhile; try again", a.from, p.epoch.n)
		return nil
	}
	s := p.sides[a.epoch]
	if s == nil || s.leaving || s.epoch.over.Load() {
		a.done <- fmt.Errorf("epoch %d: %w", a.epoch, ErrEpoch)
		return nil
	}
	e := s.epoch
	delete(p.sides, e.n)
	close(s.promoted)
	p.before = nil
	if old != nil {
		p.before = &predecessor{spec: old.keep(), until: time.Now().Add(Probation)}
	}
	p.epoch, p.spec = e, e.spec
	p.spawns++
	p.state, p.since, p.lastErr = StateUp, e.upSince(), nil
	close(p.changed)
	p.changed = make(chan struct{})
	if old != nil {
		s := newSide(old)
		p.sides[old.n] = s
		p.aside(s)
	}
	p.log.Info("plugin was handed over", "epoch", e.n)
	a.done <- nil
	return e
}

// keep is the epoch's spec with the program that runs, whatever is put in the place of its file. (A script and
// a module are read by their path.)
func (e *epoch) keep() *Spec {
	s := *e.spec
	if fd, err := unix.FcntlInt(e.proc.prog.file.Fd(), unix.F_DUPFD_CLOEXEC, minProgramFD); err == nil {
		s.running = os.NewFile(uintptr(fd), e.proc.prog.file.Name())
	}
	return &s
}

// End ends an epoch that is not the plugin's own: it is drained and stopped as by Stop. Lost and Reaped
// follow. It does not wait.
func (p *Plugin) End(epoch uint32) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.sides[epoch]
	if s == nil {
		return fmt.Errorf("plugin %s: epoch %d: %w", p.name, epoch, ErrEpoch)
	}
	s.end()
	return nil
}

// end is called with Plugin.mu.
func (s *side) end() {
	if !s.asked {
		s.asked = true
		close(s.leave)
	}
}

// Discard is End for an epoch that did not take over, which has nothing to drain; the channel that it returns is closed when the epoch is reaped, or was left to be reaped when
// its processes die (Config.Sink gets its Reaped then). It is closed already when there is no such epoch beside
// the plugin's own.
func (p *Plugin) Discard(epoch uint32) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.sides[epoch]
	if s == nil {
		gone := make(chan struct{})
		close(gone)
		return gone
	}
	if !s.asked {
		s.unused = true
		s.end()
	}
	return s.gone
}

// EpochStatus is Status of one epoch that is live, whether or not it is the plugin's own; false when it is not.
func (p *Plugin) EpochStatus(epoch uint32) (Status, bool) {
	e, err := p.live(epoch)
	if err != nil {
		return Status{}, false
	}
	s := Status{Name: p.name, State: StateUp, Since: e.upSince()}
	e.status(&s)
	return s, true
}

// upSince is when the epoch answered its handshake.
func (e *epoch) upSince() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.began
}
