package peer

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// TestHammer: many goroutines send, announce, break and ask at once, on three engines that all dial
// each other. Each sender's frames arrive in its order, every sink sees its streams one after the other,
// and when it is over the links stand and hold what was announced last.
func TestHammer(t *testing.T) {
	t.Parallel()
	names := []string{"a", "b", "c"}
	var ns []*node
	for _, name := range names {
		cfg := fast(name, 1, socket(t))
		cfg.QueueFrames = 512
		ns = append(ns, start(t, cfg))
	}
	meetBoth(ns...)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const senders = 3 // of each engine
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
	other := func(rnd *rand.Rand, i int) string { return names[(i+1+rnd.IntN(len(names)-1))%len(names)] }
	for i, n := range ns {
		for s := range senders {
			seq, id := uint64(0), uint64(i*senders+s)
			run(id, func(rnd *rand.Rand) {
				to := other(rnd, i)
				conn := uint64(0)
				if rnd.IntN(4) == 0 { // a stream of the past, of now, or of nobody
					conn = 1 + rnd.Uint64N(16)
				}
				for range 1 + rnd.IntN(16) {
					seq++
					if urgent := rnd.IntN(8) == 0; urgent {
						n.Send(to, conn, abort(id<<40|seq), true)
					} else {
						n.Send(to, conn, frame(id<<40|seq), false)
					}
				}
				time.Sleep(time.Duration(rnd.IntN(1000)) * time.Microsecond)
			})
		}
		run(uint64(100+i), func(rnd *rand.Rand) {
			switch rnd.IntN(8) {
			case 0:
				breakLink(n, other(rnd, i))
			case 1, 2:
				n.AnnounceGroup(Group{Name: fmt.Sprint("g", rnd.IntN(3)), Role: statemachine.Source, Size: 1, Ranks: []int32{0}, Layout: Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"}})
			case 3:
				n.RemoveGroup(fmt.Sprint("g", rnd.IntN(3)), statemachine.Source)
			case 4:
				n.AnnounceLost("tcp", uint32(rnd.IntN(5)))
			case 5:
				n.SetBackends([]Backend{{Name: "tcp", Epoch: uint32(1 + rnd.IntN(5))}})
			case 6:
				n.Drop(other(rnd, i), uint64(rnd.IntN(5)), "no reason")
			case 7:
				n.Status()
			}
			time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
		})
	}
	run(200, func(rnd *rand.Rand) {
		meetBoth(ns...) // nothing new
		time.Sleep(5 * time.Millisecond)
	})
	began := time.Now()
	until(t, "enough for a hammer", func() bool {
		if time.Since(began) < 1500*time.Millisecond {
			return false
		}
		time.Sleep(50 * time.Millisecond)
		n := 0
		for _, x := range ns {
			n += len(x.find(Frame))
		}
		return n >= 500 && len(ns[0].find(Hello)) >= 4
	})
	close(stop)
	wg.Wait()

	for i, n := range ns {
		n.RemoveGroup("g0", statemachine.Source)
		n.RemoveGroup("g1", statemachine.Source)
		n.RemoveGroup("g2", statemachine.Source)
		if err := n.AnnounceGroup(Group{Name: "last-of-" + names[i], Role: statemachine.Source, Size: 1, Ranks: []int32{0}, Layout: Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"}}); err != nil {
			t.Fatal(err)
		}
	}
	received := 0
	for i, n := range ns {
		for j, name := range names {
			if i == j {
				continue
			}
			n.awaitUp(name, 1)
			n.await("the last group of "+name, func() bool {
				groups := map[string]bool{}
				for _, e := range n.all() {
					switch {
					case e.Node != name:
					case e.Kind == GroupUp:
						groups[e.Group.Name] = true
					case e.Kind == GroupGone:
						delete(groups, e.Group.Name)
					}
				}
				return len(groups) == 1 && groups["last-of-"+name]
			})
		}
		checkOrder(t, n.all())
		type lane struct {
			sender int64
			urgent bool
		}
		last := map[lane]int64{}
		for _, e := range n.find(Frame) {
			l := lane{e.Frame.Room >> 40, e.Frame.Kind == statemachine.FrameAbort}
			if seq := e.Frame.Room & (1<<40 - 1); seq <= last[l] {
				t.Fatalf("%s: frame %d of sender %d after %d", n.cfg.Node, seq, l.sender, last[l])
			} else {
				last[l] = seq
			}
			received++
		}
		if len(n.find(BadFrame)) > 0 {
			t.Errorf("%s: bad frames %+v", n.cfg.Node, n.find(BadFrame)[0])
		}
	}
	t.Logf("%d frames, %d streams of a", received, len(ns[0].find(Hello)))
}
