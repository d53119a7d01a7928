// Package demo is `engine demo`: first the silent inflight pin, replayed under the rules that caused
// it and under ours; then the engine's main job, two engines with one worker process each that move
// the KV cache of a request trace, with every page's content verified at the destination. In the same run
// it kills, stops and cuts what can be killed, stopped and cut, as a cluster would sooner or later, and
// tries again what that ended, as a router does.
//
// The demo uses nothing that a user could not use: engines are started as `engine run -c FILE`, the
// workers speak the public worker API, what it prints about a room comes from the admin API.
package demo

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Options is what `engine demo` takes. The zero value is not usable: start from Defaults.
type Options struct {
	// Trace is a Mooncake-format file of JSON lines; empty: a generated sample.
	Trace string
	// Rooms is how many requests are replayed (of a trace file: at most, from its start).
	Rooms int
	// Bytes is about how much KV is moved in all; the size of a page follows from it.
	Bytes int64
	// Seed decides the generated trace, the page lists, the aborts and the spread of arrivals.
	Seed uint64
	// AbortFraction of the rooms is aborted by one of its workers at a random moment.
	AbortFraction float64
	// Arrival is "burst" (requests with one timestamp arrive at once) or "spread".
	Arrival string
	// Ranks is how many worker processes share the model, as prefill:decode. Python plays one of one alone.
	Ranks string
	// NoPython runs both workers in Go even where Python is there.
	NoPython bool
	// Plugin is empty for the embedded backend, "exec:PATH" for a plugin program, or "wasm:FILE" for a guest.
	Plugin string
	// Peers is how the engines find each other: PeersLocal, or PeersEtcd with a store that the demo starts.
	Peers string
	// Output is "table" or "json". With json, standard output holds one JSON object and nothing else.
	Output string
	// NoIncident leaves the first part out.
	NoIncident bool
	// Faults are what the demo does to the engines, plugins and workers meanwhile: "all", "none", or names
	// of FaultNames, with commas in between.
	Faults string
	// Upgrade has the transfer plugin of one side upgraded among the faults, as `engine plugins upgrade` does: no
	// room may fail by that.
	Upgrade bool

	// Executable is the engine binary; empty: this process's own.
	Executable string
	// Deadline bounds the whole run.
	Deadline time.Duration
	// Stdout gets the result, Stderr what happens meanwhile when Output is json.
	Stdout, Stderr io.Writer
	// Terminal says that Stdout is one: a progress bar is drawn in place.
	Terminal bool
}

// Defaults returns the options of a plain `engine demo`.
func Defaults() Options {
	return Options{
		Rooms:         1024,
		Bytes:         9 << 28, // 2.25 GiB: 5 % are aborted, and 2 GiB should still arrive
		Seed:          1,
		AbortFraction: 0.05,
		Arrival:       ArrivalBurst,
		Faults:        faultsAll,
		Ranks:         "1:1",
		Peers:         PeersLocal,
		Output:        "table",
		Deadline:      3 * time.Minute,
		Stdout:        io.Discard,
		Stderr:        io.Discard,
	}
}

// Limits of what one run may ask for.
const (
	maxRooms = 100_000
	maxBytes = int64(1) << 40
)

// ErrOptions is what errors about options are: the caller's mistake, nothing was started.
var ErrOptions = errors.New("wrong options")

// optionsError keeps the text of err and is ErrOptions.
type optionsError struct{ error }

func (optionsError) Is(target error) bool { return target == ErrOptions }

func asOptions(err error) error {
	if err == nil {
		return nil
	}
	return optionsError{err}
}

// check reports every wrong field at once.
func (o Options) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.Rooms < 1 || o.Rooms > maxRooms {
		bad("--rooms %d: must be between 1 and %d", o.Rooms, maxRooms)
	}
	if o.Bytes < 1<<20 || o.Bytes > maxBytes {
		bad("--bytes %d: must be between 1 MiB and 1 TiB", o.Bytes)
	}
	if !(o.AbortFraction >= 0 && o.AbortFraction <= 1) {
		bad("--abort-fraction %v: must be between 0 and 1", o.AbortFraction)
	}
	if o.Arrival != ArrivalBurst && o.Arrival != ArrivalSpread {
		bad("--arrival %q: must be %s or %s", o.Arrival, ArrivalBurst, ArrivalSpread)
	}
	if _, err := ranksOf(o.Ranks); err != nil {
		errs = append(errs, err)
	}
	if o.Output != "table" && o.Output != "json" {
		bad("-o %q: must be table or json", o.Output)
	}
	if o.Plugin != "" {
		if kind, path, _ := strings.Cut(o.Plugin, ":"); kind != "exec" && kind != "wasm" || path == "" {
			bad("--plugin %q: must be exec:PATH or wasm:FILE", o.Plugin)
		}
	}
	if o.Peers != PeersLocal && o.Peers != PeersEtcd {
		bad("--peers %q: must be %s or %s", o.Peers, PeersLocal, PeersEtcd)
	}
	if kinds, err := o.strikes(); err != nil {
		errs = append(errs, err)
	} else if least := leastRooms(len(kinds)); o.Rooms >= 1 && o.Rooms < least {
		bad("--rooms %d: too few to have --faults %s strike while others are in flight; take %d or more, or --faults none", o.Rooms, o.Faults, least)
	}
	if o.Deadline <= 0 {
		bad("--deadline %v: must be more than 0", o.Deadline)
	}
	return asOptions(errors.Join(errs...))
}

// Result is the outcome of a run, by the decode side's verdicts. A room that was tried again because a
// fault ended it counts as what its last attempt came to. The JSON form is public.
type Result struct {
	Rooms       int `json:"rooms"` // success + failed + aborted + nonterminal
	Success     int `json:"success"`
	Failed      int `json:"failed"`
	Aborted     int `json:"aborted"` // Failed(aborted) or Failed(peer_aborted)
	Nonterminal int `json:"nonterminal"`
	// Unknown counts attempts that the source side ended as outcome_unknown or engine_lost while the
	// destination succeeded: the one difference that the protocol allows.
	Unknown int `json:"unknown"`
	// Disagreed counts every other difference between the two sides of an attempt.
	Disagreed int   `json:"disagreed"`
	Bytes     int64 `json:"bytes"` // verified at the destination

	MismatchedPages     int64 `json:"mismatched_pages"`
	LeakedPages         int64 `json:"leaked_pages"`
	WrittenAfterRelease int64 `json:"written_after_release"`

	Reasons map[string]int `json:"reasons"` // rooms by reason, "success" among them
	Faults  []Fault        `json:"faults"`  // that the demo provoked, in their order; never null
	// Retried is the rooms of which a fault ended an attempt, so that there was another; RetriedSuccess and
	// RetriedAborted what those came to in the end; LostAttempts the attempts that were ended, by reason.
	Retried        int            `json:"retried"`
	RetriedSuccess int            `json:"retried_success"`
	RetriedAborted int            `json:"retried_aborted"`
	LostAttempts   map[string]int `json:"lost_attempts"`
	// Errors is what went wrong beside the figures: a process that died, a worker's complaint.
	Errors []string `json:"errors,omitempty"`
}

// Fault is one that the demo provoked: how long the rooms that were open and not terminal at that moment
// took from it until their workers saw a terminal status.
type Fault struct {
	What  string  `json:"what"` // of FaultNames, or "upgrade"
	Rooms int     `json:"rooms"`
	P50   float64 `json:"p50_ms"`
	P99   float64 `json:"p99_ms"`
	Max   float64 `json:"max_ms"`
}

// Err says what in the result is not as it must be, or returns nil.
func (r Result) Err() error {
	var errs []error
	bad := func(n int64, format string) {
		if n != 0 {
			errs = append(errs, fmt.Errorf(format, n))
		}
	}
	if r.Rooms == 0 {
		errs = append(errs, errors.New("no room was run"))
	}
	bad(int64(r.Nonterminal), "%d rooms reached no terminal status")
	bad(int64(r.Disagreed), "%d rooms ended differently on the two sides")
	bad(r.MismatchedPages, "%d pages hold other content than was sent")
	bad(r.LeakedPages, "%d pages were not given back")
	bad(r.WrittenAfterRelease, "%d pages were written after they were released")
	if n := r.Rooms - r.Nonterminal; n > 0 {
		sum := 0
		for _, c := range r.Reasons {
			sum += c
		}
		bad(int64(n-sum), "%d rooms ended without a reason")
	}
	for _, f := range r.Errors {
		errs = append(errs, errors.New(f))
	}
	return errors.Join(errs...)
}

// WorkerOptions is what `engine demo worker` takes.
type WorkerOptions struct {
	Role   string // "prefill" or "decode"
	Socket string // of the engine's worker API
	// Group and PeerGroup default to the role's and the other role's name.
	Group, PeerGroup string

	// Schedule is a file written by the demo. Empty: the worker makes the schedule from Trace, Rooms,
	// Bytes, Seed, AbortFraction and Arrival, as its counterpart does: equal options, equal rooms.
	Schedule      string
	Trace         string
	Rooms         int
	Bytes         int64
	Seed          uint64
	AbortFraction float64
	Arrival       string

	// Rank and Size: the worker is one of several that share the model. It needs Schedule, of the same sizes.
	Rank, Size int

	// Orders has the worker play what Stdin orders instead, a JSON object a line; it needs Schedule. The
	// demo is the router then.
	Orders bool
	Stdin  io.Reader

	// Python runs the Python worker instead of the Go one.
	Python bool
	// Quiet is how long the worker goes on when nothing happens in any of its rooms.
	Quiet time.Duration
	// Stdout gets reports as JSON lines.
	Stdout, Stderr io.Writer
}

// WorkerDefaults returns the options of a plain `engine demo worker`: a short run.
func WorkerDefaults() WorkerOptions {
	return WorkerOptions{
		Size:          1,
		Rooms:         100,
		Bytes:         256 << 20,
		Seed:          1,
		AbortFraction: 0.05,
		Arrival:       ArrivalBurst,
		Quiet:         5 * time.Minute, // as long as a room waits for its counterpart
		Stdout:        io.Discard,
		Stderr:        io.Discard,
	}
}

// The roles of a worker.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
)

func (o WorkerOptions) check() error {
	var errs []error
	if o.Role != RolePrefill && o.Role != RoleDecode {
		errs = append(errs, fmt.Errorf("--role %q: must be %s or %s", o.Role, RolePrefill, RoleDecode))
	}
	if o.Socket == "" {
		errs = append(errs, errors.New("--socket: the path of the engine's worker socket is missing"))
	}
	if o.Orders && o.Schedule == "" {
		errs = append(errs, errors.New("--orders: needs the file of --schedule, whose rooms the orders name"))
	}
	if o.Orders && o.Python {
		errs = append(errs, errors.New("--orders: not with --python"))
	}
	switch {
	case o.Size < 1 || o.Size > maxRanks || o.Rank < 0 || o.Rank >= o.Size:
		errs = append(errs, fmt.Errorf("--rank %d --size %d: of 1 to %d ranks, from 0", o.Rank, o.Size, maxRanks))
	case o.Size > 1 && (o.Schedule == "" || o.Python):
		errs = append(errs, errors.New("--size: needs the file of --schedule, which says what the ranks share, and a worker in Go"))
	}
	if o.Quiet <= 0 {
		errs = append(errs, fmt.Errorf("--quiet %v: must be more than 0", o.Quiet))
	}
	if o.Schedule == "" {
		d := Defaults()
		d.Rooms, d.Bytes, d.AbortFraction, d.Arrival, d.Faults = o.Rooms, o.Bytes, o.AbortFraction, o.Arrival, faultsNone
		errs = append(errs, d.check())
	}
	return asOptions(errors.Join(errs...))
}
