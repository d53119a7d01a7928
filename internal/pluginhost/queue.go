package pluginhost

import (
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	sendFrame  = 512 << 10 // the writer closes a frame here
	eventFrame = 8         // upper bound of what a frame adds to one event: tag and length
)

// queue is the bounded queue before one stream. Senders never wait; one writer takes what it holds.
type queue struct {
	maxEvents, maxBytes int
	wake                chan struct{} // capacity 1: something was pushed, or the queue was closed

	mu     sync.Mutex
	events []sized
	bytes  int
	closed bool
}

type sized struct {
	event *contract.HostEvent
	size  int
}

func newQueue(maxEvents, maxBytes int) *queue {
	return &queue{maxEvents: maxEvents, maxBytes: maxBytes, wake: make(chan struct{}, 1)}
}

// push appends all events or none.
func (q *queue) push(events []*contract.HostEvent) error {
	if len(events) == 0 {
		return nil
	}
	total := 0
	sizes := make([]sized, len(events))
	for i, ev := range events {
		size := encodedSize(ev) + eventFrame
		if size > sdk.MaxFrame {
			return fmt.Errorf("event %d of %d bytes: %w", i, size, ErrTooLarge)
		}
		sizes[i] = sized{ev, size}
		total += size
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return ErrEpoch
	}
	if len(q.events)+len(events) > q.maxEvents || q.bytes+total > q.maxBytes {
		return fmt.Errorf("%d events, %d bytes wait: %w", len(q.events), q.bytes, ErrFull)
	}
	q.events = append(q.events, sizes...)
	q.bytes += total
	q.signal()
	return nil
}

// Upper bounds of a small Submit: without page runs, and of one number of those.
const (
	submitSize = 256
	numberSize = 5
	smallSize  = 4 << 10
)

// encodedSize is an event's size; of a small Submit, the event that is frequent, an upper bound that
// costs nothing.
func encodedSize(ev *contract.HostEvent) int {
	if s, ok := ev.GetEvent().(*contract.HostEvent_Submit); ok {
		m := s.Submit
		numbers := 3 * (len(m.GetSource().GetStart()) + len(m.GetDestination().GetStart()))
		if size := submitSize + numberSize*numbers + len(m.GetTrace()); size <= smallSize {
			return size
		}
	}
	return proto.Size(ev)
}

// last replaces everything that waits by one final event and closes the queue for senders.
func (q *queue) last(ev *contract.HostEvent) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.events = []sized{{ev, proto.Size(ev) + eventFrame}}
	q.closed = true
	q.signal()
}

// close drops what waits and ends the writer.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events, q.bytes, q.closed = nil, 0, true
	q.signal()
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take fills frame with what waits, up to sendFrame bytes. more is false when the queue is closed and
// empty.
func (q *queue) take(frame *contract.HostFrame) (more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	frame.Events = frame.Events[:0]
	n, bytes := 0, 0
	for n < len(q.events) && (n == 0 || bytes+q.events[n].size <= sendFrame) {
		frame.Events = append(frame.Events, q.events[n].event)
		bytes += q.events[n].size
		n++
	}
	clear(q.events[:n])
	q.events = q.events[n:]
	if len(q.events) == 0 {
		q.events = nil
	}
	q.bytes -= bytes
	return n > 0 || !q.closed
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.events)
}

// write sends frames until the queue is closed and empty or the stream fails. Whatever gathers while a
// Send blocks in flow control goes into the next frame: batches grow by themselves, without a timer.
func (q *queue) write(send func(*contract.HostFrame) error) error {
	var frame contract.HostFrame
	for q.take(&frame) {
		if len(frame.Events) == 0 {
			<-q.wake
			continue
		}
		if err := send(&frame); err != nil {
			return err
		}
	}
	return nil
}
