package conformance

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Storms are random by the seed alone: what the suite sends, and in which order, depends on no answer. They
// work in slots, sets of destination pages, and wait until the op of a slot is quiet before they reuse it.

func init() {
	register(
		Case{
			ID: "storm/ops", Rule: "R1", Profile: Robustness, Storm: true, Timeout: 60 * time.Second,
			Title: "hundreds of ops of all sizes, layers and urgencies, every third aborted at some moment, all end",
			Script: `
> 400 Submits, up to 24 at once; AbortOp of some: before the Submit, at once, later, twice
< Accepted, one end, of each: Done; Done or Aborted of those that were aborted
= the bytes of the done ones; pages are used again as soon as their op is quiet`,
			Run: stormOps,
		},
		Case{
			ID: "storm/generations", Rule: "R3", Profile: Robustness, Storm: true, Needs: []string{sdk.FeatureReceiverChecked}, Timeout: 60 * time.Second,
			Title: "openers come and go over the same pages; a stale one never writes",
			Script: `
> Grant, Submit, Revoke while the op is open, Grant of the next opener on the same pages, Submit of a
  revoked opener: 250 steps
< Granted, Revoked; Done of the ops of live openers; Done or Failed of those whose opener was revoked
  meanwhile; Failed(CAUSE_REFUSED or CAUSE_BOUNDS) of stale ones
= after Revoked(quiet=true) nothing of the old opener lands`,
			Run: stormGenerations,
		},
		Case{
			ID: "storm/peers", Rule: "R12", Profile: Robustness, Storm: true, Timeout: 60 * time.Second,
			Title: "a peer comes and goes with ops open; ops in the other direction do not notice",
			Script: `
> 25 times: PeerAccept, PeerAdd, Submits, some AbortOps, PeerRemove with ops open; all the while ops from B to A
< PeerReady; Done, Aborted or Failed(CAUSE_PEER_UNREACHABLE), of each before PeerRemoved
< Done of every op from B to A`,
			Run: stormPeers,
		},
		Case{
			ID: "storm/regions", Rule: "R4", Profile: Robustness, Storm: true, Timeout: 60 * time.Second,
			Title: "memory comes and goes while ops on other memory run",
			Script: `
> 30 times: RegionAdd, PoolAdd, PlanAdd, Submits; everything taken back as soon as they are quiet; all the
  while ops on memory that stays
< Done, of each
= lease and mapping of a removed region are gone`,
			Run: stormRegions,
		},
		Case{
			ID: "storm/bad-submits", Rule: "R12", Profile: Robustness, Storm: true, Timeout: 60 * time.Second,
			Title: "broken Submits among good ones are refused one by one and harm none",
			Script: `
> 300 Submits in frames of up to 20; four in ten with one field spoilt
< Accepted, Done of the good ones
< Accepted, Failed(CAUSE_PROTOCOL, quiet=true) of the broken ones; CAUSE_UNSUPPORTED of READ`,
			Run: stormBadSubmits,
		},
		Case{
			ID: "storm/two-way", Rule: "R12", Profile: Robustness, Storm: true, Timeout: 60 * time.Second,
			Title: "both plugins send and receive at once",
			Script: `
> 200 Submits at A and 200 at B, up to 16 at once each, some aborted
< Done, or Aborted where asked for, of each`,
			Run: stormTwoWay,
		},
		Case{
			ID: "storm/slow-host", Rule: "R1", Profile: Robustness, Storm: true, Timeout: 60 * time.Second,
			Title: "a host that stands still loses no end, and costs the plugin no more memory than its window",
			Script: `
> a window of Submits; AbortOp of every fifth
= the host reads nothing of A's Session for a while
> 4 times that
< Accepted, one end, of each, in order
= the plugin's memory has not grown beyond bounds`,
			Run: stormSlowHost,
		},
		Case{
			ID: "storm/kill", Rule: "R6", Profile: Robustness, Storm: true, Fresh: true, Needs: []string{NeedProcess}, Timeout: 90 * time.Second,
			Title: "the receiver is killed with ops open, twice: they end, and a new epoch takes over",
			Script: `
> Submits from A to B; SIGKILL to B in the middle
< Done or Failed, of each; quiet at the latest when the peer is removed
> PeerRemove; a new process for B's engine, PeerAccept, PeerAdd, Submits
< Done, of each`,
			Run: stormKill,
		},
	)
}

// stormWindow is how many ops of a size may be open at once: want, or what the plugin's limits leave of it.
func stormWindow(t *T, want int, bytes uint64) int {
	l := t.A().Hello().GetLimits()
	for _, limit := range []uint64{uint64(l.GetMaxOps()), uint64(l.GetMaxOpsPerPeer()), l.GetMaxBytesPerPeer() / max(1, bytes)} {
		if limit != 0 {
			want = min(want, int(limit))
		}
	}
	return max(1, want)
}

// stormDone checks the end of an op in an otherwise healthy world.
func stormDone(o *Op, aborted bool) {
	want := "to be done"
	if aborted {
		want = "to be done or aborted"
	}
	end := o.End()
	o.node.case_().Check(end.Kind == "done" || aborted && end.Kind == "aborted", "R1", fmt.Sprintf("op %d %s", o.ID, want), "%s", end)
	o.Quiet()
}

// stormSlots keeps one open op a slot, on the slot's own pages of both pools.
type stormSlots struct {
	t       *T
	path    *Path
	each    uint32 // pages of a slot
	ops     []*Op
	aborted map[*Op]bool
	n       int
}

func newStormSlots(t *T, p *Path, slots int, each uint32) *stormSlots {
	return &stormSlots{t: t, path: p, each: each, ops: make([]*Op, slots), aborted: map[*Op]bool{}}
}

// next takes the next slot, when its last op is quiet, and makes a Submit of it.
func (s *stormSlots) next() (slot int, sub Submit) {
	slot = s.n % len(s.ops)
	s.n++
	s.settle(slot)
	r := s.t.Rand()
	first := uint32(slot) * s.each
	n := 1 + r.Uint32N(s.each)
	ids := func() []uint32 {
		list := layoutPerm(s.t, s.each, n)
		for i := range list {
			list[i] += first
		}
		return list
	}
	sub = Submit{Src: layoutCut(s.t, ids()), Dst: layoutCut(s.t, ids()), Priority: int32(r.IntN(7)) - 3}
	if r.IntN(4) == 0 {
		sub.Deadline = time.Duration(1 + r.Int64N(int64(time.Second))) // a hint, whatever it says (R5)
	}
	if layers := uint32(len(s.path.Src.Tensors)); layers > 1 && s.t.Has(sdk.FeatureLayerRange) && r.IntN(2) == 0 {
		sub.LayerFrom = r.Uint32N(layers)
		sub.LayerTo = sub.LayerFrom + 1 + r.Uint32N(layers)
	}
	return slot, sub
}

// submit sends an op in the next slot; about every third is aborted sooner or later.
func (s *stormSlots) submit() {
	r := s.t.Rand()
	slot, sub := s.next()
	op, m := s.path.prepare(sub)
	if r.IntN(20) == 0 { // an abort that overtakes
		m.Op = s.path.From.NewID()
		op.ID = m.Op
		s.abort(op)
	}
	s.ops[slot] = s.path.From.submit(op, m)
	if r.IntN(3) == 0 {
		if victim := s.ops[r.IntN(len(s.ops))]; victim != nil {
			s.abort(victim)
			if r.IntN(4) == 0 {
				s.abort(victim)
			}
		}
	}
}

func (s *stormSlots) abort(o *Op) {
	s.aborted[o] = true
	o.Abort()
}

// settle waits for the op of a slot.
func (s *stormSlots) settle(slot int) {
	if o := s.ops[slot]; o != nil {
		stormDone(o, s.aborted[o])
		delete(s.aborted, o)
		s.ops[slot] = nil
	}
}

func (s *stormSlots) settleAll() {
	for slot := range s.ops {
		s.settle(slot)
	}
}

func stormOps(t *T) {
	const pages, bytes, layers = 16, 8192, 4
	slots := stormWindow(t, 24, pages*bytes*layers)
	p := t.Path(Shape{Pages: uint32(slots) * pages, PageBytes: bytes, Layers: layers, Gap: 64})
	s := newStormSlots(t, p, slots, pages)
	for range 400 {
		s.submit()
	}
	s.settleAll()
}

func stormTwoWay(t *T) {
	const pages, bytes, layers = 12, 4000, 2
	n := stormWindow(t, 16, pages*bytes*layers)
	shape := Shape{Pages: uint32(n) * pages, PageBytes: bytes, Layers: layers, Gap: 8}
	there := newStormSlots(t, t.PathBetween(t.A(), t.B(), shape), n, pages)
	back := newStormSlots(t, t.PathBetween(t.B(), t.A(), shape), n, pages)
	for range 400 {
		if t.Rand().IntN(2) == 0 {
			there.submit()
		} else {
			back.submit()
		}
	}
	there.settleAll()
	back.settleAll()
}

// stormGeneration is one opener over the pages of a slot.
type stormGeneration struct {
	generation *contract.Generation
	grant      uint64
	op         *Op // its open op, if any
}

func stormGenerations(t *T) {
	const pages, bytes = 8, 16384
	slots := stormWindow(t, 12, pages*bytes)
	r := t.Rand()
	p := t.Path(Shape{Pages: uint32(slots) * pages, PageBytes: bytes, NoGrant: true})
	live := make([]*stormGeneration, slots)
	dead := make([][]*contract.Generation, slots) // by the slot that they were granted
	settle := func(g *stormGeneration) {
		if g.op != nil {
			g.op.Done()
			g.op = nil
		}
	}
	for range 250 {
		slot := r.IntN(slots)
		first := uint32(slot) * pages
		switch g := live[slot]; {
		case g == nil:
			g = &stormGeneration{generation: p.NewGeneration()}
			g.grant = p.Grant(g.generation.Destination, p.Dst, Pages(first, pages)...)
			live[slot] = g
		case r.IntN(4) == 0 && len(dead[slot]) > 0: // a stale opener of these pages, which a live one may be writing
			old := dead[slot][r.IntN(len(dead[slot]))]
			end := p.Submit(Submit{Generation: old, Src: Pages(first, pages), Dst: Pages(first, pages), Change: func(*contract.Submit) {}}).Quiet()
			t.Check(end.Kind == "failed" && (end.Cause == contract.Cause_CAUSE_REFUSED || end.Cause == contract.Cause_CAUSE_BOUNDS), "R3",
				"an op of a revoked opener to end Failed(CAUSE_REFUSED or CAUSE_BOUNDS)", "%s", end)
		case r.IntN(3) == 0:
			quiet := p.Revoke(g.grant)
			dead[slot] = append(dead[slot], g.generation)
			live[slot] = nil
			if g.op == nil {
				break
			}
			if quiet { // the pages are free now, although the writer has not heard of it
				p.shut(g.op)
			}
			end := g.op
			if !quiet || r.IntN(2) == 0 {
				end.Quiet()
			}
			t.stale(end)
		default:
			settle(g)
			g.op = p.Submit(Submit{Generation: g.generation, Src: layoutSingles(layoutPerm(t, uint32(slots)*pages, pages)), Dst: Pages(first, pages)})
		}
	}
	for _, g := range live {
		if g != nil {
			settle(g)
		}
	}
}

// stale checks the end of an op whose opener was revoked while it was open, if it has come.
func (t *T) stale(o *Op) {
	if !o.Ended() {
		return // finish waits for it
	}
	end := o.End()
	t.Check(end.Kind == "done" || end.Kind == "failed" && (end.Cause == contract.Cause_CAUSE_REFUSED || end.Cause == contract.Cause_CAUSE_BOUNDS), "R3",
		fmt.Sprintf("op %d, whose opener was revoked, to end Done or Failed(CAUSE_REFUSED or CAUSE_BOUNDS)", o.ID), "%s", end)
}

// shut says that no byte of the op may land any more, whatever its writer knows: its pages are the worker's
// again, who writes to them.
func (p *Path) shut(o *Op) {
	p.From.mu.Lock()
	defer p.From.mu.Unlock()
	for _, s := range o.spans {
		s.dst.mu.Lock()
		if s.dst.open[o] {
			for i := range s.n {
				s.dst.Bytes[s.dstOff+i] = 0xEE
			}
			copy(s.dst.shadow[s.dstOff:][:s.n], s.dst.Bytes[s.dstOff:])
		}
		s.dst.mu.Unlock()
	}
	for _, r := range o.destinations() {
		r.mu.Lock()
		delete(r.open, o)
		r.mu.Unlock()
	}
	o.spans = nil
}

func stormPeers(t *T) {
	const pages, bytes = 40, 16384
	r := t.Rand()
	back := t.PathBetween(t.B(), t.A(), Shape{Pages: 64, PageBytes: 512})
	steady := newStormSlots(t, back, stormWindow(t, 4, 16*512), 16)
	src, dst := layoutPool(t.A(), pages, layoutTensor{bytes: bytes}), layoutPool(t.B(), pages, layoutTensor{bytes: bytes})
	window := stormWindow(t, 10, 4*bytes)
	for range 25 {
		p := t.Connect(t.A(), t.B(), 0)
		layoutPlan(p, src, dst, layoutWhole(src)...)
		var ops []*Op
		aborted := map[*Op]bool{}
		for i := range r.IntN(window + 1) {
			o := p.Submit(Submit{Src: layoutSingles(layoutPerm(t, pages, 4)), Dst: Pages(uint32(4*i), 4)})
			ops = append(ops, o)
			if r.IntN(6) == 0 {
				o.Abort()
				aborted[o] = true
			}
			_, sub := steady.next()
			steady.ops[(steady.n-1)%len(steady.ops)] = back.Submit(sub)
		}
		if len(ops) > 0 && r.IntN(2) == 0 {
			ops[r.IntN(len(ops))].End()
		}
		p.Remove()
		for _, o := range ops {
			end := o.Quiet()
			t.Check(end.Kind == "done" || aborted[o] && end.Kind == "aborted" || end.Kind == "failed" && end.Cause == contract.Cause_CAUSE_PEER_UNREACHABLE, "R12",
				fmt.Sprintf("op %d of a removed peer to end Done or Failed(CAUSE_PEER_UNREACHABLE)", o.ID), "%s", end)
		}
		for _, g := range p.Grants() {
			p.Revoke(g)
		}
	}
	steady.settleAll()
}

func stormRegions(t *T) {
	r := t.Rand()
	p := t.Path(Shape{Pages: 64, PageBytes: 2048})
	steady := newStormSlots(t, p, stormWindow(t, 8, 8*2048), 8)
	window := max(1, stormWindow(t, 12, 50*4096)-len(steady.ops))
	own := p.Plan
	type piece struct {
		src, dst *Pool
		plan     *Plan
		grant    uint64
		ops      []*Op
	}
	var open []*piece
	retire := func(c *piece) {
		layoutDone(c.ops)
		p.retire(c.grant, c.plan)
	}
	for range 30 {
		tensors := []layoutTensor{{bytes: 1 + r.Uint64N(4000)}, {bytes: 1 + r.Uint64N(4000), layer: 1, region: r.IntN(2)}}
		pages := 1 + r.Uint32N(50)
		c := &piece{src: layoutPool(p.From, pages, tensors...), dst: layoutPool(p.To, pages, tensors...)}
		c.plan = p.AddPlan(c.src, c.dst, 1, 1, layoutWhole(c.src)...)
		generation := p.NewGeneration()
		c.grant = p.Grant(generation.Destination, c.dst, Pages(0, pages)...)
		for at := uint32(0); at < pages && len(c.ops) < max(1, window/3); {
			n := min(pages-at, 1+r.Uint32N(20))
			c.ops = append(c.ops, p.Submit(Submit{Plan: c.plan, Generation: generation, Src: Pages(at, n), Dst: Pages(at, n)}))
			at += n
		}
		_, sub := steady.next()
		sub.Plan = own
		steady.ops[(steady.n-1)%len(steady.ops)] = p.Submit(sub)
		if open = append(open, c); len(open) == 3 {
			i := r.IntN(len(open))
			retire(open[i])
			open = slices.Delete(open, i, i+1)
		}
	}
	for _, c := range open {
		retire(c)
	}
	steady.settleAll()
}

func stormBadSubmits(t *T) {
	spoil := []struct {
		what string
		do   func(p *Path, m *contract.Submit)
	}{
		{"plan", func(_ *Path, m *contract.Submit) { m.Plan += 1 << 40 }},
		{"peer", func(_ *Path, m *contract.Submit) { m.Peer += 1 << 20 }},
		{"bytes", func(_ *Path, m *contract.Submit) { m.Bytes++ }},
		{"no bytes", func(_ *Path, m *contract.Submit) { m.Bytes = 0 }},
		{"page out of range", func(p *Path, m *contract.Submit) { m.Destination.Start[0] = p.Dst.Pages }},
		{"page beyond 2^32", func(_ *Path, m *contract.Submit) { m.Source.Start[0] = 1<<32 - 1 }},
		{"count 0", func(_ *Path, m *contract.Submit) { m.Source.Count[0] = 0 }},
		{"count of 2^32-1", func(_ *Path, m *contract.Submit) { m.Destination.Count[0] = 1<<32 - 1 }},
		{"no destination", func(_ *Path, m *contract.Submit) { m.Destination = nil }},
		{"columns of unequal length", func(_ *Path, m *contract.Submit) { m.Source.Count = append(m.Source.Count, 1) }},
		{"zero opener", func(_ *Path, m *contract.Submit) {
			m.Generation = &contract.Generation{Source: &contract.Opener{}, Destination: m.Generation.Destination}
		}},
		{"no generation", func(_ *Path, m *contract.Submit) { m.Generation = nil }},
		{"empty layers", func(_ *Path, m *contract.Submit) { m.LayerTo = m.LayerFrom }},
		{"direction 0", func(_ *Path, m *contract.Submit) { m.Direction = 0 }},
		{"READ", func(_ *Path, m *contract.Submit) { m.Direction = contract.Direction_DIRECTION_READ }},
	}
	const pages, bytes = 4, 1000
	r := t.Rand()
	slots := stormWindow(t, 20, pages*bytes)
	p := t.Path(Shape{Pages: uint32(slots) * pages, PageBytes: bytes})
	for sent := 0; sent < 300; {
		var list []Submit
		var what []string
		for slot := range 1 + r.IntN(slots) {
			s := Submit{Src: layoutSingles(layoutPerm(t, p.Src.Pages, pages)), Dst: Pages(uint32(slot)*pages, pages)}
			name := ""
			if r.IntN(10) < 4 {
				bad := spoil[r.IntN(len(spoil))]
				name = bad.what
				s.Change = func(m *contract.Submit) { bad.do(p, m) }
			}
			list, what = append(list, s), append(what, name)
		}
		for i, o := range p.SubmitAll(list) {
			switch what[i] {
			case "":
				o.Done()
			case "READ":
				layoutRefused(o, contract.Cause_CAUSE_UNSUPPORTED)
			default:
				end := o.End()
				t.Check(end.Kind == "failed" && end.Cause == contract.Cause_CAUSE_PROTOCOL && end.Quiet, "R12",
					fmt.Sprintf("op %d (%s) to end Failed(CAUSE_PROTOCOL, quiet=true)", o.ID, what[i]), "%s", end)
			}
		}
		sent += len(list)
	}
}

func stormSlowHost(t *T) {
	const bytes = 512
	window := stormWindow(t, 256, bytes)
	p := t.Path(Shape{Pages: uint32(window), PageBytes: bytes})
	p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done() // what the plugin opens at its first op it may keep
	base := leakMeasure(t)
	for range 4 {
		release := t.A().Hold()
		ops := make([]*Op, window)
		aborted := map[*Op]bool{}
		for i := range ops {
			ops[i] = p.Submit(Submit{Src: Pages(uint32(t.Rand().IntN(window)), 1), Dst: Pages(uint32(i), 1)})
			if i%5 == 4 {
				ops[i].Abort()
				aborted[ops[i]] = true
			}
		}
		t.B().Stats()                  // the receiver is not held up by it
		t.Sleep(50 * time.Millisecond) // the host stands still
		release()
		for _, o := range ops {
			stormDone(o, aborted[o])
		}
	}
	base.check(t, base.grown)
}

func stormKill(t *T) {
	const pages, bytes = 16, 65536
	r := t.Rand()
	window := stormWindow(t, 16, pages*bytes)
	src := layoutPool(t.A(), pages*4, layoutTensor{bytes: bytes})
	to := t.B()
	for life := range 2 {
		p := t.Connect(t.A(), to, 0)
		dst := layoutPool(to, uint32(window)*pages, layoutTensor{bytes: bytes})
		layoutPlan(p, src, dst, layoutWhole(src)...)
		var ops []*Op
		kill := r.IntN(window)
		for i := range window {
			ops = append(ops, p.Submit(Submit{Src: layoutSingles(layoutPerm(t, src.Pages, pages)), Dst: Pages(uint32(i)*pages, pages)}))
			if i == kill {
				ops[r.IntN(len(ops))].Accepted()
				to.MayDie()
				if err := to.Process().Kill(); err != nil {
					t.broke("kill the receiver: %v", err)
				}
			}
		}
		to.UntilReaped(30 * time.Second)
		p.closed = true // the receiver's half of it is gone
		t.A().removePeer(p.Handle)
		for _, o := range ops {
			end := o.Quiet()
			t.Check(end.Kind == "done" || end.Kind == "failed", "R6", fmt.Sprintf("op %d to a receiver that was killed to end Done or Failed", o.ID), "%s", end)
		}
		to = t.Launch(to.ID.Node, to.ID.Incarnation+1, uint32(life)+2)
	}
	p := t.Connect(t.A(), to, 0)
	dst := layoutPool(to, pages, layoutTensor{bytes: bytes})
	layoutPlan(p, src, dst, layoutWhole(src)...)
	p.Submit(Submit{Src: Pages(0, pages), Dst: Pages(0, pages)}).Done()
}
