package membership

import (
	"fmt"
	"sync"
	"time"
)

// lease is the registration of a driver that works with a lock file.
type lease struct {
	inc    uint64
	lock   *lock
	intact func() bool
	lost   chan struct{}
	done   chan struct{} // closed by Close
	ended  chan struct{} // closed by guard
	once   sync.Once
	err    error
}

// newLease watches over lk: when intact says no, a second engine may have started under this name.
func newLease(inc uint64, lk *lock, every time.Duration, intact func() bool) *lease {
	l := &lease{inc: inc, lock: lk, intact: intact, lost: make(chan struct{}), done: make(chan struct{}), ended: make(chan struct{})}
	go l.guard(every)
	return l
}

func (l *lease) guard(every time.Duration) {
	defer close(l.ended)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-tick.C:
		}
		if !l.intact() {
			close(l.lost)
			return
		}
	}
}

// Incarnation implements Lease.
func (l *lease) Incarnation() uint64 { return l.inc }

// Lost implements Lease.
func (l *lease) Lost() <-chan struct{} { return l.lost }

// Err implements Lease.
func (l *lease) Err() error {
	select {
	case <-l.lost:
		return fmt.Errorf("the lock %s was removed or replaced, or a newer incarnation has registered", l.lock.f.Name())
	default:
		return nil
	}
}

// Close implements Lease. A record stays: with its lock free it is the proof of death.
func (l *lease) Close() error {
	l.once.Do(func() {
		close(l.done)
		<-l.ended
		l.err = l.lock.release()
	})
	return l.err
}
