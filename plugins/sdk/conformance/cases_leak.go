package conformance

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
)

func init() {
	register(
		Case{
			ID: "leak/ten-thousand-ops", Rule: "R1", Profile: Robustness, Timeout: 3 * time.Minute,
			Title: "of ten thousand ops none is lost, and none leaves anything behind",
			Script: `
> 10000 Submits, up to 64 at once; every hundredth aborted
< Accepted, one end, of each
= Stats.open_ops is empty; threads and descriptors are what they were after the first 1000; memory grew by less than
  4 MiB and 2.75 KiB an op in one half of the others`,
			Run: leakOps,
		},
		Case{
			ID: "leak/thousand-regions", Rule: "R4", Profile: Robustness, Timeout: 2 * time.Minute,
			Title: "a thousand regions, one after the other, leave neither lease nor mapping behind",
			Script: `
> 1000 times RegionAdd, RegionRemove
< RegionReady, RegionRemoved
= lease and mapping of each are gone; threads and descriptors are what they were after the first 100; memory grew by
  less than 4 MiB and 8 KiB a region in one half of the others`,
			Run: func(t *T) {
				var removed []*Region
				leakRepeat(t, 100, 900, 8<<10, func(int) {
					r := t.A().AddRegion(3*4096 + 11)
					t.A().RemoveRegion(r)
					if removed = append(removed, r); len(removed) == 50 {
						t.free(removed)
						removed = nil
					}
				})
			},
		},
		Case{
			ID: "leak/hundred-peers", Rule: "R12", Profile: Robustness, Timeout: 2 * time.Minute,
			Title: "a peer that comes a hundred times leaves nothing behind",
			Script: `
> 100 times PeerAccept, PeerAdd, Submit, PeerRemove at both ends
< PeerReady, Done, PeerRemoved
= threads and descriptors are what they were after the first 20; memory grew by less than 4 MiB and 48 KiB a time in
  one half of the others`,
			Run: func(t *T) {
				src, dst := layoutPool(t.A(), 4, layoutTensor{bytes: 4096}), layoutPool(t.B(), 4, layoutTensor{bytes: 4096})
				leakRepeat(t, 20, 80, 48<<10, func(int) {
					p := t.Connect(t.A(), t.B(), 0)
					layoutPlan(p, src, dst, layoutWhole(src)...)
					p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4)}).Done()
					p.Remove()
					for _, g := range p.Grants() {
						p.Revoke(g)
					}
					t.forgetPath(p)
				})
			},
		},
		Case{
			ID: "leak/grants", Rule: "R3", Profile: Robustness, Needs: []string{sdk.FeatureReceiverChecked}, Timeout: 2 * time.Minute,
			Title: "a thousand grants that were revoked cost next to nothing",
			Script: `
> 1000 times Grant of a new opener, Submit every tenth time, Revoke
< Granted, Done, Revoked(quiet=true)
= threads and descriptors are what they were after the first 100; memory grew by less than 4 MiB and 8 KiB a time in
  one half of the others`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 64, PageBytes: 256, NoGrant: true})
				leakRepeat(t, 100, 900, 8<<10, func(i int) {
					g := p.NewGeneration()
					grant := p.Grant(g.Destination, p.Dst, Pages(0, 64)...)
					if i%10 == 0 {
						p.Submit(Submit{Generation: g, Src: Pages(0, 8), Dst: Pages(8, 8)}).Done()
					}
					t.Check(p.Revoke(grant), "R4", "Revoked with quiet=true, all ops being quiet", "quiet=false")
				})
			},
		},
		Case{
			ID: "leak/plans", Rule: "R12", Profile: Robustness, Timeout: 2 * time.Minute,
			Title: "a thousand pools and plans that were removed leave nothing behind",
			Script: `
> 1000 times PoolAdd, PlanAdd, Submit, PlanRemove, PoolRemove
< Done
= threads and descriptors are what they were after the first 100; memory grew by less than 4 MiB and 8 KiB a time in
  one half of the others`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 256})
				leakRepeat(t, 100, 900, 8<<10, func(int) {
					plan := p.AddPlan(t.A().AddPool(8, p.Src.Tensors...), p.Dst, 1, 1, layoutWhole(p.Src)...)
					p.Submit(Submit{Plan: plan, Src: Pages(0, 4), Dst: Pages(4, 4)}).Done()
					p.dropPlan(plan)
				})
			},
		},
	)
}

// leakRepeat does something first+then times. What the plugins hold is measured after the first ones, in the middle of
// the others and at the end; each time may leave so many bytes of garbage.
func leakRepeat(t *T, first, then, garbage int, do func(i int)) {
	for i := range first {
		do(i)
	}
	l := leakMeasure(t)
	for i := range then / 2 {
		do(first + i)
	}
	half := l.now()
	for i := then / 2; i < then; i++ {
		do(first + i)
	}
	l.check(t, func(i int, is leakHeld) string {
		a, b := half[i].memory-l.held[i].memory, is.memory-half[i].memory
		if min(a, b) > leakSteady+then/2*garbage || a+b > leakBytes+then/2*garbage {
			return fmt.Sprintf("%d KiB of memory, after %d KiB more in the first %d times and %d KiB more in the last %d",
				is.memory>>10, a>>10, then/2, b>>10, then-then/2)
		}
		return ""
	})
}

func leakOps(t *T) {
	const bytes = 512
	window := stormWindow(t, 64, bytes)
	p := t.Path(Shape{Pages: uint32(window), PageBytes: bytes})
	ops := make([]*Op, window)
	aborted := map[*Op]bool{}
	leakRepeat(t, 1000, 9000, 2816, func(i int) {
		slot := i % window
		if o := ops[slot]; o != nil {
			stormDone(o, aborted[o])
			delete(aborted, o)
		}
		ops[slot] = p.Submit(Submit{Src: Pages(uint32(window-1-slot), 1), Dst: Pages(uint32(slot), 1)})
		if i%100 == 99 {
			aborted[ops[slot].Abort()] = true
		}
	})
	for _, o := range ops {
		stormDone(o, aborted[o])
	}
}

// leakage is what the processes of the pair hold. Nothing is measured of plugins in this process.
type leakage struct {
	nodes []*Node
	held  []leakHeld // at first
}

type leakHeld struct {
	memory       int // bytes that are no file: those of its own and shared ones, regions among them
	threads, fds int
}

func leakMeasure(t *T) *leakage {
	l := &leakage{}
	for _, n := range t.nodes {
		if n.Process() != nil && n.Lost() == nil {
			l.nodes = append(l.nodes, n)
		}
	}
	l.held = l.now()
	return l
}

// grown tells whether one of them holds more memory than a runtime may come to.
func (l *leakage) grown(i int, is leakHeld) string {
	if was := l.held[i]; is.memory > was.memory+leakBytes {
		return fmt.Sprintf("%d KiB of memory, %d KiB before", is.memory>>10, was.memory>>10)
	}
	return ""
}

// now is what they hold now.
func (l *leakage) now() (held []leakHeld) {
	for _, n := range l.nodes {
		held = append(held, leakHeldBy(n.Process().PID()))
	}
	return held
}

// The slack leaves room for what runtimes do: arenas, thread pools, garbage that is not worth collecting. Arenas come now
// and then; a leak grows in one half as in the other.
const (
	leakSteady  = 4 << 20  // more memory in either half,
	leakBytes   = 24 << 20 // and in the whole
	leakThreads = 32
	leakFDs     = 8
)

const leakExpected = "the plugin to hold no more than it did, give or take what its runtime keeps"

// check compares with what they hold now. The memory of each is for the caller to judge.
func (l *leakage) check(t *T, memory func(i int, is leakHeld) string) {
	t.eventually("R12", leakExpected, func() string {
		for i, is := range l.now() {
			was, at := l.held[i], l.nodes[i].Name
			bad := memory(i, is)
			switch {
			case bad != "":
			case is.threads > was.threads+leakThreads:
				bad = fmt.Sprintf("%d threads, %d before", is.threads, was.threads)
			case is.fds > was.fds+leakFDs:
				bad = fmt.Sprintf("%d descriptors, %d before", is.fds, was.fds)
			}
			if bad != "" {
				return at + " with " + bad
			}
		}
		return ""
	})
}

// leakHeldBy adds up what the processes of a group hold.
func leakHeldBy(pgid int) (h leakHeld) {
	for _, pid := range group(pgid) {
		h.fds += len(entriesOf(fmt.Sprintf("/proc/%d/fd", pid)))
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // it has just ended
		}
		for line := range strings.Lines(string(status)) {
			name, value, _ := strings.Cut(line, ":")
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			switch {
			case err != nil:
			case name == "RssAnon", name == "RssShmem":
				h.memory += n << 10
			case name == "Threads":
				h.threads += n
			}
		}
	}
	return h
}
