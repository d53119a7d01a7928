package peer

import (
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// batchBytes is where a batch is cut: large enough to amortise a message, small enough that an
// urgent frame waits little, and that the peer works on the first frames of a burst while the last are
// still written.
const batchBytes = 64 << 10

type item struct {
	frame *wire.Frame
	size  int
}

// A queue holds the frames of one stream until its writer takes them. It is bounded in frames and
// bytes; put never waits.
type queue struct {
	maxFrames, maxBytes int
	wake                chan struct{} // capacity 1: something was put

	mu      sync.Mutex
	closed  bool
	first   []item // Hello and the replay: before anything else, not counted against the bounds
	urgent  []item
	normal  []item
	bytes   int
	beatDue bool
}

func newQueue(maxFrames, maxBytes int) *queue {
	return &queue{maxFrames: maxFrames, maxBytes: maxBytes, wake: make(chan struct{}, 1)}
}

// putFirst queues a frame ahead of everything that put takes.
func (q *queue) putFirst(f *wire.Frame) {
	q.mu.Lock()
	q.first = append(q.first, item{f, proto.Size(f)})
	q.mu.Unlock()
	q.signal()
}

// sizeOf is at least what a frame takes on the wire. It is cheap for the frames that come by the thousand:
// gRPC computes the size once more.
func sizeOf(f *wire.Frame) int {
	// A room: number, attempt and openers of at most 11 bytes a number, and what frames them.
	const room = 96
	switch k := f.GetRoom().GetKind().(type) {
	case *wire.Room_Bound, *wire.Room_Verdict, *wire.Room_Abort, *wire.Room_Drained, *wire.Room_Progress:
		return room + 32
	case *wire.Room_RankEnd:
		n := room + 32 + len(k.RankEnd.GetAux())
		for _, sent := range k.RankEnd.GetSent() {
			n += 24 + 32*len(sent.GetParts())
		}
		return n
	}
	return proto.Size(f)
}

// put queues a frame. fits is false when the queue is full; a closed queue swallows the frame.
func (q *queue) put(f *wire.Frame, urgent bool) (fits bool) {
	it := item{f, sizeOf(f)}
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return true
	}
	list := &q.normal
	if urgent {
		list = &q.urgent
	}
	if len(*list) >= q.maxFrames || q.bytes+it.size > q.maxBytes {
		q.mu.Unlock()
		return false
	}
	*list = append(*list, it)
	q.bytes += it.size
	q.mu.Unlock()
	q.signal()
	return true
}

// beat makes the next batch begin with a Beat.
func (q *queue) beat() {
	q.mu.Lock()
	q.beatDue = true
	q.mu.Unlock()
	q.signal()
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take returns the next batch, or nil when nothing waits.
func (q *queue) take() *wire.Batch {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := &wire.Batch{}
	size := 0
	if len(q.first) > 0 {
		q.first = move(b, &size, q.first)
		return b
	}
	if q.beatDue {
		q.beatDue = false
		b.Frames = append(b.Frames, beatFrame)
	}
	before := size
	q.urgent = move(b, &size, q.urgent)
	if len(q.urgent) == 0 {
		q.normal = move(b, &size, q.normal)
	}
	q.bytes -= size - before
	if len(b.Frames) == 0 {
		return nil
	}
	return b
}

var beatFrame = &wire.Frame{Frame: &wire.Frame_Beat{Beat: &wire.Beat{}}}

// move appends items to b up to batchBytes, at least one, and returns the rest.
func move(b *wire.Batch, size *int, items []item) []item {
	n := 0
	for _, it := range items {
		if *size > 0 && *size+it.size > batchBytes {
			break
		}
		b.Frames = append(b.Frames, it.frame)
		*size += it.size
		n++
	}
	if n == len(items) {
		clear(items)
		return items[:0]
	}
	clear(items[:n])
	return items[n:]
}

// len returns the number of waiting frames.
func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.first) + len(q.urgent) + len(q.normal)
}

// close drops what waits.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.first, q.urgent, q.normal, q.bytes = nil, nil, nil, 0
	q.mu.Unlock()
}
