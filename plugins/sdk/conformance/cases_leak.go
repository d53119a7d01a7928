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
= Stats.open_ops is empty; memory, threads and descriptors are what they were after the first 1000`,
			Run: leakOps,
		},
		Case{
			ID: "leak/thousand-regions", Rule: "R4", Profile: Robustness, Timeout: 2 * time.Minute,
			Title: "a thousand regions, one after the other, leave neither lease nor mapping behind",
			Script: `
> 1000 times RegionAdd, RegionRemove
< RegionReady, RegionRemoved
= lease and mapping of each are gone; memory, threads and descriptors are what they were after the first 100`,
			Run: func(t *T) {
				var removed []*Region
				leakRepeat(t, 100, 900, func(int) {
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
= memory, threads and descriptors are what they were after the first 20`,
			Run: func(t *T) {
				src, dst := layoutPool(t.A(), 4, layoutTensor{bytes: 4096}), layoutPool(t.B(), 4, layoutTensor{bytes: 4096})
				leakRepeat(t, 20, 80, func(int) {
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
= memory, threads and descriptors are what they were after the first 100`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 64, PageBytes: 256, NoGrant: true})
				leakRepeat(t, 100, 900, func(i int) {
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
= memory, threads and descriptors are what they were after the first 100`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 256})
				leakRepeat(t, 100, 900, func(int) {
					plan := p.AddPlan(t.A().AddPool(8, p.Src.Tensors...), p.Dst, 1, 1, layoutWhole(p.Src)...)
					p.Submit(Submit{Plan: plan, Src: Pages(0, 4), Dst: Pages(4, 4)}).Done()
					p.dropPlan(plan)
				})
			},
		},
	)
}

// leakRepeat does something first+then times; what the plugins hold is measured after the first ones and must
// be the same at the end.
func leakRepeat(t *T, first, then int, do func(i int)) {
	for i := range first {
		do(i)
	}
	base := leakMeasure(t)
	for i := range then {
		do(first + i)
	}
	base.check(t, leakBytes)
}

func leakOps(t *T) {
	const bytes = 512
	window := stormWindow(t, 64, bytes)
	p := t.Path(Shape{Pages: uint32(window), PageBytes: bytes})
	ops := make([]*Op, window)
	aborted := map[*Op]bool{}
	submit := func(i int) {
		slot := i % window
		if o := ops[slot]; o != nil {
			stormDone(o, aborted[o])
			delete(aborted, o)
		}
		ops[slot] = p.Submit(Submit{Src: Pages(uint32(window-1-slot), 1), Dst: Pages(uint32(slot), 1)})
		if i%100 == 99 {
			aborted[ops[slot].Abort()] = true
		}
	}
	for i := range 1000 {
		submit(i)
	}
	base := leakMeasure(t)
	for i := range 9000 {
		submit(1000 + i)
	}
	for _, o := range ops {
		stormDone(o, aborted[o])
	}
	base.check(t, 2*leakBytes) // a plugin may remember the ids of ops that ended
}

// leakage is what the processes of the pair hold. Nothing is measured of plugins in this process.
type leakage struct {
	nodes []*Node
	held  []leakHeld
}

type leakHeld struct {
	anonymous    int // bytes of memory that is no file and no region
	threads, fds int
}

func leakMeasure(t *T) *leakage {
	l := &leakage{}
	for _, n := range t.nodes {
		if n.Process() != nil && n.Lost() == nil {
			l.nodes = append(l.nodes, n)
			l.held = append(l.held, leakHeldBy(n.Process().PID()))
		}
	}
	return l
}

// The slack leaves room for what runtimes do: garbage, arenas, thread pools.
const (
	leakBytes   = 24 << 20
	leakThreads = 32
	leakFDs     = 8
)

// check compares with what they hold now; bytes is how much more memory they may have.
func (l *leakage) check(t *T, bytes int) {
	t.eventually("R12", "the plugin to hold no more than it did, give or take what its runtime keeps", func() string {
		for i, n := range l.nodes {
			was, is := l.held[i], leakHeldBy(n.Process().PID())
			switch {
			case is.anonymous > was.anonymous+bytes:
				return fmt.Sprintf("%d KiB of memory at %s, %d KiB before", is.anonymous>>10, n.Name, was.anonymous>>10)
			case is.threads > was.threads+leakThreads:
				return fmt.Sprintf("%d threads at %s, %d before", is.threads, n.Name, was.threads)
			case is.fds > was.fds+leakFDs:
				return fmt.Sprintf("%d descriptors at %s, %d before", is.fds, n.Name, was.fds)
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
			case name == "RssAnon":
				h.anonymous += n << 10
			case name == "Threads":
				h.threads += n
			}
		}
	}
	return h
}
