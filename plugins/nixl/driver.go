package nixl

import (
	"runtime"
	"sync"
	"time"
)

// driver owns the sending agent and everything that is on its way: one goroutine, so that each request has one owner
// and nothing needs a lock. Others hand it functions by do.
type driver struct {
	b     *Backend
	agent *agent
	done  chan struct{} // closed when run has returned

	mu     sync.Mutex
	queue  []func()
	closed bool
	wake   chan struct{} // 1

	// Of the goroutine.
	links  map[*link]struct{} // with requests, ops or proofs open
	pieces []piece
}

func newDriver(b *Backend, a *agent) *driver {
	return &driver{b: b, agent: a, done: make(chan struct{}), wake: make(chan struct{}, 1), links: map[*link]struct{}{}}
}

// do runs f on the driver's goroutine, in order. After close it does nothing.
func (d *driver) do(f func()) {
	d.mu.Lock()
	if !d.closed {
		d.queue = append(d.queue, f)
	}
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *driver) take() (list []func(), closed bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, d.queue = d.queue, nil
	return list, d.closed
}

// How the driver waits for the library, which has nothing to wait on: it asks again at once for as long as a small
// write takes, then ever more rarely. A millisecond is what an op may wait for its end when the lane is slow.
const (
	spins   = 100
	napStep = 10 * time.Microsecond
	napMost = time.Millisecond
)

func (d *driver) run() {
	defer close(d.done)
	nap := time.NewTimer(time.Hour)
	defer nap.Stop()
	idle := 0
	for {
		list, closed := d.take()
		if closed {
			return
		}
		for _, f := range list {
			f()
		}
		moved, open := len(list) > 0, false
		for l := range d.links {
			if l.step() {
				moved = true
			}
			open = open || l.open()
		}
		switch {
		case moved:
			idle = 0
		case !open:
			<-d.wake
			idle = 0
		case idle < spins:
			idle++
			runtime.Gosched()
		default:
			idle++
			nap.Reset(min(time.Duration(idle-spins)*napStep, napMost))
			select {
			case <-d.wake:
			case <-nap.C:
			}
		}
	}
}

// close ends the goroutine and destroys the agent: no request reads memory afterwards.
func (d *driver) close() {
	d.mu.Lock()
	d.closed = true
	d.queue = nil
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
	<-d.done
	for l := range d.links {
		l.s.conn.Close()
	}
	d.agent.destroy()
}
