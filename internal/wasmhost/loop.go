package wasmhost

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	// maxWaiting is how many events may wait for the guest.
	maxWaiting = 65536
	// maxEvents and maxEventBytes bound a frame to the guest.
	maxEvents     = 256
	maxEventBytes = 256 << 10
	// pumpEvery is how often an idle guest with open ops is pumped.
	pumpEvery = 100 * time.Millisecond
)

// item is an event on its way to the guest. op is set for a Submit.
type item struct {
	event *contract.HostEvent
	op    *openOp
}

// inbox is what waits for the guest.
type inbox struct {
	wake chan struct{} // 1: something was put

	mu     sync.Mutex
	items  []item
	aborts []*openOp
}

func newInbox() inbox { return inbox{wake: make(chan struct{}, 1)} }

// put queues an item; false means that there is no room.
func (q *inbox) put(i item) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) >= maxWaiting {
		return false
	}
	q.items = append(q.items, i)
	q.ring()
	return true
}

// abort queues an abort; it overtakes. At most one comes for each op.
func (q *inbox) abort(o *openOp) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.aborts = append(q.aborts, o)
	q.ring()
}

func (q *inbox) ring() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take returns the aborts, and items for one frame.
func (q *inbox) take() (aborts []*openOp, items []item) {
	q.mu.Lock()
	defer q.mu.Unlock()
	aborts, q.aborts = q.aborts, nil
	n, size := 0, 0
	for n < len(q.items) && n < maxEvents {
		size += proto.Size(q.items[n].event)
		if n > 0 && size > maxEventBytes {
			break
		}
		n++
	}
	items = q.items[:n:n]
	q.items = q.items[n:]
	if len(q.items) == 0 {
		q.items = nil // the memory goes with the frame
	}
	return aborts, items
}

// close lets go of what was never handed over.
func (q *inbox) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, i := range q.items {
		if i.op != nil {
			i.op.release()
		}
	}
	q.items = nil
}

// loop is the goroutine that calls the guest.
func (b *Backend) loop() {
	defer close(b.looped)
	tick := time.NewTicker(pumpEvery)
	defer tick.Stop()
	var more bool
	for {
		aborts, items := b.in.take()
		if len(aborts) == 0 && len(items) == 0 && (!more || len(b.ops) == 0) {
			select {
			case <-b.in.wake:
				continue
			case <-tick.C:
				if len(b.ops) == 0 && !more {
					continue
				}
			case <-b.ctx.Done():
				return
			}
		}
		var err error
		if more, err = b.turn(aborts, items); err != nil {
			if b.ctx.Err() == nil {
				b.fail(err)
			}
			return
		}
		if b.ctx.Err() != nil {
			return
		}
	}
}

// turn hands one frame to the guest, when there is something to say, and pumps once.
func (b *Backend) turn(aborts []*openOp, items []item) (more bool, err error) {
	frame := b.frame(aborts, items)
	if len(frame.Events) > 0 {
		payload, err := proto.Marshal(frame)
		if err != nil {
			return false, fmt.Errorf("guest %s: encode a frame: %w", b.g.name, err)
		}
		if _, err := b.g.request(b.ctx, methodFrame, exportCall+"(FRAME)", func() string { return sum(frame) }, payload); err != nil {
			return false, err
		}
	}
	if more, err = b.g.work(b.ctx); err != nil {
		return false, err
	}
	b.mu.Lock()
	b.counts.turns++
	b.mu.Unlock()
	now := time.Now()
	for id, o := range b.ops {
		if !o.ended && !o.abortBy.IsZero() && now.After(o.abortBy) {
			return false, fmt.Errorf("guest %s: no end of op %d within %v of its AbortOp (R7)", b.g.name, id, b.g.limits.Answer)
		}
	}
	return more, nil
}

// frame makes the next frame and opens the ops in it.
func (b *Backend) frame(aborts []*openOp, items []item) *contract.HostFrame {
	frame := &contract.HostFrame{Events: make([]*contract.HostEvent, 0, len(items)+len(aborts))}
	for _, o := range aborts {
		if !o.given && !o.over { // the guest has not heard of it, and need not
			o.over = true
			o.release()
			o.op.Aborted(true)
		}
	}
	for _, i := range items {
		if o := i.op; o != nil {
			if o.over {
				continue
			}
			b.give(o)
			i.event.GetSubmit().Seq = b.seq
		}
		frame.Events = append(frame.Events, i.event)
	}
	for _, o := range aborts {
		if o.over || o.ended {
			continue
		}
		o.abortBy = time.Now().Add(b.g.limits.Answer)
		frame.Events = append(frame.Events, &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: o.op.ID()}}})
	}
	return frame
}

// give opens an op for the guest: from here on it may write where the plan leads.
func (b *Backend) give(o *openOp) {
	o.given = true
	b.seq++
	b.ops[o.op.ID()] = o
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.peers[o.op.Peer().Handle]; p != nil {
		for id, t := range o.targets {
			p.targets[id] = append(p.targets[id], t)
		}
	}
}

// shut is give undone: the op is quiet.
func (b *Backend) shut(o *openOp) {
	delete(b.ops, o.op.ID())
	b.mu.Lock()
	if p := b.peers[o.op.Peer().Handle]; p != nil {
		for id, t := range o.targets {
			p.targets[id] = without(p.targets[id], t)
			if len(p.targets[id]) == 0 {
				delete(p.targets, id)
			}
		}
	}
	b.mu.Unlock()
	o.release()
}

func without(list []*target, t *target) []*target {
	if i := slices.Index(list, t); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// own is the memory of a region that the guest names as its engine's.
func (b *Backend) own(id uint64) ([]byte, code) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.regions[id]
	switch {
	case r == nil:
		return nil, b.refused(codeHandle)
	case r.revoked:
		return nil, b.refused(codeRevoked)
	}
	return r.bytes, codeOK
}

// peer is the memory [off, off+n) of a region that the guest names as a peer's.
func (b *Backend) peer(handle uint32, id, off, n uint64) ([]byte, code) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.peers[handle]
	switch {
	case p == nil:
		return nil, b.refused(codeHandle)
	case p.revoked:
		return nil, b.refused(codeRevoked)
	}
	list := p.targets[id]
	if len(list) == 0 {
		return nil, b.refused(codeClosed)
	}
	if !within(off, n, uint64(len(list[0].window.Bytes))) { // all windows of a region are of its size
		return nil, b.refused(codeBounds)
	}
	for i, t := range list {
		if t.covers(off, n) {
			list[0], list[i] = t, list[0] // the next piece is of the same op, most likely
			return t.window.Bytes[off : off+n], codeOK
		}
	}
	return nil, b.refused(codeClosed)
}

// refused counts a refusal. b.mu is held.
func (b *Backend) refused(c code) code {
	b.counts.refused++
	return c
}

// sum names the first events of a frame, for errors.
func sum(frame *contract.HostFrame) string {
	var names []string
	for _, e := range frame.Events {
		if len(names) == 4 {
			names = append(names, fmt.Sprintf("and %d more", len(frame.Events)-4))
			break
		}
		switch e := e.GetEvent().(type) {
		case *contract.HostEvent_Submit:
			names = append(names, fmt.Sprintf("Submit %d", e.Submit.Op))
		case *contract.HostEvent_Abort:
			names = append(names, fmt.Sprintf("AbortOp %d", e.Abort.Op))
		default:
			name := fmt.Sprintf("%T", e)
			names = append(names, name[strings.LastIndexByte(name, '_')+1:])
		}
	}
	return strings.Join(names, ", ")
}
