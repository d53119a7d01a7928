package core

import (
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
)

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

// admit lets waiting rooms in, in order, as far as the limits allow.
func (m *Machine) admit() {
	for {
		idx := m.firstWaiting()
		if idx == nil32 {
			return
		}
		if m.live-m.queued >= m.cfg.Limits.Rooms {
			return
		}
		if r := m.rooms.at(idx); r.paged == r.size && r.sm.Role == statemachine.Destination {
			if m.pinned > 0 && m.pinned+r.total > m.cfg.Limits.RoomBytes {
				return
			}
			m.pin(idx)
		}
		m.waiting = m.waiting[1:]
		e := statemachine.Event{Kind: statemachine.OnAdmit}
		if r := m.rooms.at(idx); r.sm.Role == statemachine.Source {
			var h placeholder
			if h, e.D = m.held(r.id, r.sm.Att, true, idx); !e.D.IsZero() {
				m.setPeer(idx, h.peer)
			}
		}
		m.step(idx, e)
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
