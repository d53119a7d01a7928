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
func (m *Machine) eachSession(idx int32, fn func(*session, *rank)) {
	for i := m.rooms.at(idx).ranks; i != nil32; i = m.ranks.at(i).next {
		if s := m.sessions[m.ranks.at(i).session]; s != nil {
			fn(s, m.ranks.at(i))
		}
	}
}

// fits reports whether a destination's pages fit into the limits of all, and into those of its workers.
func (m *Machine) fits(idx int32) (all, workers bool) {
	l := &m.cfg.Limits
	var sum need
	workers = true
	m.eachSession(idx, func(s *session, k *rank) {
		sum.pages, sum.bytes = sum.pages+k.need.pages, sum.bytes+k.need.bytes
		workers = workers && k.need.fits(s.held, l.SessionPages, l.SessionBytes)
	})
	return sum.fits(m.held, l.RoomPages, l.RoomBytes), workers
}

// account adds (sign 1) or takes away (-1) a destination's pages.
func (m *Machine) account(idx int32, sign int64) {
	m.rooms.at(idx).pinned = sign > 0
	m.freed = m.freed || sign < 0
	for i := m.rooms.at(idx).ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		m.held.pages, m.held.bytes = m.held.pages+sign*k.need.pages, m.held.bytes+sign*k.need.bytes
		if s := m.sessions[k.session]; s != nil {
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
		m.eachSession(idx, func(s *session, _ *rank) { s.queued++ })
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
		paged := r.sm.Role == statemachine.Destination && r.paged == r.size
		all, workers := true, true
		if paged {
			all, workers = m.fits(idx)
		}
		m.eachSession(idx, func(s *session, _ *rank) { workers = workers && s.live-s.queued < m.cfg.Limits.RoomsPerSession })
		if !all {
			break
		}
		if !workers {
			m.waiting[keep] = idx
			keep++
			continue
		}
		if paged {
			m.account(idx, 1)
		}
		e := statemachine.Event{Kind: statemachine.OnAdmit}
		if r.sm.Role == statemachine.Source {
			var h placeholder
			if h, e.D = m.placeholderFor(r.id, r.sm.Att, true, idx); !e.D.IsZero() {
				m.setPeer(idx, h.peer)
			}
		}
		m.step(idx, e)
	}
	if keep != i {
		m.waiting = append(m.waiting[:keep], m.waiting[i:]...)
	}
}

// maxOpens is how many records of one room and role are kept before its oldest tombstone goes: a room
// that is opened again and again must not make its own lookup slow.
const maxOpens = 16

func (m *Machine) trim(k roomKey) {
	n, oldest := 0, nil32
	for i := m.head(k); i != nil32; i = m.rooms.at(i).next {
		n++
		if m.forgettable(i) {
			oldest = i
		}
	}
	if n >= maxOpens && oldest != nil32 {
		m.evict(oldest)
	}
}

// evict forgets a tombstone.
func (m *Machine) evict(idx int32) {
	if !m.forgettable(idx) {
		return
	}
	r := m.rooms.at(idx)
	key := roomKey{r.id, r.sm.Role}
	if h := m.heads[key]; h == idx {
		if r.next == nil32 {
			delete(m.heads, key)
		} else {
			m.heads[key] = r.next
		}
	} else {
		for h != nil32 && m.rooms.at(h).next != idx {
			h = m.rooms.at(h).next
		}
		m.rooms.at(h).next = r.next
	}
	if r.buried {
		*m.tombs(r.peer)--
	}
	if r.sm.Ops.Lost > 0 {
		m.unproven = max(m.unproven, r.sm.Own.Seq)
	}
	for slot := range numTimers {
		m.disarm(idx, slot)
	}
	for i := r.ranks; i != nil32; {
		k := m.ranks.at(i)
		next := k.next
		for c := k.cursors; c != nil32; {
			n := m.cursors.at(c).next
			m.cursors.del(c)
			c = n
		}
		m.ranks.del(i)
		i = next
	}
	m.freeParts(idx)
	for o := r.ops; o != nil32; { // ops whose writer is proven gone
		n := m.ops.at(o).next
		m.ops.del(o)
		o = n
	}
	delete(m.aux, idx)
	delete(m.details, idx)
	m.rooms.del(idx)
	for i := range m.rooms.at(idx).timers {
		m.rooms.at(idx).timers[i].class = noClock
	}
	m.stats.Evicted++
}

func (m *Machine) freeParts(idx int32) {
	r := m.rooms.at(idx)
	for p := r.dst; p != nil32; {
		n := m.parts.at(p).next
		m.freeRuns(m.parts.at(p).runs)
		m.parts.del(p)
		p = n
	}
	r.dst = nil32
}
