package sim

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

type opener = statemachine.Opener

const (
	backend = "sim"
	slots   = 64
	beat    = int64(500 * time.Millisecond)
	silence = int64(5 * time.Second) // a stream on which nothing arrives for so long is closed
	beats   = int64(3 * time.Second) // a plugin that is silent for so long is killed
)

// Violation is a promise that was broken.
type Violation struct {
	Promise Promise       `json:"promise"`
	Seed    uint64        `json:"seed"`
	At      time.Duration `json:"at_ns"`
	What    string        `json:"what"`
}

func (v *Violation) String() string {
	return fmt.Sprintf("%s: seed %d at %v: %s", v.Promise, v.Seed, v.At, v.What)
}

// world is a cluster at a moment. It is used again for the next schedule.
type world struct {
	plan    *plan
	now     int64
	q       queue
	hash    uint64
	events  uint64
	total   totals
	broke   *Violation
	story   io.Writer // nil: untold
	pending int       // events other than wakes in the queue
	incs    uint64    // incarnations minted
	asked   []ask     // by request number
	engines []*engine
	links   []link
	workers []worker
	mems    []memory
	lives   []life
	ops     []op
	epochs  []epoch
	answers []answered
	local   []core.Event // frames of engines to themselves
	runs    []layout.Run // of requests, see partOf
	parts   []core.Part
	ranks   []int32 // of groups, see tellGroup
	votes   []vote
	wins    []win
	byInc   map[uint64]int32   // engine of an incarnation
	byOwn   map[opener][]int32 // lives of an opener, one a rank
	plans   map[copies][]layout.Slice
	cells   []tag              // for content
	verdict map[opener]outcome // by what the cores recorded
	sealed  map[opener]bool    // destinations that nothing can be written to any more
	held    map[opener]bool    // rooms that a plugin held when it died
	tries   []int              // by request
	unmet   int                // lives that are not over
	orphans []orphan
	minted  core.SessionID
	// Faults that go on, by kind.
	blind, slowed, lateness, failing int
	replay                           bool // this schedule is replayed at its end

	second     core.Machine // and its effects, for the replay
	secondSays core.Effects
}

type outcome struct {
	reason statemachine.Reason
	pair   opener
}

// engine is one incarnation of an engine, and its host.
type engine struct {
	id     int32
	inc    uint64
	up     bool
	m      *core.Machine
	out    core.Effects
	skew   int64 // how long its clock stood still
	frozen int   // by so many faults
	stood  int64 // since when its clock stands; 0: it runs
	inbox  []core.Event
	wakeAt int64
	heard  [maxEngines]int64
	dead   uint64 // peers that its core had found dead, ever
	epoch  int32  // index of the newest epoch of its plugin; -1: none, or noticed dead
	served int32  // index of the newest epoch that its core knew before this step, -1: none
	number uint32
	drains bool
	// What ends now and is quarantined has rested long enough at rests; an event then is on its way for
	// incarnation resting.
	rests   int64
	resting uint64
	dice    dice
	told    []core.Event // this incarnation, for the replay
	steps   []batch      // of them
	said    uint64       // hash of what it answered
}

// batch is the events of one step: those of engine.told up to end that no earlier step had.
type batch struct {
	now int64
	end int
}

// ask is a request of a worker that its engine has not answered yet.
type ask struct {
	life int32
	kind core.EventKind
}

// answered is what a plugin answers later.
type answered struct {
	epoch int32
	event core.Event
	op    core.PluginEffect // FencePeer, Revoke: whom
}

// reset makes the world of a plan.
func (w *world) reset(p *plan, story io.Writer) {
	w.plan, w.now, w.hash, w.events, w.broke, w.story = p, int64(time.Second), mix(p.seed), 0, nil, story
	w.q.heap, w.q.seq, w.pending, w.unmet = w.q.heap[:0], 0, 0, 0
	w.blind, w.slowed, w.lateness, w.failing, w.minted, w.orphans = 0, 0, 0, 0, 0, w.orphans[:0]
	w.votes, w.wins = w.votes[:0], w.wins[:0]
	w.asked, w.lives, w.ops, w.epochs, w.answers, w.links, w.workers = w.asked[:0], w.lives[:0], w.ops[:0], w.epochs[:0], w.answers[:0], w.links[:0], w.workers[:0]
	w.mems, w.local, w.runs, w.parts, w.ranks = w.mems[:0], w.local[:0], w.runs[:0], w.parts[:0], w.ranks[:0]
	if w.byInc == nil {
		w.byInc, w.byOwn, w.verdict = map[uint64]int32{}, map[opener][]int32{}, map[opener]outcome{}
		w.sealed, w.held = map[opener]bool{}, map[opener]bool{}
		w.plans = map[copies][]layout.Slice{}
	}
	clear(w.byInc)
	clear(w.byOwn)
	clear(w.verdict)
	clear(w.sealed)
	clear(w.held)
	w.tries = append(w.tries[:0], make([]int, len(p.requests))...)
	w.incs = 0
	w.replay = p.seed%16 == 0
	w.engines = slices.Grow(w.engines[:0], int(p.engines))[:p.engines] // those of earlier schedules are used again
	for i, e := range w.engines {
		if e == nil {
			e = &engine{m: new(core.Machine)}
			w.engines[i] = e
		}
		*e = engine{id: int32(i), dice: roll(p.seed, 4, uint64(i)), m: e.m, inbox: e.inbox[:0], out: e.out, told: e.told[:0], steps: e.steps[:0]}
	}
	for i := range p.engines {
		for j := range i {
			var old [2][2]lane
			if n := len(w.links); n < cap(w.links) { // its memory is used again
				old = w.links[:n+1][n].lane
			}
			w.links = append(w.links, link{ends: [2]int32{j, i}, dice: roll(p.seed, 5, uint64(i), uint64(j)), lane: old})
			for k := range 4 {
				w.links[len(w.links)-1].lane[k/2][k%2].clear()
			}
		}
	}
	for g := range p.groups {
		for rank := range p.shape[p.groups[g].role].Ranks {
			w.workers = append(w.workers, worker{id: int32(len(w.workers)), group: int32(g), rank: rank, engine: p.groups[g].at[rank], mem: -1})
		}
	}
	for i := range w.workers {
		w.startWorker(&w.workers[i])
	}
	for _, e := range w.engines {
		w.startEngine(e)
	}
	for i := range w.links {
		w.push(due{at: w.now, what: dial, a: int32(i)})
	}
	for i := range p.requests {
		w.request(int32(i), w.now+p.requests[i].at)
	}
	for i := range p.faults {
		w.push(due{at: w.now + p.faults[i].at, what: fault, a: int32(i)})
	}
}

func (w *world) push(d due) {
	if d.what != wake {
		w.pending++
	}
	w.q.push(d)
}

func (w *world) after(d int64, what what, a, b int32, n uint64) {
	w.push(due{at: w.now + d, what: what, a: a, b: b, n: n})
}

// violate notes the first violation; it ends the schedule.
func (w *world) violate(p Promise, format string, args ...any) {
	if w.broke == nil {
		w.broke = &Violation{Promise: p, Seed: w.plan.seed, At: time.Duration(w.now), What: fmt.Sprintf(format, args...)}
		w.say("VIOLATION of %s: %s", p, w.broke.What)
	}
}

func (w *world) say(format string, args ...any) {
	if w.story != nil {
		fmt.Fprintf(w.story, "%12.6f  %s\n", float64(w.now)/1e9, fmt.Sprintf(format, args...))
	}
}

// horizon is longer than every clock of a room after every other.
const horizon = int64(4000 * time.Second)

// run runs the schedule to its end.
func (w *world) run() *Violation {
	limit := w.now + int64(longest) + horizon
	for w.broke == nil && len(w.q.heap) > 0 && (w.pending > 0 || w.unmet > 0) {
		d := w.q.pop()
		if d.at > limit {
			w.notTerminal()
			break
		}
		w.now = max(w.now, d.at)
		if d.what != wake {
			w.pending--
		}
		w.events++
		w.hash = mix(w.hash ^ mix(uint64(d.at)^uint64(d.what)<<56^uint64(d.a)<<40^uint64(d.b)<<32^d.n))
		w.dispatch(&d)
	}
	if w.broke == nil && w.unmet > 0 {
		w.notTerminal()
	}
	if w.broke == nil {
		w.idle()
	}
	return w.broke
}

func (w *world) dispatch(d *due) {
	switch d.what {
	case wake:
		e := w.engines[d.a]
		if e.up && e.frozen == 0 && e.wakeAt == d.at {
			e.wakeAt = 0
			w.step(e, nil)
		}
	case deliver:
		w.arrive(&w.links[d.a], int(d.b), d.n)
	case broken:
		w.streamEnds(&w.links[d.a], int(d.b), d.n)
	case dial:
		w.dial(d.a, d.n)
	case opStep:
		w.opStep(d.a)
	case opAbort:
		w.opAborted(d.a)
	case answer:
		w.pluginAnswers(d.a)
	case open:
		w.openLife(d.a)
	case act:
		w.lives[d.a].woken = false
		w.act(d.a)
	case abortLife:
		w.abortLife(d.a)
	case fault:
		w.strike(d.a)
	case healed:
		w.heal(d.a)
	case noticed:
		w.epochNoticed(d.a)
	case fenced:
		w.epochFenced(d.a)
	case pluginUp:
		if e := w.engines[d.a]; e.up && e.inc == d.n && e.epoch < 0 {
			w.startPlugin(e)
		}
	case workerUp:
		if p := &w.workers[d.a]; p.gen == d.n && !p.up {
			w.startWorker(p)
			w.joinEngine(p)
		}
	case engineUp:
		w.startEngine(w.engines[d.a])
	case limbo:
		w.endLimbo(d.a, d.n)
	case drainEnd:
		if e := w.engines[d.a]; e.up && e.inc == d.n {
			w.step(e, &core.Event{Kind: core.DrainEnd})
			w.after(int64(20*time.Second), replaceEngine, d.a, 0, d.n)
		}
	case replaceEngine:
		if e := w.engines[d.a]; e.up && e.inc == d.n {
			w.say("%s is replaced", e.name())
			w.killEngine(e)
			w.after(int64(time.Second), engineUp, d.a, 0, 0)
		}
	case retry:
		w.request(d.a, w.now)
	case stale:
		w.staleEnd(d.a)
	case retire:
		if e := w.engines[d.a]; e.up && e.inc == d.n {
			w.retire(e)
		}
	case orphanEnds:
		w.epochEnds(d.a)
	case upgrade:
		w.besides(d.a)
	case kept:
		w.keeps(d.a)
	case local:
		if e := w.engines[d.a]; e.inc == d.n {
			w.step(e, &w.local[d.b])
		}
	case gone:
		w.step(w.engines[d.a], &core.Event{Kind: core.PeerGone, Peer: core.PeerID(d.b), Inc: d.n})
	}
}

func (e *engine) name() string { return engineName(e.id) }

// startEngine starts an incarnation of an engine, its plugin, and connects its workers.
func (w *world) startEngine(e *engine) {
	if e.up {
		return
	}
	w.incs++
	e.inc = w.incs
	w.restart(e.m, e)
	e.up, e.inbox, e.wakeAt, e.epoch, e.served, e.drains = true, e.inbox[:0], 0, -1, -1, false
	e.number, e.told, e.steps, e.said, e.dead = 0, e.told[:0], e.steps[:0], 0, 0
	clear(e.heard[:])
	w.byInc[e.inc] = e.id
	w.say("%s starts as incarnation %d", e.name(), e.inc)
	w.step(e, &core.Event{Kind: core.PeerHello, Peer: core.PeerID(e.id), Node: e.name(), Inc: e.inc})
	w.startPlugin(e)
	for i := range w.workers {
		if p := &w.workers[i]; p.engine == e.id && p.up {
			w.joinEngine(p)
		}
	}
}

// restart makes m the core of an incarnation that has just started.
func (w *world) restart(m *core.Machine, e *engine) {
	limits := core.DefaultLimits()
	if d := roll(w.plan.seed, 6, uint64(e.id)); w.plan.tight {
		limits.Rooms, limits.PeerOps, limits.RoomPages = int32(2+d.n(4)), int32(1+d.n(3)), int64(8+d.n(16))*int64(w.plan.shape[statemachine.Destination].Ranks)
	}
	if err := m.Reset(core.Config{Incarnation: e.inc, Clocks: w.clocks(), Limits: limits, Quarantine: w.plan.budget}); err != nil {
		panic(err) // the configuration is this package's own
	}
}

func (w *world) clocks() core.Clocks {
	c := core.DefaultClocks()
	if w.plan.retire > 0 {
		c.Retire = w.plan.retire
	}
	return c
}

// killEngine ends an incarnation without a word.
func (w *world) killEngine(e *engine) {
	if !e.up {
		return
	}
	w.beats()
	if w.replay {
		w.again(e)
	}
	if e.stood > 0 {
		e.skew, e.stood = e.skew+w.now-e.stood, 0
	}
	e.up, e.inbox = false, e.inbox[:0]
	last := w.now
	for i := range w.epochs { // orphaned plugins notice that their host is gone, stop and let the leases go
		if ep := &w.epochs[i]; ep.engine == e.id && ep.inc == e.inc {
			if ep.alive {
				at := w.now + e.dice.spread(time.Millisecond, 2*time.Second)
				w.push(due{at: at, what: orphanEnds, a: int32(i)})
				ep.fenceAt = at + e.dice.spread(time.Millisecond, 10*time.Second)
				w.push(due{at: ep.fenceAt, what: fenced, a: int32(i)})
			}
			last = max(last, ep.fenceAt)
		}
	}
	for i := range w.links {
		if l := &w.links[i]; l.of(e.id) >= 0 {
			w.breakStream(l, 50*time.Millisecond)
		}
	}
	for i := range w.workers {
		if p := &w.workers[i]; p.engine == e.id {
			w.leaveEngine(p, last+1)
		}
	}
	for _, o := range w.engines { // the same host: its lock is free, which is proof
		if o != e && o.up && e.dice.one(4) {
			w.push(due{at: w.now + e.dice.spread(time.Millisecond, time.Second), what: gone, a: o.id, b: e.id, n: e.inc})
		}
	}
}

// coreNow is the engine's time.
func (e *engine) coreNow(now int64) int64 { return now - e.skew }

// hand puts an event before an engine, which reads it with its next step.
func (w *world) hand(e *engine, in *core.Event) {
	if !e.up {
		return
	}
	n := len(e.inbox)
	if n == cap(e.inbox) {
		e.inbox = slices.Grow(e.inbox, 1)
	}
	e.inbox = e.inbox[:n+1]
	e.inbox[n] = *in
}

// step gives an event, if it is not nil, to an engine and carries out what it asks for. A stopped engine reads
// them later, all at once.
func (w *world) step(e *engine, in *core.Event) {
	if !e.up {
		return
	}
	if in != nil {
		w.hand(e, in)
	}
	if e.frozen > 0 {
		return
	}
	hears := true
	for _, o := range w.engines {
		if !w.hears(e, o) {
			hears = false
		} else if w.now-e.heard[o.id] >= beat {
			e.heard[o.id] = w.now
			w.hand(e, &core.Event{Kind: core.PeerHeard, Peer: core.PeerID(o.id)})
		}
	}
	now := e.coreNow(w.now)
	if w.replay {
		e.keep(now)
	}
	e.out.Reset()
	e.m.Step(now, e.inbox, &e.out)
	e.inbox = e.inbox[:0]
	w.effects(e)
	if w.plan.spans {
		w.partsOfDead(e)
	}
	e.served = max(e.served, e.epoch)
	if hears {
		w.wakeAt(e, e.m.NextHeard())
	} else {
		w.wakeAt(e, e.m.Next())
	}
}

// wakeAt lets an engine step at a time of its core, 0: never.
func (w *world) wakeAt(e *engine, at int64) {
	if at == 0 {
		return
	}
	at = max(at+e.skew, w.now+1)
	if e.wakeAt == 0 || at < e.wakeAt || e.wakeAt <= w.now {
		e.wakeAt = at
		w.push(due{at: at, what: wake, a: e.id})
	}
}

// hears tells whether the beats of another engine reach e. It hears itself.
func (w *world) hears(e, o *engine) bool {
	if o == e {
		return true
	}
	l, _ := w.linkOf(e.id, o.id)
	side := l.of(e.id)
	return l.said[side] && l.stuck[1-side] == 0 && o.up && o.frozen == 0
}

// beats tells every engine the beats that it has heard until now, and lets it notice if there are no more. While
// all beats arrive and nothing else happens, they are not told: it comes before whatever may silence somebody.
func (w *world) beats() {
	for _, e := range w.engines {
		if e.up && e.frozen == 0 {
			w.step(e, nil)
			w.wakeAt(e, e.m.Next())
		}
	}
}

// effects carries out what an engine asks for. Nothing here steps an engine: that comes as an event.
func (w *world) effects(e *engine) {
	e.said = hashEffects(e.said, &e.out)
	w.hash = mix(w.hash ^ e.said)
	for i := range e.out.Frames { // before the records: the same step may end what it registers
		switch f := &e.out.Frames[i].Frame; f.Kind {
		case core.FrameRegister:
			w.registers(e, f)
		case core.FrameReady:
			w.voted(f)
		}
	}
	for i := range e.out.Records {
		w.recorded(e, &e.out.Records[i])
	}
	for i := range e.out.Words {
		w.word(e, &e.out.Words[i])
	}
	for i := range e.out.Replies {
		w.replied(e, &e.out.Replies[i])
	}
	for i := range e.out.Frames {
		f := &e.out.Frames[i]
		w.sendFrame(e, f)
	}
	for i := range e.out.Plugin {
		w.asksPlugin(e, &e.out.Plugin[i])
	}
	for _, s := range e.out.Gone {
		w.sessionGone(s)
	}
}

// hashEffects folds what an engine answered into h.
func hashEffects(h uint64, out *core.Effects) uint64 {
	for i := range out.Words {
		o := &out.Words[i]
		h = mix(h ^ uint64(o.Session)<<40 ^ uint64(o.Slot)<<16 ^ uint64(o.Status)<<8 ^ uint64(o.Residency)<<4 ^ uint64(o.Reason)<<32 ^ o.Opener.Seq<<20)
	}
	for i := range out.Replies {
		o := &out.Replies[i]
		h = mix(h ^ o.Seq<<8 ^ uint64(o.Code)<<4 ^ uint64(o.Reason)<<48 ^ 1)
	}
	for i := range out.Frames {
		f := &out.Frames[i]
		h = mix(h ^ uint64(f.Peer)<<56 ^ uint64(f.Frame.Kind)<<48 ^ uint64(f.Frame.Room)<<32 ^ f.Frame.S.Seq<<16 ^ f.Frame.D.Seq<<4 ^ 2)
	}
	for i := range out.Plugin {
		p := &out.Plugin[i]
		h = mix(h ^ uint64(p.Kind)<<56 ^ uint64(p.Op)<<8 ^ uint64(p.Grant) ^ 3)
	}
	return h
}

// keep notes for the replay what the engine is told now.
func (e *engine) keep(now int64) {
	for i := range e.inbox {
		e.told = append(e.told, e.inbox[i])
		if in := &e.told[len(e.told)-1]; in.Kind == core.PeerFrame {
			in.Frame = in.Frame.Clone()
		}
	}
	e.steps = append(e.steps, batch{now, len(e.told)})
}
