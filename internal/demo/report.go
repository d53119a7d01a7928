package demo

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// report is one line of a worker's standard output. T says which fields are set.
type report struct {
	// T: "ready" (connected, memory registered), "progress", "open" (about to be opened), "ended" (a
	// terminal status was seen), "room" (released, or given up), "lost" (the engine is; Detail says why),
	// "back" (connected to the next one), "waiting" (Detail says for what; at most once), "end" (the
	// last line).
	T string `json:"t"`

	Language string `json:"language,omitempty"` // ready: go or python

	Done  int64 `json:"done,omitempty"`  // progress: rooms that have ended
	Bytes int64 `json:"bytes,omitempty"` // progress, room: verified (decode) or sent (prefill)

	Room       int64  `json:"room,omitempty"`
	Attempt    int64  `json:"attempt,omitempty"`
	Status     string `json:"status,omitempty"` // Success, Failed, or what it was when given up
	Reason     string `json:"reason,omitempty"`
	Detail     string `json:"detail,omitempty"`
	Asked      bool   `json:"asked,omitempty"` // this worker aborted the room
	Mismatched int64  `json:"mismatched,omitempty"`
	BadAux     bool   `json:"bad_aux,omitempty"`
	NoAux      bool   `json:"no_aux,omitempty"`    // the engine was lost before the aux record was taken
	Opened     int64  `json:"opened_ns,omitempty"` // room: when the open was asked for; see monotonic
	Ended      int64  `json:"ended_ns,omitempty"`  // room: when the terminal status was seen

	Leaked  int64  `json:"leaked,omitempty"`  // end: pages that did not come back
	Written int64  `json:"written,omitempty"` // progress, end: pages written after release
	Pages   int64  `json:"pages,omitempty"`   // end: pages in all page lists
	Runs    int64  `json:"runs,omitempty"`    // end: runs of consecutive pages in them
	Error   string `json:"error,omitempty"`   // end: why the worker stopped early

	split bool // the ranks of one side saw different ends
}

// monotonic is CLOCK_MONOTONIC in nanoseconds: the clock that all processes of this machine share.
func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail
	return t.Nano()
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

// note says that the line's Detail is for whoever watches the worker.
func (r report) note() bool { return r.T == "waiting" || r.T == "lost" || r.T == "back" }

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
	if line.note() {
		fmt.Fprintln(r.notes, line.Detail)
	}
	if err := r.enc.Encode(line); err != nil && r.err == nil {
		r.err = err
	}
}
