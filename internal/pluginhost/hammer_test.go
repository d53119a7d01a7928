package pluginhost

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// TestHammer: many goroutines send to one plugin and look at it, while it is restarted, killed and
// found at fault. Every epoch answers the ops that were queued for it in their order, without a gap up
// to where it ended; nothing is heard of it afterwards; and Stop ends it all.
func TestHammer(t *testing.T) {
	t.Parallel()
	var heard, answers atomic.Uint64 // the epoch of the last frame, all frames
	h, rec := newTestHost(t, func(cfg *Config) {
		sink := cfg.Sink
		cfg.Sink = func(ev Event) {
			if sink(ev); ev.Kind == Frame {
				heard.Store(uint64(ev.Epoch))
				answers.Add(1)
			}
		}
		cfg.RestartBudget, cfg.DrainTimeout, cfg.Grace = 1000, 300*time.Millisecond, 300*time.Millisecond
	})
	p := start(t, h, mode("echo"))
	ready(t, p)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	var queue sync.Mutex
	queued := map[uint32]uint64{} // last op queued, by epoch: ops of an epoch are 1, 2, 3, …
	var full, gone, sent atomic.Uint64

	stop := make(chan struct{})
	var wg sync.WaitGroup
	run := func(id uint64, do func(rnd *rand.Rand)) {
		rnd := rand.New(rand.NewPCG(seed, id))
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					do(rnd)
				}
			}
		})
	}
	for id := range uint64(6) {
		run(id, func(rnd *rand.Rand) {
			epoch := p.Status().Epoch
			queue.Lock()
			next := queued[epoch]
			events := make([]*contract.HostEvent, 1+rnd.IntN(8))
			for i := range events {
				events[i] = submit(next + 1 + uint64(i))
			}
			err := p.Send(epoch, events...)
			if err == nil {
				queued[epoch] = next + uint64(len(events))
				sent.Add(uint64(len(events)))
			}
			queue.Unlock()
			switch {
			case err == nil:
			case errors.Is(err, ErrFull):
				full.Add(1)
			case errors.Is(err, ErrEpoch):
				gone.Add(1)
				time.Sleep(time.Millisecond)
			default:
				t.Error(err)
			}
			if rnd.IntN(16) == 0 {
				time.Sleep(time.Duration(rnd.IntN(500)) * time.Microsecond)
			}
		})
	}
	run(10, func(rnd *rand.Rand) {
		epoch := p.Status().Epoch
		err := p.SendControl(epoch, &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: rnd.Uint64N(100)}}})
		if err != nil && !errors.Is(err, ErrEpoch) && !errors.Is(err, ErrFull) {
			t.Error(err)
		}
		h.Plugins()
		time.Sleep(100 * time.Microsecond)
	})
	run(11, func(rnd *rand.Rand) {
		time.Sleep(time.Duration(50+rnd.IntN(150)) * time.Millisecond)
		s := p.Status()
		how := rnd.IntN(4)
		if how < 3 && heard.Load() != uint64(s.Epoch) {
			return // it has yet to work
		}
		switch how % 3 {
		case 0:
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rnd.IntN(200))*time.Millisecond)
			_ = p.Restart(ctx) // or not, when the time is short
			cancel()
		case 1:
			if s.PID > 0 {
				unix.Kill(s.PID, unix.SIGKILL)
			}
		case 2:
			_ = p.Fault(s.Epoch, &contract.Fault{Rule: "R8"})
		}
	})
	began := time.Now()
	eventually(t, "enough for a hammer", func() bool {
		return time.Since(began) > 1500*time.Millisecond && p.Status().Epoch > 5 && answers.Load() > 100
	})
	close(stop)
	wg.Wait()
	within(t, "Stop", func() {
		if err := p.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if s := p.Status(); s.State != StateDown || s.PID != 0 {
		t.Errorf("status %+v", s)
	}

	rec.mu.Lock()
	defer rec.mu.Unlock()
	answered, epochs := uint64(0), 0
	var up, lost, reaped uint32
	var done uint64 // of epoch up
	for _, ev := range rec.events {
		switch ev.Kind {
		case Up:
			if up != reaped || ev.Epoch <= up {
				t.Fatalf("up %d after up %d, reaped %d", ev.Epoch, up, reaped)
			}
			up, done = ev.Epoch, 0
			epochs++
		case Lost:
			lost = ev.Epoch
		case Reaped:
			reaped = ev.Epoch
		case Frame:
			if ev.Epoch != up || ev.Epoch == lost {
				t.Fatalf("a frame of epoch %d: up %d, lost %d", ev.Epoch, up, lost)
			}
			for _, e := range ev.Frame.Events {
				if d := e.GetDone(); d != nil {
					if d.Op != done+1 || d.Op > queued[up] {
						t.Fatalf("epoch %d ended op %d after %d of %d", up, d.Op, done, queued[up])
					}
					done++
					answered++
				}
			}
		}
	}
	t.Logf("%d epochs, %d ops sent, %d answered; %d times full, %d times between epochs", epochs, sent.Load(), answered, full.Load(), gone.Load())
}
