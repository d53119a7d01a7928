package peer

import (
	"math"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// Urgent frames overtake those that wait.
func TestUrgent(t *testing.T) {
	q := newQueue(1000, maxMessage)
	for i := range uint64(100) {
		f, _ := encodeRoom(frame(i))
		q.put(f, false)
	}
	f, _ := encodeRoom(abort(7))
	q.put(f, true)
	q.beat()
	b := q.take()
	if b.Frames[0].GetBeat() == nil || b.Frames[1].GetRoom().GetAbort() == nil || b.Frames[2].GetRoom().GetRoom() != 0 || len(b.Frames) != 102 {
		t.Fatalf("%d frames, first %v, %v", len(b.Frames), b.Frames[0], b.Frames[1])
	}
	if q.bytes != 0 || q.len() != 0 || q.take() != nil {
		t.Fatal("the queue is not empty")
	}
}

// sizeOf is never too small, whatever the numbers, or a batch could exceed what the peer reads.
func TestSizeOf(t *testing.T) {
	largest := statemachine.Opener{Inc: 1<<64 - 1, Seq: 1<<64 - 1}
	for name, f := range roomFrames() {
		f.Room, f.Att, f.Bytes = math.MaxInt64, 1<<64-1, math.MaxInt64
		if !f.S.IsZero() {
			f.S = largest
		}
		if !f.D.IsZero() {
			f.D = largest
		}
		w, err := encodeRoom(f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got, exact := sizeOf(w), proto.Size(w); got < exact || got > exact+256 {
			t.Errorf("%s: %d, the frame has %d", name, got, exact)
		}
	}
}

func TestQueueBounds(t *testing.T) {
	f, _ := encodeRoom(frame(1))
	q := newQueue(2, maxMessage)
	for i, want := range []bool{true, true, false} {
		if q.put(f, false) != want {
			t.Fatalf("frame %d", i)
		}
	}
	if !q.put(f, true) {
		t.Fatal("urgent frames have a bound of their own")
	}
	q = newQueue(1000, 10)
	if q.put(f, false) {
		t.Fatal("the bound in bytes was not kept")
	}
	// A large list leaves in several batches, in order.
	q = newQueue(1000, 64<<20)
	big := roomFrames()["rank_end"]
	big.Aux = make([]byte, 100<<10)
	for i := range int64(10) {
		big.Room = i
		w, err := encodeRoom(big)
		if err != nil || !q.put(w, false) {
			t.Fatal(err)
		}
	}
	next, batches := uint64(0), 0
	for b := q.take(); b != nil; b = q.take() {
		batches++
		for _, f := range b.Frames {
			if f.GetRoom().GetRoom() != next {
				t.Fatalf("room %d, want %d", f.GetRoom().GetRoom(), next)
			}
			next++
		}
	}
	if next != 10 || batches != 10 || q.bytes != 0 {
		t.Fatalf("%d frames in %d batches, %d bytes left", next, batches, q.bytes)
	}
}
