// Package sweep kills the processes of a small cluster at every moment that a syscall marks, and looks whether the
// product's promises hold.
//
// A clean run under strace gives the pairs (process, syscall, n) of two engines, their plugins and two workers; then each
// is killed there once, by strace's own fault injection, or stopped. After each, every room of the workers that are left
// must be terminal, no page may hold what it should not, and nothing may be left over. Workers are processes of their own
// (sweepworker), engines what a user runs.
//
// n is counted from when strace is attached: after the process has said Hello, is idle, and before the play begins. strace
// counts for each thread; the pair is the first thread that comes to its nth call. What a clean run counted is no promise
// for the next: a process may end its part before it comes there. Such pairs are counted as not hit, never as passed.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"slices"
	"sync"
	"time"
)

// Options is what a sweep takes.
type Options struct {
	Engine, Worker string   // the programs
	WorkerArgs     []string // more for the worker
	Mode           Mode
	Lanes          []string // shm, tcp
	Kinds          []Kind   // empty: all
	Pairs          int      // so many are drawn by Seed; 0: all
	Seed           uint64
	Parallel       int    // clusters at once
	CleanRuns      int    // the pairs are those of so many
	Mutant         string // a bug that the programs have to have, if they were built with it
	Progress       io.Writer
	Verbose        bool
	Enough         int       // so many violations end the sweep; 0: none does
	Until          time.Time // no pair is begun after it; zero: never
}

// Run sweeps. Its error says that it could not; what it found wrong with the product is in the result.
func Run(ctx context.Context, o Options) (*Result, error) {
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	program, err := exec.LookPath(tracerProgram)
	if err != nil {
		return nil, err
	}
	var pairs []Pair
	for _, lane := range o.Lanes {
		counts, err := observe(ctx, &o, program, lane)
		if broken := (*brokenError)(nil); errors.As(err, &broken) {
			r := newResult(o, nil)
			r.add(Outcome{Pair: Pair{Lane: lane}, Mode: o.Mode, Faults: broken.faults})
			r.finish()
			return r, nil
		}
		if err != nil {
			return nil, fmt.Errorf("clean run, lane %s: %w", lane, err)
		}
		pairs = append(pairs, pairsOf(lane, counts)...)
	}
	if len(o.Kinds) > 0 {
		pairs = slices.DeleteFunc(pairs, func(p Pair) bool { return !slices.Contains(o.Kinds, p.Kind) })
	}
	r := newResult(o, pairs)
	rng := rand.New(rand.NewPCG(o.Seed, 0x6b696c6c))
	rng.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
	if o.Pairs > 0 && o.Pairs < len(pairs) {
		pairs = pairs[:o.Pairs]
	}
	var mu sync.Mutex // of r and what is left of pairs
	todo := map[string][]Pair{}
	for _, p := range pairs {
		todo[p.Lane] = append(todo[p.Lane], p)
	}
	take := func(lane string) (Pair, bool) {
		mu.Lock()
		defer mu.Unlock()
		l := todo[lane]
		if len(l) == 0 || !o.Until.IsZero() && time.Now().After(o.Until) || o.Enough > 0 && r.Violations >= o.Enough {
			return Pair{}, false
		}
		todo[lane] = l[1:]
		return l[0], true
	}
	add := func(out Outcome) {
		mu.Lock()
		defer mu.Unlock()
		r.add(out)
		if o.Verbose {
			fmt.Fprintf(o.Progress, "%s %s: hit %v, %d ended, %v; slowest %s\n", out.Mode, out.Pair, out.Hit, len(out.Verdict), out.Took.Round(time.Millisecond), out.Slowest)
		}
		for _, f := range out.Faults {
			fmt.Fprintf(o.Progress, "%s %s: %s\n", out.Mode, out.Pair, f)
		}
		if n := r.Pairs; n%100 == 0 {
			fmt.Fprintf(o.Progress, "%d of %d pairs, %d hit, %d violations\n", n, len(pairs), r.Hit, r.Violations)
		}
	}
	var clusters sync.WaitGroup
	errs := make([]error, o.Parallel)
	for i := range o.Parallel {
		clusters.Go(func() {
			// Lanes are taken one after the other, each cluster beginning with another.
			for k := range o.Lanes {
				if errs[i] = sweepLane(ctx, &o, program, o.Lanes[(i+k)%len(o.Lanes)], take, add); errs[i] != nil {
					return
				}
			}
		})
	}
	clusters.Wait()
	r.finish()
	return r, errors.Join(errs...)
}

// observe counts the syscalls of each kind of process in clean runs.
func observe(ctx context.Context, o *Options, program, lane string) (map[Kind]map[string]int, error) {
	c, err := newCluster(ctx, o, lane, o.Mode)
	if err != nil {
		return nil, err
	}
	defer c.close()
	counts := map[Kind]map[string]int{}
	for range o.CleanRuns {
		tracers := map[Kind]*tracer{}
		for _, k := range kinds {
			if tracers[k], err = attach(program, c.pid(k), "trace="+passed); err != nil {
				return nil, err
			}
		}
		t := newTrial(c, Pair{}, "")
		t.run(ctx, nil)
		for _, k := range kinds {
			tracers[k].detach()
			if counts[k] == nil {
				counts[k] = map[string]int{}
			}
			for name, n := range tracers[k].syscalls() {
				counts[k][name] = max(counts[k][name], n)
			}
		}
		if t.settle(ctx); len(t.out.Faults) > 0 {
			return nil, &brokenError{t.out.Faults}
		}
	}
	return counts, nil
}

// tries is how often a pair is tried until it is hit.
const tries = 3

// sweepLane takes pairs until there are none. After a fault it goes on with a new cluster, since the old one may not
// be whole.
func sweepLane(ctx context.Context, o *Options, program, lane string, take func(string) (Pair, bool), add func(Outcome)) (err error) {
	var c *cluster
	defer func() {
		if c != nil && err == nil {
			if faults := c.finish(ctx); len(faults) > 0 {
				add(Outcome{Mode: o.Mode, Pair: Pair{Lane: lane, Syscall: "at the end of a cluster"}, Faults: faults})
			}
		} else if c != nil {
			c.close()
		}
	}()
	for ctx.Err() == nil {
		p, ok := take(lane)
		if !ok {
			return nil
		}
		if c == nil {
			c, err = newCluster(ctx, o, lane, o.Mode)
			if broken := (*brokenError)(nil); errors.As(err, &broken) {
				add(Outcome{Pair: p, Mode: o.Mode, Faults: broken.faults})
				err = nil
				continue
			}
			if err != nil {
				return err
			}
		}
		var out Outcome
		// Which thread does what is the scheduler's business: a pair that was not hit may be hit the next time.
		for range tries {
			if out, err = c.try(ctx, program, p); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
			if out.Hit || len(out.Faults) > 0 {
				break
			}
		}
		if len(out.Faults) > 0 {
			out.Faults = append(out.Faults, c.lastWords())
			c.close()
			c = nil
		}
		add(out)
	}
	return context.Cause(ctx)
}

// try does what the mode says at a pair.
func (c *cluster) try(ctx context.Context, program string, p Pair) (Outcome, error) {
	began := time.Now()
	signal := "SIGSTOP"
	if c.mode == Kill {
		signal = "SIGKILL"
	}
	tr, err := attach(program, c.pid(p.Kind), "trace="+p.Syscall, fmt.Sprintf("inject=%s:signal=%s:when=%d", p.Syscall, signal, p.Nth))
	if err != nil {
		return Outcome{}, err
	}
	t := newTrial(c, p, c.mode)
	t.run(ctx, tr)
	tr.detach()
	t.late(tr)
	t.settle(ctx)
	t.out.Took = time.Since(began)
	return t.out, nil
}
