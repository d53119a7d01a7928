package core

import (
	"cmp"
	"encoding/binary"
	"hash"
	"hash/fnv"
	"maps"
	"slices"
)

// Clone returns an independent copy of the machine, for explorers and what-if questions.
func (m *Machine) Clone() *Machine {
	c := *m
	c.out, c.scratch = nil, nil
	c.policy = m.policy.Clone()
	c.rooms, c.ranks, c.parts, c.cursors = m.rooms.clone(), m.ranks.clone(), m.parts.clone(), m.cursors.clone()
	c.chunks, c.ops, c.runs = m.chunks.clone(), m.ops.clone(), m.runs.clone()
	c.heads, c.marks, c.placeholders = maps.Clone(m.heads), maps.Clone(m.marks), maps.Clone(m.placeholders)
	c.holdQueue = slices.Clone(m.holdQueue)
	c.markQueue, c.aux, c.details = slices.Clone(m.markQueue), maps.Clone(m.aux), maps.Clone(m.details)
	c.remotePools, c.ids = maps.Clone(m.remotePools), maps.Clone(m.ids)
	c.names, c.waiting, c.peers = slices.Clone(m.names), slices.Clone(m.waiting), slices.Clone(m.peers)
	c.sessions = make(map[SessionID]*session, len(m.sessions))
	for id, s := range m.sessions {
		t := *s
		t.slots, t.pools = slices.Clone(s.slots), slices.Clone(s.pools)
		for i := range t.pools {
			t.pools[i].armed = slices.Clone(t.pools[i].armed)
		}
		c.sessions[id] = &t
	}
	c.groups = make(map[groupPair]*group, len(m.groups))
	for id, g := range m.groups {
		h := *g
		h.backends = slices.Clone(g.backends)
		c.groups[id] = &h
	}
	c.plugins = make(map[int32]*plugin, len(m.plugins))
	for id, p := range m.plugins {
		q := *p
		c.plugins[id] = &q
	}
	return &c
}

// Hash is a canonical hash of the state without absolute times: two machines that behave the same from
// here on hash the same, whatever their clocks read and wherever their records lie. Counters that only
// grow do not take part.
func (m *Machine) Hash() uint64 {
	h := hasher{Hash64: fnv.New64a()}
	var idx []int32
	m.eachRecord(func(i int32, _ *room) { idx = append(idx, i) })
	slices.SortFunc(idx, func(a, b int32) int {
		x, y := m.rooms.at(a), m.rooms.at(b)
		return cmp.Or(cmp.Compare(x.id, y.id), cmp.Compare(x.sm.Role, y.sm.Role), cmp.Compare(x.sm.Own.Seq, y.sm.Own.Seq))
	})
	for _, i := range idx {
		m.hashRoom(&h, i)
	}
	for _, k := range slices.SortedFunc(maps.Keys(m.marks), func(a, b markKey) int {
		return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.role, b.role), cmp.Compare(a.att, b.att))
	}) {
		h.put(k.id, int64(k.role), int64(k.att), int64(m.marks[k].peer))
	}
	for _, id := range slices.Sorted(maps.Keys(m.placeholders)) {
		p := m.placeholders[id]
		h.put(id, int64(p.d.Inc), int64(p.d.Seq), int64(p.att), int64(p.peer))
	}
	for i := range m.peers {
		p := &m.peers[i]
		h.put(int64(i), int64(p.inc), flag(p.known), flag(p.ready), flag(p.dead), flag(p.draining), int64(p.ops), p.bytes)
	}
	for _, b := range slices.Sorted(maps.Keys(m.plugins)) {
		p := m.plugins[b]
		h.put(int64(b), int64(p.epoch), flag(p.up), flag(p.down))
	}
	for _, id := range slices.Sorted(maps.Keys(m.sessions)) {
		s := m.sessions[id]
		h.put(int64(id), int64(s.group), int64(s.role), int64(s.rank), int64(s.size), int64(len(s.slots)), int64(s.live), int64(s.queued), int64(s.pinned), s.held.pages, s.held.bytes, flag(s.down))
		for _, p := range s.pools {
			h.put(int64(p.id), int64(p.pages), int64(p.layers), p.pageBytes)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(m.groups), func(a, b groupPair) int {
		return cmp.Or(cmp.Compare(a.own, b.own), cmp.Compare(a.peer, b.peer))
	}) {
		g := m.groups[k]
		h.put(int64(k.own), int64(k.peer), int64(g.peer), int64(g.role), int64(g.size), int64(g.reason), int64(len(g.backends)))
		for _, b := range g.backends {
			h.put(int64(b))
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(m.remotePools), func(a, b remotePool) int {
		return cmp.Or(cmp.Compare(a.peer, b.peer), cmp.Compare(a.pool, b.pool))
	}) {
		p := m.remotePools[k]
		h.put(int64(k.peer), int64(k.pool), int64(p.pages), int64(p.layers), p.pageBytes)
	}
	for _, w := range m.waiting {
		if r := m.rooms.at(w); r.sm.State.Live() && !r.sm.Admitted {
			h.put(r.id, int64(r.sm.Role))
		}
	}
	h.put(flag(m.draining), m.held.pages, m.held.bytes, int64(m.unproven))
	return h.Sum64()
}

func (m *Machine) hashRoom(h *hasher, i int32) {
	r := m.rooms.at(i)
	s := &r.sm
	h.put(r.id, int64(s.Role), int64(s.State), int64(s.Reason), flag(s.ByPeer), flag(s.Admitted), flag(s.Started), flag(s.Armed),
		flag(s.RankQuiet), flag(s.SourceEnded), flag(s.DrainedSent), int64(s.Own.Inc), int64(s.Own.Seq), int64(s.Pair.Inc), int64(s.Pair.Seq),
		int64(s.Att), int64(s.Ops.Open), int64(s.Ops.Linger), int64(s.Ops.Dead), int64(s.Ops.Lost), int64(s.Pages), int64(s.Rung))
	h.put(int64(r.peer), int64(r.backend), int64(r.epoch), int64(r.joined), int64(r.paged), flag(r.peerQueued), flag(r.outstanding),
		flag(r.havePages), flag(r.wantPages), flag(r.confirmOwed), flag(r.told), flag(r.parked), int64(r.grant), int64(r.rungArmed),
		int64(r.clockLog2), int64(r.deadline), r.total, r.held, r.moved, r.flight, flag(r.pinned))
	for t := range r.timers {
		h.put(int64(r.timers[t].class))
	}
	for k := r.ranks; k != nil32; k = m.ranks.at(k).next {
		kk := m.ranks.at(k)
		h.put(int64(kk.session), int64(kk.slot), int64(kk.rank), int64(kk.chunks), int64(kk.word), flag(kk.paged), flag(kk.armed), flag(kk.gone), flag(kk.done),
			int64(kk.ops.Open), int64(kk.ops.Linger), int64(kk.ops.Dead), int64(kk.ops.Lost))
		for c := kk.cursors; c != nil32; c = m.cursors.at(c).next {
			cc := m.cursors.at(c)
			h.put(int64(cc.ordinal), int64(cc.page), int64(cc.chunk), int64(cc.layer))
		}
		for c := kk.head; c != nil32; c = m.chunks.at(c).next {
			cc := m.chunks.at(c)
			h.put(int64(cc.ordinal), int64(cc.from), int64(cc.pages), int64(cc.off), int64(cc.layerFrom), int64(cc.layerTo))
			m.hashRuns(h, cc.runs)
		}
	}
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		pp := m.parts.at(p)
		h.put(int64(pp.rank), int64(pp.ordinal), int64(pp.pages), int64(pp.prefix), int64(pp.pool))
		m.hashRuns(h, pp.runs)
	}
	for o := r.ops; o != nil32; o = m.ops.at(o).next {
		oo := m.ops.at(o)
		h.put(int64(m.ranks.at(oo.rank).rank), int64(oo.state), int64(oo.epoch), oo.bytes, oo.progress)
	}
	if a, ok := m.aux[i]; ok {
		h.put(int64(len(a.data)), int64(a.crc))
	}
}

func (m *Machine) hashRuns(h *hasher, head int32) {
	for ; head != nil32; head = m.runs.at(head).next {
		b := m.runs.at(head)
		for _, r := range b.runs[:b.n] {
			h.put(int64(r.Start), int64(r.Count), int64(r.Stride))
		}
	}
}

type hasher struct {
	hash.Hash64
	buf [8]byte
}

func (h *hasher) put(vs ...int64) {
	for _, v := range vs {
		binary.LittleEndian.PutUint64(h.buf[:], uint64(v))
		h.Write(h.buf[:])
	}
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
