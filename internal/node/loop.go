package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/core"
)

// tick is how often the core is stepped when nothing happens. A step that comes more than pauseBound
// later than that means that this process was stopped, not that time passed for the rooms.
const (
	tick       = 100 * time.Millisecond
	pauseBound = 500 * time.Millisecond
)

// inboxSoft is the number of waiting items beyond which workers are slowed down.
const inboxSoft = 1 << 16

var errStopped = errors.New("the engine is stopping")

// item is one thing for the owner goroutine: a core event, or a function that runs there before the
// next step.
type item struct {
	ev core.Event
	fn func()
}

// inbox is the owner's queue. Order of arrival is kept.
type inbox struct {
	mu     sync.Mutex
	room   sync.Cond // signalled when the queue was emptied
	items  []item
	wake   chan struct{}
	closed bool
}

func newInbox() *inbox {
	b := &inbox{wake: make(chan struct{}, 1)}
	b.room.L = &b.mu
	return b
}

// put appends an item; false when the engine is stopping.
func (b *inbox) put(it item, mayWait bool) bool {
	b.mu.Lock()
	for mayWait && len(b.items) >= inboxSoft && !b.closed {
		b.room.Wait()
	}
	if b.closed {
		b.mu.Unlock()
		return false
	}
	b.items = append(b.items, it)
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
	return true
}

// take swaps the queue against an empty one.
func (b *inbox) take(spare []item) []item {
	b.mu.Lock()
	items := b.items
	b.items = spare[:0]
	b.room.Broadcast()
	b.mu.Unlock()
	return items
}

func (b *inbox) close() {
	b.mu.Lock()
	b.closed = true
	b.room.Broadcast()
	b.mu.Unlock()
}

// clock is core time: monotonic time minus the pauses of this process. After a pause it stands still
// until what arrived meanwhile has been taken in, so that nothing is judged on an old picture.
type clock struct {
	start   time.Time
	last    time.Duration // monotonic, at the last look
	paused  time.Duration // taken out so far
	pauses  uint64
	resumed bool          // a pause was noticed and what it kept waiting is still being taken in
	since   time.Duration // monotonic: when it was noticed
}

// resumeBound is how long core time stands still at most after a pause, for an inbox that is never empty.
const resumeBound = time.Second

// now returns core time in nanoseconds, never zero; idle says that a tick found the inbox empty. The
// owner calls it once an iteration.
func (c *clock) now(idle bool) int64 {
	t := time.Since(c.start)
	passed := t - c.last
	c.last = t
	switch {
	case passed-tick > pauseBound:
		c.pauses++
		c.resumed, c.since = true, t
	case c.resumed && (idle && t-c.since >= tick || t-c.since >= resumeBound): // readers had a tick to hand over
		c.resumed = false
	}
	if c.resumed {
		c.paused += passed
	}
	return int64(t-c.paused) + int64(time.Second)
}

// run is the owner goroutine: it alone touches the machine and the node's tables.
func (n *Node) run() {
	defer close(n.stopped)
	timer := time.NewTimer(tick)
	defer timer.Stop()
	var items []item
	for {
		ticked := false
		select {
		case <-n.inbox.wake:
		case <-timer.C:
			ticked = true
			timer.Reset(tick)
		case <-n.quit:
			return
		}
		items = n.inbox.take(items)
		now := n.clock.now(ticked && len(items) == 0)
		if n.clock.resumed {
			// A worker that gave this engine up closed its socket first: it is heard before any peer, or
			// a room could succeed that its worker has seen fail.
			gone := n.workers.HungUp()
			items = append(items, n.inbox.take(nil)...) // those whose goroutine was faster are there by now
			n.events = leaversFirst(n.events, gone, items)
		}
		for i := range items {
			if ev := &items[i].ev; items[i].fn != nil {
				items[i].fn()
			} else {
				if ev.Kind == core.PeerFrame && ev.Node != "" { // of peerSink, which does not know the id
					ev.Peer, ev.Node = n.peerID(ev.Node), ""
				}
				n.events = append(n.events, *ev)
			}
			items[i] = item{}
		}
		n.step(now)
	}
}

// leaversFirst appends the end of every session that has hung up or whose SessionDown is among the items. The core
// drops what else the items say of such a session, a second SessionDown included.
func leaversFirst(events []core.Event, gone []core.SessionID, items []item) []core.Event {
	for _, id := range gone {
		events = append(events, core.Event{Kind: core.SessionDown, Session: id})
	}
	for i := range items {
		if items[i].fn == nil && items[i].ev.Kind == core.SessionDown {
			events = append(events, items[i].ev)
		}
	}
	return events
}

// step runs the core over the collected events and carries out what it asks for. Effects may cause
// events of their own (a plugin that cannot take an op, a frame to this very engine): they go to the
// inbox and are seen by the next step.
func (n *Node) step(now int64) {
	n.beat(now)
	n.out.Reset()
	n.m.Step(now, n.events, &n.out)
	clear(n.events)
	n.events = n.events[:0]
	n.steps.Add(1)
	n.stepped.Store(int64(time.Since(n.clock.start)))
	n.apply()
}

// apply carries out effects, in the order that core.Effects states.
func (n *Node) apply() {
	out := &n.out
	n.workers.Apply(out)
	for i := range out.Frames {
		n.sendFrame(&out.Frames[i])
	}
	for i := range out.Plugin {
		n.pluginEffect(&out.Plugin[i])
	}
	n.flush()
	for _, s := range out.Gone {
		n.forgetSession(s)
	}
	if dead := n.m.Stats().PeersDead; dead != n.peersDead {
		n.peersDead = dead
		n.dropDead()
	}
	for i := range out.Stages {
		s := &out.Stages[i]
		n.stages[s.Role][s.Stage].Observe(s.Took)
	}
	if len(out.Records) > 0 {
		n.record(out.Records)
	}
	if out.Drained {
		n.drainedOnce.Do(func() { close(n.drained) })
	}
}

// post hands an event to the core from any goroutine.
func (n *Node) post(ev core.Event) { n.inbox.put(item{ev: ev}, false) }

// do runs fn on the owner goroutine, before the next step.
func (n *Node) do(fn func()) bool { return n.inbox.put(item{fn: fn}, false) }

// ask runs fn on the owner goroutine and waits for it.
func (n *Node) ask(ctx context.Context, fn func()) error {
	done := make(chan struct{})
	if !n.do(func() { fn(); close(done) }) {
		return errStopped
	}
	select {
	case <-done:
		return nil
	case <-n.stopped:
		return errStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
