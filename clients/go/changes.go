package client

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// changes is the state of the consumer of Changes: what it was told last about each slot.
type changes struct {
	mu     sync.Mutex
	cur    cursor
	mirror []uint64 // eight status bytes each: what was delivered last
	bytes  []byte   // mirror, by slot
	lost   bool     // the latch was delivered

	freshMu sync.Mutex
	fresh   []*Room // opened since the last call: their first changes may have passed unseen
	waiting atomic.Int32
}

func (ch *changes) init(c *Client) {
	ch.mirror = make([]uint64, (c.page.slots+7)/8)
	ch.bytes = unsafe.Slice((*byte)(unsafe.Pointer(&ch.mirror[0])), 8*len(ch.mirror))
	ch.cur.n = c.page.counter()
}

// add makes a room known, whatever the ring said before.
func (ch *changes) add(r *Room) {
	ch.freshMu.Lock()
	ch.fresh = append(ch.fresh, r)
	ch.freshMu.Unlock()
	ch.waiting.Add(1)
	r.c.events.broadcast()
}

// Changes calls fn for each room whose status or residency is not what fn was told last, and returns
// how many there were. Without changes it is two memory reads. Nothing is lost when it is called
// late: it then looks at every slot. Intermediate statuses may be skipped. fn must not call Changes.
func (c *Client) Changes(fn func(Change)) int {
	ch := &c.changes
	ch.mu.Lock()
	defer ch.mu.Unlock()
	n := 0
	look := func(slot int32) {
		r := c.rooms[slot].Load()
		if r == nil {
			return
		}
		b := r.low()
		ch.bytes[slot] = b
		if r.seen == latched|uint16(b) {
			return
		}
		r.seen = latched | uint16(b)
		n++
		fn(Change{r, Status(b & 7), Residency(b >> 3 & 7)})
	}
	if c.lost.Load() && !ch.lost {
		ch.lost = true
		for slot := range c.rooms {
			look(int32(slot))
		}
		return n
	}
	if !ch.cur.next(c.page, look) {
		ch.scan(c.page, look)
	}
	if ch.waiting.Load() > 0 {
		ch.freshMu.Lock()
		fresh := ch.fresh
		ch.fresh = nil
		ch.waiting.Store(0)
		ch.freshMu.Unlock()
		for _, r := range fresh {
			if c.rooms[r.slot].Load() == r { // else released before we came here
				look(r.slot)
			}
		}
	}
	return n
}

// scan looks at the slots whose byte in the plane is not what was delivered.
func (ch *changes) scan(p *page, look func(int32)) {
	for k := range ch.mirror {
		w := p.planeWord(k)
		for d := w ^ ch.mirror[k]; d != 0; {
			i := trailingByte(d)
			d &^= 0xff << (8 * i)
			if slot := 8*k + i; slot < p.slots {
				look(int32(slot))
			}
		}
	}
}

// Wait returns when Changes has something to deliver. It returns the session's error when the session
// is over and everything was delivered.
func (c *Client) Wait(ctx context.Context) error {
	pause := 50 * time.Microsecond
	for {
		woken := c.events.wait()
		if c.changes.any(c) {
			return nil
		}
		if err := c.Err(); err != nil {
			return err
		}
		if c.eventfd != nil {
			pause = 100 * time.Millisecond // a second line: wakes are not lost
		}
		t := time.NewTimer(pause)
		select {
		case <-woken:
		case <-t.C:
			pause = min(2*pause, time.Millisecond)
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
		t.Stop()
	}
}

// any reports whether Changes should look.
func (ch *changes) any(c *Client) bool {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.cur.n != c.page.counter() || ch.waiting.Load() > 0 || c.lost.Load() && !ch.lost
}

// watchEvents sleeps on the eventfd and wakes those who wait for a room or for anything. One wake may
// stand for many changes, so it reads the ring with a cursor of its own.
func (c *Client) watchEvents() {
	defer c.wg.Done()
	cur := cursor{c.page.counter()}
	for {
		ok := cur.next(c.page, func(slot int32) {
			if r := c.rooms[slot].Load(); r != nil {
				r.changed.broadcast()
			}
		})
		if !ok {
			for i := range c.rooms {
				if r := c.rooms[i].Load(); r != nil {
					r.changed.broadcast()
				}
			}
		}
		c.events.broadcast()
		if !c.eventfd.wait() {
			return
		}
	}
}

// broadcaster wakes all who wait; it costs one load when nobody does. Zero value ready.
type broadcaster struct {
	armed atomic.Bool
	mu    sync.Mutex
	ch    chan struct{}
}

// wait returns a channel that the next broadcast closes. Take it first, look second.
func (b *broadcaster) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
		b.armed.Store(true)
	}
	return b.ch
}

func (b *broadcaster) broadcast() {
	if !b.armed.Load() {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
		b.armed.Store(false)
	}
}
