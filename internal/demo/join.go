package demo

import (
	"cmp"
	"fmt"
	"strconv"
)

// attemptID names one attempt of one room.
type attemptID struct{ room, attempt int64 }

func (r report) id() attemptID { return attemptID{r.Room, r.Attempt} }

// side is what the workers of one role reported, one after another.
type side struct {
	role     string
	language string
	// rooms has every attempt that a worker was to play, as it was reported last: a report without a
	// status is of one that has not ended.
	rooms map[attemptID]report
	// died has the attempts that were open at a worker when it was killed. Its engine ended them as
	// worker_lost; no worker of this side saw a verdict, and what was in its memory is gone.
	died     map[attemptID]bool
	end      *report // of the last worker; nil: it did not finish
	progress report  // of the last worker
	bytes    int64   // verified or sent by workers that were killed
	written  int64   // pages written after release, as workers that were killed had counted until then
}

func newSide(role string) *side {
	return &side{role: role, rooms: make(map[attemptID]report), died: make(map[attemptID]bool)}
}

// unfinished says how many of the reported rooms did not end, and why one of them did not; empty when
// there is none.
func (s *side) unfinished() string {
	n, example := 0, report{}
	for _, line := range s.rooms {
		if !line.terminal() {
			n++
			if example.Detail == "" {
				example = line
			}
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%d rooms; room %d: %s", n, example.Room, cmp.Or(example.Detail, cmp.Or(example.Status, "never opened")))
}

// add takes one line.
func (s *side) add(line report) {
	switch line.T {
	case "ready":
		s.language = line.Language
	case "progress":
		s.progress = line
	case "room":
		s.rooms[line.id()] = line
	case "end":
		s.end = &line
	}
}

// Reasons and statuses, as workers report them.
const (
	statusSuccess        = "Success"
	statusFailed         = "Failed"
	reasonSuccess        = "success"
	reasonAborted        = "aborted"
	reasonPeerAborted    = "peer_aborted"
	reasonOutcomeUnknown = "outcome_unknown"
	reasonPeerLost       = "peer_lost"
	reasonSuperseded     = "peer_superseded"
	reasonWorkerLost     = "worker_lost"
	reasonPluginLost     = "plugin_lost"
	reasonEngineLost     = "engine_lost"
	reasonStaleRoom      = "stale_room"
	reasonTransferFailed = "transfer_failed"
	reasonNone           = "none"
)

func (r report) terminal() bool { return r.Status == statusSuccess || r.Status == statusFailed }

// aborted says that a worker asked for the end of the room.
func (r report) aborted() bool {
	return r.Status == statusFailed && (r.Reason == reasonAborted || r.Reason == reasonPeerAborted)
}

// join puts the two sides' reports together, by room of the plan. Every attempt must have ended, equally
// on both sides; a room counts as what its last attempt came to.
func join(p *Plan, prefill, decode *side) Result {
	res := Result{Rooms: len(p.Rooms), Reasons: map[string]int{}, Faults: []Fault{}, LostAttempts: map[string]int{}}
	badAux := 0
	for i := range p.Rooms {
		id := attemptID{room: p.Rooms[i].ID}
		for {
			dst := decode.rooms[id]
			res.MismatchedPages += dst.Mismatched
			if dst.BadAux {
				badAux++
			}
			res.compare(id, prefill, decode)
			next := attemptID{id.room, id.attempt + 1}
			if !prefill.has(next) && !decode.has(next) {
				break
			}
			res.LostAttempts[lostReason(dst)]++
			id = next
		}
		dst := decode.rooms[id]
		res.Bytes += dst.Bytes
		if dst.terminal() && dst.Reason != "" && dst.Reason != reasonNone {
			res.Reasons[dst.Reason]++
		}
		if id.attempt > 0 {
			res.Retried++
		}
		switch {
		case !dst.terminal():
			res.Nonterminal++
		case dst.Status == statusSuccess:
			res.Success++
			if id.attempt > 0 {
				res.RetriedSuccess++
			}
		case dst.aborted():
			res.Aborted++
			if id.attempt > 0 {
				res.RetriedAborted++
			}
		default:
			res.Failed++
		}
	}
	if badAux > 0 {
		res.Errors = append(res.Errors, strconv.Itoa(badAux)+" rooms got another aux record than was sent")
	}
	for _, s := range []*side{prefill, decode} {
		res.WrittenAfterRelease += s.written
		if s.end == nil {
			res.Errors = append(res.Errors, "the "+s.role+" worker did not finish its report")
			continue
		}
		res.LeakedPages += s.end.Leaked
		res.WrittenAfterRelease += s.end.Written
		if s.end.Error != "" {
			res.Errors = append(res.Errors, "the "+s.role+" worker: "+s.end.Error)
		}
	}
	return res
}

func (s *side) has(id attemptID) bool { _, ok := s.rooms[id]; return ok }

// lostReason is the decode side's reason of an attempt that was followed by another.
func lostReason(dst report) string {
	switch {
	case dst.NoAux:
		return reasonEngineLost // its pages arrived, the rest died with the engine
	case dst.Status == statusSuccess:
		return reasonWorkerLost // all arrived, and then died with the worker
	}
	return cmp.Or(dst.Reason, reasonNone)
}

// compare counts a difference between the two sides of one attempt that has ended at the destination. Of
// a side that died nobody saw the verdict.
func (r *Result) compare(id attemptID, prefill, decode *side) {
	src, dst := prefill.rooms[id], decode.rooms[id]
	switch {
	case prefill.died[id] || decode.died[id]:
	case src.split || dst.split:
		r.Disagreed++
	case !dst.terminal() || src.Status == dst.Status:
	case dst.Status == statusSuccess && src.Status == statusFailed && (src.Reason == reasonOutcomeUnknown || src.Reason == reasonEngineLost):
		r.Unknown++
	default:
		r.Disagreed++
	}
}
