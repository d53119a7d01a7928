package demo

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// fakeEngine is both engines and the backend in one: it pairs rooms and copies pages in memory.
// lateWrite makes it write a page of an aborted room after it said quiet; skipEvery makes it say Done
// for every n-th room without moving a byte; hang makes it forget every n-th room. lose makes one side
// lose its engine; its pages are reusable once proven is closed.
type fakeEngine struct {
	mu        sync.Mutex
	rooms     map[int64]*fakePair
	mem       map[string]memory // by role
	lateWrite bool
	skipEvery int
	hangEvery int
	decode    *worker
	late      sync.WaitGroup
	loseAt    int                      // the source's worker loses its engine with the n-th room, once
	gone      map[string]chan struct{} // by role: closed when the engine is lost
	proven    chan struct{}
}

// fakeSession is a worker's session with the fake.
type fakeSession struct{ gone chan struct{} }

func (s fakeSession) Done() <-chan struct{} { return s.gone }
func (s fakeSession) Err() error {
	select {
	case <-s.gone:
		return fmt.Errorf("%w: killed", client.ErrEngineLost)
	default:
		return nil
	}
}

func (e *fakeEngine) session(role string) session { return fakeSession{e.gone[role]} }

// next is the engine that comes after one that was lost.
func (e *fakeEngine) next(role string) link {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gone[role] = make(chan struct{})
	return link{e.session(role), e.open(role)}
}

// lose must be called with mu held: the counterpart's rooms end as peer_lost.
func (e *fakeEngine) lose(role string) {
	close(e.gone[role])
	for _, p := range e.rooms {
		if r := p.sides[role]; r != nil && !p.finished {
			p.end(role, client.Failed)
			for by, r := range p.sides {
				if r.reason = client.Reason("peer_lost"); by == role {
					r.reason = client.ReasonEngineLost
				}
			}
		}
	}
}

// writeWhenFree damages a page as soon as the decode worker has given it back.
func (e *fakeEngine) writeWhenFree(id int32) {
	for range 2000 {
		e.decode.mu.Lock()
		free := !e.decode.alloc.held[id]
		if free {
			copy(e.mem[RoleDecode].page(0, id), "late")
		}
		e.decode.mu.Unlock()
		if free {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

type fakePair struct {
	n        int // in order of the first open
	sides    map[string]*fakeRoom
	dst      []int32
	src      []int32
	last     bool
	aux      []byte
	finished bool
}

type fakeRoom struct {
	e      *fakeEngine
	pair   *fakePair
	role   string
	done   chan struct{}
	status client.Status
	reason client.Reason
}

func newFakeEngine() *fakeEngine {
	return &fakeEngine{
		rooms: map[int64]*fakePair{}, mem: map[string]memory{}, proven: make(chan struct{}),
		gone: map[string]chan struct{}{RolePrefill: make(chan struct{}), RoleDecode: make(chan struct{})},
	}
}

func (e *fakeEngine) open(role string) openFunc {
	return func(ctx context.Context, o client.OpenOptions) (kvRoom, error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		p := e.rooms[o.Room]
		if p == nil {
			p = &fakePair{n: len(e.rooms) + 1, sides: map[string]*fakeRoom{}}
			e.rooms[o.Room] = p
		}
		if err := e.session(role).Err(); err != nil {
			p.end(role, client.Failed) // as a router would end it
			return nil, err
		}
		if p.sides[role] != nil {
			return nil, errors.New("the room is open")
		}
		r := &fakeRoom{e: e, pair: p, role: role, done: make(chan struct{})}
		p.sides[role] = r
		if p.finished {
			return nil, &client.EndedError{Reason: "peer_aborted"}
		}
		return r, nil
	}
}

// end must be called with mu held.
func (p *fakePair) end(by string, status client.Status) {
	if p.finished {
		return
	}
	p.finished = true
	for role, r := range p.sides {
		r.status, r.reason = status, "success"
		if status == client.Failed {
			r.reason = "peer_aborted"
			if role == by {
				r.reason = "aborted"
			}
		}
		close(r.done)
	}
}

// step finishes a pair of which both sides have done their part.
func (r *fakeRoom) step() {
	e, p := r.e, r.pair
	if p.finished || !p.last || p.sides[RoleDecode] == nil || p.dst == nil && len(p.src) > 0 {
		return
	}
	if e.hangEvery > 0 && p.n%e.hangEvery == 0 {
		return
	}
	if e.skipEvery == 0 || p.n%e.skipEvery != 0 {
		for i, id := range p.src {
			for t := range e.mem[RolePrefill].tensors {
				copy(e.mem[RoleDecode].page(t, p.dst[i]), e.mem[RolePrefill].page(t, id))
			}
		}
	}
	p.end("", client.Success)
}

func (r *fakeRoom) Register(ctx context.Context, parts ...client.RegisterPart) error {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	if err := r.over(); err != nil {
		return err
	}
	r.pair.dst = parts[0].Pages[parts[0].Prefix:]
	r.step()
	return nil
}

func (r *fakeRoom) Send(ctx context.Context, c client.Chunk) error {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	if err := r.over(); err != nil {
		return err
	}
	for _, part := range c.Parts {
		r.pair.src = append(r.pair.src, part.Pages...)
	}
	r.pair.last, r.pair.aux = c.Last, c.Aux
	if r.e.loseAt > 0 && r.pair.n >= r.e.loseAt {
		r.e.loseAt = 0
		r.e.lose(r.role)
		return r.over()
	}
	r.step()
	return nil
}

func (r *fakeRoom) Abort(ctx context.Context) error {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	if r.pair.finished {
		return nil
	}
	if r.e.lateWrite && len(r.pair.dst) > 0 {
		id := r.pair.dst[0]
		r.e.late.Go(func() { r.e.writeWhenFree(id) })
	}
	r.pair.end(r.role, client.Failed)
	return nil
}

func (r *fakeRoom) WaitTerminal(ctx context.Context) (client.Status, error) {
	select {
	case <-r.done:
		return r.status, nil
	case <-ctx.Done():
		return client.Transferring, context.Cause(ctx)
	}
}

// over must be called with mu held.
func (r *fakeRoom) over() error {
	if err := r.e.session(r.role).Err(); err != nil {
		return err
	}
	if r.pair.finished {
		return &client.EndedError{Reason: r.reason}
	}
	return nil
}

func (r *fakeRoom) WaitReusable(ctx context.Context) error {
	if r.reason != client.ReasonEngineLost {
		return ctx.Err()
	}
	select {
	case <-r.e.proven:
		return nil
	case <-ctx.Done():
		return client.ErrNotReusable
	}
}

func (r *fakeRoom) Release(ctx context.Context) error { return ctx.Err() }

func (r *fakeRoom) Failure(ctx context.Context) (client.Failure, error) {
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	return client.Failure{Status: r.status, Reason: r.reason}, nil
}

func (r *fakeRoom) Aux(ctx context.Context) ([]byte, error) {
	return r.pair.aux, r.e.session(r.role).Err()
}
