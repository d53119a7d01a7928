package explore

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// groupState is one state of the whole: the engines, the links, and the truth that no engine sees.
type groupState struct {
	node   [maxGroup]uint32
	at     [maxGroup]groupAt
	queue  [maxGroup][maxGroup]uint32
	ops    [maxSide][maxSide][maxSlots]groupOp // by source engine, destination engine, and slot of the source's opener
	won    [maxSlots]uint16                    // by slot of the judge's opener: 1, and two bits for the slot of each engine that it decided for
	faults uint8
	hurt   bool // a fault hit the last attempt
}

// groupAt is what surrounds an engine.
type groupAt struct {
	inc      uint8 // restarts
	opens    uint8 // of this incarnation
	moved    bool  // the newest open has registered, or has sent
	known    uint8 // engines whose ranks it knows, by bit
	epoch    uint8 // of its plugin, from 0
	down     bool  // the plugin ended, the next has not started
	unproven bool  // the plugin ended, and is not proven gone
	sealed   uint8 // destinations in whose pages no write can land any more, by slot
	att      [maxSlots]uint8
	end      [maxSlots]end
}

// groupOp is the truth about the op of a source's opener to a destination engine.
type groupOp struct {
	state opState
	d     uint8 // slot of the destination's opener
	epoch uint8
	done  bool
	cut   bool
}

func (o *groupOp) mayLand() bool {
	return !o.cut && (o.state == opOpen || o.state == opLinger || o.state == opDead || o.state == opUnread)
}

func (o *groupOp) mayRead() bool {
	return o.state == opOpen || o.state == opLinger || o.state == opDead
}

// pack appends a state, the same number of bytes for each of a configuration.
func (x *groups) pack(b []byte, st *groupState) []byte {
	for e := range x.n {
		b = binary.LittleEndian.AppendUint32(b, st.node[e])
		a := &st.at[e]
		b = append(b, a.inc|a.opens<<1|bit(a.moved)<<3|a.epoch<<4|bit(a.down)<<5|bit(a.unproven)<<6, a.known|a.sealed<<4)
		var atts, ends byte
		for s := range maxSlots {
			atts |= a.att[s] << (2 * s)
			ends |= byte(a.end[s]) << (2 * s)
		}
		b = append(b, atts, ends)
		for o := range x.n {
			if x.linked(e, o) {
				b = binary.LittleEndian.AppendUint32(b, st.queue[e][o])
			}
		}
	}
	if x.Ops {
		for i := range x.Sources {
			for j := range x.Destinations {
				for s := range maxSlots {
					o := &st.ops[i][j][s]
					b = append(b, byte(o.state)|o.d<<3|o.epoch<<5|bit(o.done)<<6|bit(o.cut)<<7)
				}
			}
		}
	}
	for s := range maxSlots {
		b = binary.LittleEndian.AppendUint16(b, st.won[s])
	}
	return append(b, st.faults<<1|bit(st.hurt))
}

func (x *groups) unpack(b []byte, st *groupState) {
	for e := range x.n {
		st.node[e] = binary.LittleEndian.Uint32(b)
		c := b[4]
		a := &st.at[e]
		*a = groupAt{inc: c & 1, opens: c >> 1 & 3, moved: c>>3&1 != 0, epoch: c >> 4 & 1, down: c>>5&1 != 0, unproven: c>>6&1 != 0, known: b[5] & 15, sealed: b[5] >> 4}
		for s := range maxSlots {
			a.att[s], a.end[s] = b[6]>>(2*s)&3, end(b[7]>>(2*s)&3)
		}
		b = b[8:]
		for o := range x.n {
			if x.linked(e, o) {
				st.queue[e][o] = binary.LittleEndian.Uint32(b)
				b = b[4:]
			}
		}
	}
	if x.Ops {
		for i := range x.Sources {
			for j := range x.Destinations {
				for s := range maxSlots {
					c := b[0]
					st.ops[i][j][s] = groupOp{state: opState(c & 7), d: c >> 3 & 3, epoch: c >> 5 & 1, done: c>>6&1 != 0, cut: c>>7 != 0}
					b = b[1:]
				}
			}
		}
	}
	for s := range maxSlots {
		st.won[s] = binary.LittleEndian.Uint16(b)
		b = b[2:]
	}
	st.faults, st.hurt = b[0]>>1, b[0]&1 != 0
}

// record of an opener by its slot; nil when its incarnation is gone.
func (x *groups) record(st *groupState, e int, slot uint8) *groupRecord {
	if slot/maxOpens != st.at[e].inc {
		return nil
	}
	return &x.engines[e].nodes[st.node[e]].rec[slot%maxOpens]
}

// newest is the attempt and the record of an engine's newest open.
func (x *groups) newest(st *groupState, e int) (slot uint8, r *groupRecord) {
	a := &st.at[e]
	if a.opens == 0 {
		return 0, &groupRecord{}
	}
	slot = slotOf(a.inc, a.opens)
	return slot, x.record(st, e, slot)
}

// last reports whether an engine has opened the last attempt in this incarnation.
func (x *groups) last(st *groupState, e int) bool {
	slot, _ := x.newest(st, e)
	return st.at[e].opens > 0 && int(st.at[e].att[slot]) == x.Attempts
}

// apply carries an event out in a composed state.
func (x *groups) apply(st *groupState, e int, ev event) {
	t := x.step(e, st.node[e], ev)
	st.node[e] = t.to
	if t.violated != "" {
		x.bad = t.violated
		return
	}
	for _, f := range t.frames {
		x.push(&st.queue[e][f.peer], f.frame)
	}
	for _, s := range t.submits {
		d := int(s.to)
		st.ops[e][d-x.Sources][slotOf(st.at[e].inc, s.seq)] = groupOp{state: opOpen, d: x.slot(d, s.d), epoch: st.at[e].epoch}
	}
	x.observe(st, e)
}

// observe notes how records ended, and for whom the judge decided.
func (x *groups) observe(st *groupState, e int) {
	a := &st.at[e]
	for seq := uint8(1); seq <= a.opens; seq++ {
		slot := slotOf(a.inc, seq)
		r := x.record(st, e, slot)
		if r.state != statemachine.Ended || a.end[slot] != notEnded {
			continue
		}
		switch r.reason {
		case statemachine.Success:
			a.end[slot] = endSuccess
		case statemachine.OutcomeUnknown:
			a.end[slot] = endUnknown
		default:
			a.end[slot] = endFailed
		}
		if e == x.Sources && r.reason == statemachine.Success {
			x.decide(st, slot, r)
		}
	}
}

// decide notes a Success of the judge.
func (x *groups) decide(st *groupState, slot uint8, r *groupRecord) {
	judge := x.Sources
	won := uint16(1) | uint16(slot)<<(1+2*judge)
	for o := range x.n {
		if o == judge {
			continue
		}
		if r.pairs[o].IsZero() {
			x.bad = "G2: the judge is Success without " + x.name(o)
			return
		}
		s := x.slot(o, r.pairs[o])
		won |= uint16(s) << (1 + 2*o)
		if st.at[o].att[s] != st.at[judge].att[slot] {
			x.bad = fmt.Sprintf("G8: the judge is Success with attempt %d of %s, its own is %d", st.at[o].att[s], x.name(o), st.at[judge].att[slot])
		}
	}
	st.won[slot] = won
	for i := range x.Sources {
		for j := range x.Destinations {
			if op := st.ops[i][j][decided(won, i)]; x.Ops && !(op.done && op.d == decided(won, x.Sources+j)) {
				x.bad = fmt.Sprintf("G4: the judge is Success, the op of %s to D%d is not Done", x.name(i), j+1)
			}
		}
	}
}

// decided is the slot of an engine's opener that the judge decided for.
func decided(won uint16, e int) uint8 { return uint8(won >> (1 + 2*e) & 3) }

func (x *groups) check(st *groupState) {
	for e := range x.n {
		if e == x.Sources {
			continue
		}
		for slot := range uint8(maxSlots) {
			yes := slices.ContainsFunc(st.won[:], func(won uint16) bool { return won != 0 && decided(won, e) == slot })
			switch end := st.at[e].end[slot]; {
			case end == endSuccess && !yes:
				x.bad = fmt.Sprintf("G2: %s is Success, the judge is not", x.name(e))
			case end == endFailed && yes:
				x.bad = fmt.Sprintf("G5: %s is Failed, the judge is Success", x.name(e))
			}
		}
	}
	if !x.Ops {
		return
	}
	for i := range x.Sources {
		for j := range x.Destinations {
			for slot := range uint8(maxSlots) {
				op, d := &st.ops[i][j][slot], x.Sources+j
				if op.mayLand() && st.at[d].sealed>>op.d&1 == 0 && x.reusable(st, d, op.d) {
					x.bad = fmt.Sprintf("G3: the pages of %s are reusable, the write of %s may land", x.name(d), x.name(i))
				}
				if op.mayRead() && x.reusable(st, i, slot) {
					x.bad = fmt.Sprintf("G3: the pages of %s are reusable, its op to %s may read them", x.name(i), x.name(d))
				}
			}
		}
	}
}

// reusable reports whether the worker may use the pages of an opener for something else.
func (x *groups) reusable(st *groupState, e int, slot uint8) bool {
	r := x.record(st, e, slot)
	return r != nil && (r.state == statemachine.Absent || r.state == statemachine.Ended && r.reusable)
}

// search is breadth first.
func (x *groups) search(first groupState) *GroupResult {
	res := &GroupResult{}
	if res.Violation = x.bad; x.bad != "" {
		return res
	}
	met := newStore(len(x.pack(nil, &first)))
	var buf []byte
	add := func(st *groupState, from parent) {
		buf = x.pack(buf[:0], st)
		met.add(buf, from)
	}
	story := func(at uint32) (out []string) {
		for at != 0 {
			p := met.parent(at)
			st, i := groupState{}, uint8(0)
			x.unpack(met.packed(p.state), &st)
			x.moves(&st, func(_ bool, label func() string, _ func(*groupState)) {
				if i == p.ordinal {
					out = append(out, label())
				}
				i++
			})
			at = p.state
		}
		slices.Reverse(out)
		return out
	}
	add(&first, parent{})
	level := 1
	for at := 0; at < met.n; at++ {
		if at == level {
			res.Depth++
			level = met.n
		}
		st := groupState{}
		x.unpack(met.packed(uint32(at)), &st)
		musts, i := 0, 0
		x.moves(&st, func(must bool, label func() string, f func(*groupState)) {
			i++
			if x.bad != "" {
				return
			}
			n := st
			f(&n)
			res.Edges++
			if must && n != st {
				musts++
			}
			if x.bad == "" {
				x.check(&n)
			}
			if x.bad == "" && i > 256 {
				x.bad = "more moves than a byte can number"
			}
			if x.bad != "" {
				res.Violation, res.Trace = x.bad, append(story(uint32(at)), label())
				return
			}
			add(&n, parent{uint32(at), uint8(i - 1)})
		})
		if x.bad == "" && musts == 0 {
			if why := x.stuck(&st); why != "" {
				x.bad, res.Violation, res.Trace = why, why, story(uint32(at))
			}
		}
		if x.bad != "" || x.Limit > 0 && met.n >= x.Limit {
			res.States = met.n
			return res
		}
	}
	res.States, res.Complete = met.n, true
	return res
}

// mutes are the faults after which an engine may wait for one that says nothing more: only a clock ends that.
const mutes = string(groupRestart) + string(groupSilent)

// stuck says what is wrong with a state in which nothing is left to happen but clocks and faults.
func (x *groups) stuck(st *groupState) string {
	for e := range x.n {
		for seq := uint8(1); seq <= st.at[e].opens; seq++ {
			slot := slotOf(st.at[e].inc, seq)
			r := x.record(st, e, slot)
			switch {
			case r.state.Live() && x.NoClocks && !strings.ContainsAny(x.Kinds, mutes):
				return fmt.Sprintf("G6: %s is %s and nothing is left to happen", x.name(e), r.state)
			case r.state == statemachine.Ended && !r.reusable && !r.quarant:
				return fmt.Sprintf("G6: the pages of %s are never quiet", x.name(e))
			case x.NoClocks && !st.hurt && int(st.at[e].att[slot]) == x.Attempts && st.at[e].end[slot] != endSuccess:
				return fmt.Sprintf("G7: %s ended %s and nothing disturbed it", x.name(e), r.reason)
			}
		}
	}
	return ""
}

// moves calls try for everything that can happen in a state; must: it is no fault and nobody's choice.
func (x *groups) moves(st *groupState, try func(must bool, label func() string, f func(n *groupState))) {
	x.deliveries(st, try)
	for e := range x.n {
		x.workerMoves(st, e, try)
		x.pluginMoves(st, e, try)
		x.memberMoves(st, e, try)
		if x.fault(st, groupRestart) && st.at[e].inc == 0 {
			try(false, say("%s restarts", x.name(e)), func(n *groupState) {
				x.lose(n, e)
				x.restart(n, e)
			})
		}
	}
	if x.Ops {
		x.opMoves(st, try)
	}
	for a := range x.n {
		for b := range a {
			if !x.linked(a, b) {
				continue
			}
			if x.fault(st, groupBreak) {
				try(false, say("the link of %s and %s breaks", x.name(b), x.name(a)), func(n *groupState) {
					n.faults++
					x.breakLink(n, a, b, false)
				})
			}
			if x.fault(st, groupSilent) {
				for _, s := range [][2]int{{a, b}, {b, a}} {
					try(false, say("%s takes %s for dead", x.name(s[0]), x.name(s[1])), func(n *groupState) {
						x.lose(n, a, b)
						x.breakLink(n, s[0], s[1], true)
					})
				}
			}
		}
	}
}

func say(format string, args ...any) func() string {
	return func() string { return fmt.Sprintf(format, args...) }
}

func (x *groups) fault(st *groupState, kind rune) bool {
	return int(st.faults) < x.Faults && strings.ContainsRune(x.Kinds, kind)
}

// suffer counts a fault of some engines. One that had not opened the last attempt yet leaves that able to succeed.
func (x *groups) suffer(n *groupState, engines ...int) {
	n.faults++
	for _, e := range engines {
		n.hurt = n.hurt || x.last(n, e)
	}
}

// lose counts the loss of engines. A destination ends with a sibling that is lost, whenever it hears of that.
func (x *groups) lose(n *groupState, engines ...int) {
	x.suffer(n, engines...)
	for _, e := range engines {
		n.hurt = n.hurt || !x.source(e) && x.Destinations > 1
	}
}

func (x *groups) deliveries(st *groupState, try func(bool, func() string, func(*groupState))) {
	for a := range x.n {
		for b := range x.n {
			list := x.queues[st.queue[a][b]]
			for i, f := range list {
				if i > 0 && (!x.Overtake || x.hello[list[0]] != 0) {
					break
				}
				if i > 0 && !x.urgent[f] {
					continue
				}
				try(true, func() string { return fmt.Sprintf("%s gets %s of %s", x.name(b), x.text(f), x.name(a)) }, func(n *groupState) {
					n.queue[a][b] = x.queueOf(slices.Delete(slices.Clone(list), i, i+1))
					switch said := x.said[f]; {
					case said != 0:
						x.hear(n, b, a, said)
					case x.hello[f] != 0:
						x.apply(n, b, event{kind: evHello, peer: uint8(a), f: f})
					default:
						x.apply(n, b, event{kind: evFrame, peer: uint8(a), f: f})
					}
				})
			}
		}
	}
}

func (x *groups) open(n *groupState, e int, att uint8) {
	a := &n.at[e]
	a.opens++
	a.moved = false
	a.att[slotOf(a.inc, a.opens)] = att
	x.apply(n, e, event{kind: evOpen, k: a.opens, a: att})
}

func (x *groups) workerMoves(st *groupState, e int, try func(bool, func() string, func(*groupState))) {
	a := &st.at[e]
	slot, r := x.newest(st, e)
	live := r.state.Live()
	if !live && a.opens < maxOpens && a.known>>e&1 != 0 {
		from := uint8(1)
		switch {
		case a.opens > 0:
			from = a.att[slot] + 1
		case a.inc > 0: // what it had opened before it died, or the next
			from = max(1, a.att[0], a.att[1])
		}
		for att := from; int(att) <= x.Attempts; att++ {
			try(true, say("%s opens attempt %d", x.name(e), att), func(n *groupState) { x.open(n, e, att) })
		}
	}
	if live && !a.moved {
		kind, word := evSend, "sends"
		if !x.source(e) {
			kind, word = evRegister, "registers"
		}
		try(true, say("%s %s", x.name(e), word), func(n *groupState) {
			n.at[e].moved = true
			x.apply(n, e, event{kind: kind, k: a.opens})
		})
	}
	for seq := uint8(1); seq <= a.opens; seq++ {
		at := slotOf(a.inc, seq)
		q := x.record(st, e, at)
		earlier := int(a.att[at]) < x.Attempts
		switch {
		case q.state.Live() && (!x.NoClocks || earlier):
			try(x.NoClocks, say("a clock of %s runs out", x.name(e)), func(n *groupState) { x.apply(n, e, event{kind: evClock, k: seq}) })
		case q.state == statemachine.Ended && !q.reusable && !q.quarant:
			try(true, say("a clock of %s runs out", x.name(e)), func(n *groupState) { x.apply(n, e, event{kind: evClock, k: seq}) })
		case q.state == statemachine.Ended && q.reusable && x.fault(st, groupEvict):
			try(false, say("%s forgets attempt %d", x.name(e), a.att[at]), func(n *groupState) {
				n.faults++
				n.hurt = n.hurt || !earlier
				x.apply(n, e, event{kind: evClock, k: seq})
			})
		}
	}
	if live && x.fault(st, groupAbort) {
		past := r.state == statemachine.Committed || r.state == statemachine.Voted
		earlier := int(a.att[slot]) < x.Attempts
		if earlier || x.Attempts == 1 && (past || x.NoClocks) {
			try(false, say("the worker of %s aborts", x.name(e)), func(n *groupState) {
				n.faults++
				n.hurt = n.hurt || !earlier
				x.apply(n, e, event{kind: evAbort, k: a.opens})
			})
		}
	}
	if live && x.fault(st, groupWorker) {
		try(false, say("the worker of %s dies", x.name(e)), func(n *groupState) {
			x.suffer(n, e)
			x.apply(n, e, event{kind: evWorkerDies})
		})
	}
	node := &x.engines[e].nodes[st.node[e]]
	for p := range x.n {
		for k, id := range node.cut[p] {
			if id == 0 {
				continue
			}
			for quiet := range uint8(2) {
				if quiet == 0 && !strings.ContainsRune(x.Kinds, groupUnquiet) {
					continue
				}
				try(true, say("%s fences %s: %v", x.name(e), x.name(p), quiet == 1), func(n *groupState) {
					d := slotOf(a.inc, uint8(k)+1)
					for s := 0; x.source(p) && s < maxSlots; s++ {
						// The writers of the pair; a writer of another incarnation is another pair's.
						if o := &n.ops[p][e-x.Sources][s]; quiet == 1 && o.d == d && x.slot(p, node.rec[k].pairs[p]) == uint8(s) {
							o.cut = true
						}
					}
					x.apply(n, e, event{kind: evFenceAnswer, peer: uint8(p), k: uint8(k) + 1, a: quiet})
				})
			}
		}
	}
}

func (x *groups) pluginMoves(st *groupState, e int, try func(bool, func() string, func(*groupState))) {
	a := st.at[e]
	if a.epoch == 0 && !a.down && x.fault(st, groupPlugin) {
		try(false, say("the plugin of %s dies", x.name(e)), func(n *groupState) {
			x.suffer(n, e)
			n.at[e].down, n.at[e].unproven = true, true
			x.eachOp(n, e, a.inc, func(o *groupOp) {
				if o.state == opOpen || o.state == opLinger {
					o.state = opDead
				}
			})
			x.apply(n, e, event{kind: evPluginLost, a: 1})
		})
	}
	if a.down {
		try(true, say("the plugin of %s starts", x.name(e)), func(n *groupState) {
			n.at[e].down, n.at[e].epoch = false, 1
			x.apply(n, e, event{kind: evPluginUp, a: 2})
		})
	}
	if a.unproven {
		try(true, say("the plugin of %s is proven gone", x.name(e)), func(n *groupState) {
			n.at[e].unproven = false
			x.eachOp(n, e, a.inc, func(o *groupOp) {
				if o.state == opDead && o.epoch == 0 {
					o.state = opUnread
				}
			})
			for seq := uint8(1); seq <= a.opens && !x.source(e); seq++ {
				if slot := slotOf(a.inc, seq); x.record(st, e, slot).epoch == 1 {
					n.at[e].sealed |= 1 << slot
				}
			}
			x.apply(n, e, event{kind: evPluginGone, a: 1})
		})
	}
}

// eachOp calls fn for every op of an incarnation of a source engine.
func (x *groups) eachOp(n *groupState, e int, inc uint8, fn func(*groupOp)) {
	for j := 0; x.source(e) && j < x.Destinations; j++ {
		for seq := uint8(1); seq <= maxOpens; seq++ {
			fn(&n.ops[e][j][slotOf(inc, seq)])
		}
	}
}

// memberMoves: the workers of an engine come or leave, and those without a link to it hear of that.
func (x *groups) memberMoves(st *groupState, e int, try func(bool, func() string, func(*groupState))) {
	if st.at[e].known>>e&1 == 0 {
		try(x.NoClocks, say("the workers of %s come", x.name(e)), func(n *groupState) { x.announce(n, e, ranksHere) })
	} else if x.fault(st, groupLeave) {
		try(false, say("the workers of %s die for good", x.name(e)), func(n *groupState) {
			x.suffer(n, e)
			x.apply(n, e, event{kind: evWorkerDies})
			x.announce(n, e, ranksGone)
		})
	}
	for o := range x.n {
		if here := st.at[o].known >> o & 1; o != e && !x.linked(e, o) && st.at[e].known>>o&1 != here {
			said := ranksGone - ranksWord(here)
			try(x.NoClocks, say("%s gets %s of %s", x.name(e), x.text(x.ranksOf(o, said)), x.name(o)), func(n *groupState) { x.hear(n, e, o, said) })
		}
	}
}

// announce says on every link of an engine whether it hosts ranks.
func (x *groups) announce(n *groupState, e int, said ranksWord) {
	n.at[e].known ^= 1 << e
	for o := range x.n {
		if x.linked(e, o) {
			x.push(&n.queue[e][o], x.ranksOf(e, said))
		}
	}
}

// hear lets an engine know whether another hosts ranks.
func (x *groups) hear(n *groupState, e, of int, said ranksWord) {
	n.at[e].known &^= 1 << of
	if said == ranksHere {
		n.at[e].known |= 1 << of
	}
	x.apply(n, e, event{kind: evGroup, peer: uint8(of), a: uint8(said)})
}

func (x *groups) opMoves(st *groupState, try func(bool, func() string, func(*groupState))) {
	for i := range x.Sources {
		for j := range x.Destinations {
			d := x.Sources + j
			for seq := uint8(1); seq <= st.at[i].opens; seq++ {
				slot := slotOf(st.at[i].inc, seq)
				op := st.ops[i][j][slot]
				end := func(must bool, word string, a uint8, set func(n *groupState, o *groupOp)) {
					try(must, say("the op of %s to %s %s", x.name(i), x.name(d), word), func(n *groupState) {
						set(n, &n.ops[i][j][slot])
						x.apply(n, i, event{kind: evOpEnd, peer: uint8(d), k: seq, a: a})
					})
				}
				switch op.state {
				case opOpen:
					refused := op.cut || op.d/maxOpens != st.at[d].inc || st.at[d].sealed>>op.d&1 != 0
					if !refused {
						end(true, "is Done", endDone, func(_ *groupState, o *groupOp) { o.state, o.done = opQuiet, true })
						if x.fault(st, groupUnquiet) {
							end(false, "is Done, quiet=no", endDoneUnquiet, func(n *groupState, o *groupOp) {
								n.faults++
								o.state, o.done = opLinger, true
							})
						}
					}
					if refused || x.record(st, i, slot).state == statemachine.Ended {
						end(true, "is aborted", endSkipped, func(_ *groupState, o *groupOp) { o.state = opSkipped })
					}
				case opLinger:
					try(true, say("the op of %s to %s is quiet", x.name(i), x.name(d)), func(n *groupState) {
						n.ops[i][j][slot].state = opQuiet
						x.apply(n, i, event{kind: evOpQuiesced, peer: uint8(d), k: seq})
					})
				}
			}
		}
	}
}

// breakLink loses what is under way; both ends say Hello again. Before that a may take b for dead.
func (x *groups) breakLink(n *groupState, a, b int, dead bool) {
	for _, e := range [][2]int{{a, b}, {b, a}} {
		x.apply(n, e[0], event{kind: evLinkDown, peer: uint8(e[1])})
	}
	if dead {
		x.apply(n, a, event{kind: evPeerDead, peer: uint8(b)})
	}
	for _, e := range [][2]int{{a, b}, {b, a}} {
		from, to := e[0], e[1]
		say := []uint32{x.helloOf(from, n.at[from].inc)}
		switch here, known := n.at[from].known>>from&1 != 0, n.at[to].known>>from&1 != 0; {
		case here && !known:
			say = append(say, x.ranksOf(from, ranksHere))
		case known && !here:
			say = append(say, x.ranksOf(from, ranksGone))
		}
		n.queue[from][to] = x.queueOf(say)
	}
}

// restart kills an engine and starts its next incarnation.
func (x *groups) restart(n *groupState, e int) {
	x.eachOp(n, e, 0, func(o *groupOp) {
		if o.state == opOpen || o.state == opLinger {
			o.state = opDead // its orphan plugin goes on writing
		}
	})
	old := n.at[e]
	n.at[e] = groupAt{inc: 1, known: x.known(e), sealed: old.sealed, att: old.att, end: old.end}
	id, err := x.start(e, 1)
	if err != nil {
		x.bad = err.Error()
		return
	}
	n.node[e] = id
	for o := range x.n {
		if x.linked(e, o) {
			x.breakLink(n, e, o, false)
		}
	}
}
