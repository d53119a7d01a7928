package sim

import (
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// worker is one rank of a group, across its restarts.
type worker struct {
	id      int32
	group   int32
	rank    int32
	engine  int32
	gen     uint64 // of the process
	up      bool
	session core.SessionID // 0: not connected
	mem     int32
	slot    [slots]int32 // life plus one
}

// stage of a life.
type stage uint8

const (
	planned  stage = iota
	asking         // Open is on its way
	opened         // the engine took it
	paged          // everything is registered, or sent
	freeing        // Release is on its way
	over           // released
	refused        // the engine did not take it
	orphaned       // its worker is gone; the engine sees to the rest
	inLimbo        // its engine is gone: Failed(engine_lost); the pages wait for the leases
)

// life is one open of a room by one worker.
type life struct {
	req    int32
	try    int
	worker int32
	gen    uint64
	mem    int32
	slot   int32
	role   statemachine.Role
	stage  stage
	own    opener
	inc    uint64 // engine incarnation
	epoch  int32  // plugin epoch that the pages are registered with, -1
	pages  []int32
	sent   int32 // pages that were handed over
	chunk  int32
	layer  int32 // of the chunk that is next
	busy   bool  // a request is on its way
	woken  bool
	worded bool
	status statemachine.KVPoll
	res    statemachine.Residency
	reason statemachine.Reason
}

// request opens the lives of a request at a time.
func (w *world) request(at int32, when int64) {
	r := &w.plan.requests[at]
	if r.out {
		return
	}
	w.tries[at]++
	for role := statemachine.Source; role <= statemachine.Destination; role++ {
		g := r.src
		if role == statemachine.Destination {
			g = r.dst
		}
		if r.delay[role] < 0 {
			continue
		}
		for i := range w.workers {
			p := &w.workers[i]
			if p.group != g {
				continue
			}
			n := int32(len(w.lives))
			var pages []int32
			if int(n) < cap(w.lives) {
				pages = w.lives[:n+1][n].pages[:0]
			}
			w.lives = append(w.lives, life{req: at, try: w.tries[at], worker: p.id, role: role, epoch: -1, pages: pages})
			w.unmet++
			d := roll(w.plan.seed, 8, uint64(at), uint64(w.tries[at]), uint64(p.id))
			w.push(due{at: when + r.delay[role] + d.spread(time.Microsecond, 5*time.Millisecond), what: open, a: n})
			if r.abort == role && w.tries[at] == 1 {
				w.push(due{at: when + r.abortIn, what: abortLife, a: n})
			}
		}
	}
}

func (w *world) alive(l *life) bool {
	p := &w.workers[l.worker]
	return p.up && p.gen == l.gen && p.session != 0
}

// openLife: the worker asks for the room.
func (w *world) openLife(at int32) {
	l := &w.lives[at]
	p := &w.workers[l.worker]
	r := &w.plan.requests[l.req]
	slot := int32(-1)
	for i := range p.slot {
		if p.slot[i] == 0 {
			slot = int32(i)
			break
		}
	}
	if !p.up || p.session == 0 || slot < 0 { // the router is told: no such worker
		w.settle(at, refused)
		return
	}
	l.gen, l.mem, l.slot, l.stage, l.inc = p.gen, p.mem, slot, asking, w.engines[p.engine].inc
	p.slot[slot] = at + 1
	ev := core.Event{Kind: core.Open, Room: r.room, Att: uint64(l.try), Slot: slot, Deadline: r.deadline, Priority: int32(r.room % 3)}
	switch {
	case l.role == statemachine.Destination:
		ev.PeerGroup = w.plan.groups[r.src].name
	case r.named:
		ev.PeerGroup = w.plan.groups[r.dst].name
	}
	w.ask(at, &ev)
}

// ask sends a request of a worker to its engine.
func (w *world) ask(at int32, ev *core.Event) {
	l := &w.lives[at]
	l.busy = true
	p := &w.workers[l.worker]
	ev.Session, ev.Slot, ev.Seq = p.session, l.slot, uint64(len(w.asked))
	w.asked = append(w.asked, ask{at, ev.Kind})
	w.step(w.engines[p.engine], ev)
}

// replied: the engine answers.
func (w *world) replied(e *engine, r *core.Reply) {
	a := w.asked[r.Seq]
	l := &w.lives[a.life]
	if l.stage == orphaned || l.stage == inLimbo || l.inc != e.inc {
		return
	}
	l.busy = false
	switch {
	case a.kind == core.Open && r.Code == core.OK:
		l.stage, l.own = opened, r.Opener
		w.byOwn[l.own] = append(w.byOwn[l.own], a.life)
		if w.story != nil {
			w.say("%s opens room %d (try %d, rank %d) as %s", e.name(), w.plan.requests[l.req].room, l.try, w.workers[l.worker].rank, w.openerText(l.own))
		}
		// The word of the slot came with the same step, before the reply.
	case a.kind == core.Open:
		w.say("%s does not open room %d: %s%s", e.name(), w.plan.requests[l.req].room, r.Reason, r.Detail)
		w.workers[l.worker].slot[l.slot] = 0
		w.settle(a.life, refused)
		return
	case a.kind == core.Release && r.Code == core.Freed:
		w.workers[l.worker].slot[l.slot] = 0
		w.give(a.life)
		w.settle(a.life, over)
		return
	case a.kind == core.Release:
		w.violate(Memory, "%s: release of %s, whose pages the word calls %s, is refused: %s", e.name(), w.openerText(l.own), l.res, r.Detail)
		return
	case r.Code == core.Refused && a.kind != core.Abort:
		w.say("%s refuses a request of %s: %s", e.name(), w.openerText(l.own), r.Detail)
		w.after(0, abortLife, a.life, 0, 0)
	}
	w.showLife(a.life, 9)
}

// showLife lets a worker see something, in a while; what it is of is a number for the dice.
func (w *world) showLife(at int32, of uint64) {
	if !w.lives[at].woken {
		d := roll(w.plan.seed, of, uint64(at), uint64(w.now))
		w.wakeLife(at, d.spread(5*time.Microsecond, 5*time.Millisecond))
	}
}

func (w *world) wakeLife(at int32, d int64) {
	if l := &w.lives[at]; !l.woken {
		l.woken = true
		w.after(d, act, at, 0, 0)
	}
}

// act: the worker looks at its word and goes on.
func (w *world) act(at int32) {
	l := &w.lives[at]
	if l.busy || l.stage != opened && l.stage != paged || !w.alive(l) {
		return
	}
	r := &w.plan.requests[l.req]
	switch {
	case l.worded && l.status.Terminal():
		if l.res.Reusable() {
			l.stage = freeing
			w.ask(at, &core.Event{Kind: core.Release})
		}
	case l.stage == paged:
	case l.role == statemachine.Destination:
		if len(l.pages) == 0 && !w.take(at, int(r.pages)) {
			return
		}
		l.stage = paged
		m := &w.mems[l.mem]
		for k, page := range l.pages {
			if int32(k) < r.prefix { // held already
				w.want(m.of(page)[:0], l, int32(k))
			} else {
				clear(m.of(page))
			}
		}
		w.ask(at, &core.Event{Kind: core.Register, Parts: w.partOf(r.prefix, l.pages)})
	default:
		if !r.early && !(l.worded && (l.status == statemachine.WaitingForInput || l.status == statemachine.Transferring)) {
			return
		}
		n := r.sent
		if len(l.pages) == 0 && n > 0 {
			if !w.take(at, int(n)) {
				return
			}
			for k, page := range l.pages {
				w.want(w.mems[l.mem].of(page)[:0], l, int32(k))
			}
		}
		to := n * (l.chunk + 1) / r.chunks
		ev := core.Event{Kind: core.Send}
		if to > l.sent {
			ev.Parts = w.partOf(0, l.pages[l.sent:to])
		}
		if layers := w.plan.shape[l.role].layers; r.layered && to > l.sent {
			ev.LayerFrom, ev.LayerTo = l.layer, l.layer+1
			l.layer = (l.layer + 1) % layers
		}
		if l.layer == 0 {
			l.chunk, l.sent = l.chunk+1, to
		}
		if l.chunk == r.chunks {
			ev.Last, l.stage = true, paged
		}
		w.ask(at, &ev)
	}
}

// partOf is pages as a request has them. They stay as they are until the schedule ends: an engine that is stopped
// reads the request later.
func (w *world) partOf(prefix int32, ids []int32) []core.Part {
	from := len(w.runs)
	w.runs = slices.Grow(w.runs, len(ids))
	w.runs = w.runs[:from+len(layout.AppendIDs(w.runs[from:from], ids))]
	w.parts = append(w.parts, core.Part{Prefix: prefix, Runs: w.runs[from:len(w.runs):len(w.runs)]})
	n := len(w.parts)
	return w.parts[n-1 : n : n]
}

func (w *world) abortLife(at int32) {
	l := &w.lives[at]
	if (l.stage == opened || l.stage == paged) && w.alive(l) && !l.busy {
		w.ask(at, &core.Event{Kind: core.Abort})
	}
}

// word: the engine writes a status word.
func (w *world) word(e *engine, o *core.WordEffect) {
	at := int32(-1)
	for i := range w.workers {
		if p := &w.workers[i]; p.session == o.Session {
			at = p.slot[o.Slot] - 1
		}
	}
	if at < 0 {
		return
	}
	l := &w.lives[at]
	if l.worded && l.status.Terminal() && (o.Status != l.status || o.Reason != l.reason) {
		w.violate(Sticky, "%s: the word of %s was %s (%s) and is %s (%s)", e.name(), w.openerText(o.Opener), l.status, l.reason, o.Status, o.Reason)
	}
	first := o.Status.Terminal() && !(l.worded && l.status.Terminal())
	l.worded, l.status, l.res, l.reason = true, o.Status, o.Residency, o.Reason
	if l.own.IsZero() {
		l.own = o.Opener
	}
	if first {
		if o.Status == statemachine.Succeeded && l.role == statemachine.Destination {
			w.content(at, l.own)
		}
	}
	if o.Status.Terminal() && o.Residency.Reusable() {
		w.untouched(at, o.Residency)
	}
	w.showLife(at, 10)
}

// quarantine is how long the operator of a cluster without a budget of quarantine lets pages rest before the plugin
// that they are registered with is killed: rung 5, the proof that is always to be had.
const quarantine = 20 * time.Second

func (w *world) retire(e *engine) {
	if e.frozen > 0 {
		w.after(int64(time.Second), retire, e.id, 0, e.inc)
		return
	}
	if e.resting = 0; w.now < e.rests { // something ended meanwhile
		e.resting = e.inc
		w.push(due{at: e.rests, what: retire, a: e.id, n: e.inc})
	}
	e.m.Rooms(func(v *core.View) bool {
		if v.Residency == statemachine.Quarantined && v.Backend == backend {
			for i := range w.epochs {
				if ep := &w.epochs[i]; ep.engine == e.id && ep.inc == e.inc && ep.number == v.Epoch {
					w.epochEnds(int32(i))
				}
			}
		}
		return true
	})
}

// content holds that a destination has the bytes that its source meant, when its judge says Success.
func (w *world) content(at int32, judge opener) {
	l := &w.lives[at]
	for k, p := range l.pages {
		if w.cells = w.want(w.cells[:0], l, int32(k)); !slices.Equal(w.cells, w.mems[l.mem].of(p)) {
			w.violate(Memory, "%s is Success, but page %d of %d of %s does not hold what its source sent", w.openerText(judge), k, len(l.pages), w.openerText(l.own))
			return
		}
	}
}

// settle ends a life; a request that failed may be tried again.
func (w *world) settle(at int32, s stage) {
	l := &w.lives[at]
	if l.stage >= over && l.stage != inLimbo && l.stage != orphaned {
		return
	}
	l.stage = s
	w.unmet--
	r := &w.plan.requests[l.req]
	failed := s == refused || s == inLimbo || l.status == statemachine.Failed
	if failed && l.try == w.tries[l.req] && w.tries[l.req] < r.tries && r.abort == 0 {
		for i := range w.lives { // when nothing of this try is left
			if o := &w.lives[i]; o.req == l.req && (o.stage < over || o.stage == inLimbo || o.stage == orphaned) {
				return
			}
		}
		d := roll(w.plan.seed, 11, uint64(l.req))
		w.after(d.spread(time.Millisecond, 2*time.Second), retry, l.req, 0, 0)
	}
}

// shapeOf is how a worker lays out its pages.
func (w *world) shapeOf(p *worker) *shape { return &w.plan.shape[w.plan.groups[p.group].role] }

func (w *world) startWorker(p *worker) {
	p.gen++
	p.up, p.session, p.slot = true, 0, [slots]int32{}
	p.mem = w.newMemory(w.shapeOf(p).cells)
}

// joinEngine connects a worker to its engine, if that is there.
func (w *world) joinEngine(p *worker) {
	e := w.engines[p.engine]
	if !e.up || !p.up || p.session != 0 {
		return
	}
	w.minted++
	p.session, p.slot = w.minted, [slots]int32{}
	g, s := &w.plan.groups[p.group], w.shapeOf(p)
	w.hand(e, &core.Event{Kind: core.SessionUp, Session: p.session, Group: g.name, Role: g.role, Rank: p.rank, Size: s.Ranks, Slots: slots})
	w.step(e, &core.Event{Kind: core.PoolUp, Session: p.session, Pool: uint64(p.mem) + 1, Pages: w.plan.pages, Layers: s.layers, PageBytes: s.bytes()})
	ev := w.poolEvent(e, p)
	w.announce(e, func(o *engine, tell func(core.Event)) {
		tell(ev)
		w.tellGroup(p.group, e, o, tell)
	})
}

// killWorker: the process dies; its engine reads EOF.
func (w *world) killWorker(p *worker) {
	if !p.up {
		return
	}
	p.up = false
	w.say("%s worker %d (rank %d) dies", engineName(p.engine), p.id, p.rank)
	session := p.session
	p.session = 0
	for i := range w.lives {
		l := &w.lives[i]
		if l.worker != p.id || l.gen != p.gen {
			continue
		}
		switch l.stage {
		case asking, opened, paged, freeing:
			l.stage = orphaned
			w.orphans = append(w.orphans, orphan{session, int32(i)})
		}
	}
	e := w.engines[p.engine]
	if session != 0 {
		if e.up {
			w.step(e, &core.Event{Kind: core.SessionDown, Session: session})
			w.announce(e, func(o *engine, tell func(core.Event)) { w.tellGroup(p.group, e, o, tell) })
		}
	}
	d := roll(w.plan.seed, 12, uint64(p.id), p.gen)
	w.after(d.in(50*time.Millisecond, 3*time.Second), workerUp, p.id, 0, p.gen)
}

// orphan is a life whose worker is gone, until its engine lets the memory go.
type orphan struct {
	session core.SessionID
	life    int32
}

// sessionGone: the engine lets the memory of a dead worker go.
func (w *world) sessionGone(s core.SessionID) {
	for _, o := range w.orphans {
		if o.session == s && w.lives[o.life].stage == orphaned {
			w.give(o.life)
			w.settle(o.life, over)
		}
	}
}

// leaveEngine: the engine of a worker is gone. What had not ended is Failed(engine_lost); pages wait for the
// leases of every plugin that the engine had.
func (w *world) leaveEngine(p *worker, leases int64) {
	for i := range w.orphans { // of workers that died before: the kernel freed the memory with the engine
		if l := &w.lives[w.orphans[i].life]; l.worker == p.id && l.stage == orphaned && l.inc == w.engines[p.engine].inc {
			l.stage = inLimbo
		}
	}
	for i := range w.lives {
		l := &w.lives[i]
		if l.worker != p.id || l.gen != p.gen || p.session == 0 {
			continue
		}
		switch l.stage {
		case asking, opened, paged, freeing:
			if !l.worded || !l.status.Terminal() {
				l.worded, l.status, l.reason = true, statemachine.Failed, statemachine.EngineLost
			}
			l.stage = inLimbo
		}
	}
	p.session = 0
	w.push(due{at: leases, what: limbo, a: p.id, n: w.engines[p.engine].inc})
}

func (w *world) endLimbo(id int32, inc uint64) {
	for i := range w.lives {
		if l := &w.lives[i]; l.worker == id && l.inc == inc && l.stage == inLimbo {
			w.give(int32(i))
			w.settle(int32(i), over)
		}
	}
}
