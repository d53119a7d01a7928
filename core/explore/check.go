package explore

import (
	"fmt"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// observe notes what must be remembered of records that may be forgotten later.
func (x *explorer) observe(n *state) {
	for e := range x.Sources + 1 {
		for k := range x.side(n, e) {
			o := &x.side(n, e)[k]
			r := x.record(n, e, o)
			if r == nil || r.state == statemachine.Absent {
				continue
			}
			if r.epoch != 0 {
				o.epoch = r.epoch
			}
			if r.state != statemachine.Ended {
				continue
			}
			if o.end == notEnded {
				switch r.reason {
				case statemachine.Success:
					o.end = endSuccess
				case statemachine.OutcomeUnknown:
					o.end = endUnknown
				default:
					o.end = endFailed
				}
			}
			if o.pair == 0 {
				if o.at, o.pair = x.resolve(n, r.pair); e < x.Sources {
					o.at = 0
				}
			}
		}
	}
}

// normalise drops what makes no difference any more: an orphan plugin that touches no page is gone without
// a step (no engine hears of it), and the plugin of an op that has ended does not matter.
func (x *explorer) normalise(n *state) {
	for e := range x.Sources + 1 {
		p := &n.plugin[e]
		var orphans uint8
		if e < x.Sources {
			x.eachOp(n, e, func(o *opener, w *op) {
				switch {
				case w.state == opNone:
				case w.cut && !w.mayRead(), w.state == opQuiet, w.state == opSkipped:
					w.epoch = 0
				case o.inc != p.inc:
					orphans |= 1 << o.inc
				}
			})
		} else {
			for k := range n.d {
				switch o := &n.d[k]; {
				case o.epoch == 0 || o.flags&sealed != 0:
				case o.inc != p.inc:
					orphans |= 1 << o.inc
				}
			}
		}
		p.orphans &= orphans
	}
}

// reusable reports whether the worker may use the pages of an opener for something else.
func (x *explorer) reusable(n *state, e int, o *opener) bool {
	r := x.record(n, e, o)
	if r == nil { // its engine is gone: the worker waits for the lease of every process that maps them
		return x.NoLease || n.plugin[e].orphans&(1<<o.inc) == 0
	}
	if r.state == statemachine.Absent || o.flags&workerGone != 0 {
		return r.state == statemachine.Absent || r.reusable
	}
	return r.reusable
}

// violate notes the first rule that a step breaks.
func (x *explorer) violate(rule, format string, args ...any) {
	if x.violated == "" && !strings.Contains(" "+x.Ignore+" ", " "+rule+" ") {
		x.violated = rule + ": " + fmt.Sprintf(format, args...)
	}
}

// check looks for a rule that a state breaks.
func (x *explorer) check(n *state) {
	x.checkReads(n)
	if x.Alone != 0 {
		return
	}
	for e := range x.Sources {
		for k := range x.Openers {
			s := &n.s[e][k]
			if s.seq == 0 {
				continue
			}
			if s.end == endSuccess && (s.pair == 0 || n.d[s.pair-1].end != endSuccess) {
				x.violate("R11", "s%d is Success, its destination is not", k+1)
			}
			if s.end == endFailed && s.pair != 0 && n.d[s.pair-1].end == endSuccess && n.d[s.pair-1].pair == uint8(k)+1 && int(n.d[s.pair-1].at) == e {
				x.violate("R10", "s%d failed, d%d is Success", k+1, s.pair)
			}
			for c := range x.Chunks {
				w := &n.ops[e][k][c]
				if w.state == opNone {
					continue
				}
				if d := &n.d[w.d-1]; w.mayLand() && d.flags&sealed == 0 && x.reusable(n, x.Sources, d) {
					x.violate("R4", "chunk %d of s%d may still be written, the pages of d%d are reusable", c, k+1, w.d)
				}
			}
			if r := x.record(n, e, s); r != nil {
				x.checkPair(n, e, k, r)
			}
		}
	}
	for k := range x.Openers {
		d := &n.d[k]
		r := x.record(n, x.Sources, d)
		if r == nil || r.state != statemachine.Ended || r.reason != statemachine.Success {
			continue
		}
		at, pair := x.resolve(n, r.pair)
		for e := range x.Sources {
			for s := range x.Openers {
				for c := range x.Chunks {
					w := &n.ops[e][s][c]
					switch own := e == int(at) && s+1 == int(pair); {
					case own && (!w.done || int(w.d) != k+1):
						x.violate("R11", "d%d is Success, chunk %d of s%d has not arrived", k+1, c, s+1)
					case !own && int(w.d) == k+1 && w.state != opSkipped:
						x.violate("R11", "d%d is Success with s%d, s%d has written to its pages", k+1, pair, s+1)
					}
				}
			}
		}
	}
	x.checkIdleLink(n)
}

// checkReads: no page of a source is reusable while an op may read it.
func (x *explorer) checkReads(n *state) {
	for e := range x.Sources {
		for k := range x.Openers {
			for c := range x.Chunks {
				if s := &n.s[e][k]; s.seq != 0 && n.ops[e][k][c].mayRead() && x.reusable(n, e, s) {
					x.violate("R4", "chunk %d of s%d may still be read, its pages are reusable", c, k+1)
				}
			}
		}
	}
}

// checkPair: a source that may write is agreed with a destination that says so too.
func (x *explorer) checkPair(n *state, e, k int, r *record) {
	if r.state != statemachine.Confirmed && r.state != statemachine.Committed {
		return
	}
	_, d := x.resolve(n, r.pair)
	if d == 0 {
		x.violate("R3", "s%d is %s with a destination that never was", k+1, r.state)
		return
	}
	q := x.record(n, x.Sources, &n.d[d-1])
	if q == nil || q.state == statemachine.Absent {
		return
	}
	if at, s := x.resolve(n, q.pair); int(at) != e || int(s) != k+1 {
		x.violate("R3", "s%d is %s with d%d, which is not bound to it", k+1, r.state, d)
	}
}

// checkIdleLink is the bound in time: once a link has carried what there was to carry, the end of one
// side is known to the other. The end of a room takes one step on the link, or two when it must be asked.
func (x *explorer) checkIdleLink(n *state) {
	D := x.engines[x.Sources]
	for e := range x.Sources {
		incP, incD := x.engines[e].incBase()+uint64(n.plugin[e].inc), D.incBase()+uint64(n.plugin[x.Sources].inc)
		if n.link[e] != linkUp || n.toD[e] != 0 || n.toP[e] != 0 ||
			x.engines[e].nodes[n.engine[e]].heard[0] != incD || D.nodes[n.engine[x.Sources]].heard[e] != incP {
			continue
		}
		if slices.ContainsFunc(n.d[:], func(d opener) bool { return d.asked&askedGrant != 0 }) {
			continue // a Confirm waits for the plugin
		}
		if !D.nodes[n.engine[x.Sources]].grouped[e] || !x.engines[e].nodes[n.engine[e]].grouped[0] {
			continue
		}
		x.checkUntold(n, e)
		for k := range x.Openers {
			r := x.record(n, e, &n.s[e][k])
			if r != nil && r.state.Live() && !r.pair.IsZero() {
				_, d := x.resolve(n, r.pair)
				if q := x.record(n, x.Sources, &n.d[d-1]); q == nil || !q.state.Live() {
					x.violate("R10", "s%d is %s, its destination d%d has ended and nothing is under way", k+1, r.state, d)
				}
			}
		}
		for k := range x.Openers {
			q := x.record(n, x.Sources, &n.d[k])
			if q == nil || !q.state.Live() || q.pair.IsZero() {
				continue
			}
			at, s := x.resolve(n, q.pair)
			if int(at) != e {
				continue
			}
			if r := x.record(n, e, &n.s[e][s-1]); r == nil || !r.state.Live() {
				x.violate("R10", "d%d is %s, its source s%d has ended and nothing is under way", k+1, q.state, s)
			}
		}
	}
}

// checkUntold is the same for attempts that never met, where nothing was lost on the way: an end is known
// to the counterpart that waits for it.
func (x *explorer) checkUntold(n *state, e int) {
	if x.Sources > 1 || n.faults > 0 || x.SameAttempt {
		return
	}
	for i := range x.Openers {
		for k := range x.Openers {
			s, d := &n.s[e][i], &n.d[k]
			r, q := x.record(n, e, s), x.record(n, x.Sources, d)
			if r == nil || q == nil || s.attempt != d.attempt || x.room(i) != x.room(k) || !r.pair.IsZero() || !q.pair.IsZero() {
				continue
			}
			switch {
			case r.state == statemachine.Unbound && q.state == statemachine.Ended:
				x.violate("R10", "s%d waits, d%d of its attempt has ended and nothing is under way", i+1, k+1)
			case r.state == statemachine.Ended && q.state == statemachine.Registered:
				x.violate("R10", "d%d waits, s%d of its attempt has ended and nothing is under way", k+1, i+1)
			}
		}
	}
}

// checkEnd judges a state in which nothing is left to happen but what nobody owes.
func (x *explorer) checkEnd(n *state) string {
	for e := range x.Sources + 1 {
		for k := range x.side(n, e) {
			o := &x.side(n, e)[k]
			r := x.record(n, e, o)
			if r == nil || r.state == statemachine.Absent {
				continue
			}
			if r.state.Live() {
				return fmt.Sprintf("R1: opener %d of %s is %s and nothing is left to happen", k+1, x.engines[e].name(), r.state)
			}
			if x.Alone != 0 {
				continue // the counterpart owes the rest
			}
			if r.rung == statemachine.Quarantine {
				// A resting place, unless the source knows better and could say so.
				if at, s := x.resolve(n, r.pair); s != 0 && n.s[at][s-1].inc == n.plugin[at].inc && n.link[at] == linkUp && x.drained(n, int(at), int(s)-1) {
					return fmt.Sprintf("R4: the pages of d%d rest in quarantine, s%d has drained", k+1, s)
				}
				continue
			}
			if !x.reusable(n, e, o) && !x.opsOpen(n, e, k) {
				return fmt.Sprintf("R4: the pages of opener %d of %s are %s and nothing is left to happen", k+1, x.engines[e].name(), r.residency)
			}
		}
	}
	return ""
}

// drained is the truth: every op of the source ended quiet by its plugin's word.
func (x *explorer) drained(n *state, e, k int) bool {
	for c := range x.Chunks {
		if w := n.ops[e][k][c].state; w != opNone && w != opQuiet && w != opSkipped {
			return false
		}
	}
	return true
}

// opsOpen reports whether a plugin still has an op of a source.
func (x *explorer) opsOpen(n *state, e, k int) bool {
	if e == x.Sources {
		return false
	}
	for c := range x.Chunks {
		if w := n.ops[e][k][c].state; w == opOpen || w == opLinger {
			return true
		}
	}
	return false
}
