package node

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core"
)

// TestInboxHammer: what many goroutines put comes out once, each one's in its order; one that waits for
// room is let go when there is some, or at the end; nothing is taken in after the end.
func TestInboxHammer(t *testing.T) {
	const producers, each = 8, 5_000
	b := newInbox()
	var taken [producers]uint64
	var accepted [producers]uint64
	ran := 0 // functions
	done := make(chan struct{})
	go func() {
		defer close(done)
		var items []item
		for range b.wake {
			items = b.take(items)
			closed := false
			for _, it := range items {
				if it.fn != nil {
					it.fn()
					ran++
					continue
				}
				if it.ev.Kind == core.DrainEnd {
					closed = true
					continue
				}
				if it.ev.Seq != taken[it.ev.Slot]+1 {
					t.Errorf("producer %d: %d after %d", it.ev.Slot, it.ev.Seq, taken[it.ev.Slot])
				}
				taken[it.ev.Slot] = it.ev.Seq
			}
			if closed {
				return
			}
		}
	}()
	var wg sync.WaitGroup
	functions := 0
	var mu sync.Mutex
	for p := range producers {
		rnd := rand.New(rand.NewPCG(1, uint64(p)))
		wg.Go(func() {
			for seq := uint64(1); seq <= each; seq++ {
				if b.put(item{ev: core.Event{Slot: int32(p), Seq: seq}}, rnd.IntN(2) == 0) {
					accepted[p]++
				}
				if rnd.IntN(100) == 0 {
					mu.Lock()
					if b.put(item{fn: func() {}}, false) {
						functions++
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	b.put(item{ev: core.Event{Kind: core.DrainEnd}}, false)
	<-done
	for p := range producers {
		if accepted[p] != each || taken[p] != each {
			t.Errorf("producer %d: %d of %d accepted, %d taken", p, accepted[p], each, taken[p])
		}
	}
	if ran != functions {
		t.Errorf("%d of %d functions ran", ran, functions)
	}

	// A full inbox makes those wait that may; its end lets them go with nothing taken in.
	for range inboxSoft {
		b.put(item{}, false)
	}
	var waiting atomic.Int32
	refused := make(chan bool, producers)
	for range producers {
		go func() {
			waiting.Add(1)
			refused <- !b.put(item{}, true)
		}()
	}
	for waiting.Load() < producers {
		time.Sleep(time.Millisecond)
	}
	select {
	case <-refused:
		t.Error("a full inbox took one in")
	case <-time.After(20 * time.Millisecond):
	}
	b.close()
	for range producers {
		select {
		case ok := <-refused:
			if !ok {
				t.Error("a closed inbox took one in")
			}
		case <-time.After(10 * time.Second):
			t.Fatal("a put still waits for a closed inbox")
		}
	}
	if b.put(item{}, false) {
		t.Error("a closed inbox took one in")
	}
}
