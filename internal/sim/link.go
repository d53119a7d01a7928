package sim

import (
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// link is the stream between two engines. Side s is the one that ends[s] sends from.
type link struct {
	ends   [2]int32
	stream uint64    // number of the present one, or of the last
	incs   [2]uint64 // who talks on it
	up     bool
	said   [2]bool // the engine at that end has had the Hello of the other
	last   [2]int64
	lane   [2][2]lane // by side, then ordinary and urgent
	stuck  [2]int     // nothing that the side sent arrives, by so many faults
	slow   int
	mixed  int // everything overtakes that may, by so many faults
	twice  int // frames arrive twice, by so many faults
	dice   dice
}

type parcel struct {
	at int64
	ev core.Event
}

// lane is parcels in order, the oldest at head.
type lane struct {
	parcels []parcel
	head    int
}

func (l *lane) push(at int64, ev *core.Event) {
	n := len(l.parcels)
	if n == cap(l.parcels) {
		l.parcels = slices.Grow(l.parcels, 1)
	}
	l.parcels = l.parcels[:n+1]
	l.parcels[n].at, l.parcels[n].ev = at, *ev // in place: events are large
}

// pop takes the oldest parcel off. It stays as it is until something is pushed.
func (l *lane) pop() *core.Event {
	p := &l.parcels[l.head]
	if l.head++; l.head == len(l.parcels) {
		l.clear()
	}
	return &p.ev
}

func (l *lane) clear() { l.parcels, l.head = l.parcels[:0], 0 }

func (l *lane) empty() bool { return l.head == len(l.parcels) }

// of is the side of an engine, -1 when the link is not its.
func (l *link) of(e int32) int {
	switch e {
	case l.ends[0]:
		return 0
	case l.ends[1]:
		return 1
	}
	return -1
}

func (w *world) linkOf(a, b int32) (*link, int32) {
	i, j := max(a, b), min(a, b)
	at := i*(i-1)/2 + j
	return &w.links[at], at
}

// dial opens a stream, if both ends can be reached.
func (w *world) dial(at int32, stream uint64) {
	l := &w.links[at]
	a, b := w.engines[l.ends[0]], w.engines[l.ends[1]]
	if l.up || l.stream != stream {
		return
	}
	unknown := w.blind > 0 && l.stream > 0 && w.restarted(l)
	if !a.up || !b.up || a.frozen+b.frozen+l.stuck[0]+l.stuck[1] > 0 || unknown {
		w.after(l.dice.in(50*time.Millisecond, time.Second), dial, at, 0, stream)
		return
	}
	l.stream++
	l.up, l.said = true, [2]bool{}
	l.incs = [2]uint64{a.inc, b.inc}
	w.say("%s and %s connect", a.name(), b.name())
	for side, e := range []*engine{a, b} {
		o := w.engines[l.ends[1-side]]
		w.post(l, side, false, &core.Event{Kind: core.PeerHello, Peer: core.PeerID(e.id), Node: e.name(), Inc: e.inc})
		if e.drains {
			w.post(l, side, false, &core.Event{Kind: core.PeerDraining, Peer: core.PeerID(e.id)})
		}
		w.tellAll(e, o, func(ev core.Event) { w.post(l, side, false, &ev) })
	}
}

// restarted tells whether one end is an incarnation that the other has never met.
func (w *world) restarted(l *link) bool {
	return l.incs != [2]uint64{w.engines[l.ends[0]].inc, w.engines[l.ends[1]].inc}
}

// tellAll tells what an engine announces to another: pools and groups.
func (w *world) tellAll(e, o *engine, tell func(core.Event)) {
	for i := range w.workers {
		if p := &w.workers[i]; p.engine == e.id && p.session != 0 {
			tell(w.poolEvent(e, p))
		}
	}
	for g := range w.plan.groups {
		if w.plan.hosts(int32(g), e.id) {
			w.tellGroup(int32(g), e, o, tell)
		}
	}
}

func (w *world) poolEvent(e *engine, p *worker) core.Event {
	s := w.shapeOf(p)
	return core.Event{Kind: core.PeerPool, Peer: core.PeerID(e.id), Pool: uint64(p.mem) + 1, Pages: w.plan.pages, Layers: s.layers, PageBytes: s.bytes()}
}

// tellGroup tells an engine which ranks of a group are at another.
func (w *world) tellGroup(group int32, e, o *engine, tell func(core.Event)) {
	from := len(w.ranks)
	for i := range w.workers {
		if p := &w.workers[i]; p.group == group && p.engine == e.id && p.session != 0 {
			w.ranks = append(w.ranks, p.rank)
		}
	}
	w.tellPart(group, e.id, w.ranks[from:len(w.ranks):len(w.ranks)], o, tell)
}

// tellPart tells an engine that those ranks of a group are at another, or none: for each of its own groups that could
// work with it, and of its own group.
func (w *world) tellPart(group, at int32, ranks []int32, o *engine, tell func(core.Event)) {
	g := &w.plan.groups[group]
	size := w.plan.shape[g.role].Ranks
	if len(ranks) == 0 {
		size = 0
	}
	for i := range int32(len(w.plan.groups)) {
		own := &w.plan.groups[i]
		if !w.plan.hosts(i, o.id) || own.role == g.role && i != group || i == group && at == o.id {
			continue
		}
		ev := core.Event{Kind: core.PeerGroup, Peer: core.PeerID(at), Group: g.name, PeerGroup: own.name, Role: g.role, Size: size, Ranks: ranks}
		if i != group {
			ev.Map, ev.Backends = w.plan.mapped, backends
		}
		tell(ev)
	}
}

var backends = []string{backend}

// announce tells every peer, and the engine itself, something that changed.
func (w *world) announce(e *engine, tell func(o *engine, tell func(core.Event))) {
	tell(e, func(ev core.Event) { w.step(e, &ev) })
	for i := range w.links {
		if l := &w.links[i]; l.up && l.of(e.id) >= 0 && e.up {
			side := l.of(e.id)
			tell(w.engines[l.ends[1-side]], func(ev core.Event) { w.post(l, side, false, &ev) })
		}
	}
}

// post sends over the stream, from a side.
func (w *world) post(l *link, side int, urgent bool, ev *core.Event) {
	if !l.up {
		return
	}
	ahead := urgent && (l.mixed > 0 || l.dice.one(2))
	delay := l.dice.spread(20*time.Microsecond, 2*time.Millisecond)
	if l.slow > 0 || l.mixed > 0 && !ahead {
		delay = l.dice.in(50*time.Millisecond, 900*time.Millisecond)
	}
	at, to := w.now+delay, &l.lane[side][0]
	if ahead {
		if to = &l.lane[side][1]; !to.empty() {
			at = max(at, to.parcels[len(to.parcels)-1].at+1)
		}
		if at < l.last[side] {
			w.total.overtaken++
		}
	} else {
		at = max(at, l.last[side]+1)
		l.last[side] = at
	}
	to.push(at, ev)
	_, i := w.linkOf(l.ends[0], l.ends[1])
	w.push(due{at: at, what: deliver, a: i, b: int32(side), n: l.stream})
}

func (w *world) sendFrame(e *engine, f *core.FrameEffect) {
	ev := core.Event{Kind: core.PeerFrame, Peer: core.PeerID(e.id), Frame: f.Frame.Clone()}
	if w.story != nil {
		w.say("%s sends %s", e.name(), frameText(&f.Frame))
	}
	if int32(f.Peer) == e.id {
		w.local = append(w.local, ev)
		w.push(due{at: w.now + 1, what: local, a: e.id, b: int32(len(w.local) - 1), n: e.inc})
		return
	}
	l, _ := w.linkOf(e.id, int32(f.Peer))
	urgent := f.Urgent || f.Frame.Kind == statemachine.FrameAbort || f.Frame.Kind == statemachine.FrameVerdict
	w.post(l, l.of(e.id), urgent, &ev)
	if l.up && l.twice > 0 && l.dice.one(2) { // at once after it; of what may overtake, one before and one after the rest
		w.total.doubled++
		w.post(l, l.of(e.id), urgent, &ev)
	}
}

// arrive hands over what is due from a side.
func (w *world) arrive(l *link, side int, stream uint64) {
	if !l.up || l.stream != stream || l.stuck[side] > 0 {
		return // what is stuck arrives when the fault ends
	}
	to := w.engines[l.ends[1-side]]
	for urgent := 1; urgent >= 0; urgent-- {
		q := &l.lane[side][urgent]
		for !q.empty() && q.parcels[q.head].at <= w.now && l.up {
			ev := q.pop()
			if urgent == 1 && !l.said[1-side] { // nothing overtakes the Hello
				w.post(l, side, false, ev)
				continue
			}
			if ev.Kind == core.PeerHello {
				l.said[1-side] = true
				to.heard[ev.Peer] = w.now
			}
			w.step(to, ev)
		}
	}
}

// breakStream ends a stream: what is in flight is lost, each side notices within late.
func (w *world) breakStream(l *link, late time.Duration) {
	if !l.up {
		return
	}
	w.beats()
	l.up = false
	l.last = [2]int64{}
	for i := range 4 {
		q := &l.lane[i/2][i%2]
		w.total.lost += len(q.parcels) - q.head
		q.clear()
	}
	_, i := w.linkOf(l.ends[0], l.ends[1])
	w.say("the stream between %s and %s breaks", engineName(l.ends[0]), engineName(l.ends[1]))
	latest := int64(0)
	for side := range l.ends {
		d := l.dice.spread(10*time.Microsecond, late)
		latest = max(latest, d)
		w.after(d, broken, i, int32(side), l.stream)
	}
	w.after(latest+l.dice.spread(time.Millisecond, time.Second), dial, i, 0, l.stream)
}

// streamEnds: one side notices. Side -1: nobody has heard anything for long.
func (w *world) streamEnds(l *link, side int, stream uint64) {
	if l.stream != stream {
		return
	}
	if side < 0 {
		if l.stuck[0]+l.stuck[1] > 0 {
			w.breakStream(l, 500*time.Millisecond)
		}
		return
	}
	e := w.engines[l.ends[side]]
	if e.up && e.inc == l.incs[side] && l.said[side] {
		l.said[side] = false
		w.step(e, &core.Event{Kind: core.PeerDown, Peer: core.PeerID(l.ends[1-side])})
	}
}

// block stops what a side sends; silence ends the stream.
func (w *world) block(l *link, side int) {
	w.beats()
	l.stuck[side]++
	_, i := w.linkOf(l.ends[0], l.ends[1])
	w.after(silence, broken, i, -1, l.stream)
}

func (w *world) unblock(l *link, side int) {
	l.stuck[side]--
	_, i := w.linkOf(l.ends[0], l.ends[1])
	w.after(0, deliver, i, int32(side), l.stream)
}
