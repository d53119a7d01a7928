package sim

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Config is a run of many schedules.
type Config struct {
	Schedules int
	Seed      uint64 // of the first schedule; the others follow by ones
	Workers   int    // at once; 0: as many as there are processors
	// Violations ends the run when so many schedules broke a promise; 0 means 1.
	Violations int
	// Progress, if set, is told now and then how many schedules are done.
	Progress func(done int)
}

// Result is what a run found.
type Result struct {
	Schedules  int     `json:"schedules"`
	Distinct   int     `json:"distinct"` // histories, by their hash
	Events     uint64  `json:"events"`
	Faults     int     `json:"faults"`
	Virtual    float64 `json:"virtual_seconds"`
	Violations int     `json:"violations"`

	Version string    `json:"version"` // of the program, as its build names it
	Command string    `json:"command"` // that does the same again
	Began   time.Time `json:"began"`

	Seed       uint64          `json:"seed"`
	Rooms      int             `json:"rooms"` // opens that were accepted, of both roles
	FaultKinds map[string]int  `json:"fault_kinds"`
	Happened   map[string]int  `json:"happened"` // what faults of links and plugins did: see totals
	Verdicts   map[string]int  `json:"verdicts"`
	Broken     []Violation     `json:"broken,omitempty"`
	Promises   map[Promise]int `json:"broken_promises,omitempty"`
	Took       time.Duration   `json:"took_ns"`
	Hash       string          `json:"hash"` // of all histories: the same seeds give the same
}

// Run runs schedules until all are done, enough are broken, or ctx ends.
func Run(ctx context.Context, cfg Config) *Result {
	if cfg.Workers == 0 {
		cfg.Workers = runtime.GOMAXPROCS(0)
	}
	if cfg.Violations == 0 {
		cfg.Violations = 1
	}
	// A world is small and short-lived: collecting seldom costs a few hundred megabytes and saves a third of the time.
	defer debug.SetGCPercent(debug.SetGCPercent(800))
	began := time.Now()
	res := &Result{Began: began.UTC().Truncate(time.Second), Seed: cfg.Seed, FaultKinds: map[string]int{}, Happened: map[string]int{}, Verdicts: map[string]int{}, Promises: map[Promise]int{}}
	hashes := make([]uint64, cfg.Schedules)
	var next, done, broken atomic.Int64
	var mu sync.Mutex
	var work sync.WaitGroup
	for range cfg.Workers {
		work.Go(func() {
			var w world
			var p plan
			for ctx.Err() == nil && broken.Load() < int64(cfg.Violations) {
				i := next.Add(1) - 1
				if i >= int64(cfg.Schedules) {
					break
				}
				p.draw(cfg.Seed + uint64(i))
				w.reset(&p, nil)
				if v := w.run(); v != nil {
					broken.Add(1)
					mu.Lock()
					res.Broken = append(res.Broken, *v)
					res.Promises[v.Promise]++
					mu.Unlock()
				}
				hashes[i] = w.hash
				w.total.add(&w)
				if n := done.Add(1); cfg.Progress != nil && n%1024 == 0 {
					cfg.Progress(int(n))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			w.total.into(res)
		})
	}
	work.Wait()
	res.Schedules, res.Violations, res.Took = int(done.Load()), len(res.Broken), time.Since(began)
	slices.SortFunc(res.Broken, func(a, b Violation) int { return int(a.Seed) - int(b.Seed) })
	var all uint64
	for _, h := range hashes {
		all = mix(all ^ h)
	}
	res.Hash = fmt.Sprintf("%016x", all)
	slices.Sort(hashes)
	hashes = slices.Compact(hashes)
	if res.Distinct = len(hashes); len(hashes) > 0 && hashes[0] == 0 {
		res.Distinct-- // schedules that did not run
	}
	return res
}

// totals are of the schedules of one worker of Run.
type totals struct {
	events   uint64
	faults   [numFaults]int
	virtual  int64
	rooms    int
	verdicts map[string]int

	lost      int // frames that were on their way when their stream broke
	overtaken int // frames that arrived before some that were sent earlier
	doubled   int // frames that arrived twice
	late      int // pages that landed after their op had ended
	retired   int // plugin epochs beside which a newer one came up
	mapped    int // pages of which parts became parts of a page that is laid out differently
	replaced  int // plugin epochs that a core wanted replaced
	cut       int // plugin epochs that a core wanted ended though something used them: the bound had passed
	spanned   int // rooms that succeeded at more than one engine a side
	refused   int // pages that would have, of writers that were cut off or on memory that was sealed
}

func (t *totals) add(w *world) {
	if t.verdicts == nil {
		t.verdicts = map[string]int{}
	}
	t.events += w.events
	t.virtual += w.now
	for i := range w.plan.faults {
		t.faults[w.plan.faults[i].kind]++
	}
	t.rooms += len(w.byOwn)
	for _, v := range w.verdict {
		t.verdicts[v.reason.String()]++
	}
}

func (t *totals) into(r *Result) {
	r.Events += t.events
	r.Virtual += float64(t.virtual) / 1e9
	r.Rooms += t.rooms
	for what, n := range map[string]int{
		"frames-lost": t.lost, "frames-overtaken": t.overtaken, "frames-doubled": t.doubled, "pages-late": t.late, "pages-mapped": t.mapped, "pages-refused": t.refused,
		"epochs-retired": t.retired, "epochs-replaced": t.replaced, "epochs-cut": t.cut,
		"rooms-spanning": t.spanned,
	} {
		r.Happened[what] += n
	}
	for k, n := range t.faults {
		r.Faults += n
		if n > 0 {
			r.FaultKinds[faultKind(k).String()] += n
		}
	}
	for v, n := range t.verdicts {
		r.Verdicts[v] += n
	}
}

// Repro runs one schedule, without the faults and requests that less leaves out, and tells its story to out
// if that is not nil. It returns the promise that it breaks, nil if it breaks none.
func Repro(seed uint64, less Less, out io.Writer) *Violation {
	var w world
	p := draw(seed)
	less.apply(p)
	if out != nil {
		fmt.Fprintln(out, p)
	}
	w.reset(p, out)
	return w.run()
}

// Planned returns how many faults and requests the schedule of seed has; they are numbered from 0.
func Planned(seed uint64) (faults, requests int) {
	p := draw(seed)
	return len(p.faults), len(p.requests)
}

// Less leaves out faults and requests of a plan, by their numbers.
type Less struct {
	Faults, Requests []int
}

func (l Less) apply(p *plan) {
	for _, i := range l.Faults {
		if i >= 0 && i < len(p.faults) {
			p.faults[i].kind = noFault
		}
	}
	for _, i := range l.Requests {
		if i >= 0 && i < len(p.requests) {
			p.requests[i].out = true
		}
	}
}

// Shrink leaves out faults and requests as long as the schedule breaks the same promise. It returns what was
// left out, and the violation of what is left; nil if the whole schedule breaks none.
func Shrink(seed uint64) (Less, *Violation) {
	var less Less
	found := Repro(seed, less, nil)
	if found == nil {
		return less, nil
	}
	p := draw(seed)
	try := func(l Less) bool {
		v := Repro(seed, l, nil)
		if v == nil || v.Promise != found.Promise {
			return false
		}
		less, found = l, v
		return true
	}
	// Halves first, then one by one.
	part := func(n int, with func(Less, []int) Less) {
		left := make([]int, n)
		for i := range left {
			left[i] = i
		}
		for size := n; size > 0; size /= 2 {
			for i := 0; i < len(left); {
				some := left[i:min(i+size, len(left))]
				if try(with(less, some)) {
					left = slices.Delete(slices.Clone(left), i, i+len(some))
				} else {
					i += size
				}
			}
		}
	}
	part(len(p.requests), func(l Less, some []int) Less {
		return Less{l.Faults, slices.Concat(l.Requests, some)}
	})
	part(len(p.faults), func(l Less, some []int) Less {
		return Less{slices.Concat(l.Faults, some), l.Requests}
	})
	slices.Sort(less.Faults)
	slices.Sort(less.Requests)
	return less, found
}
