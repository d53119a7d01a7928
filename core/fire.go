package core

import "github.com/terminus-kv/terminus/core/statemachine"

// What an explorer needs to let every clock run out in every state: the passing of time for one record
// alone. Each is one Step without events; nothing else in the engine ages by it.

// Fire lets the clock of the record own come due: a live record ends, a rung of the ladder is over, a
// tombstone is forgotten. It reports whether a clock ran. Which clock it is decides only the reason of
// an end, unless the room is committed or has voted: a reason other than None takes its place.
func (m *Machine) Fire(own statemachine.Opener, reason statemachine.Reason, out *Effects) bool {
	fired := false
	m.eachRecord(func(idx int32, r *room) {
		c := r.class[slotPhase]
		if fired || r.sm.Own != own || c == noClock {
			return
		}
		fired, m.out = true, out
		m.disarm(r, slotPhase)
		if r.sm.State.Live() { // not by fired: for a stall clock it asks how long the peer moved nothing
			if reason == statemachine.None || r.sm.State == statemachine.Committed || r.sm.State == statemachine.Voted {
				reason = c.reason()
			}
			m.step(idx, statemachine.Event{Kind: statemachine.OnClock, Reason: reason})
		} else {
			m.fired(idx, c)
		}
	})
	m.flush(out)
	return fired
}

// FirePeer lets a peer be silent for too long. It reports whether its rooms were judged.
func (m *Machine) FirePeer(id PeerID, out *Effects) bool {
	p := m.peer(id)
	if !p.known || p.dead {
		return false
	}
	m.out = out
	m.peerDead(id)
	m.flush(out)
	return true
}

// FireHold lets the placeholders of a room be dropped, as their clock and the cap do. It reports whether
// there was one.
func (m *Machine) FireHold(room int64, out *Effects) bool {
	m.out = out
	ok := false
	for id := range m.peers {
		k := holdKey{room, PeerID(id)}
		if h, held := m.placeholders[k]; held {
			ok = true
			m.dropHold(k, h)
		}
	}
	m.flush(out)
	return ok
}
