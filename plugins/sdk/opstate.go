package sdk

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// progressEvery is the shortest time between two Progress events of an op.
const progressEvery = time.Millisecond

type endKind uint8

const (
	endDone endKind = iota + 1
	endFailed
	endSkipped
	endAborted
)

// opEnd is what the author (or the SDK) said about the end of an op.
type opEnd struct {
	kind   endKind
	cause  contract.Cause
	quiet  bool
	lane   contract.Lane
	format string
	args   []any
}

// opState is the session's side of an op. It never refers to the author's Op, so that a dropped handle
// can be noticed.
type opState struct {
	s         *Session
	id        uint64
	gen       Generation
	peer      *peerState
	plan      *Plan
	regions   []*regionState // distinct local regions of the plan
	source    *contract.Runs
	dest      *contract.Runs
	layerFrom uint32
	layerTo   uint32
	bytes     uint64
	priority  int32
	deadline  time.Time
	trace     string
	async     atomic.Bool

	// Guarded by s.mu.
	ctx      context.Context // made when the author first asks for it
	cancel   context.CancelCauseFunc
	why      error // the context is done, or will be when it is made: its cause
	started  bool  // Transfer was called
	ended    bool
	quiet    bool
	moved    uint64 // highest Progress
	sent     uint64 // highest Progress queued or sent
	queued   bool   // a Progress waits in the outbox
	lastSent time.Time

	accepted acceptedMemory // the two events that every op sends
	done     doneMemory
}

// transfer runs the author's code for one op on the calling goroutine.
func (s *Session) transfer(st *opState) {
	s.mu.Lock()
	if st.ended { // aborted while it waited for its turn
		s.mu.Unlock()
		return
	}
	st.started = true
	s.mu.Unlock()

	defer func() {
		if r := recover(); r != nil {
			s.count("backend_panics", 1)
			s.logf(contract.Log_LEVEL_ERROR, "Transfer of op %d panicked: %v\n%s", st.id, r, debug.Stack())
			s.noTerminal(st, fmt.Sprintf("Transfer panicked: %v", r))
			return
		}
		if !st.async.Load() {
			s.noTerminal(st, "Transfer returned without an end")
		}
	}()
	s.backend.Transfer(&Op{st: st})
}

// noTerminal ends an op that its author forgot. An op that has ended is left alone.
func (s *Session) noTerminal(st *opState, detail string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.ended {
		return
	}
	s.counts["no_terminal"]++
	s.endLocked(st, opEnd{kind: endFailed, cause: contract.Cause_CAUSE_NO_TERMINAL}, detail)
}

// opDropped is the cleanup of a handle that its author kept.
func (s *Session) opDropped(st *opState) {
	s.noTerminal(st, "the op handle was dropped without an end")
}

// context is the author's context of the op. Many an op ends before anybody asks for it.
func (st *opState) context() context.Context {
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	if st.ctx == nil {
		st.ctx, st.cancel = context.WithCancelCause(st.s.ctx)
		if st.why != nil {
			st.cancel(st.why)
		}
	}
	return st.ctx
}

// cancelLocked makes the context done; the first cause counts. s.mu is held.
func (st *opState) cancelLocked(why error) {
	if st.why == nil {
		st.why = why
	}
	if st.cancel != nil {
		st.cancel(why)
	}
}

// opEnd carries out the author's end: the first one counts.
func (s *Session) opEnd(st *opState, e opEnd) {
	detail := ""
	if e.format != "" {
		detail = fmt.Sprintf(e.format, e.args...)
	}
	switch {
	case e.kind == endDone && !concreteLane(e.lane):
		detail = fmt.Sprintf("the backend reported lane %v for a finished op", e.lane)
		e = opEnd{kind: endFailed, cause: contract.Cause_CAUSE_INTERNAL, quiet: e.quiet}
	case e.kind == endDone && slower(e.lane, st.peer.RequireLane):
		detail = fmt.Sprintf("the bytes took lane %v, %v is demanded", e.lane, st.peer.RequireLane)
		e = opEnd{kind: endFailed, cause: contract.Cause_CAUSE_LANE, quiet: e.quiet}
	case (e.kind == endFailed || e.kind == endSkipped) && !known(contract.Cause_name, int32(e.cause)):
		detail = cut(fmt.Sprintf("the backend gave cause %d; %s", e.cause, detail), MaxDetail)
		e.cause = contract.Cause_CAUSE_INTERNAL
	}
	s.mu.Lock()
	if e.kind == endAborted && st.why == ErrPeerRemoved {
		detail = "the peer was removed"
		e.kind, e.cause = endFailed, contract.Cause_CAUSE_PEER_UNREACHABLE
	}
	ended := st.ended
	if ended {
		s.counts["second_ends"]++
	} else {
		s.endLocked(st, e, detail)
	}
	s.mu.Unlock()
	if ended {
		s.logf(contract.Log_LEVEL_WARN, "op %d was ended a second time (%s); the first end stands", st.id, detail)
	}
}

// endLocked is the only place that ends an op. s.mu is held, st.ended is false.
func (s *Session) endLocked(st *opState, e opEnd, detail string) {
	detail = cut(detail, MaxDetail)
	st.ended, st.quiet = true, e.quiet
	var event *contract.PluginEvent
	switch e.kind {
	case endDone:
		s.bytesDone += st.bytes
		done := &st.done.done
		done.Op, done.Bytes, done.Quiet, done.Lane = st.id, st.bytes, e.quiet, e.lane
		event = st.done.link()
	case endFailed:
		event = &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: st.id, Cause: e.cause, Detail: detail, Quiet: e.quiet}}}
	case endSkipped:
		event = &contract.PluginEvent{Event: &contract.PluginEvent_Skipped{Skipped: &contract.Skipped{Op: st.id, Cause: e.cause, Detail: detail, Quiet: e.quiet}}}
	case endAborted:
		event = &contract.PluginEvent{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: st.id, Quiet: e.quiet}}}
	}
	s.emit(event, len(detail))
	st.cancelLocked(context.Canceled)
	st.peer.live--
	if st.peer.live == 0 && st.peer.removing {
		notify(s.wake)
	}
	if e.quiet {
		s.forget(st)
	}
}

func (s *Session) opQuiesced(st *opState) {
	s.mu.Lock()
	bad := !st.ended || st.quiet
	if bad {
		s.counts["stray_quiesced"]++
	} else {
		st.quiet = true
		m := &quiescedMemory{}
		m.quiesced.Op = st.id
		s.emit(m.link(), 0)
		s.forget(st)
	}
	s.mu.Unlock()
	if bad {
		s.logf(contract.Log_LEVEL_WARN, "Quiesced of op %d ignored: it is legal once, after an end with quiet=false", st.id)
	}
}

// forget drops an op that has ended and is quiet. s.mu is held.
func (s *Session) forget(st *opState) {
	delete(s.ops, st.id)
	s.done.add(st.id)
	for _, r := range st.regions {
		r.unquiet--
		if r.unquiet == 0 && r.removing {
			notify(s.wake)
		}
	}
	if len(s.ops) == 0 && s.draining {
		notify(s.wake)
	}
}

func (s *Session) opProgress(st *opState, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.ended {
		return
	}
	if bytes > st.bytes {
		s.counts["progress_beyond_size"]++
		bytes = st.bytes
	}
	if bytes < st.moved {
		s.counts["progress_backwards"]++
	}
	st.moved = max(st.moved, bytes)
	if now := time.Now(); st.moved > st.sent && now.Sub(st.lastSent) >= progressEvery {
		s.queueProgress(st, now)
	}
}

// queueProgress puts a Progress in the outbox unless one waits there already. s.mu is held.
func (s *Session) queueProgress(st *opState, now time.Time) {
	st.lastSent = now
	if st.queued {
		return
	}
	st.queued = true
	s.out.put(outEvent{progress: st, size: 32})
}

// progressEvent is called by the writer when the waiting Progress goes out.
func (s *Session) progressEvent(st *opState) *contract.PluginEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.queued = false
	st.sent = st.moved
	m := &progressMemory{}
	m.progress.Op, m.progress.Bytes = st.id, st.moved
	return m.link()
}

// flushProgress sends what the rate limit held back; called on every beat.
func (s *Session) flushProgress(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.ops {
		if !st.ended && st.moved > st.sent {
			s.queueProgress(st, now)
		}
	}
}

// abortOp makes the op's context done. An op that has not begun ends at once.
func (s *Session) abortOp(st *opState, why error) {
	s.mu.Lock()
	if !st.started && !st.ended {
		if i := slices.Index(s.queue, st); i >= 0 {
			s.queue = slices.Delete(s.queue, i, i+1)
		}
		if why == ErrPeerRemoved {
			s.endLocked(st, opEnd{kind: endFailed, cause: contract.Cause_CAUSE_PEER_UNREACHABLE, quiet: true}, "the peer was removed")
		} else {
			s.endLocked(st, opEnd{kind: endAborted, quiet: true}, "")
		}
	}
	st.cancelLocked(why)
	s.mu.Unlock()
}

// endedOps remembers at least the ids of the last recentIDs/2 ops that ended, so that a reused one is
// noticed. Ids that follow one another, as an engine numbers them, each have a place of their own.
type endedOps struct {
	places  []endedOp // by id modulo recentIDs
	n       uint64    // ops that ended
	crowded recent    // whose place was taken too early
}

type endedOp struct{ id, n uint64 }

func newEndedOps() endedOps {
	return endedOps{places: make([]endedOp, recentIDs), crowded: newRecent(recentIDs)}
}

func (e *endedOps) add(id uint64) {
	e.n++
	place := &e.places[id%recentIDs]
	if place.n != 0 && place.id != id && e.n-place.n < recentIDs/2 {
		e.crowded.add(place.id)
	}
	*place = endedOp{id, e.n}
}

func (e *endedOps) has(id uint64) bool {
	place := &e.places[id%recentIDs]
	return place.n != 0 && place.id == id || e.crowded.has(id)
}

// recent remembers the last ids added, so that a reused one is noticed.
type recent struct {
	ids  map[uint64]struct{}
	ring []uint64
	next int
	most int
}

func newRecent(n int) recent { return recent{ids: make(map[uint64]struct{}), most: n} }

func (r *recent) add(id uint64) {
	if r.has(id) {
		return
	}
	if len(r.ring) < r.most {
		r.ring = append(r.ring, id)
	} else {
		delete(r.ids, r.ring[r.next])
		r.ring[r.next] = id
		r.next = (r.next + 1) % len(r.ring)
	}
	r.ids[id] = struct{}{}
}

func (r *recent) has(id uint64) bool {
	_, ok := r.ids[id]
	return ok
}

func known(names map[int32]string, v int32) bool {
	_, ok := names[v]
	return ok && v != 0
}

func concreteLane(l contract.Lane) bool {
	return known(contract.Lane_name, int32(l)) && l != contract.Lane_LANE_ANY
}

func validUTF8(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }
