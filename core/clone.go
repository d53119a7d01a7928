package core

import (
	"maps"
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// Clone returns an independent copy of the machine, for explorers and what-if questions. The machine
// itself is only read.
func (m *Machine) Clone() *Machine {
	c := *m
	c.asked = statemachine.Out{}
	c.out, c.scratch, c.reports, c.firsts, c.gathered, c.saying = nil, nil, nil, nil, nil, nil
	c.policy = m.policy.Clone()
	c.rooms, c.ranks, c.parts, c.cursors = m.rooms.clone(), m.ranks.clone(), m.parts.clone(), m.cursors.clone()
	c.chunks, c.ops, c.runs = m.chunks.clone(), m.ops.clone(), m.runs.clone()
	c.pairs, c.lanes, c.saids = m.pairs.clone(), m.lanes.clone(), m.saids.clone()
	c.auxes, c.details, c.sessions, c.sessionIDs = m.auxes.clone(), m.details.clone(), m.sessions.clone(), maps.Clone(m.sessionIDs)
	c.heads, c.marks, c.placeholders = m.heads.clone(), maps.Clone(m.marks), maps.Clone(m.placeholders)
	c.markQueue, c.holdQueue, c.waiting = slices.Clone(m.markQueue), slices.Clone(m.holdQueue), slices.Clone(m.waiting)
	c.maps, c.mapIDs = m.maps.clone(), maps.Clone(m.mapIDs)
	c.remotePools, c.ids = maps.Clone(m.remotePools), maps.Clone(m.ids)
	c.names, c.peers, c.sets = slices.Clone(m.names), slices.Clone(m.peers), slices.Clone(m.sets)
	for i := range int32(c.sessions.len()) {
		s := c.sessions.at(i)
		s.slots, s.pools, s.armed = slices.Clone(s.slots), slices.Clone(s.pools), slices.Clone(s.armed)
		for i := range s.armed {
			s.armed[i] = slices.Clone(s.armed[i])
		}
	}
	c.groups = maps.Clone(m.groups) // a group is replaced, never changed
	c.plugins, c.retirees, c.lost = slices.Clone(m.plugins), slices.Clone(m.retirees), slices.Clone(m.lost)
	return &c
}
