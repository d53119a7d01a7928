// Package bench holds the benchmarks of `engine bench`. Each measures one promise of the product on the
// shipped code, and where a figure has a reference, measures that in the same run: on a machine that others
// use too only the ratio of the two can be trusted.
//
// A benchmark is one Bench value in a file of its own and one entry of All.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Better says which way a figure improves.
type Better string

// The two ways.
const (
	Higher Better = "higher"
	Lower  Better = "lower"
)

// Result is one figure of a benchmark.
type Result struct {
	Name   string  `json:"name"` // [a-z0-9_]+, unique within the benchmark
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Better Better  `json:"better"`
	// Reference is what Value is compared with, measured in the same run; nil where none is named.
	Reference *Reference `json:"reference"`
	// Ratio is Value / Reference.Value; nil without a reference. Bench.Measure sets it.
	Ratio *float64 `json:"ratio"`
	// Target is the bound that is promised; nil for figures that only inform.
	Target *Target `json:"target,omitempty"`
	// Samples is how many measurements stand behind Value; 0: not a sample.
	Samples int `json:"samples,omitempty"`
	// Note says what one has to know to read the figure: one line.
	Note string `json:"note,omitempty"`
}

// Reference is another program or method that does the same work.
type Reference struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"` // in the unit of the result
}

// Target bounds Value or Ratio, from above or below as Better says.
type Target struct {
	Of    string  `json:"of"` // OfValue or OfRatio
	Limit float64 `json:"limit"`
}

// What a target bounds.
const (
	OfValue = "value"
	OfRatio = "ratio"
)

// Report is what `engine bench NAME -o json` prints; the headline comes first.
type Report struct {
	Results []Result `json:"results"`
}

// Met tells whether the target is met; ok is false when there is none.
func (r *Result) Met() (met, ok bool) {
	if r.Target == nil {
		return false, false
	}
	v := r.Value
	if r.Target.Of == OfRatio {
		if r.Ratio == nil {
			return false, false
		}
		v = *r.Ratio
	}
	if r.Better == Higher {
		return v >= r.Target.Limit, true
	}
	return v <= r.Target.Limit, true
}

// check says what is wrong with the shape of a result.
func (r *Result) check() error {
	finite := func(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
	switch {
	case r.Name == "" || strings.Trim(r.Name, "abcdefghijklmnopqrstuvwxyz0123456789_") != "":
		return fmt.Errorf("result %q: want a name of a-z, 0-9 and _", r.Name)
	case r.Unit == "":
		return fmt.Errorf("result %s has no unit", r.Name)
	case r.Better != Higher && r.Better != Lower:
		return fmt.Errorf("result %s: better is %q", r.Name, r.Better)
	case !finite(r.Value):
		return fmt.Errorf("result %s is %v", r.Name, r.Value)
	case r.Reference != nil && (r.Reference.Name == "" || !finite(r.Reference.Value) || r.Reference.Value <= 0):
		return fmt.Errorf("result %s: reference %q is %v", r.Name, r.Reference.Name, r.Reference.Value)
	case r.Target != nil && r.Target.Of != OfValue && r.Target.Of != OfRatio:
		return fmt.Errorf("result %s: the target is of %q", r.Name, r.Target.Of)
	case r.Target != nil && r.Target.Of == OfRatio && r.Reference == nil:
		return fmt.Errorf("result %s: a target of the ratio needs a reference", r.Name)
	}
	return nil
}

// Options is what a benchmark may use.
type Options struct {
	// Engine is a binary that runs Child when its first argument is ChildCommand: the engine, or the test
	// binary of a test.
	Engine string
	// Dir is an empty directory with a short path, for sockets and files. The caller removes it.
	Dir string
	// Backend is the transfer backend where one is measured.
	Backend string
	// Module is the WASM guest where one is measured; empty: one that is built from the source tree.
	Module string
	// Duration is about how long one measurement lasts; a benchmark has several. It also scales down what
	// is measured by counts.
	Duration time.Duration
	Seed     uint64
	Stderr   io.Writer // progress, one line a step
}

// DefaultDuration is Options.Duration of `engine bench`.
const DefaultDuration = 3 * time.Second

// progress says on Stderr what goes on.
func (o *Options) progress(format string, args ...any) {
	if o.Stderr != nil {
		fmt.Fprintf(o.Stderr, format+"\n", args...)
	}
}

// Bench is one benchmark.
type Bench struct {
	Name  string // the argument of `engine bench`
	Short string // one line of the list
	Long  string // what is measured, and against what: shown before a run; no full stop at its end
	// Run measures. It returns when ctx ends, and leaves no process, socket or file outside Options.Dir
	// behind, whatever happens.
	Run func(ctx context.Context, o Options) ([]Result, error)
	// Child is run in a process of its own, which Options.child starts; nil when there is none.
	Child func(ctx context.Context, args []string) error
}

// All returns the benchmarks in the order of the list.
func All() []Bench {
	return []Bench{
		step,
		million,
		boundary,
		poll,
		transfer,
		rooms,
		faults,
		wasm,
	}
}

// Find returns the benchmark of that name.
func Find(name string) (Bench, bool) {
	for _, b := range All() {
		if b.Name == name {
			return b, true
		}
	}
	return Bench{}, false
}

// Measure runs the benchmark and completes and checks what it returns.
func (b Bench) Measure(ctx context.Context, o Options) (Report, error) {
	results, err := b.Run(ctx, o)
	if err != nil {
		return Report{}, fmt.Errorf("bench %s: %w", b.Name, err)
	}
	if len(results) == 0 {
		return Report{}, fmt.Errorf("bench %s returned no result", b.Name)
	}
	seen := make(map[string]bool, len(results))
	for i := range results {
		r := &results[i]
		if err := r.check(); err != nil {
			return Report{}, fmt.Errorf("bench %s: %w", b.Name, err)
		}
		if seen[r.Name] {
			return Report{}, fmt.Errorf("bench %s: result %s comes twice", b.Name, r.Name)
		}
		seen[r.Name] = true
		if r.Reference != nil {
			ratio := r.Value / r.Reference.Value
			r.Ratio = &ratio
		}
	}
	return Report{Results: results}, nil
}

// ChildCommand is the hidden first argument of a process that a benchmark starts: ChildCommand NAME ARGS.
const ChildCommand = "bench-child"

// Child runs the child part of a benchmark: args are what follows ChildCommand.
func Child(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("want the name of a benchmark")
	}
	b, ok := Find(args[0])
	if !ok || b.Child == nil {
		return fmt.Errorf("no benchmark %q has a child process", args[0])
	}
	return b.Child(ctx, args[1:])
}

// child prepares, and does not start, the Child of a benchmark in a process of its own. The end of ctx kills
// it; so does the end of this process.
func (o *Options) child(ctx context.Context, bench string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, o.Engine, append([]string{ChildCommand, bench}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 3 * time.Second // a grandchild that holds the pipes does not hold us
	cmd.Env = os.Environ()
	return cmd
}
