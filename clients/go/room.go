package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Room is one attempt of one request's hand-over, opened by this client.
type Room struct {
	c       *Client
	id      int64
	attempt int64
	slot    int32
	tag     uint64        // of the opener; the word is ours when it carries it
	final   atomic.Uint32 // latched|status|residency once the page no longer speaks for the room
	leaving atomic.Uint32 // latched|status of a room whose release was asked for
	chunks  atomic.Int32
	seen    uint16      // last delivered to Changes; under changes.mu
	listed  Status      // last put on the group's list; this and the next two under groupList.mu
	open    bool        // answered with a slot
	applied Status      // what this rank was told last
	kept    atomic.Bool // pages are kept until the group's list has ended the room
	changed broadcaster
}

const (
	latched = 1 << 8 // set in Room.final and in Room.seen when they hold something
)

// ID returns the room's number.
func (r *Room) ID() int64 { return r.id }

// Attempt returns the attempt that it was opened with.
func (r *Room) Attempt() int64 { return r.attempt }

// Poll returns the room's status: one memory read, no system call, no lock. Before the engine has
// written it for this opener it reads Bootstrapping. Terminal statuses never change. After the engine
// is gone, a room that had not ended reads Failed (engine_lost).
func (r *Room) Poll() Status {
	b := r.low()
	return Status(b & 7)
}

// Residency returns who may still touch the room's pages. After the engine is gone, pages that were in
// use read Quarantined until WaitReusable or Reusable has the proof; then Fenced.
func (r *Room) Residency() Residency {
	return Residency(r.low() >> 3 & 7)
}

// State returns status and residency of the same moment.
func (r *Room) State() (Status, Residency) {
	b := r.low()
	return Status(b & 7), Residency(b >> 3 & 7)
}

// low returns status | residency<<3.
func (r *Room) low() uint8 {
	if f := r.final.Load(); f != 0 {
		return r.afterLoss(f)
	}
	// The order matters: a word read before the engine was found lost still speaks for it.
	lost := r.c.lost.Load()
	w := r.c.page.word(r.slot)
	b := uint8(w & 63)
	if w>>16 != r.tag {
		b = uint8(Bootstrapping)
		if l := r.leaving.Load(); l != 0 { // released, and the answer is on its way: the slot has a new room
			b = uint8(l&7) | uint8(Released)<<3
		}
	}
	if !lost {
		return b
	}
	// Latch: whatever a frozen engine writes later, this room has ended for its worker.
	f := uint32(b)
	if !Status(b & 7).Terminal() {
		f = uint32(Failed) | uint32(b)&^7
	}
	r.final.CompareAndSwap(0, f|latched)
	return r.afterLoss(r.final.Load())
}

// afterLoss corrects a latched residency by what is proven now.
func (r *Room) afterLoss(f uint32) uint8 {
	b := uint8(f & 63)
	if !Residency(b >> 3).Reusable() {
		if r.c.free.Load() {
			return b&7 | uint8(Fenced)<<3
		}
		return b&7 | uint8(Quarantined)<<3
	}
	return b
}

// install makes the room pollable; on the reader goroutine, when the open is answered.
func (r *Room) install(a *answer) error {
	if err := a.err(); err != nil {
		if r.c.group != nil {
			r.c.group.refused(r, err)
		}
		return nil
	}
	if a.Slot < 0 || int(a.Slot) >= len(r.c.rooms) {
		return fmt.Errorf("the engine answered slot %d of %d", a.Slot, len(r.c.rooms))
	}
	r.slot, r.tag = a.Slot, a.Opener&(1<<48-1)
	r.c.rooms[r.slot].Store(r)
	r.c.changes.add(r)
	if r.c.group != nil {
		r.c.group.opened(r)
	}
	return nil
}

// Register names the pages of a destination room, once. It returns when the engine took them.
func (r *Room) Register(ctx context.Context, parts ...RegisterPart) error {
	p, err := r.StartRegister(ctx, parts...)
	if err != nil {
		return err
	}
	return p.Wait(ctx)
}

// StartRegister is Register without waiting for the answer.
func (r *Room) StartRegister(ctx context.Context, parts ...RegisterPart) (*Pending, error) {
	hp := make([]partHeader, 0, len(parts))
	payload := make([][]byte, 0, len(parts))
	for _, p := range parts {
		hp = append(hp, partHeader{Pool: p.Pool, Pages: len(p.Pages), Prefix: p.Prefix})
		payload = append(payload, idBytes(p.Pages))
	}
	return r.start(ctx, request{T: "register", Parts: hp}, payload)
}

// Send hands over a chunk whose pages are complete in memory. It returns when the engine took it; the
// pages are in use until Residency says otherwise.
func (r *Room) Send(ctx context.Context, ch Chunk) error {
	p, err := r.StartSend(ctx, ch)
	if err != nil {
		return err
	}
	return p.Wait(ctx)
}

// StartSend is Send without waiting for the answer. Calls for one room must not overlap.
func (r *Room) StartSend(ctx context.Context, ch Chunk) (*Pending, error) {
	q := request{T: "send", Last: ch.Last, Aux: len(ch.Aux)}
	n := r.chunks.Add(1) - 1
	q.Chunk = &n
	payload := make([][]byte, 0, len(ch.Parts)+1)
	for _, p := range ch.Parts {
		q.Parts = append(q.Parts, partHeader{Pool: p.Pool, Pages: len(p.Pages)})
		payload = append(payload, idBytes(p.Pages))
	}
	if ch.Layers != [2]int{} {
		q.Layers = ch.Layers[:]
	}
	if len(ch.Aux) > 0 {
		payload = append(payload, ch.Aux)
	}
	return r.start(ctx, q, payload)
}

// Abort ends the room. It is idempotent: aborting a room that has ended changes nothing and is no error.
func (r *Room) Abort(ctx context.Context) error {
	p, err := r.start(ctx, request{T: "abort"}, nil)
	if err == nil {
		err = p.Wait(ctx)
	}
	var ended *EndedError
	if errors.As(err, &ended) || errors.Is(err, ErrReleased) {
		return nil
	}
	return err
}

// Release takes the pages back and frees the slot. While somebody may still touch the pages it
// returns an error that is ErrNotReusable, and may be tried again. After the engine is gone nothing
// is left to free: it reports only whether the pages are reusable.
func (r *Room) Release(ctx context.Context) error {
	p, err := r.startRelease(ctx)
	if err == nil {
		err = p.Wait(ctx)
	}
	if err == nil || r.c.Err() == nil {
		return err
	}
	if r.released() || r.Reusable() {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrNotReusable, err)
}

// StartRelease is Release without waiting for the answer.
func (r *Room) StartRelease(ctx context.Context) (*Pending, error) { return r.startRelease(ctx) }

func (r *Room) startRelease(ctx context.Context) (*Pending, error) {
	if r.kept.Load() {
		return nil, fmt.Errorf("room %d: %w: the group's list has not ended the room", r.id, ErrNotReusable)
	}
	if b := r.low(); Status(b & 7).Terminal() {
		r.leaving.Store(uint32(b&7) | latched)
	}
	return r.startApply(ctx, request{T: "release"}, nil, func(a *answer) error {
		if a.err() == nil {
			r.forget()
		}
		return nil
	})
}

// forget detaches the room from its slot, which another open may get next. The status stays.
func (r *Room) forget() {
	b := r.low()
	r.final.CompareAndSwap(0, uint32(b&7)|uint32(Released)<<3|latched)
	r.c.rooms[r.slot].CompareAndSwap(r, nil)
	if r.c.group != nil {
		r.c.group.released(r)
	}
	r.changed.broadcast()
}

// released reports that the engine freed the slot.
func (r *Room) released() bool {
	f := r.final.Load()
	return f != 0 && Residency(f>>3&7) == Released
}

// Reusable reports whether the pages may be used for something else. It differs from
// Residency().Reusable() after the engine is gone, when it looks for the proof, and with
// Options.GroupList: it is false until the list has ended the room.
func (r *Room) Reusable() bool {
	if r.kept.Load() {
		return false
	}
	if r.Residency().Reusable() {
		return true
	}
	return r.c.lost.Load() && r.c.fenced() && r.Residency().Reusable()
}

// Failure asks why the room ended; Reason is "none" while it has not.
func (r *Room) Failure(ctx context.Context) (Failure, error) {
	p, err := r.start(ctx, request{T: "failure"}, nil)
	if err == nil {
		err = p.Wait(ctx)
	}
	if err != nil {
		if r.c.Err() == nil {
			return Failure{}, err
		}
		st, res := r.State()
		f := Failure{Status: st, Residency: res, Reason: ReasonEngineLost, Detail: r.c.Err().Error(),
			Doc: "The engine is gone; its verdict, if there was one, is in its flight recorder: engine rooms why."}
		if st == Success {
			f.Reason, f.Doc = "success", "Every byte arrived and the judge said so before the engine was lost."
		}
		return f, nil
	}
	a := p.answer
	return Failure{Status: Status(a.Status), Residency: Residency(a.Residency), Reason: a.Reason, Doc: a.Doc, Detail: a.Detail}, nil
}

// Aux fetches the record that the source sent with its last chunk; empty when there is none. It is
// there from the moment that Success is seen until Release.
func (r *Room) Aux(ctx context.Context) ([]byte, error) {
	p, err := r.start(ctx, request{T: "aux"}, nil)
	if err != nil {
		return nil, err
	}
	if err := p.Wait(ctx); err != nil {
		return nil, err
	}
	return p.answer.payload, nil
}

// WaitTerminal waits until the room has ended.
func (r *Room) WaitTerminal(ctx context.Context) (Status, error) {
	err := r.wait(ctx, func() bool { return r.Poll().Terminal() })
	return r.Poll(), err
}

// WaitReusable waits until the pages may be used for something else. After the engine is gone that is
// when nobody holds a writable descriptor or mapping of this session's regions.
func (r *Room) WaitReusable(ctx context.Context) error {
	if err := r.wait(ctx, r.Reusable); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReusable, err)
	}
	return nil
}

// wait looks, sleeps until the room changes, looks again. It looks every so often even without a
// change: after the engine is gone, and where there is no eventfd, nobody wakes it.
func (r *Room) wait(ctx context.Context, ok func() bool) error {
	pause := 50 * time.Microsecond
	longest := time.Millisecond
	if r.c.eventfd != nil {
		pause, longest = 100*time.Millisecond, 100*time.Millisecond
	}
	var t *time.Timer
	for {
		ch := r.changed.wait()
		if ok() {
			return nil
		}
		if r.c.lost.Load() {
			pause, longest = max(pause, time.Millisecond), 50*time.Millisecond
		}
		if t == nil {
			t = time.NewTimer(pause)
			defer t.Stop()
		} else {
			t.Reset(pause)
		}
		select {
		case <-ch:
		case <-t.C:
			pause = min(2*pause, longest)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *Room) start(ctx context.Context, q request, payload [][]byte) (*Pending, error) {
	return r.startApply(ctx, q, payload, nil)
}

func (r *Room) startApply(ctx context.Context, q request, payload [][]byte, apply func(*answer) error) (*Pending, error) {
	if r.released() { // the slot may be another attempt's
		return nil, fmt.Errorf("room %d: %w", r.id, ErrReleased)
	}
	q.Slot, q.Room = r.slot, r.id
	return r.c.start(ctx, &q, payload, nil, apply)
}
