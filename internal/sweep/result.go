package sweep

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// maxBroken is how many broken promises a result quotes.
const maxBroken = 20

// Result is what a sweep came to. The JSON form is what RELIABILITY.md shows.
type Result struct {
	Mode       Mode `json:"mode"`
	Known      int  `json:"known"` // pairs that clean runs have
	Pairs      int  `json:"pairs"` // that were tried: all, or so many that the seed drew
	Hit        int  `json:"hit"`   // the process was struck there; else it had ended its part before
	Violations int  `json:"violations"`
	Ended      int  `json:"rooms_ended"`    // by the fault, at workers that were left
	Unharmed   int  `json:"rooms_unharmed"` // under way then, and Success later
	Times
	Reasons map[string]int `json:"reasons"` // of rooms_ended
	ByKind  []KindResult   `json:"processes"`
	Broken  []Outcome      `json:"broken,omitempty"` // the first of them
	Seed    uint64         `json:"seed"`
	Began   time.Time      `json:"began"`
	Seconds float64        `json:"seconds"`
	Version string         `json:"version"`
	Command string         `json:"command"`
	Load    string         `json:"load"` // of the machine, at the beginning and at the end

	verdicts []float64
	byKind   map[Kind]*KindResult
}

// Times is from the fault to the verdicts of the rooms that it ended, in ms. In mode stop: from when the process
// went on.
type Times struct {
	P50 float64 `json:"p50_ms"`
	P99 float64 `json:"p99_ms"`
	Max float64 `json:"max_ms"`
}

// KindResult is the part of one kind of process.
type KindResult struct {
	Kind     Kind `json:"kind"`
	Syscalls int  `json:"syscalls"`
	Pairs    int  `json:"pairs"`
	Hit      int  `json:"hit"`
	Ended    int  `json:"rooms_ended"`
	Times

	verdicts []float64
}

// Time to verdict, p99, in ms.
const (
	// Target is what the product promises for a death that is proven at once.
	Target = 250
	// Busy is what a machine that does other things at the same time is given; a clock would take longer.
	Busy = 1500
)

// Err says what in the result must not be. In mode kill target is the most that the time to verdict may be, p99, in ms.
func (r *Result) Err(target float64) error {
	var errs []error
	if r.Violations > 0 {
		errs = append(errs, fmt.Errorf("%d pairs broke a promise", r.Violations))
	}
	if r.Mode == Kill && r.P99 > target {
		errs = append(errs, fmt.Errorf("time to verdict is %v ms at p99, more than %v", r.P99, target))
	}
	if r.Hit == 0 || 2*r.Hit < r.Pairs {
		errs = append(errs, fmt.Errorf("%d of %d pairs were hit: the sweep says little", r.Hit, r.Pairs))
	}
	return errors.Join(errs...)
}

func newResult(o Options, pairs []Pair) *Result {
	r := &Result{Mode: o.Mode, Known: len(pairs), Reasons: map[string]int{}, Seed: o.Seed, Began: time.Now().UTC().Truncate(time.Second), byKind: map[Kind]*KindResult{}, Load: load()}
	names := map[string]bool{}
	for _, p := range pairs {
		k := r.byKind[p.Kind]
		if k == nil {
			k = &KindResult{Kind: p.Kind}
			r.byKind[p.Kind] = k
		}
		if name := string(p.Kind) + p.Syscall; !names[name] {
			names[name] = true
			k.Syscalls++
		}
	}
	return r
}

func (r *Result) add(o Outcome) {
	if len(o.Faults) > 0 {
		r.Violations++
		if len(r.Broken) < maxBroken {
			r.Broken = append(r.Broken, o)
		}
	}
	k := r.byKind[o.Pair.Kind]
	if k == nil {
		return // the end of a cluster
	}
	r.Pairs++
	k.Pairs++
	if o.Hit {
		r.Hit++
		k.Hit++
	}
	r.Unharmed += len(o.Later)
	for reason, n := range o.Reasons {
		r.Reasons[reason] += n
	}
	r.verdicts = append(r.verdicts, o.Verdict...)
	k.verdicts = append(k.verdicts, o.Verdict...)
}

// load is how many threads wanted to run during the last minute.
func load() string {
	text, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(text), " ")
	return first
}

func (r *Result) finish() {
	r.Load = fmt.Sprintf("%s to %s on %d cores", r.Load, load(), runtime.NumCPU())
	r.Seconds = time.Since(r.Began).Round(time.Second).Seconds()
	r.Ended, r.Times = len(r.verdicts), timesOf(r.verdicts)
	for _, kind := range kinds {
		if k := r.byKind[kind]; k != nil {
			k.Ended, k.Times = len(k.verdicts), timesOf(k.verdicts)
			r.ByKind = append(r.ByKind, *k)
		}
	}
}

func timesOf(ms []float64) (t Times) {
	if len(ms) == 0 {
		return t
	}
	slices.Sort(ms)
	at := func(q float64) float64 { return float64(int(ms[int(q*float64(len(ms)-1))]*10)) / 10 }
	return Times{P50: at(0.5), P99: at(0.99), Max: at(1)}
}
