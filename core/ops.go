package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// ready hands a room that has held chunks for the engine of a pair to the scheduler.
func (m *Machine) ready(pi int32) {
	p := m.pairs.at(pi)
	if r := m.rooms.at(p.room); p.held > 0 && p.havePages && agreed(r) {
		m.policy.Add(pi, p.peer, p.held, r.priority, m.now)
	}
}

func (m *Machine) readyAll(idx int32, r *room) {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		m.ready(i)
	}
}

// windows adapts the peers' windows to the policy.
type windows struct{ m *Machine }

// Open implements Windows.
func (w windows) Open(id PeerID) bool {
	p := w.m.peer(id)
	return p.ops < w.m.cfg.Limits.PeerOps && (p.bytes < w.m.cfg.Limits.PeerBytes || p.ops == 0)
}

// schedule submits ops as far as the windows allow.
func (m *Machine) schedule() {
	for m.policy.Len() > 0 {
		pi, ok := m.policy.Next(m.now, windows{m})
		if !ok {
			return
		}
		if p := m.pairs.at(pi); !m.submit(pi, p) {
			m.policy.Remove(pi)
			p.parked = p.held > 0 && agreed(m.rooms.at(p.room))
		}
	}
}

// unpark gives rooms that waited for a plugin back to the scheduler.
func (m *Machine) unpark() {
	m.eachRoom(func(idx int32) {
		for i := m.rooms.at(idx).pairs; i != nil32; i = m.pairs.at(i).next {
			if p := m.pairs.at(i); p.parked {
				p.parked = false
				m.ready(i)
			}
		}
	})
}

// submit cuts one op from the chunks that a room holds for the engine of a pair. It returns false when it
// cannot submit now: the room ended, has nothing, or its backend is not up.
func (m *Machine) submit(pi int32, p *pair) bool {
	idx := p.room
	r := m.rooms.at(idx)
	pl := m.backend(p.backend)
	if pl == nil || !pl.up {
		if pl != nil && pl.down {
			m.end(idx, statemachine.BackendDown, "backend "+m.name(p.backend)+" is down on this engine")
		}
		return false
	}
	var ln *lane
	k := r.ranks
	for ; k != nil32; k = m.ranks.at(k).next {
		if ln = m.laneOf(m.ranks.at(k), pi); ln != nil && ln.at != nil32 {
			break
		}
	}
	if k == nil32 || !agreed(r) {
		return false
	}
	kk := m.ranks.at(k)
	c := m.chunks.at(ln.at)
	lm := layout.Map{}
	if !c.state {
		lm = m.mapOf(r)
	}
	pt, st, why, detail := m.target(r, p, kk, ln, c, lm)
	if why != statemachine.None {
		m.end(idx, why, detail)
		return false
	}
	limit := m.cfg.Limits.OpBytes
	if pl.maxOp > 0 {
		limit = min(limit, pl.maxOp)
	}
	perPage := lm.Bytes(kk.rank, ln.to, c.pageBytes, c.layerFrom, c.layerTo)
	n := int32(max(1, min(int64(st.Count-ln.off), limit/max(perPage, 1))))
	src, dst := st.Src+ln.off*st.SrcStep, pt.prefix+st.Dst+ln.off*st.DstStep
	start := len(m.out.runs)
	var took, took2 int32
	m.out.runs, took = m.cut(m.out.runs, c.runs, src, st.SrcStep, n, m.cfg.Limits.OpRuns)
	mid := len(m.out.runs)
	m.out.runs, took2 = m.cut(m.out.runs, pt.runs, dst, st.DstStep, took, m.cfg.Limits.OpRuns)
	if took2 < took { // the destination's list is more fragmented: cut the source's shorter
		took = took2
		m.out.runs = m.out.runs[:start]
		m.out.runs, _ = m.cut(m.out.runs, c.runs, src, st.SrcStep, took, m.cfg.Limits.OpRuns)
		mid = len(m.out.runs)
		m.out.runs, _ = m.cut(m.out.runs, pt.runs, dst, st.DstStep, took, m.cfg.Limits.OpRuns)
	}
	bytes := int64(took) * perPage
	m.gens++
	oi := m.ops.add(op{room: idx, rank: k, pair: pi, next: r.ops, gen: m.gens, backend: p.backend, epoch: pl.epoch, state: opOpen, bytes: bytes, peer: p.peer})
	r.ops = oi
	id := opID(oi, m.gens)
	r.held -= bytes
	p.held -= bytes
	p.outstanding, r.outstanding = true, true
	p.sm.Ops.Open++
	kk.ops.Open++
	to := m.peer(p.peer)
	to.ops++
	to.bytes += bytes
	m.stats.Ops++
	m.policy.Charge(p.peer, bytes)
	rec := m.record(r, RecOp)
	rec.Op, rec.Bytes = id, bytes
	m.stepAt(idx, m.placeOf(r, pi), statemachine.Event{Kind: statemachine.OnSubmit})

	e := m.plugin(PluginSubmit, p.backend, pl.epoch)
	e.Op, e.S, e.D, e.Room, e.Peer, e.PeerInc, e.PeerEpoch = id, r.sm.Own, p.sm.Other, r.id, p.peer, p.sm.Other.Inc, p.epoch
	e.SrcRank, e.DstRank, e.Map, e.Phase = kk.rank, ln.to, lm, ln.phase
	e.SrcPool, e.DstPool, e.Source, e.Destination = c.pool, pt.pool, m.out.runs[start:mid:mid], tail(m.out.runs, mid)
	e.LayerFrom, e.LayerTo, e.Priority, e.Bytes = c.layerFrom, c.layerTo, r.priority, bytes
	for _, slot := range []int{slotTransfer, slotDeadline} {
		if left := r.timers[slot].due - m.now; r.class[slot] != noClock && (e.DeadlineIn == 0 || left < e.DeadlineIn) {
			e.DeadlineIn = max(left, 1)
		}
	}
	ln.off += took
	if ln.off == st.Count && m.chunkDone(r, p, kk, ln, c, lm) {
		m.pass(kk, ln)
		m.skip(r, p, kk, ln)
	}
	if p.held > 0 {
		m.policy.Add(pi, p.peer, p.held, r.priority, m.now)
	} else {
		m.policy.Remove(pi)
	}
	m.tell(r, p)
	return true
}

// target is where a chunk goes next of what the engine of a pair hosts: the part of the destination rank
// ln.to, and what the phase ln.phase moves of it. It passes over ranks and phases that get nothing. Part nil:
// nothing is left to be sent. A reason says that the parts of both sides do not fit.
func (m *Machine) target(r *room, p *pair, k *rank, ln *lane, c *chunk, lm layout.Map) (pt *part, st layout.Steps, why statemachine.Reason, detail string) {
	end := k.rank + 1 // of the zero map
	if lm.IsZero() {
		ln.to = k.rank
	} else {
		_, end = lm.Ranks()
	}
	for phases := lm.Phases(); ln.to < end; ln.to, ln.phase, ln.off = ln.to+1, 0, 0 {
		if !m.hosts(p.set, ln.to) || lm.Bytes(k.rank, ln.to, c.pageBytes, c.layerFrom, c.layerTo) == 0 && !lm.IsZero() {
			continue
		}
		pi := m.part(r, ln.to, c.ordinal)
		if pi == nil32 || !lm.Holds(int64(c.from)+int64(c.pages), int64(m.parts.at(pi).pages-m.parts.at(pi).prefix)) {
			return nil, st, statemachine.LengthMismatch, "the source sends more pages than the destination registered"
		}
		if pt = m.parts.at(pi); pt.state != c.state {
			return nil, st, statemachine.LayoutMismatch, fmt.Sprintf("pool %d is of kind state on one side only", c.ordinal)
		}
		for ; ln.phase < phases; ln.phase, ln.off = ln.phase+1, 0 {
			if st = lm.Steps(ln.phase, c.from, c.pages, pt.pages-pt.prefix); ln.off < st.Count {
				return pt, st, statemachine.None, ""
			}
		}
		if lm.IsZero() {
			break
		}
	}
	return nil, st, statemachine.None, ""
}

// chunkDone reports whether all of a chunk for the engine of a pair is submitted whose present phase is.
func (m *Machine) chunkDone(r *room, p *pair, k *rank, ln *lane, c *chunk, lm layout.Map) bool {
	if lm.IsZero() {
		return true
	}
	pt, _, why, _ := m.target(r, p, k, ln, c, lm)
	return pt == nil && why == statemachine.None
}

// carried is the bytes that a chunk takes to the destination ranks of a pair in all phases; before the
// destination's layout is known, what the chunk has.
func (m *Machine) carried(r *room, p *pair, k *rank, c *chunk) int64 {
	lm := m.mapOf(r)
	if c.state || lm.IsZero() {
		if !m.hosts(p.set, k.rank) {
			return 0
		}
		return int64(c.pages) * c.pageBytes
	}
	_, per := lm.Scale()
	_, ranks := lm.Ranks()
	var sum int64
	for q := range ranks {
		b := lm.Bytes(k.rank, q, c.pageBytes, c.layerFrom, c.layerTo)
		if b == 0 || !m.hosts(p.set, q) {
			continue
		}
		n := int64(c.pages)
		if pi := m.part(r, q, c.ordinal); pi != nil32 && per > 1 {
			pt := m.parts.at(pi)
			left := int64(pt.pages-pt.prefix) - int64(c.from)*int64(per)
			n = max(1, min(n*int64(per), left)) // what does not fit ends the room when it is submitted
		}
		sum += n * b
	}
	return sum
}

// nothing reports whether a chunk has nothing for the engine of a pair.
func (m *Machine) nothing(r *room, p *pair, k *rank, c *chunk) bool {
	if r.layout == nil32 || c.state {
		return !m.hosts(p.set, k.rank)
	}
	return m.carried(r, p, k, c) == 0
}

// recount is for a source that has just learned of a destination or of its layout, and has submitted
// nothing to it: what it holds for that engine is counted anew.
func (m *Machine) recount(r *room, pi int32) {
	p := m.pairs.at(pi)
	var held int64
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		ln := m.laneOf(k, pi)
		m.skip(r, p, k, ln)
		for c := ln.at; c != nil32; c = m.chunks.at(c).next {
			held += m.carried(r, p, k, m.chunks.at(c))
		}
	}
	r.held += held - p.held
	r.total += held - p.held
	p.held = held
}

// keepChunk puts a chunk behind those that its rank holds. It returns the bytes that it takes to all engines.
func (m *Machine) keepChunk(r *room, k *rank, ch int32) (sum int64) {
	if k.head == nil32 {
		k.head = ch
	} else {
		m.chunks.at(k.tail).next = ch
	}
	k.tail = ch
	c := m.chunks.at(ch)
	for l := k.lanes; l != nil32; l = m.lanes.at(l).next {
		ln := m.lanes.at(l)
		p := m.pairs.at(ln.pair)
		bytes := m.carried(r, p, k, c)
		p.held += bytes
		sum += bytes
		if c.lanes++; ln.at == nil32 {
			ln.at = ch
		}
	}
	for l := k.lanes; l != nil32; l = m.lanes.at(l).next {
		ln := m.lanes.at(l)
		m.skip(r, m.pairs.at(ln.pair), k, ln)
	}
	r.held += sum
	return sum
}

// skip passes over chunks at the front of a lane that have nothing for its engine. While engines of the other group
// may be missing nothing is passed: a chunk that all known engines have passed is forgotten.
func (m *Machine) skip(r *room, p *pair, k *rank, ln *lane) {
	for (r.whole || m.bound(r)) && ln.at != nil32 && m.nothing(r, p, k, m.chunks.at(ln.at)) {
		m.pass(k, ln)
	}
}

func (m *Machine) freeChunk(c int32) {
	m.freeRuns(m.chunks.at(c).runs)
	m.chunks.del(c)
}

func opID(o int32, gen uint32) OpID { return OpID(uint64(gen)<<32 | uint64(uint32(o))) }

// progressEvery paces Progress while bytes grow: well below any stall clock that the judge may have.
const progressEvery = 100 * time.Millisecond

// tell sends Progress when what the judge must know changed: ops outstanding or not, or bytes grew and
// progressEvery has passed.
func (m *Machine) tell(r *room, p *pair) {
	if r.sm.Role != statemachine.Source || !agreed(r) {
		return
	}
	if p.outstanding == p.told && m.now-p.toldAt < int64(progressEvery) {
		return
	}
	p.told, p.toldAt = p.outstanding, m.now
	if p.peer == nilPeer {
		return
	}
	if f := m.frameTo(p.peer, FrameProgress); f != nil {
		f.Room, f.S, f.D, f.Bytes, f.Outstanding = r.id, r.sm.Own, p.sm.Other, p.moved+p.flight, p.outstanding
	}
}

// cancel drops the held chunks of an ended source and aborts what a plugin has of it.
func (m *Machine) cancel(r *room) {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		m.policy.Remove(i)
		p := m.pairs.at(i)
		p.held, p.parked = 0, false
	}
	r.held = 0
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		for c := k.head; c != nil32; {
			n := m.chunks.at(c).next
			m.freeChunk(c)
			c = n
		}
		k.head, k.tail = nil32, nil32
		for l := k.lanes; l != nil32; l = m.lanes.at(l).next {
			m.lanes.at(l).at = nil32
		}
	}
	for o := r.ops; o != nil32; o = m.ops.at(o).next {
		if oo := m.ops.at(o); oo.state == opOpen {
			p := m.plugin(PluginAbort, oo.backend, oo.epoch)
			p.Room, p.Op = r.id, opID(o, oo.gen)
		}
	}
}

// opOf resolves an op id; nil32 when the op is known to be quiet, or never was.
func (m *Machine) opOf(id OpID) int32 {
	o := int32(uint32(id))
	if o < 0 || int(o) >= m.ops.len() || m.ops.at(o).gen != uint32(id>>32) || m.ops.at(o).state == 0 {
		return nil32
	}
	return o
}

func (m *Machine) opProgress(e *Event) {
	o := m.opOf(e.Op)
	if o == nil32 || m.ops.at(o).state != opOpen {
		m.stats.Dropped++
		return
	}
	oo := m.ops.at(o)
	m.heard(oo.peer) // bytes that move prove the peer's life
	grown := min(e.Bytes, oo.bytes) - oo.progress
	if grown <= 0 {
		return // not progress (R9)
	}
	oo.progress += grown
	m.peer(oo.peer).moved = m.now
	idx := oo.room
	r, p := m.rooms.at(idx), m.pairs.at(oo.pair)
	r.count(p, 0, grown)
	if r.sm.State == statemachine.Confirmed {
		m.arm(idx, r, slotPhase, clkStallSrc)
	}
	m.tell(r, p)
}

func (m *Machine) opEnd(e *Event) {
	o := m.opOf(e.Op)
	if o == nil32 || m.ops.at(o).state != opOpen {
		m.stats.Dropped++
		return
	}
	oo := m.ops.at(o)
	idx := oo.room
	r, k := m.rooms.at(idx), m.ranks.at(oo.rank)
	m.leaveWindow(oo)
	p, at := m.pairs.at(oo.pair), m.placeOf(r, oo.pair)
	p.sm.Ops.Open--
	k.ops.Open--
	r.count(p, 0, -oo.progress)
	if e.Quiet {
		m.freeOp(o)
	} else {
		oo.state = opLinger
		p.sm.Ops.Linger++
		k.ops.Linger++
	}
	m.setOutstanding(r, p, p.sm.Ops.Open > 0)
	rec := m.record(r, RecOpEnd)
	rec.Op, rec.End, rec.Bytes, rec.Detail = e.Op, e.End, e.Bytes, e.Detail
	m.stats.OpEnds[e.End&7]++
	if e.End == EndDone {
		r.count(p, max(e.Bytes, 0), 0)
		m.stats.Bytes += max(e.Bytes, 0)
		m.heard(p.peer)
		m.peer(p.peer).moved = m.now
		if r.sm.State == statemachine.Confirmed {
			m.disarm(r, slotPhase) // progress: whichever clock follows starts anew
		}
		m.step(idx, statemachine.Event{Kind: statemachine.OnOps})
		m.maybeComplete(idx, r)
		m.tell(r, p)
		return
	}
	why := e.Reason
	switch {
	case e.End == EndSkipped:
		why = statemachine.Skipped
	case e.End == EndAborted && why == statemachine.None:
		why = statemachine.Aborted
	case why == statemachine.None:
		why = statemachine.TransferFailed
	}
	if agreed(r) {
		m.explain(idx, e.Detail)
	}
	m.stepAt(idx, at, statemachine.Event{Kind: statemachine.OnOpFailed, Reason: why})
}

func (m *Machine) leaveWindow(o *op) {
	p := m.peer(o.peer)
	p.ops--
	p.bytes -= o.bytes
}

// freeOp unlinks an op that is quiet.
func (m *Machine) freeOp(o int32) {
	r := m.rooms.at(m.ops.at(o).room)
	if oo := m.ops.at(o); oo.state != opDead {
		m.unuse(oo.backend, oo.epoch)
	}
	if r.ops == o {
		r.ops = m.ops.at(o).next
	} else {
		i := r.ops
		for m.ops.at(i).next != o {
			i = m.ops.at(i).next
		}
		m.ops.at(i).next = m.ops.at(o).next
	}
	m.ops.del(o)
}

func (m *Machine) opQuiesced(e *Event) {
	o := m.opOf(e.Op)
	if o == nil32 || m.ops.at(o).state != opLinger {
		m.stats.Dropped++
		return
	}
	idx := m.ops.at(o).room
	m.pairs.at(m.ops.at(o).pair).sm.Ops.Linger--
	m.ranks.at(m.ops.at(o).rank).ops.Linger--
	m.freeOp(o)
	m.step(idx, statemachine.Event{Kind: statemachine.OnOps})
}

// maybeComplete raises OnComplete when every rank sent its last and every op is Done.
func (m *Machine) maybeComplete(idx int32, r *room) {
	if r.sm.State != statemachine.Confirmed || r.paged != r.local || r.held > 0 || m.opsOf(r).Open > 0 {
		return
	}
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		if m.ranks.at(i).head != nil32 {
			return
		}
	}
	m.step(idx, statemachine.Event{Kind: statemachine.OnComplete})
}

// backend is the plugin of a backend of this engine; nil when none has come up yet. There are few.
func (m *Machine) backend(id int32) *plugin {
	for i := range m.plugins {
		if m.plugins[i].backend == id {
			return &m.plugins[i]
		}
	}
	return nil
}

func (m *Machine) addBackend(id int32) *plugin {
	if pl := m.backend(id); pl != nil {
		return pl
	}
	m.plugins = append(m.plugins, plugin{backend: id})
	return &m.plugins[len(m.plugins)-1]
}

// pluginUp: a new epoch serves. Rooms that waited for one go on. An older one that is up retires.
func (m *Machine) pluginUp(e *Event) {
	b := m.intern(e.Backend)
	old := m.addBackend(b)
	if e.Epoch < old.epoch {
		m.stats.Dropped++
		return
	}
	if old.up && e.Epoch > old.epoch {
		m.supersede(old)
	}
	*old = plugin{backend: b, epoch: e.Epoch, up: true, receiverChecked: e.ReceiverChecked, maxOp: e.MaxOpBytes}
	m.unpark()
	m.eachRoom(func(idx int32) {
		if r := m.rooms.at(idx); r.sm.State == statemachine.Registered && r.backend == nil32 {
			m.resyncAll(idx, r)
		}
	})
}

// pluginLost: the epoch ended. Ops of it without an end are lost, their rooms end; destinations that
// are registered with it or bound to it end (R6).
func (m *Machine) pluginLost(e *Event) {
	b := m.intern(e.Backend)
	if !m.epochLost(b, e.Epoch) {
		m.stats.Dropped++
		return
	}
	m.stats.PluginsLost++
	for o := range int32(m.ops.len()) {
		oo := m.ops.at(o)
		if oo.state == 0 || oo.state == opDead || oo.backend != b || oo.epoch != e.Epoch {
			continue
		}
		idx := oo.room
		r, k, p := m.rooms.at(idx), m.ranks.at(oo.rank), m.pairs.at(oo.pair)
		why := statemachine.None
		if oo.state == opOpen {
			m.leaveWindow(oo)
			p.sm.Ops.Open--
			k.ops.Open--
			r.count(p, 0, -oo.progress)
			m.setOutstanding(r, p, p.sm.Ops.Open > 0)
			why = statemachine.PluginLost
		} else {
			p.sm.Ops.Linger--
			k.ops.Linger--
		}
		oo.state = opDead
		p.sm.Ops.Dead++
		k.ops.Dead++
		if agreed(r) && why != statemachine.None {
			m.explain(idx, e.Detail)
		}
		m.stepAt(idx, m.placeOf(r, oo.pair), statemachine.Event{Kind: statemachine.OnPluginLost, Reason: why})
	}
	m.eachRoom(func(idx int32) {
		r := m.rooms.at(idx)
		if r.sm.Role == statemachine.Destination && r.backend == b && r.epoch == e.Epoch {
			r.grant = noGrant
			m.explain(idx, e.Detail)
			m.step(idx, statemachine.Event{Kind: statemachine.OnPluginLost, Reason: statemachine.PluginLost})
		}
	})
	m.eachRecord(func(_ int32, r *room) {
		if r.sm.Rung != statemachine.NoRung && r.backend == b && r.epoch == e.Epoch {
			m.stats.Rungs[RungRetire].Entered++
			m.record(r, RecRung).Rung = RungRetire
		}
	})
}

// pluginFenced: that epoch is provably gone. Its ops are quiet here, its registered pages are fenced.
func (m *Machine) pluginFenced(e *Event) {
	b := m.intern(e.Backend)
	for o := range int32(m.ops.len()) {
		oo := m.ops.at(o)
		if oo.state != opDead || oo.backend != b || oo.epoch != e.Epoch {
			continue
		}
		idx := oo.room
		p, k := m.pairs.at(oo.pair), m.ranks.at(oo.rank)
		p.sm.Ops.Dead--
		k.ops.Dead--
		p.sm.Ops.Lost++
		k.ops.Lost++
		m.freeOp(o)
		m.step(idx, statemachine.Event{Kind: statemachine.OnOps})
	}
	m.eachRecord(func(idx int32, r *room) {
		if r.sm.Role == statemachine.Destination && r.backend == b && r.epoch == e.Epoch {
			m.step(idx, statemachine.Event{Kind: statemachine.OnPluginFenced})
		}
	})
	m.weigh = true
	m.lost = slices.DeleteFunc(m.lost, func(l lostEpoch) bool { return l.backend == b && l.epoch == e.Epoch })
}

// pluginDown: the backend will not come back by itself. Rooms that wait for it end.
func (m *Machine) pluginDown(e *Event) {
	b := m.intern(e.Backend)
	pl := m.addBackend(b)
	pl.up, pl.down = false, true
	m.unpark()
	m.eachRoom(m.endIfDown)
}

// granted: the plugin accepts, or cannot accept, writes of a destination opener.
func (m *Machine) granted(e *Event) {
	idx := m.roomOf(e.Grant)
	if idx == nil32 {
		m.stats.Dropped++
		return
	}
	r := m.rooms.at(idx)
	if r.grant != grantAsked {
		m.stats.Dropped++
		return
	}
	if e.Kind == GrantFailed {
		r.grant = noGrant
		m.end(idx, statemachine.TransferFailed, "the plugin cannot open the pages for writing: "+e.Detail)
		return
	}
	r.grant = granted
	m.eachPair(r, func(at int, p *pair) {
		if p.confirmOwed && r.sm.Column(&p.sm) == statemachine.Bound {
			p.confirmOwed = false
			m.sendFrame(idx, r, &statemachine.Send{Kind: FrameConfirm, At: at, S: p.sm.Other, D: r.sm.Own})
		}
	})
}

// revoked: the plugin refuses a destination opener for good, or does not know.
func (m *Machine) revoked(e *Event) {
	idx := m.roomOf(e.Grant)
	if idx == nil32 {
		m.stats.Dropped++
		return
	}
	r := m.rooms.at(idx)
	r.grant = noGrant
	if r.sm.Rung != statemachine.NoRung && e.Quiet {
		m.leftRung(RungReceiver, r.since)
	}
	m.step(idx, statemachine.Event{Kind: statemachine.OnRevoked, Quiet: e.Quiet})
}

// fenced is the answer to FencePeer about the source of one pair.
func (m *Machine) fenced(e *Event) {
	pi := m.fenceOf(e.Grant)
	if pi == nil32 {
		m.stats.Dropped++
		return
	}
	p := m.pairs.at(pi)
	if e.Quiet {
		m.shut(m.rooms.at(p.room), p)
	}
	m.stepAt(p.room, m.placeOf(m.rooms.at(p.room), pi), statemachine.Event{Kind: statemachine.OnFenced, Quiet: e.Quiet})
}
