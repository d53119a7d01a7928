// Package telemetry turns the engine's numbers into Prometheus metrics and its messages into a
// rate-limited log. No label names a room.
package telemetry

import (
	"context"
	"time"
)

// Source is where the metrics come from. The node implements it: one Snapshot per scrape, taken by
// the owner loop in a single step so that the numbers agree with each other. It returns within ctx; an
// error makes terminus_up 0 and leaves the other metrics out.
type Source interface {
	Snapshot(ctx context.Context) (Snapshot, error)
}

// Snapshot is every number of the engine at one moment. Fields that end in Total only grow during an
// incarnation.
type Snapshot struct {
	Rooms            []RoomsBy // every (role, state) that has rooms; the others are reported as 0
	Overdue          int       // non-terminal rooms beyond the clock that should have ended them; must be 0
	Unreleased       int       // terminal rooms whose pages the worker has not taken back
	OldestUnreleased time.Duration
	Opened           map[RoleBackend]uint64 // opens accepted
	Verdicts         map[Verdict]uint64
	Stages           map[RoomStage]Histogram
	Late             map[string]uint64 // messages dropped because they came too late, by kind (frame, op, worker)
	Disagreed        uint64            // (outcome_unknown or engine_lost, Success) pairs known here

	PinnedBytes      int64 // pages armed or quiescing
	QuarantinedBytes int64
	OldestPinned     time.Duration // age of the oldest terminal room with pinned pages
	OldestQuarantine time.Duration
	RegisteredBytes  int64

	OpsOut     map[string]int // outstanding, by backend
	OldestOp   map[string]time.Duration
	OpsTotal   map[OpEnd]uint64  // ended ops
	MovedBytes map[Moved]uint64  // bytes by direction, backend and lane
	OpsHeld    int               // ready but held by a window
	QueueDepth int               // accepted, not admitted
	Refused    map[string]uint64 // requests of workers by cause, of package core

	Rungs     map[string]Rung // of the fencing ladder, by number
	Replaced  uint64          // plugin epochs that were to be replaced because of pages in quarantine
	Retired   uint64          // epochs that a newer one took over from
	RetireCut uint64          // rooms and ops that these had when their time was over

	Plugins   []Plugin
	Peers     map[string]int // by state
	Sessions  map[string]int // workers, by role
	BadFrames map[BadFrame]uint64

	Draining bool
	Frozen   bool          // membership cannot be read
	Lag      time.Duration // sum of observed pauses that virtual time left out
	LagTotal uint64        // observed pauses
	Steps    uint64        // steps of the core
}

// RoomsBy is the rooms of one role in one state.
type RoomsBy struct {
	Role   string // source, destination
	State  string // statemachine.State
	Count  int
	Oldest time.Duration // longest in this state; of states that have not ended
}

// RoleBackend, Verdict, OpEnd, Moved and BadFrame are label sets; every value is from a closed set.
type (
	RoleBackend struct{ Role, Backend string }
	Verdict     struct{ Role, Reason string }
	OpEnd       struct{ Backend, End string }             // done, failed, skipped, aborted
	Moved       struct{ Direction, Backend, Lane string } // out, in
	BadFrame    struct{ Source, Code string }             // worker, peer, plugin
)

// Rung is how often pages stood on a rung of the fencing ladder, and how long those that left it.
type Rung struct {
	Entered, Left uint64
	Time          time.Duration
}

// Plugin is one plugin of the snapshot.
type Plugin struct {
	Name, Version string
	Up            bool
	Epoch         uint32
	BeatAge       time.Duration
	Restarts      uint64
	Epochs        int // processes that are live
}
