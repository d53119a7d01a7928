package core

import (
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// Stats are counters since the start; they only grow.
type Stats struct {
	Enter           [3][statemachine.NumStates]uint64 // records by role that entered a state
	Verdicts        [3][statemachine.NumReasons]uint64
	FramesIn        [statemachine.NumFrameKinds]uint64
	FramesOut       [statemachine.NumFrameKinds]uint64
	Unsent          uint64              // frames not sent because the link is not ready; Resync makes up for them
	Dropped         uint64              // late or impossible events that changed nothing
	Refused         [NumRefusals]uint64 // worker requests
	Ops             uint64
	OpEnds          [8]uint64 // by EndKind
	Bytes           int64     // of ops that are Done
	PluginsLost     uint64
	PeersDead       uint64
	InflightEntered uint64 // source rooms that handed over their first page
	InflightLeft    uint64 // of those, ended
	Evicted         uint64
	Rungs           [NumRungs]RungStats // of the fencing ladder
	Replaces        uint64              // plugin epochs that the host was asked to replace, because of pages in quarantine
	Retires         uint64              // epochs that retired beside a newer one
	RetiresCut      uint64              // rooms and ops that they still had when they were ended
}

// RungStats is how often a destination's pages stood on a rung, and for how long.
type RungStats struct {
	Entered, Left uint64
	Time          time.Duration // of those that left
}

// Counts is what the core holds now. At idle, when every room has been released and forgotten, all of
// it is zero: conservation.
type Counts struct {
	Records, Live, Waiting, Queued, Inflight      int
	Ranks, Parts, Cursors, Chunks, Ops, RunBlocks int
	WindowOps, WindowBytes, Pinned                int64
	Marks, Placeholders, Aux, Details             int
	Pairs, Said                                   int // pairs beyond the first of each record, and what RankEnds said of ranks
}

// Counts returns what the core holds.
func (m *Machine) Counts() Counts {
	c := Counts{
		Records: m.rooms.used(), Live: int(m.live), Waiting: int(m.queued), Queued: m.policy.Len(),
		Inflight: int(m.stats.InflightEntered - m.stats.InflightLeft),
		Ranks:    m.ranks.used(), Parts: m.parts.used(), Cursors: m.cursors.used(), Chunks: m.chunks.used(),
		Ops: m.ops.used(), RunBlocks: m.runs.used(), Pinned: m.held.bytes,
		Marks: len(m.marks), Placeholders: len(m.placeholders), Aux: m.auxes.used(), Details: m.details.used(),
		Pairs: m.pairs.used() - m.rooms.used(), Said: m.saids.used(),
	}
	for i := range m.peers {
		c.WindowOps += int64(m.peers[i].ops)
		c.WindowBytes += m.peers[i].bytes
	}
	return c
}

// Stats returns the counters.
func (m *Machine) Stats() Stats { return m.stats }
