package core

import (
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// What the core remembers of destinations and attempts that are not open here: per room at most one
// placeholder (a destination that registered before its source opened), and abort marks (attempts that
// the peer aborted). Both are capped per peer and have a clock.

// forgetHolds drops the placeholders of a peer whose link is over. An Abort of one of them may have
// been lost with the link, and a destination that is still registered says so again after Hello.
func (m *Machine) forgetHolds(id PeerID) {
	for room, h := range m.placeholders {
		if h.peer == id {
			delete(m.placeholders, room)
			m.peer(id).holds--
		}
	}
}

// remember keeps or drops placeholders and abort marks.
func (m *Machine) remember(from PeerID, f *Frame, role statemachine.Role, o *statemachine.Out) {
	p := m.peer(from)
	if o.Do&statemachine.DoDropPlaceholder != 0 {
		if h, ok := m.placeholders[f.Room]; ok && h.d == f.D && h.peer == from {
			delete(m.placeholders, f.Room)
			m.peer(h.peer).holds--
			if f.Kind == FrameAbort && m.liveRoom(keyOf(f.Room, role)) == nil32 {
				o.Do |= statemachine.DoMark
			}
		}
	}
	if o.Do&statemachine.DoPlaceholder != 0 {
		if h, ok := m.placeholders[f.Room]; ok {
			m.peer(h.peer).holds--
			delete(m.placeholders, f.Room)
			if h.peer != from { // another engine's destination would wait in vain
				m.sendStale(h.peer, f.Room, h.d, h.att)
			}
		}
		if p.holds >= m.cfg.Limits.PeerMarks {
			m.sendStale(from, f.Room, f.D, f.Att)
			m.stats.Dropped++
		} else {
			m.hold(f.Room, placeholder{d: f.D, att: f.Att, peer: from, group: f.Group})
		}
	}
	if o.Do&statemachine.DoMark != 0 {
		k := markKey{keyOf(f.Room, role), f.Att}
		if old, ok := m.marks[k]; ok {
			m.dropMark(k, old)
		}
		if p.marks >= m.cfg.Limits.PeerMarks {
			m.stats.Dropped++
			return
		}
		m.seq++
		mk := mark{from, m.now + int64(m.cfg.Clocks.Tombstone), m.seq}
		m.marks[k] = mk
		p.marks++
		if len(m.markQueue) > 2*len(m.marks)+64 { // mostly marks that were consumed or renewed
			m.markQueue = slices.DeleteFunc(m.markQueue, func(d markDue) bool { return m.marks[d.key].seq != d.seq })
		}
		m.markQueue = append(m.markQueue, markDue{k, mk.seq})
	}
}

// hold keeps a placeholder. It outlives the bootstrap clock of its destination, so that one which is
// still there then was forgotten: its Abort overtook the Register, or was lost.
func (m *Machine) hold(room int64, h placeholder) {
	m.seq++
	h.seq = m.seq
	m.placeholders[room] = h
	m.peer(h.peer).holds++
	if len(m.holdQueue) > 2*len(m.placeholders)+64 { // mostly those that were used
		m.holdQueue = slices.DeleteFunc(m.holdQueue, func(d holdDue) bool { return m.placeholders[d.room].seq != d.seq })
	}
	m.holdQueue = append(m.holdQueue, holdDue{room, h.seq, m.now + int64(m.cfg.Clocks.Bootstrap) + int64(m.cfg.Clocks.Tombstone)})
}

// expireHolds drops placeholders that nobody asked for; as at the cap, the destination is told.
func (m *Machine) expireHolds() {
	for len(m.holdQueue) > 0 {
		d := m.holdQueue[0]
		if h, ok := m.placeholders[d.room]; ok && h.seq == d.seq {
			if d.due > m.now {
				return
			}
			m.dropHold(d.room, h)
		}
		m.holdQueue = m.holdQueue[1:]
	}
}

// dropHold forgets a placeholder that its destination still counts on, and tells it.
func (m *Machine) dropHold(room int64, h placeholder) {
	delete(m.placeholders, room)
	m.peer(h.peer).holds--
	m.sendStale(h.peer, room, h.d, h.att)
}

// sendStale tells a destination that is not wanted here that it waits in vain.
func (m *Machine) sendStale(to PeerID, room int64, d statemachine.Opener, att uint64) {
	if f := m.frameTo(to, FrameAbort); f != nil {
		f.Room, f.D, f.Att, f.Reason = room, d, att, statemachine.StaleRoom
	}
}

func (m *Machine) dropMark(k markKey, mk mark) {
	delete(m.marks, k)
	m.peer(mk.peer).marks--
}

// expireMarks drops the abort marks whose tombstone clock is over; the queue is in order of time.
func (m *Machine) expireMarks() {
	for len(m.markQueue) > 0 {
		d := m.markQueue[0]
		mk, ok := m.marks[d.key]
		if ok && mk.seq == d.seq {
			if mk.due > m.now {
				return
			}
			m.dropMark(d.key, mk)
		}
		m.markQueue = m.markQueue[1:]
	}
}
