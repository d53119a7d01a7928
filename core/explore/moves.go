package explore

import (
	"fmt"
	"strings"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// move is one step of the whole. A fault costs one of the budget; a may-move is one that nobody owes: a
// state in which only those are left is an end.
type move struct {
	kind    moveKind
	e       uint8 // engine, or link
	k, a, b uint8
	fault   byte // its letter, or 0
	may     bool
	frame   uint32
}

type moveKind uint8

const (
	mvToD moveKind = iota // a: place in the queue
	mvToP
	mvRedial
	mvBreak
	mvCut
	mvPeerDead // e: who judges, a: peer
	mvPeerGone
	mvOpen // k, a: attempt
	mvSend
	mvRegister
	mvAbort
	mvWorkerDies
	mvClock // of opener k of engine e
	mvForget
	mvDropHold // a: room
	mvOpEnd    // b: end
	mvQuiesced
	mvPluginDies
	mvPluginStarts
	mvPluginGone // a: epoch
	mvRestart
	mvOrphanExits // a: incarnation
	mvGranted
	mvRevoked
	mvFenced // a: 1 quiet
	mvAny    // a frame of the alphabet
	mvGroup  // e hears of the group at a: peer
	mvLate
)

// Faults, by letter. What is not listed happens whenever it can, at no cost: deliveries, overtaking,
// redial, every clock, both answers to FencePeer, the proof that an epoch is gone.
const (
	FaultBreak       = 'b' // the link breaks, both queues are lost
	FaultCut         = 'X' // the link is down for ever
	FaultRestartP    = 'p' // a source engine dies and comes back
	FaultRestartD    = 'd'
	FaultPluginP     = 'm' // its plugin dies
	FaultPluginD     = 'n'
	FaultAbortP      = 'a' // its worker aborts
	FaultAbortD      = 'c'
	FaultWorkerP     = 'w' // its worker dies
	FaultWorkerD     = 'v'
	FaultSkip        = 's' // an op is skipped
	FaultUnquiet     = 'q' // an op is Done with quiet=no
	FaultForgetP     = 'e' // a tombstone is evicted
	FaultForgetD     = 'f'
	FaultPlaceholder = 'h' // a placeholder is dropped
)

// AllFaults is every kind.
const AllFaults = "bXpdmnacwvsqefh"

// record of an opener at its engine: nil when that engine is gone.
func (x *explorer) record(st *state, e int, o *opener) *record {
	if o.seq == 0 || o.inc != st.plugin[e].inc {
		return nil
	}
	return &x.engines[e].nodes[st.engine[e]].records[o.seq]
}

func (x *explorer) side(st *state, e int) []opener {
	if e == x.Sources {
		return st.d[:x.Openers]
	}
	return st.s[e][:x.Openers]
}

// room of the k-th opener (from 0).
func (x *explorer) room(k int) uint8 {
	if x.Rooms > 1 {
		return uint8(k) + 1
	}
	return 1
}

// attempts that the next opener of a side may carry.
func (x *explorer) attempts(side []opener, k int) (from, to uint8) {
	switch {
	case x.Rooms > 1:
		return 1, 1
	case x.SameAttempt:
		return 1, 1
	case k == 0:
		return 1, uint8(x.Openers)
	}
	return side[k-1].attempt + 1, uint8(x.Openers)
}

// successors calls yield for every state that one step leads to. A violated rule comes with the step.
func (x *explorer) successors(st *state, yield func(mv *move, next *state, violated string)) {
	x.from, x.yield = st, yield
	if x.Alone != 0 {
		x.aloneMoves(st)
	} else {
		x.linkMoves(st)
	}
	for e := range x.Sources + 1 {
		if x.Alone == 'P' && e == x.Sources || x.Alone == 'D' && e < x.Sources {
			continue
		}
		x.workerMoves(st, e)
		x.clockMoves(st, e)
		x.pluginMoves(st, e)
	}
	if x.Alone != 'D' {
		x.opMoves(st)
	}
	x.answerMoves(st)
}

// do makes a move: f changes a copy of the state. One that changes nothing is no step.
func (x *explorer) do(mv move, f func(n *state)) {
	if mv.fault != 0 && (x.from.faults >= uint8(x.Faults) || !x.kinds[mv.fault]) {
		return
	}
	n := &x.next
	*n = *x.from
	x.violated = ""
	f(n)
	if *n == *x.from && x.violated == "" {
		return
	}
	if mv.fault != 0 {
		n.faults++
	}
	x.observe(n)
	x.normalise(n)
	x.check(n)
	x.move = mv
	x.yield(&x.move, n, x.violated)
}

// apply lets an event happen to one engine.
func (x *explorer) apply(n *state, e int, ev event) {
	g := x.engines[e]
	t := g.step(n.engine[e], ev)
	if t.violated != "" {
		rule, why, _ := strings.Cut(t.violated, ": ")
		x.violate(rule, "%s", why)
	}
	n.engine[e] = t.to
	for _, f := range t.frames {
		if x.Alone != 0 {
			break
		}
		if e == x.Sources {
			n.toP[f.peer] = x.push(n.toP[f.peer], f.frame)
		} else {
			n.toD[e] = x.push(n.toD[e], f.frame)
		}
	}
	inc := n.plugin[e].inc
	for _, s := range t.submits {
		_, d := x.resolve(n, s.d)
		k := n.index(n.s[e][:], inc, s.seq)
		if x.Alone != 0 {
			n.ops[e][k-1][s.chunk] = op{state: opOpen, epoch: n.plugin[e].epoch}
			continue
		}
		if n.d[d-1].asked&askedGrant != 0 {
			x.violate("R4", "s%d writes to d%d, whose plugin has not opened the pages yet", k, d)
		}
		n.ops[e][k-1][s.chunk] = op{state: opOpen, d: d, epoch: n.plugin[e].epoch}
	}
	ask := func(seqs []uint8, a asked) {
		for _, q := range seqs {
			n.d[n.index(n.d[:], inc, q)-1].asked |= a
		}
	}
	ask(t.grants, askedGrant)
	ask(t.revokes, askedRevoke)
	ask(t.fences, askedFence)
}

func (x *explorer) linkMoves(st *state) {
	for l := range x.Sources {
		deliver := func(kind moveKind, q uint32, to int, peer uint8) {
			for i, f := range x.queues[q] {
				if i > 0 && (!x.frames[f].urgent() || x.frames[x.queues[q][0]].hello) {
					continue
				}
				x.do(move{kind: kind, e: uint8(l), a: uint8(i), frame: f}, func(n *state) {
					_, rest := x.take(q, i)
					if kind == mvToD {
						n.toD[l] = rest
					} else {
						n.toP[l] = rest
					}
					ev := event{kind: evFrame, peer: peer, f: f}
					if x.frames[f].hello {
						ev.kind = evHello
					}
					x.apply(n, to, ev)
				})
			}
		}
		deliver(mvToD, st.toD[l], x.Sources, uint8(l))
		deliver(mvToP, st.toP[l], l, 0)
		if st.link[l] == linkDown {
			x.do(move{kind: mvRedial, e: uint8(l)}, func(n *state) {
				n.link[l] = linkUp
				n.toD[l] = x.queue([]uint32{x.hello(x.engines[l].incBase() + uint64(st.plugin[l].inc))})
				n.toP[l] = x.queue([]uint32{x.hello(x.engines[x.Sources].incBase() + uint64(st.plugin[x.Sources].inc))})
			})
		}
		if st.link[l] == linkUp {
			x.do(move{kind: mvBreak, e: uint8(l), fault: FaultBreak}, func(n *state) { x.breakLink(n, l, linkDown) })
		}
		if st.link[l] != linkGone {
			x.do(move{kind: mvCut, e: uint8(l), fault: FaultCut}, func(n *state) { x.breakLink(n, l, linkGone) })
		}
		if st.link[l] != linkUp {
			x.do(move{kind: mvPeerDead, e: uint8(x.Sources), a: uint8(l)}, func(n *state) { x.apply(n, x.Sources, event{kind: evPeerDead, peer: uint8(l)}) })
			x.do(move{kind: mvPeerDead, e: uint8(l)}, func(n *state) { x.apply(n, l, event{kind: evPeerDead}) })
		}
		for _, side := range [2][2]int{{x.Sources, l}, {l, 0}} {
			if g := &x.engines[side[0]].nodes[st.engine[side[0]]]; g.heard[side[1]] != 0 && !g.grouped[side[1]] {
				x.do(move{kind: mvGroup, e: uint8(side[0]), a: uint8(side[1])}, func(n *state) {
					x.apply(n, side[0], event{kind: evGroup, peer: uint8(side[1])})
				})
			}
		}
		// On one host the death of an incarnation is proven.
		gone := func(judge, dead int, peer uint8) {
			h := x.engines[judge].nodes[st.engine[judge]].heard[peer]
			if !x.NoProof && h != 0 && h < x.engines[dead].incBase()+uint64(st.plugin[dead].inc) {
				x.do(move{kind: mvPeerGone, e: uint8(judge), a: peer}, func(n *state) { x.apply(n, judge, event{kind: evPeerGone, peer: peer}) })
			}
		}
		gone(x.Sources, l, uint8(l))
		gone(l, x.Sources, 0)
	}
}

// breakLink loses what is in flight and tells both ends.
func (x *explorer) breakLink(n *state, l int, to linkState) {
	n.link[l], n.toD[l], n.toP[l] = to, 0, 0
	x.apply(n, l, event{kind: evLinkDown})
	x.apply(n, x.Sources, event{kind: evLinkDown, peer: uint8(l)})
	n.toD[l], n.toP[l] = 0, 0
}

func (x *explorer) workerMoves(st *state, e int) {
	side := x.side(st, e)
	set := func(n *state) []opener { return x.side(n, e) }
	inc := st.plugin[e].inc
	source := e < x.Sources
	alive := false
	for k := range side {
		o := &side[k]
		r := x.record(st, e, o)
		if r != nil && r.state == statemachine.Ended && o.flags&workerGone == 0 && !x.reusable(st, e, o) {
			x.do(move{kind: mvLate, e: uint8(e), k: uint8(k) + 1, may: true}, func(n *state) { x.apply(n, e, event{kind: evLate, k: uint8(k) + 1}) })
		}
		if r == nil || !r.state.Live() {
			continue
		}
		if x.Rooms == 1 {
			alive = true
		}
		if o.flags&workerGone != 0 {
			continue
		}
		slot := uint8(k) + 1
		switch {
		case source && int(o.sent) < max(x.Chunks, 1) && r.state != statemachine.Committed:
			x.do(move{kind: mvSend, e: uint8(e), k: slot, a: o.sent, may: true}, func(n *state) {
				set(n)[k].sent++
				x.apply(n, e, event{kind: evSend, k: slot, a: o.sent})
			})
		case !source && o.sent == 0:
			x.do(move{kind: mvRegister, e: uint8(e), k: slot, may: true}, func(n *state) {
				set(n)[k].sent = 1
				x.apply(n, e, event{kind: evRegister, k: slot})
			})
		}
		fault := byte(FaultAbortP)
		if !source {
			fault = FaultAbortD
		}
		x.do(move{kind: mvAbort, e: uint8(e), k: slot, fault: fault}, func(n *state) { x.apply(n, e, event{kind: evAbort, k: slot}) })
	}
	next := 0
	for next < len(side) && side[next].seq != 0 {
		next++
	}
	var seq uint8
	for k := range next {
		if side[k].inc == inc {
			seq++
		}
	}
	if next < len(side) && !alive {
		from, to := x.attempts(side, next)
		for att := from; att <= to; att++ {
			x.do(move{kind: mvOpen, e: uint8(e), k: uint8(next) + 1, a: att, may: true}, func(n *state) {
				set(n)[next] = opener{seq: seq + 1, inc: inc, attempt: att}
				x.apply(n, e, event{kind: evOpen, k: uint8(next) + 1, a: att, b: x.room(next)})
			})
		}
	}
	fault := byte(FaultWorkerP)
	if !source {
		fault = FaultWorkerD
	}
	x.do(move{kind: mvWorkerDies, e: uint8(e), fault: fault}, func(n *state) {
		any := false
		for k := range set(n) {
			if o := &set(n)[k]; o.seq != 0 && o.inc == inc && o.flags&workerGone == 0 {
				o.flags |= workerGone
				any = true
			}
		}
		if any {
			x.apply(n, e, event{kind: evWorkerDies})
		}
	})
}

func (x *explorer) clockMoves(st *state, e int) {
	source := e < x.Sources
	for k, o := range x.side(st, e) {
		r := x.record(st, e, &o)
		if r == nil || r.state == statemachine.Absent {
			continue
		}
		mv := move{kind: mvClock, e: uint8(e), k: uint8(k) + 1}
		switch {
		case r.state.Live(), r.rung == statemachine.Drain, r.rung == statemachine.Fence:
		default:
			mv.kind, mv.fault = mvForget, FaultForgetP
			if !source {
				mv.fault = FaultForgetD
			}
		}
		x.do(mv, func(n *state) { x.apply(n, e, event{kind: evClock, k: o.seq}) })
	}
	if source {
		for room := range uint8(x.Rooms) {
			x.do(move{kind: mvDropHold, e: uint8(e), a: room + 1, fault: FaultPlaceholder}, func(n *state) {
				x.apply(n, e, event{kind: evDropHold, a: room + 1})
			})
		}
	}
}

func (x *explorer) pluginMoves(st *state, e int) {
	p := st.plugin[e]
	source := e < x.Sources
	die, restart := byte(FaultPluginP), byte(FaultRestartP)
	if !source {
		die, restart = FaultPluginD, FaultRestartD
	}
	if !p.down {
		x.do(move{kind: mvPluginDies, e: uint8(e), a: p.epoch, fault: die}, func(n *state) {
			q := &n.plugin[e]
			q.down = true
			q.gone |= 1 << q.epoch
			if source {
				x.eachOp(n, e, func(o *opener, w *op) {
					if o.inc == q.inc && w.epoch == q.epoch && (w.state == opOpen || w.state == opLinger) {
						w.state = opDead
					}
				})
			}
			for k := range n.d {
				if !source && n.d[k].inc == q.inc && n.d[k].epoch == q.epoch {
					n.d[k].asked = 0
				}
			}
			x.apply(n, e, event{kind: evPluginLost, a: q.epoch})
		})
	} else {
		x.do(move{kind: mvPluginStarts, e: uint8(e)}, func(n *state) {
			q := &n.plugin[e]
			q.down = false
			q.epoch++
			x.apply(n, e, event{kind: evPluginUp, a: q.epoch})
		})
	}
	for epoch := uint8(1); epoch < 8; epoch++ {
		if p.gone&(1<<epoch) == 0 {
			continue
		}
		x.do(move{kind: mvPluginGone, e: uint8(e), a: epoch}, func(n *state) {
			n.plugin[e].gone &^= 1 << epoch
			if source {
				x.eachOp(n, e, func(o *opener, w *op) {
					if o.inc == p.inc && w.epoch == epoch && w.state == opDead {
						w.state = opUnread
					}
				})
			} else {
				x.seal(n, func(o *opener) bool { return o.inc == p.inc && o.epoch == epoch })
			}
			x.apply(n, e, event{kind: evPluginGone, a: epoch})
		})
	}
	x.do(move{kind: mvRestart, e: uint8(e), fault: restart}, func(n *state) { x.restart(n, e) })
	for inc := uint8(0); inc < p.inc; inc++ {
		if p.orphans&(1<<inc) == 0 {
			continue
		}
		x.do(move{kind: mvOrphanExits, e: uint8(e), a: inc}, func(n *state) {
			n.plugin[e].orphans &^= 1 << inc
			if source {
				x.eachOp(n, e, func(o *opener, w *op) {
					if o.inc == inc && w.mayRead() {
						w.state = opUnread
					}
				})
			} else {
				x.seal(n, func(o *opener) bool { return o.inc == inc })
			}
		})
	}
}

// restart kills an engine and starts its next incarnation. Its plugins live on as orphans until they
// notice; its workers latch engine_lost.
func (x *explorer) restart(n *state, e int) {
	p := &n.plugin[e]
	p.orphans |= 1 << p.inc
	*p = plugin{inc: p.inc + 1, epoch: 1, orphans: p.orphans}
	for k := range x.side(n, e) {
		o := &x.side(n, e)[k]
		o.asked = 0
		if o.seq != 0 && o.end == notEnded {
			o.end = endUnknown
		}
	}
	id, err := x.engines[e].start(p.inc)
	if err != nil {
		x.violate("R12", "%v", err)
		return
	}
	n.engine[e] = id
	for l := range x.Sources {
		if e != x.Sources && e != l {
			continue
		}
		n.toD[l], n.toP[l] = 0, 0
		if n.link[l] == linkUp {
			n.link[l] = linkDown
			other, peer := l, uint8(0)
			if e == l {
				other, peer = x.Sources, uint8(l)
			}
			x.apply(n, other, event{kind: evLinkDown, peer: peer})
		}
	}
}

// eachOp calls fn for every op of a source engine.
func (x *explorer) eachOp(n *state, e int, fn func(o *opener, w *op)) {
	for k := range n.s[e] {
		for c := range n.ops[e][k] {
			fn(&n.s[e][k], &n.ops[e][k][c])
		}
	}
}

// seal notes that nothing can land any more in the pages of some destinations.
func (x *explorer) seal(n *state, which func(o *opener) bool) {
	for k := range n.d {
		if n.d[k].seq != 0 && which(&n.d[k]) {
			n.d[k].flags |= sealed
		}
	}
}

func (x *explorer) opMoves(st *state) {
	for e := range x.Sources {
		p := st.plugin[e]
		for k := range x.Openers {
			o := st.s[e][k]
			for c := range x.Chunks {
				w := st.ops[e][k][c]
				if o.inc != p.inc || w.epoch != p.epoch || p.down {
					continue // no plugin that could say anything about it
				}
				mv := move{kind: mvOpEnd, e: uint8(e), k: uint8(k) + 1, a: uint8(c), may: true}
				end := func(b uint8, fault byte, s opState) {
					mv.b, mv.fault = b, fault
					x.do(mv, func(n *state) {
						v := &n.ops[e][k][c]
						v.state, v.done = s, b != endSkipped
						x.apply(n, e, event{kind: evOpEnd, k: o.seq, a: uint8(c), b: b})
					})
				}
				switch w.state {
				case opOpen:
					end(endDone, 0, opQuiet)
					end(endDoneUnquiet, FaultUnquiet, opLinger)
					end(endSkipped, FaultSkip, opSkipped)
				case opLinger:
					mv.kind = mvQuiesced
					x.do(mv, func(n *state) {
						n.ops[e][k][c].state = opQuiet
						x.apply(n, e, event{kind: evOpQuiesced, k: o.seq, a: uint8(c)})
					})
				}
			}
		}
	}
}

// answerMoves are what the destination's plugin was asked and answers.
func (x *explorer) answerMoves(st *state) {
	for k := range x.Openers {
		o := st.d[k]
		mv := move{e: uint8(x.Sources), k: uint8(k) + 1}
		if o.asked&askedGrant != 0 {
			mv.kind = mvGranted
			x.do(mv, func(n *state) {
				n.d[k].asked &^= askedGrant
				x.apply(n, x.Sources, event{kind: evGranted, k: o.seq})
			})
		}
		if o.asked&askedRevoke != 0 {
			mv.kind = mvRevoked
			for quiet := range uint8(2) {
				mv.a = quiet
				x.do(mv, func(n *state) {
					n.d[k].asked &^= askedRevoke
					if quiet == 1 {
						n.d[k].flags |= sealed
					}
					x.apply(n, x.Sources, event{kind: evRevoked, k: o.seq, a: quiet})
				})
			}
			mv.a = 0
		}
		if o.asked&askedFence != 0 {
			mv.kind = mvFenced
			for quiet := range uint8(2) {
				mv.a = quiet
				x.do(mv, func(n *state) {
					n.d[k].asked &^= askedFence
					// The least that quiet may mean: what was posted is cut. What is posted later is not.
					for e := range x.Sources {
						x.eachOp(n, e, func(_ *opener, w *op) {
							if quiet == 1 && w.d == uint8(k)+1 && w.state != opNone {
								w.cut = true
							}
						})
					}
					x.apply(n, x.Sources, event{kind: evFenceAnswer, k: o.seq, a: quiet})
				})
			}
		}
	}
}

// describeMove tells a step in words, as seen from the state before it.
func (x *explorer) describeMove(st, next *state, mv *move) string {
	g := x.engines[mv.e].name()
	own := func() string {
		e := int(mv.e)
		name := fmt.Sprintf("d%d", mv.k)
		if e < x.Sources {
			name = fmt.Sprintf("s%d", mv.k)
			if x.Sources > 1 {
				name = g + "." + name
			}
		}
		return name
	}
	where := ""
	if x.Rooms > 1 && mv.k > 0 {
		where = fmt.Sprintf(" (room %d)", x.room(int(mv.k)-1))
	}
	switch mv.kind {
	case mvToD, mvToP:
		to := g
		if mv.kind == mvToD {
			to = x.engines[x.Sources].name()
		}
		how := ""
		if mv.a > 0 {
			how = ", overtaking"
		}
		return fmt.Sprintf("%s receives %s%s", to, x.describe(next, mv.frame), how)
	case mvRedial:
		return "the link of " + g + " is up"
	case mvBreak:
		return "the link of " + g + " breaks; what was in flight is lost"
	case mvCut:
		return "the link of " + g + " is down for ever"
	case mvPeerDead:
		return g + " has not heard its peer for too long"
	case mvPeerGone:
		return g + " has proof that its peer's old incarnation is dead"
	case mvOpen:
		return fmt.Sprintf("worker of %s opens %s (attempt %d)%s", g, own(), mv.a, where)
	case mvSend:
		if x.Chunks == 0 {
			return fmt.Sprintf("worker of %s sends its last of %s: no pages", g, own())
		}
		return fmt.Sprintf("worker of %s sends chunk %d of %s", g, mv.a, own())
	case mvRegister:
		return fmt.Sprintf("worker of %s registers pages for %s", g, own())
	case mvAbort:
		return fmt.Sprintf("worker of %s aborts %s", g, own())
	case mvWorkerDies:
		return "the worker of " + g + " dies; a new one connects"
	case mvClock:
		r := x.record(st, int(mv.e), &x.side(st, int(mv.e))[mv.k-1])
		if r.state.Live() {
			return fmt.Sprintf("a clock of %s (%s) expires", own(), r.state)
		}
		return fmt.Sprintf("the drain clock of %s expires on rung %d", own(), r.rung)
	case mvForget:
		return g + " forgets " + own()
	case mvDropHold:
		return g + " drops its placeholder"
	case mvOpEnd:
		return fmt.Sprintf("the op for chunk %d of %s ends %s", mv.a, own(), [...]string{"done", "done, not quiet", "skipped"}[mv.b])
	case mvQuiesced:
		return fmt.Sprintf("the op for chunk %d of %s is quiet", mv.a, own())
	case mvPluginDies:
		return fmt.Sprintf("the plugin of %s dies (epoch %d)", g, mv.a)
	case mvPluginStarts:
		return "the next plugin of " + g + " is up"
	case mvPluginGone:
		return fmt.Sprintf("epoch %d of the plugin of %s is proven gone", mv.a, g)
	case mvRestart:
		return g + " dies and starts again"
	case mvOrphanExits:
		return fmt.Sprintf("the orphan plugin of incarnation %d of %s exits", mv.a+1, g)
	case mvGranted:
		return "the plugin of " + g + " opens the pages of " + own()
	case mvGroup:
		return g + " learns of its peer's group"
	case mvLate:
		return fmt.Sprintf("worker of %s goes on with %s, which has ended", g, own())
	case mvAny:
		return fmt.Sprintf("%s receives %s", g, x.frames[mv.frame].text)
	case mvRevoked:
		if mv.a == 0 {
			return "the plugin of " + g + " cannot tell whether a write for " + own() + " may still land"
		}
		return "the plugin of " + g + " refuses writes for " + own() + " for good"
	}
	return fmt.Sprintf("FencePeer for %s answers %s", own(), [...]string{"unknown", "quiet"}[mv.a])
}
