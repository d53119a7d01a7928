package core

import (
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// need is what the pages of a destination take.
type need struct{ pages, bytes int64 }

func (n need) fits(held need, pages, bytes int64) bool {
	return (held.pages == 0 || held.pages+n.pages <= pages) && (held.bytes == 0 || held.bytes+n.bytes <= bytes)
}

// eachSession calls fn for every rank of a room whose session is known.
func (m *Machine) eachSession(r *room, fn func(*session, *rank)) {
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		if k := m.ranks.at(i); k.sess != nil32 {
			fn(m.sessions.at(k.sess), k)
		}
	}
}

// fits reports whether a destination's pages fit into the limits of all, and into those of its workers.
func (m *Machine) fits(r *room) (all, workers bool) {
	l := &m.cfg.Limits
	var sum need
	workers = true
	m.eachSession(r, func(s *session, k *rank) {
		sum.pages, sum.bytes = sum.pages+k.need.pages, sum.bytes+k.need.bytes
		workers = workers && k.need.fits(s.held, l.SessionPages, l.SessionBytes) && !m.over(s)
	})
	return sum.fits(m.held, l.RoomPages, l.RoomBytes), workers
}

// account adds (sign 1) or takes away (-1) a destination's pages.
func (m *Machine) account(r *room, sign int64) {
	r.pinned = sign > 0
	m.freed = m.freed || sign < 0
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		m.held.pages, m.held.bytes = m.held.pages+sign*k.need.pages, m.held.bytes+sign*k.need.bytes
		if k.sess != nil32 {
			s := m.sessions.at(k.sess)
			s.held.pages, s.held.bytes = s.held.pages+sign*k.need.pages, s.held.bytes+sign*k.need.bytes
		}
	}
}

// enqueue puts a room that was not admitted at the end of the admission queue.
func (m *Machine) enqueue(idx int32) {
	if r := m.rooms.at(idx); r.sm.State.Live() && !r.sm.Admitted {
		if len(m.waiting) > 2*int(m.queued)+64 { // mostly rooms that left
			m.waiting = slices.DeleteFunc(m.waiting, func(i int32) bool {
				w := m.rooms.at(i)
				return i == idx || !w.sm.State.Live() || w.sm.Admitted
			})
		}
		m.waiting = append(m.waiting, idx)
		m.queued++
		m.freed = true
		m.eachSession(r, func(s *session, _ *rank) { s.queued++ })
	}
}

// firstWaiting is the first room that waits for admission; nil32 when none does.
func (m *Machine) firstWaiting() int32 {
	for len(m.waiting) > 0 {
		idx := m.waiting[0]
		if r := m.rooms.at(idx); r.sm.State.Live() && !r.sm.Admitted {
			return idx
		}
		m.waiting = m.waiting[1:]
	}
	return nil32
}

// admit lets waiting rooms in, in order. A room that does not fit into the limits of all holds up those
// behind it; one that does not fit into its worker's holds up nobody.
func (m *Machine) admit() {
	if !m.freed {
		return
	}
	m.freed = false
	keep, i := 0, 0
	for ; i < len(m.waiting); i++ {
		idx := m.waiting[i]
		r := m.rooms.at(idx)
		if !r.sm.State.Live() || r.sm.Admitted {
			continue // it left
		}
		if m.live-m.queued >= m.cfg.Limits.Rooms {
			break
		}
		paged := r.sm.Role == statemachine.Destination && r.paged == r.local
		all, workers := true, true
		if paged {
			all, workers = m.fits(r)
		}
		m.eachSession(r, func(s *session, _ *rank) {
			workers = workers && s.live-s.queued < m.cfg.Limits.RoomsPerSession && !(r.sm.Role == statemachine.Destination && m.over(s))
		})
		if !all {
			break
		}
		if !workers {
			m.waiting[keep] = idx
			keep++
			continue
		}
		if paged {
			m.account(r, 1)
		}
		e, at := statemachine.Event{Kind: statemachine.OnAdmit}, -1
		if r.sm.Role == statemachine.Source {
			at, e.D = m.nextHeld(idx, r)
		}
		m.stepAt(idx, at, e)
		if r.sm.Role == statemachine.Source {
			m.offerHeld(idx, r)
		}
	}
	if keep != i {
		m.waiting = append(m.waiting[:keep], m.waiting[i:]...)
	}
}

// maxOpens is how many records of one room and role are kept before its oldest tombstone goes: a room
// that is opened again and again must not make its own lookup slow.
const maxOpens = 16

func (m *Machine) trim(head int32) {
	n, oldest := 0, nil32
	for i := head; i != nil32; i = m.rooms.at(i).next {
		n++
	}
	for i := head; i != nil32 && n >= maxOpens; i = m.rooms.at(i).next {
		if m.forgettable(m.rooms.at(i)) {
			oldest = i
		}
	}
	if oldest != nil32 {
		m.evict(oldest)
	}
}

// evict forgets a tombstone.
func (m *Machine) evict(idx int32) {
	r := m.rooms.at(idx)
	if !m.forgettable(r) {
		return
	}
	m.unlist(idx, r)
	if r.buried {
		m.leaveGrave(r)
	}
	if m.opsOf(r).Lost > 0 {
		m.unproven = max(m.unproven, r.sm.Own.Seq)
	}
	for slot := range int32(numTimers) {
		m.disarm(r, slot)
	}
	m.freeParts(r)
	for i := r.ranks; i != nil32; {
		next := m.ranks.at(i).next
		for l := m.ranks.at(i).lanes; l != nil32; {
			n := m.lanes.at(l).next
			m.lanes.del(l)
			l = n
		}
		m.ranks.del(i)
		i = next
	}
	for o := r.ops; o != nil32; { // ops whose writer is proven gone
		n := m.ops.at(o).next
		m.ops.del(o)
		o = n
	}
	m.freePairs(r)
	m.dropAux(r)
	m.dropMap(r)
	if r.detail != nil32 {
		m.details.del(r.detail)
	}
	m.rooms.del(idx)
	m.stats.Evicted++
}

// unlist takes a record out of the list of its room and role.
func (m *Machine) unlist(idx int32, r *room) {
	key := keyOf(r.id, r.sm.Role)
	h := m.head(key)
	switch {
	case h == idx && r.next == nil32:
		m.dropHead(key)
	case h == idx:
		m.setHead(key, r.next)
	default:
		for m.rooms.at(h).next != idx {
			h = m.rooms.at(h).next
		}
		m.rooms.at(h).next = r.next
	}
}

// freeParts forgets the pages of an ended record.
func (m *Machine) freeParts(r *room) {
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		for c := k.cursors; c != nil32; {
			n := m.cursors.at(c).next
			m.cursors.del(c)
			c = n
		}
		k.cursors = nil32
	}
	for p := r.dst; p != nil32; {
		n := m.parts.at(p).next
		m.freeRuns(m.parts.at(p).runs)
		m.parts.del(p)
		p = n
	}
	r.dst = nil32
}
