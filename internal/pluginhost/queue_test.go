package pluginhost

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func sizedEvent(size int) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{Op: 1, Trace: strings.Repeat("x", size)}}}
}

func TestQueueBounds(t *testing.T) {
	q := newQueue(4, 3<<20)
	if err := q.push([]*contract.HostEvent{submit(1), sizedEvent(sdk.MaxFrame)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if err := q.push([]*contract.HostEvent{submit(1), submit(2), submit(3)}); err != nil {
		t.Error(err)
	}
	if err := q.push([]*contract.HostEvent{submit(4), submit(5)}); !errors.Is(err, ErrFull) {
		t.Errorf("too many: %v", err)
	}
	if err := q.push([]*contract.HostEvent{submit(4)}); err != nil {
		t.Errorf("all or none was not kept: %v", err)
	}
	var f contract.HostFrame
	if !q.take(&f) || len(f.Events) != 4 || q.bytes != 0 {
		t.Errorf("took %d events, %d bytes left", len(f.Events), q.bytes)
	}
	big := sizedEvent(sdk.MaxFrame - 100)
	if err := q.push([]*contract.HostEvent{big, big, big}); !errors.Is(err, ErrFull) && err != nil {
		t.Error(err)
	}
	if err := q.push([]*contract.HostEvent{big}); !errors.Is(err, ErrFull) {
		t.Errorf("too many bytes: %v", err)
	}
	q.close()
	if err := q.push([]*contract.HostEvent{submit(1)}); !errors.Is(err, ErrEpoch) {
		t.Errorf("closed: %v", err)
	}
	if q.take(&f) {
		t.Error("a closed queue has more")
	}
}

// TestQueueWrite: order, frame limits, and that a large event travels alone.
func TestQueueWrite(t *testing.T) {
	q := newQueue(1<<20, 1<<30)
	const n = 3000
	var wg sync.WaitGroup
	var next uint64
	var frames, most int
	wg.Go(func() {
		err := q.write(func(f *contract.HostFrame) error {
			frames++
			if size := proto.Size(f); size > sdk.MaxFrame || size > sendFrame && len(f.Events) > 1 {
				t.Errorf("frame of %d bytes, %d events", size, len(f.Events))
			}
			most = max(most, len(f.Events))
			for _, ev := range f.Events {
				next++
				if op := ev.GetSubmit().Op; op != next && op != n+1 {
					t.Errorf("op %d, want %d", op, next)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	for op := uint64(1); op <= n; op++ {
		ev := sizedEvent(1000)
		if op == 500 {
			ev = sizedEvent(700 << 10)
		}
		ev.GetSubmit().Op = op
		if err := q.push([]*contract.HostEvent{ev}); err != nil {
			t.Fatal(err)
		}
	}
	q.last(submit(n + 1)) // drops what waits
	wg.Wait()
	if frames == 0 || next == 0 {
		t.Error("nothing was written")
	}
	t.Logf("%d frames, at most %d events", frames, most)
}

func TestQueueWriteError(t *testing.T) {
	q := newQueue(10, 1<<20)
	broken := errors.New("broken")
	if err := q.push([]*contract.HostEvent{submit(1)}); err != nil {
		t.Fatal(err)
	}
	if err := q.write(func(*contract.HostFrame) error { return broken }); !errors.Is(err, broken) {
		t.Error(err)
	}
}
