package core

import (
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Hash is a canonical hash of the state without absolute times: two machines that behave the same from
// here on hash the same, whatever their clocks read and wherever their records lie. Counters that only
// grow do not take part, nor does what is only shown to people: for which reason a room failed, and
// whose it was. What is a set here is a sum of its
// members' hashes, so that nothing need be sorted.
func (m *Machine) Hash() uint64 {
	h := hash(1)
	var sum uint64
	m.eachRecord(func(_ int32, r *room) { sum += m.hashRoom(r) })
	for k, mk := range m.marks {
		e := hash(2)
		e.put(uint64(k.roomKey), k.att, uint64(k.peer), flags(mk.sibling))
		sum += e.end()
	}
	for k, p := range m.placeholders {
		e := hash(3)
		e.put(uint64(k.room), p.d.Inc, p.d.Seq, p.att, uint64(k.peer), hashString(p.group), hashString(p.wants))
		sum += e.end()
	}
	for i := range int32(m.sessions.len()) {
		if s := m.sessions.at(i); s.size > 0 {
			sum += m.hashSession(s)
		}
	}
	for k, g := range m.groups {
		e := hash(5)
		e.put(m.hashName(k.own), m.hashName(k.peer), uint64(g.role)<<8|uint64(g.reason), uint64(g.size))
		for _, h := range g.hosts {
			e.put(pack(int32(h.peer), h.lowest))
			m.hashSet(&e, h.set)
		}
		e.putMap(g.layout)
		for _, b := range g.backends {
			e.put(m.hashName(b))
		}
		sum += e.end()
	}
	for k, p := range m.remotePools {
		e := hash(6)
		e.put(uint64(k.peer), k.pool, pack(p.pages, p.layers), uint64(p.pageBytes), flags(p.state))
		sum += e.end()
	}
	for i := range m.plugins {
		p := &m.plugins[i]
		e := hash(7)
		e.put(m.hashName(p.backend), uint64(p.epoch), flags(p.up, p.down, p.receiverChecked, p.asked, p.retryAt > m.now), uint64(p.maxOp))
		sum += e.end()
	}
	for i := range m.retirees {
		p := &m.retirees[i]
		e := hash(11)
		e.put(m.hashName(p.backend), uint64(p.epoch), uint64(p.users), flags(p.killed))
		sum += e.end()
	}
	for _, l := range m.lost {
		e := hash(12)
		e.put(m.hashName(l.backend), uint64(l.epoch))
		sum += e.end()
	}
	h.put(sum)
	for i := range m.peers {
		p := &m.peers[i]
		h.put(p.inc, flags(p.known, p.ready, p.dead, p.draining, p.suspect), uint64(p.ops), uint64(p.bytes))
		if p.shutInc != 0 {
			h.put(p.shutInc, m.hashName(p.shutBackend), uint64(p.shutEpoch))
		}
	}
	for _, w := range m.waiting {
		if r := m.rooms.at(w); r.sm.State.Live() && !r.sm.Admitted {
			h.put(uint64(r.id), uint64(r.sm.Role))
		}
	}
	if m.policy.Len() > 0 {
		h.put(m.policy.Hash(func(pi int32) uint64 { return m.rooms.at(m.pairs.at(pi).room).sm.Own.Seq }))
	}
	h.put(flags(m.draining, m.drained, m.freed && len(m.waiting) > 0), uint64(m.held.pages), uint64(m.held.bytes), m.unproven)
	return h.end()
}

func (m *Machine) hashRoom(r *room) uint64 {
	h := hash(8)
	s := &r.sm
	h.put(uint64(r.id), s.Own.Inc, s.Own.Seq, s.Att,
		uint64(s.Role)|uint64(s.State)<<8|uint64(outcome(s.Reason))<<16|uint64(s.Pages)<<24|uint64(s.Rung)<<32|uint64(r.grant)<<40|uint64(r.rungArmed)<<48,
		flags(s.Admitted, s.Started, s.Armed, r.peerQueued, r.outstanding, r.whole, r.pinned, r.counted, r.buried, r.aged))
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		p := m.pairs.at(i)
		q := &p.sm
		h.put(q.Other.Inc, q.Other.Seq, pack(int32(p.peer), int32(p.epoch)), m.hashName(p.backend),
			flags(q.Sibling, q.Judge, q.Confirmed, q.RankEnded, q.RankQuiet, q.SourceEnded, q.Quiet, q.DrainedSent,
				p.havePages, p.wantPages, p.confirmOwed, p.outstanding, p.told, p.untold, p.parked),
			pack(q.Ops.Open, q.Ops.Linger), pack(q.Ops.Dead, q.Ops.Lost), uint64(p.held), uint64(p.moved), uint64(p.flight))
		m.hashSet(&h, p.set)
		for t := p.said; t != nil32; t = m.saids.at(t).next {
			h.put(pack(m.saids.at(t).rank, m.saids.at(t).ordinal), uint64(m.saids.at(t).pages))
		}
	}
	h.put(m.hashName(r.group), m.hashName(r.peerGroup), m.hashName(r.backend), pack(int32(r.peer), int32(r.epoch)), pack(r.priority, int32(r.size)),
		pack(int32(r.joined), int32(r.paged)), uint64(r.local), uint64(r.clockLog2)<<8|uint64(r.deadline), uint64(r.total), uint64(r.held), uint64(r.moved), uint64(r.flight))
	for _, c := range r.class {
		h.put(uint64(c))
	}
	if r.layout != nil32 {
		h.putMap(m.mapOf(r))
	}
	for k := r.ranks; k != nil32; k = m.ranks.at(k).next {
		kk := m.ranks.at(k)
		h.put(uint64(kk.session), pack(kk.slot, kk.rank), pack(kk.chunks, int32(kk.word)), flags(kk.paged, kk.armed, kk.marked, kk.gone, kk.done),
			pack(kk.ops.Open, kk.ops.Linger), pack(kk.ops.Dead, kk.ops.Lost))
		for c := kk.cursors; c != nil32; c = m.cursors.at(c).next {
			cc := m.cursors.at(c)
			h.put(pack(cc.ordinal, cc.page), pack(cc.chunk, cc.layer))
		}
		for c := kk.head; c != nil32; c = m.chunks.at(c).next {
			cc := m.chunks.at(c)
			h.put(pack(cc.ordinal, cc.from), uint64(cc.pages), pack(cc.layerFrom, cc.layerTo))
			m.hashRuns(&h, cc.runs)
		}
	}
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		for k := r.ranks; k != nil32; k = m.ranks.at(k).next {
			if ln := m.laneOf(m.ranks.at(k), i); ln != nil && ln.at != nil32 {
				h.put(pack(m.chunks.at(ln.at).ordinal, m.chunks.at(ln.at).from), uint64(m.chunks.at(ln.at).layerFrom), pack(ln.to, ln.phase), uint64(ln.off))
			}
		}
	}
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		pp := m.parts.at(p)
		h.put(pack(pp.rank, int32(pp.ordinal)), pack(pp.pages, pp.prefix), pp.pool)
		m.hashRuns(&h, pp.runs)
	}
	for o := r.ops; o != nil32; o = m.ops.at(o).next {
		oo := m.ops.at(o)
		h.put(pack(m.ranks.at(oo.rank).rank, int32(oo.peer)), m.hashName(oo.backend), pack(int32(oo.state), int32(oo.epoch)), uint64(oo.bytes), uint64(oo.progress))
	}
	if r.aux != nil32 {
		a := m.auxes.at(r.aux)
		h.put(uint64(len(a.data)), uint64(a.crc))
	}
	return h.end()
}

// outcome is the reason of an end as far as it decides anything: every failure is the same.
func outcome(r statemachine.Reason) statemachine.Reason {
	switch r {
	case statemachine.None, statemachine.Success, statemachine.OutcomeUnknown:
		return r
	}
	return statemachine.Aborted
}

func (m *Machine) hashRuns(h *hash, head int32) {
	for ; head != nil32; head = m.runs.at(head).next {
		b := m.runs.at(head)
		for _, r := range b.runs[:b.n] {
			h.put(pack(r.Start, r.Count), uint64(r.Stride))
		}
	}
}

func (m *Machine) hashSession(s *session) uint64 {
	h := hash(4)
	h.put(uint64(s.id), m.hashName(s.group), pack(s.rank, s.size), pack(int32(s.role), int32(len(s.slots))), pack(s.live, s.queued), uint64(s.pinned),
		uint64(s.held.pages), uint64(s.held.bytes), flags(s.down))
	for i := range s.pools {
		p := &s.pools[i]
		h.put(p.id, pack(p.pages, p.layers), uint64(p.pageBytes), flags(p.state))
	}
	return h.end()
}

func (m *Machine) hashName(id int32) uint64 {
	if id == nil32 {
		return 0
	}
	return m.names[id].hash
}

// hash is a running hash of 64-bit words.
type hash uint64

// put adds words; each step is a bijection of the state, so that nothing is lost on the way.
func (h *hash) put(words ...uint64) {
	x := uint64(*h)
	for _, w := range words {
		x = (x ^ w) * 0x9e3779b97f4a7c15
		x ^= x >> 32
	}
	*h = hash(x)
}

func (h *hash) putMap(lm layout.Map) {
	if !lm.IsZero() {
		w := lm.Words()
		h.put(w[:]...)
	}
}

// end mixes the last words in, so that sums of hashes are as good as the hashes.
func (h *hash) end() uint64 {
	x := uint64(*h)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func hashString(s string) uint64 {
	h := hash(len(s))
	for _, c := range []byte(s) {
		h.put(uint64(c))
	}
	return h.end()
}

func pack(a, b int32) uint64 { return uint64(uint32(a))<<32 | uint64(uint32(b)) }

func flags(bits ...bool) uint64 {
	var x uint64
	for _, b := range bits {
		x <<= 1
		if b {
			x |= 1
		}
	}
	return x
}

// hashSet adds a set of ranks.
func (m *Machine) hashSet(h *hash, set int32) {
	if set == fullyHosted {
		return
	}
	for _, r := range m.sets[set] {
		h.put(uint64(r))
	}
}
