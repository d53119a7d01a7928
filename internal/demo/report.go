package demo

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
)

// report is one line of a worker's standard output. T says which fields are set.
type report struct {
	// T: "ready" (connected, memory registered), "progress", "room" (released, or given up),
	// "waiting" (Detail says for what; at most once), "end" (the last line).
	T string `json:"t"`

	Language string `json:"language,omitempty"` // ready: go or python

	Ended int64 `json:"ended,omitempty"` // progress: rooms
	Bytes int64 `json:"bytes,omitempty"` // progress, room: verified (decode) or sent (prefill)

	Room       int64  `json:"room,omitempty"`
	Status     string `json:"status,omitempty"` // Success, Failed, or what it was when given up
	Reason     string `json:"reason,omitempty"`
	Detail     string `json:"detail,omitempty"`
	Asked      bool   `json:"asked,omitempty"` // this worker aborted the room
	Mismatched int64  `json:"mismatched,omitempty"`
	BadAux     bool   `json:"bad_aux,omitempty"`
	Micros     int64  `json:"us,omitempty"` // from open to the terminal status

	Leaked  int64  `json:"leaked,omitempty"`  // end: pages that did not come back
	Written int64  `json:"written,omitempty"` // end: pages written after release
	Pages   int64  `json:"pages,omitempty"`   // end: pages in all page lists
	Runs    int64  `json:"runs,omitempty"`    // end: runs of consecutive pages in them
	Error   string `json:"error,omitempty"`   // end: why the worker stopped early
}

// tally is what one worker's lines add up to.
type tally struct {
	rooms, success, failed, lost, open   int
	bytes                                int64
	mismatched, badAux, leaked, afterEnd int64
	fault                                string
}

func (t *tally) add(line report) {
	switch line.T {
	case "room":
		t.rooms++
		switch line.Status {
		case statusSuccess:
			t.success++
			t.bytes += line.Bytes
		case statusFailed:
			t.failed++
			if line.Reason == reasonEngineLost {
				t.lost++
			}
		default:
			t.open++
		}
		t.mismatched += line.Mismatched
		if line.BadAux {
			t.badAux++
		}
	case "end":
		t.leaked, t.afterEnd, t.fault = line.Leaked, line.Written, line.Error
	}
}

// err says what is wrong with the figures.
func (t *tally) err() error {
	if t.open > 0 || t.mismatched > 0 || t.badAux > 0 || t.leaked > 0 || t.afterEnd > 0 || t.fault != "" {
		return errors.New("the worker's figures are not as they must be: " + t.String() + strings.TrimSuffix("; "+t.fault, "; "))
	}
	return nil
}

func (t *tally) String() string {
	lost := ""
	if t.lost > 0 {
		lost = fmt.Sprintf(" (%d %s)", t.lost, reasonEngineLost)
	}
	return fmt.Sprintf("%d rooms: %d Success (%s), %d Failed%s, %d not terminal; pages: %d mismatched, %d leaked, %d written after release; %d wrong aux records",
		t.rooms, t.success, sizeText(t.bytes), t.failed, lost, t.open, t.mismatched, t.leaked, t.afterEnd, t.badAux)
}

// reporter writes report lines from many goroutines.
type reporter struct {
	mu    sync.Mutex
	enc   *json.Encoder
	notes io.Writer // gets what is for people
	sum   tally
	err   error // the first
}

func newReporter(w, notes io.Writer) *reporter {
	return &reporter{enc: json.NewEncoder(w), notes: notes}
}

func (r *reporter) send(line report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum.add(line)
	if line.T == "waiting" {
		fmt.Fprintln(r.notes, line.Detail)
	}
	if err := r.enc.Encode(line); err != nil && r.err == nil {
		r.err = err
	}
}

// side is what one worker reported.
type side struct {
	role     string
	language string
	rooms    map[int64]report
	end      *report // nil: the worker did not finish
	progress report
}

func newSide(role string) *side { return &side{role: role, rooms: make(map[int64]report)} }

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
		s.rooms[line.Room] = line
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
	reasonEngineLost     = "engine_lost"
	reasonNone           = "none"
)

func (r report) terminal() bool { return r.Status == statusSuccess || r.Status == statusFailed }

// join puts the two sides' reports together, by room of the plan.
func join(p *Plan, prefill, decode *side) Result {
	res := Result{Rooms: len(p.Rooms), Reasons: map[string]int{}, Faults: []Fault{}}
	badAux := 0
	for i := range p.Rooms {
		id := p.Rooms[i].ID
		src, dst := prefill.rooms[id], decode.rooms[id]
		res.Bytes += dst.Bytes
		res.MismatchedPages += dst.Mismatched
		if dst.BadAux {
			badAux++
		}
		if dst.terminal() && dst.Reason != "" && dst.Reason != reasonNone {
			res.Reasons[dst.Reason]++
		}
		switch {
		case !dst.terminal():
			res.Nonterminal++
		case dst.Status == statusSuccess:
			res.Success++
		case dst.Reason == reasonAborted || dst.Reason == reasonPeerAborted:
			res.Aborted++
		default:
			res.Failed++
		}
		switch {
		case !dst.terminal():
		case src.Status == dst.Status:
		case dst.Status == statusSuccess && src.Status == statusFailed && (src.Reason == reasonOutcomeUnknown || src.Reason == reasonEngineLost):
			res.Unknown++
		default:
			res.Disagreed++
		}
	}
	if badAux > 0 {
		res.Errors = append(res.Errors, strconv.Itoa(badAux)+" rooms got another aux record than was sent")
	}
	for _, s := range []*side{prefill, decode} {
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
