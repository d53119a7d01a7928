package core

import (
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// What the core remembers of destinations and attempts that are not open here: per room and engine at most
// one placeholder (a destination that registered before its source opened), and abort marks (attempts that
// an engine aborted). Both are capped per peer and have a clock.

// forgetHolds drops the placeholders of a peer whose link is over. An Abort of one of them may have
// been lost with the link, and a destination that is still registered says so again after Hello.
func (m *Machine) forgetHolds(id PeerID) {
	for k := range m.placeholders {
		if k.peer == id {
			m.unhold(k)
		}
	}
}

// remember keeps or drops placeholders and abort marks.
func (m *Machine) remember(from PeerID, f *Frame, role statemachine.Role, o *statemachine.Out) {
	p := m.peer(from)
	if o.Do&statemachine.DoDropPlaceholder != 0 {
		if h, ok := m.placeholders[holdKey{f.Room, from}]; ok && h.d == f.D {
			m.unhold(holdKey{f.Room, from})
			if f.Kind == FrameAbort && m.liveRoom(keyOf(f.Room, role)) == nil32 {
				o.Do |= statemachine.DoMark
			}
		}
	}
	if o.Do&statemachine.DoPlaceholder != 0 {
		m.holdFrame(from, f)
	}
	if o.Do&statemachine.DoMark != 0 {
		k := markKey{keyOf(f.Room, role), f.Att, from}
		if _, ok := m.marks[k]; ok {
			m.dropMark(k)
		}
		if p.marks >= m.cfg.Limits.PeerMarks {
			m.stats.Dropped++
			return
		}
		m.seq++
		mk := mark{m.now + int64(m.cfg.Clocks.Tombstone), m.seq, f.Kind == FrameGroupAbort}
		m.marks[k] = mk
		p.marks++
		if len(m.markQueue) > 2*len(m.marks)+64 { // mostly marks that were consumed or renewed
			m.markQueue = slices.DeleteFunc(m.markQueue, func(d markDue) bool { return m.marks[d.key].seq != d.seq })
		}
		m.markQueue = append(m.markQueue, markDue{k, mk.seq})
	}
}

// holdFrame keeps the placeholder of a Register. It takes the place of that engine's older one, and of those of
// other attempts and groups, whose destinations would wait in vain.
func (m *Machine) holdFrame(from PeerID, f *Frame) {
	if len(m.placeholders) > 0 {
		for id := range m.peers {
			k := holdKey{f.Room, PeerID(id)}
			h, ok := m.placeholders[k]
			switch {
			case !ok:
			case k.peer == from:
				m.unhold(k)
			case h.att != f.Att || h.group != f.Group || !m.spans(h.group):
				m.dropHold(k, h)
			}
		}
	}
	if m.peer(from).holds >= m.cfg.Limits.PeerMarks {
		m.sendStale(from, f.Room, f.D, f.Att)
		m.stats.Dropped++
		return
	}
	m.hold(holdKey{f.Room, from}, placeholder{d: f.D, att: f.Att, group: f.Group, wants: f.PeerGroup})
}

// spans reports whether a group at the other side sits on more than one engine, as far as any group here
// knows it.
func (m *Machine) spans(name string) bool {
	id, ok := m.ids[name]
	if !ok {
		return false
	}
	for k, g := range m.groups {
		if k.peer == id && k.own != id && (len(g.hosts) > 1 || !g.complete()) {
			return true
		}
	}
	return false
}

// wanted reports whether the destination of an attempt has registered already.
func (m *Machine) wanted(room int64, att uint64) bool {
	for id := 0; id < len(m.peers) && len(m.placeholders) > 0; id++ {
		if h, ok := m.placeholders[holdKey{room, PeerID(id)}]; ok && h.att == att {
			return true
		}
	}
	return false
}

// nextHeld is a pair of an admitted source that is not bound and has a placeholder of its attempt, and that
// placeholder's destination; place -1 when there is none.
func (m *Machine) nextHeld(idx int32, r *room) (at int, d statemachine.Opener) {
	for id := 0; id < len(m.peers) && len(m.placeholders) > 0; id++ {
		from := PeerID(id)
		h, ok := m.placeholders[holdKey{r.id, from}]
		if !ok || h.att != r.sm.Att || r.peerGroup != nil32 && m.name(r.peerGroup) != h.group || !m.meant(r, h.wants) || !m.speaksFor(from, r) {
			continue
		}
		if at := m.towardsGroup(idx, r, from, h.group); at >= 0 && m.pairAt(r, at).sm.Other.IsZero() {
			if r.sm.State != statemachine.Ended {
				m.meetPeer(idx, r, at, from)
				m.setMap(r, towards(r, m.groupOf(r, h.group))) // Confirm will bring the pages and not the group
			}
			return at, h.d
		}
	}
	return -1, statemachine.Opener{}
}

// meant reports whether a source is of the group that a destination waits for; empty: of any.
func (m *Machine) meant(r *room, wants string) bool { return wants == "" || m.name(r.group) == wants }

// offerHeld offers a source to every placeholder of its attempt; one that has ended tells them so.
func (m *Machine) offerHeld(idx int32, r *room) {
	for r.sm.Admitted && r.sm.State != statemachine.Committed {
		at, d := m.nextHeld(idx, r)
		if at < 0 {
			return
		}
		if r.sm.State == statemachine.Ended && m.firstPair(r).next == nil32 {
			return // the only counterpart has left its mark
		}
		m.stepAt(idx, at, statemachine.Event{Kind: statemachine.OnHeld, D: d})
		if m.pairAt(r, at).sm.Other.IsZero() {
			return
		}
		m.unholdOf(r, at)
	}
}

// unholdOf forgets the placeholder that a pair has been bound to.
func (m *Machine) unholdOf(r *room, at int) {
	k := holdKey{r.id, m.pairAt(r, at).peer}
	if h, ok := m.placeholders[k]; ok && h.d == m.pairAt(r, at).sm.Other {
		m.unhold(k)
	}
}

// marked reports whether an engine has ended the attempt of a record that is being opened, and the place of the
// last such engine's pair: -1 when it has none yet. All marks of the attempt are consumed, and every engine that
// left one, or whose placeholder is answered by itself, is told nothing. What a sibling says is not the word of a
// source, which may not be known yet.
func (m *Machine) marked(key roomKey, r *room) (at int, ok bool) {
	at = -1
	for id := 0; id < len(m.peers) && len(m.marks) > 0; id++ {
		k := markKey{key, r.sm.Att, PeerID(id)}
		mk, found := m.marks[k]
		if !found || !m.speaksFor(PeerID(id), r) {
			continue
		}
		m.dropMark(k)
		ok = true
		if i := m.pairWith(r, PeerID(id), mk.sibling); i >= 0 {
			m.pairAt(r, i).sm.Told = true
			at = max(at, i)
		}
	}
	for i := r.pairs; i != nil32 && ok; i = m.pairs.at(i).next {
		p := m.pairs.at(i)
		if h, held := m.placeholders[holdKey{r.id, p.peer}]; held && h.att == r.sm.Att && r.sm.Role == statemachine.Source {
			p.sm.Told = true
		}
	}
	return at, ok
}

// unhold forgets a placeholder.
func (m *Machine) unhold(k holdKey) {
	delete(m.placeholders, k)
	m.peer(k.peer).holds--
}

// hold keeps a placeholder. It outlives the bootstrap clock of its destination, so that one which is
// still there then was forgotten: its Abort overtook the Register, or was lost.
func (m *Machine) hold(k holdKey, h placeholder) {
	m.seq++
	h.seq = m.seq
	m.placeholders[k] = h
	m.peer(k.peer).holds++
	if len(m.holdQueue) > 2*len(m.placeholders)+64 { // mostly those that were used
		m.holdQueue = slices.DeleteFunc(m.holdQueue, func(d holdDue) bool { return m.placeholders[d.key].seq != d.seq })
	}
	m.holdQueue = append(m.holdQueue, holdDue{k, h.seq, m.now + int64(m.cfg.Clocks.Bootstrap) + int64(m.cfg.Clocks.Tombstone)})
}

// expireHolds drops placeholders that nobody asked for; as at the cap, the destination is told.
func (m *Machine) expireHolds() {
	for len(m.holdQueue) > 0 {
		d := m.holdQueue[0]
		if h, ok := m.placeholders[d.key]; ok && h.seq == d.seq {
			if d.due > m.now {
				return
			}
			m.dropHold(d.key, h)
		}
		m.holdQueue = m.holdQueue[1:]
	}
}

// dropHold forgets a placeholder that its destination still counts on, and tells it.
func (m *Machine) dropHold(k holdKey, h placeholder) {
	m.unhold(k)
	m.sendStale(k.peer, k.room, h.d, h.att)
}

// sendStale tells a destination that is not wanted here that it waits in vain.
func (m *Machine) sendStale(to PeerID, room int64, d statemachine.Opener, att uint64) {
	if f := m.frameTo(to, FrameAbort); f != nil {
		f.Room, f.D, f.Att, f.Reason = room, d, att, statemachine.StaleRoom
	}
}

func (m *Machine) dropMark(k markKey) {
	delete(m.marks, k)
	m.peer(k.peer).marks--
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
			m.dropMark(d.key)
		}
		m.markQueue = m.markQueue[1:]
	}
}
