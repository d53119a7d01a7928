package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// ready hands a confirmed room with held chunks to the scheduler.
func (m *Machine) ready(idx int32, r *room) {
	if r.sm.State == statemachine.Confirmed && r.havePages && r.held > 0 {
		m.policy.Add(idx, r.peer, r.held, r.priority, m.now)
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
		idx, ok := m.policy.Next(m.now, windows{m})
		if !ok {
			return
		}
		if r := m.rooms.at(idx); !m.submit(idx, r) {
			m.policy.Remove(idx)
			r.parked = r.sm.State == statemachine.Confirmed && r.held > 0
		}
	}
}

// unpark gives rooms that waited for a plugin back to the scheduler.
func (m *Machine) unpark() {
	m.eachRoom(func(idx int32) {
		if r := m.rooms.at(idx); r.parked {
			r.parked = false
			m.ready(idx, r)
		}
	})
}

// submit cuts one op from the room's held chunks. It returns false when the room cannot submit now: it
// ended, has nothing, or its backend is not up.
func (m *Machine) submit(idx int32, r *room) bool {
	pl := m.backend(r.backend)
	if pl == nil || !pl.up {
		if pl != nil && pl.down {
			m.end(idx, statemachine.BackendDown, "backend "+m.name(r.backend)+" is down on this engine")
		}
		return false
	}
	k := r.ranks
	for k != nil32 && m.ranks.at(k).head == nil32 {
		k = m.ranks.at(k).next
	}
	if k == nil32 || r.sm.State != statemachine.Confirmed {
		return false
	}
	kk := m.ranks.at(k)
	ci := kk.head
	c := m.chunks.at(ci)
	lm := layout.Map{}
	if !c.state {
		lm = m.mapOf(r)
	}
	pt, st, why, detail := m.target(r, kk, c, lm)
	if why != statemachine.None {
		m.end(idx, why, detail)
		return false
	}
	limit := m.cfg.Limits.OpBytes
	if pl.maxOp > 0 {
		limit = min(limit, pl.maxOp)
	}
	perPage := lm.Bytes(kk.rank, c.to, c.pageBytes, c.layerFrom, c.layerTo)
	n := int32(max(1, min(int64(st.Count-c.off), limit/max(perPage, 1))))
	src, dst := st.Src+c.off*st.SrcStep, pt.prefix+st.Dst+c.off*st.DstStep
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
	oi := m.ops.add(op{room: idx, rank: k, next: r.ops, gen: m.gens, backend: r.backend, epoch: pl.epoch, state: opOpen, bytes: bytes, peer: r.peer})
	r.ops = oi
	id := opID(oi, m.gens)
	r.held -= bytes
	r.outstanding = true
	r.pair().Ops.Open++
	kk.ops.Open++
	p := m.peer(r.peer)
	p.ops++
	p.bytes += bytes
	m.stats.Ops++
	m.policy.Charge(r.peer, bytes)
	rec := m.record(r, RecOp)
	rec.Op, rec.Bytes = id, bytes
	m.step(idx, statemachine.Event{Kind: statemachine.OnSubmit})

	e := m.plugin(PluginSubmit, r.backend, pl.epoch)
	e.Op, e.S, e.D, e.Room, e.Peer, e.PeerInc, e.PeerEpoch = id, r.sm.Own, r.pair().Other, r.id, r.peer, r.pair().Other.Inc, r.epoch
	e.SrcRank, e.DstRank, e.Map, e.Phase = kk.rank, c.to, lm, c.phase
	e.SrcPool, e.DstPool, e.Source, e.Destination = c.pool, pt.pool, m.out.runs[start:mid:mid], tail(m.out.runs, mid)
	e.LayerFrom, e.LayerTo, e.Priority, e.Bytes = c.layerFrom, c.layerTo, r.priority, bytes
	for _, slot := range []int{slotTransfer, slotDeadline} {
		if left := r.timers[slot].due - m.now; r.class[slot] != noClock && (e.DeadlineIn == 0 || left < e.DeadlineIn) {
			e.DeadlineIn = max(left, 1)
		}
	}
	c.off += took
	if c.off == st.Count && m.chunkDone(r, kk, c, lm) {
		kk.head = c.next
		m.freeChunk(ci)
	}
	if r.held > 0 {
		m.policy.Add(idx, r.peer, r.held, r.priority, m.now)
	} else {
		m.policy.Remove(idx)
	}
	m.tell(r)
	return true
}

// target is where a chunk goes next: the part of the destination rank c.to, and what the phase c.phase moves
// of it. It passes over ranks and phases that get nothing. Part nil: nothing is left to be sent. A reason
// says that the parts of both sides do not fit.
func (m *Machine) target(r *room, k *rank, c *chunk, lm layout.Map) (pt *part, st layout.Steps, why statemachine.Reason, detail string) {
	end := k.rank + 1 // of the zero map
	if lm.IsZero() {
		c.to = k.rank
	} else {
		_, end = lm.Ranks()
	}
	for phases := lm.Phases(); c.to < end; c.to, c.phase, c.off = c.to+1, 0, 0 {
		if lm.Bytes(k.rank, c.to, c.pageBytes, c.layerFrom, c.layerTo) == 0 && !lm.IsZero() {
			continue
		}
		pi := m.part(r, c.to, c.ordinal)
		if pi == nil32 || !lm.Holds(int64(c.from)+int64(c.pages), int64(m.parts.at(pi).pages-m.parts.at(pi).prefix)) {
			return nil, st, statemachine.LengthMismatch, "the source sends more pages than the destination registered"
		}
		if pt = m.parts.at(pi); pt.state != c.state {
			return nil, st, statemachine.LayoutMismatch, fmt.Sprintf("pool %d is of kind state on one side only", c.ordinal)
		}
		for ; c.phase < phases; c.phase, c.off = c.phase+1, 0 {
			if st = lm.Steps(c.phase, c.from, c.pages, pt.pages-pt.prefix); c.off < st.Count {
				return pt, st, statemachine.None, ""
			}
		}
		if lm.IsZero() {
			break
		}
	}
	return nil, st, statemachine.None, ""
}

// chunkDone reports whether all of a chunk is submitted whose present phase is.
func (m *Machine) chunkDone(r *room, k *rank, c *chunk, lm layout.Map) bool {
	if lm.IsZero() {
		return true
	}
	pt, _, why, _ := m.target(r, k, c, lm)
	return pt == nil && why == statemachine.None
}

// carried is the bytes that a chunk takes to all destination ranks in all phases; before the destination's
// layout is known, what the chunk has.
func (m *Machine) carried(r *room, k *rank, c *chunk) int64 {
	if r.layout == nil32 || c.state {
		return int64(c.pages) * c.pageBytes
	}
	lm := m.mapOf(r)
	_, per := lm.Scale()
	_, ranks := lm.Ranks()
	var sum int64
	for q := range ranks {
		b := lm.Bytes(k.rank, q, c.pageBytes, c.layerFrom, c.layerTo)
		if b == 0 {
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

// recount is for a source that has just learned of its destination's pages: what it holds is counted
// anew, and chunks that other ranks send are dropped.
func (m *Machine) recount(r *room) {
	if r.layout == nil32 {
		return
	}
	r.held = 0
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		c := k.head
		k.head, k.tail = nil32, nil32
		for c != nil32 {
			cc := m.chunks.at(c)
			next := cc.next
			cc.next = nil32
			bytes := m.carried(r, k, cc)
			switch {
			case bytes == 0 && !cc.state:
				m.freeChunk(c)
			case k.head == nil32:
				k.head, k.tail = c, c
			default:
				m.chunks.at(k.tail).next, k.tail = c, c
			}
			r.held += bytes
			c = next
		}
	}
	r.total = r.held
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
func (m *Machine) tell(r *room) {
	if r.sm.Role != statemachine.Source || r.sm.State != statemachine.Confirmed {
		return
	}
	if r.outstanding == r.told && m.now-r.toldAt < int64(progressEvery) {
		return
	}
	r.told, r.toldAt = r.outstanding, m.now
	if r.peer == nilPeer {
		return
	}
	if f := m.frameTo(r.peer, FrameProgress); f != nil {
		f.Room, f.S, f.D, f.Bytes, f.Outstanding = r.id, r.sm.Own, r.pair().Other, r.moved+r.flight, r.outstanding
	}
}

// cancel drops the held chunks of an ended source and aborts what a plugin has of it.
func (m *Machine) cancel(idx int32, r *room) {
	m.policy.Remove(idx)
	r.held, r.parked = 0, false
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		for c := k.head; c != nil32; {
			n := m.chunks.at(c).next
			m.freeChunk(c)
			c = n
		}
		k.head, k.tail = nil32, nil32
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
	r := m.rooms.at(idx)
	r.flight += grown
	if r.sm.State == statemachine.Confirmed {
		m.arm(idx, r, slotPhase, clkStallSrc)
		m.tell(r)
	}
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
	r.pair().Ops.Open--
	k.ops.Open--
	r.flight -= oo.progress
	if e.Quiet {
		m.freeOp(o)
	} else {
		oo.state = opLinger
		r.pair().Ops.Linger++
		k.ops.Linger++
	}
	r.outstanding = r.pair().Ops.Open > 0
	rec := m.record(r, RecOpEnd)
	rec.Op, rec.End, rec.Bytes, rec.Detail = e.Op, e.End, e.Bytes, e.Detail
	m.stats.OpEnds[e.End&7]++
	if e.End == EndDone {
		r.moved += max(e.Bytes, 0)
		m.stats.Bytes += max(e.Bytes, 0)
		m.heard(r.peer)
		m.peer(r.peer).moved = m.now
		if r.sm.State == statemachine.Confirmed {
			m.disarm(r, slotPhase) // progress: whichever clock follows starts anew
		}
		m.step(idx, statemachine.Event{Kind: statemachine.OnOps})
		m.maybeComplete(idx, r)
		m.tell(r)
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
	if r.sm.State == statemachine.Confirmed {
		m.explain(idx, e.Detail)
	}
	m.step(idx, statemachine.Event{Kind: statemachine.OnOpFailed, Reason: why})
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
	m.rooms.at(idx).pair().Ops.Linger--
	m.ranks.at(m.ops.at(o).rank).ops.Linger--
	m.freeOp(o)
	m.step(idx, statemachine.Event{Kind: statemachine.OnOps})
}

// maybeComplete raises OnComplete when every rank sent its last and every op is Done.
func (m *Machine) maybeComplete(idx int32, r *room) {
	if r.sm.State != statemachine.Confirmed || r.paged != r.size || r.held > 0 || r.pair().Ops.Open > 0 {
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
			m.resync(idx, r)
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
		r, k := m.rooms.at(idx), m.ranks.at(oo.rank)
		why := statemachine.None
		if oo.state == opOpen {
			m.leaveWindow(oo)
			r.pair().Ops.Open--
			k.ops.Open--
			r.flight -= oo.progress
			r.outstanding = r.pair().Ops.Open > 0
			why = statemachine.PluginLost
		} else {
			r.pair().Ops.Linger--
			k.ops.Linger--
		}
		oo.state = opDead
		r.pair().Ops.Dead++
		k.ops.Dead++
		if r.sm.State == statemachine.Confirmed && why != statemachine.None {
			m.explain(idx, e.Detail)
		}
		m.step(idx, statemachine.Event{Kind: statemachine.OnPluginLost, Reason: why})
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
		r, k := m.rooms.at(idx), m.ranks.at(oo.rank)
		r.pair().Ops.Dead--
		k.ops.Dead--
		r.pair().Ops.Lost++
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
	if r.confirmOwed && r.sm.State == statemachine.Bound {
		r.confirmOwed = false
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameConfirm, S: r.pair().Other, D: r.sm.Own})
	}
}

func (m *Machine) grantEvent(e *Event, kind statemachine.Kind) {
	idx := m.roomOf(e.Grant)
	if idx == nil32 {
		m.stats.Dropped++
		return
	}
	if r := m.rooms.at(idx); kind == statemachine.OnRevoked {
		r.grant = noGrant
		if r.sm.Rung != statemachine.NoRung && e.Quiet {
			m.leftRung(RungReceiver, r.since)
		}
	}
	m.step(idx, statemachine.Event{Kind: kind, Quiet: e.Quiet})
}
