package core

import (
	"errors"
	"fmt"
	"time"
)

// Clocks are the lengths of the clocks, all finite and larger than zero. The source's run 10 % longer
// than the judge's where both have one.
type Clocks struct {
	Queue       time.Duration // accepted, not admitted here
	Bootstrap   time.Duration // open until bound
	PeerQueued  time.Duration // in place of bootstrap while the counterpart says Queued; one total
	Register    time.Duration // destination open without pages
	Input       time.Duration // bound, no op submitted
	Stall       time.Duration // ops outstanding, no progress
	TransferMin time.Duration // least length of the transfer clock
	Verdict     time.Duration // source, from RankEnd
	Drain       time.Duration // a rung of the ladder
	PeerSuspect time.Duration // peer silent: no new rooms
	PeerDead    time.Duration // peer silent: its rooms end
	Tombstone   time.Duration // an ended, released record is remembered
	Retire      time.Duration // least time for what a plugin epoch has when a newer one takes over; the longest transfer clock in it, if longer
	FloorRate   int64         // bytes/s below which a transfer is too slow
}

// DefaultClocks are the defaults of docs/protocol.md.
func DefaultClocks() Clocks {
	return Clocks{
		Queue: 300 * time.Second, Bootstrap: 300 * time.Second, PeerQueued: 300 * time.Second,
		Register: 300 * time.Second, Input: 300 * time.Second, Stall: 15 * time.Second,
		TransferMin: 120 * time.Second, Verdict: 15 * time.Second, Drain: 5 * time.Second,
		PeerSuspect: 2 * time.Second, PeerDead: 10 * time.Second, Tombstone: 600 * time.Second, Retire: 300 * time.Second,
		FloorRate: 50e6,
	}
}

// Limits bound what the core holds. Zero is refused.
type Limits struct {
	Rooms           int32 // live rooms of both roles; more wait for admission
	RoomBytes       int64 // bytes of pages that destinations may hold until they are reusable; more wait
	RoomPages       int64 // and pages
	SessionBytes    int64 // of one session; more wait
	SessionPages    int64
	OpBytes         int64 // an op is split at this size
	OpRuns          int32 // runs of one op, a side
	PeerOps         int32 // window of ops towards one peer
	PeerBytes       int64 // window of bytes towards one peer
	Tombstones      int32 // released tombstones kept of one peer
	PeerMarks       int32 // abort marks and placeholders kept for one peer, each
	AdmitQueue      int32 // rooms that may wait for admission
	RoomsPerSession int32 // live rooms of one session; more wait
}

// DefaultLimits suit one node.
func DefaultLimits() Limits {
	return Limits{
		Rooms: 100_000, RoomBytes: 1 << 50, RoomPages: 1 << 40, SessionBytes: 1 << 50, SessionPages: 1 << 40, OpBytes: 64 << 20, OpRuns: 4096, PeerOps: 64,
		PeerBytes: 1 << 30, Tombstones: 65_536, PeerMarks: 65_536, AdmitQueue: 100_000, RoomsPerSession: 65_536,
	}
}

// Config is what New needs. It is not changed afterwards.
type Config struct {
	Incarnation uint64 // of this engine; never zero, never reused
	Clocks      Clocks
	Limits      Limits
	Quarantine  Quarantine // zero: the core never asks for a replacement by itself
	Policy      Policy     // order of submissions; nil: NewSRF with its defaults
}

func (c *Config) check() error {
	var errs []error
	if c.Incarnation == 0 {
		errs = append(errs, errors.New("incarnation must not be zero"))
	}
	k := &c.Clocks
	for _, d := range []struct {
		name string
		v    time.Duration
	}{
		{"queue", k.Queue}, {"bootstrap", k.Bootstrap}, {"peer_queued", k.PeerQueued}, {"register", k.Register},
		{"input", k.Input}, {"stall", k.Stall}, {"transfer_min", k.TransferMin}, {"verdict", k.Verdict},
		{"drain", k.Drain}, {"peer_suspect", k.PeerSuspect}, {"peer_dead", k.PeerDead}, {"tombstone", k.Tombstone},
		{"retire", k.Retire},
	} {
		if d.v <= 0 {
			errs = append(errs, fmt.Errorf("clock %s is %v: every clock is finite and larger than zero", d.name, d.v))
		}
	}
	if k.FloorRate <= 0 {
		errs = append(errs, errors.New("floor rate must be larger than zero bytes a second"))
	}
	if q := &c.Quarantine; q.Share < 0 || q.Share > 10_000 || q.Age < 0 {
		errs = append(errs, fmt.Errorf("quarantine is %d hundredths of a percent and %v: want 0 to 10000 and no negative age", q.Share, q.Age))
	}
	l := &c.Limits
	for _, d := range []struct {
		name string
		v    int64
	}{
		{"rooms", int64(l.Rooms)}, {"room bytes", l.RoomBytes}, {"room pages", l.RoomPages},
		{"session bytes", l.SessionBytes}, {"session pages", l.SessionPages}, {"op bytes", l.OpBytes}, {"op runs", int64(l.OpRuns)},
		{"peer ops", int64(l.PeerOps)}, {"peer bytes", l.PeerBytes}, {"tombstones", int64(l.Tombstones)},
		{"peer marks", int64(l.PeerMarks)}, {"admit queue", int64(l.AdmitQueue)}, {"rooms per session", int64(l.RoomsPerSession)},
	} {
		if d.v <= 0 {
			errs = append(errs, fmt.Errorf("limit %s is %d: must be larger than zero", d.name, d.v))
		}
	}
	return errors.Join(errs...)
}
