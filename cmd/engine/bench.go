package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/bench"
	"github.com/terminus-kv/terminus/internal/config"
)

func newBench(a *app) *cobra.Command {
	o := bench.Options{Backend: "tcp", Duration: bench.DefaultDuration, Seed: 1}
	c := &cobra.Command{
		Use:   "bench [NAME]",
		Short: "Measure this build on this machine, each figure beside its reference in the same run",
		Long:  benchLong(),
		Example: `  engine bench                    list the benchmarks
  engine bench boundary           one of them, with targets and references
  engine bench poll -o json`,
		Args:        arguments(0, 1, "at most one NAME"),
		ValidArgs:   benchNames(),
		Annotations: effect(starts),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return listBenches(a)
			}
			b, ok := bench.Find(args[0])
			if !ok {
				msg := fmt.Sprintf("unknown benchmark %q", args[0])
				if near := config.Suggest(args[0], benchNames()); near != "" {
					msg += fmt.Sprintf("; did you mean %q?", near)
				}
				return &usageError{errors.New(msg), cmd}
			}
			if o.Duration <= 0 {
				return &usageError{fmt.Errorf("--duration %s: want more than 0", o.Duration), cmd}
			}
			return runBench(cmd, a, b, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Backend, "backend", o.Backend, "transfer backend, where one is measured")
	f.StringVar(&o.Module, "module", "", "WASM guest, where one is measured; empty: the one of the source tree")
	f.DurationVar(&o.Duration, "duration", o.Duration, "about how long one measurement lasts; a benchmark has several")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of everything that is random")
	a.outputFlag(c)
	return c
}

func benchLong() string {
	var b strings.Builder
	b.WriteString("Without NAME the benchmarks are listed:\n")
	for _, m := range bench.All() {
		fmt.Fprintf(&b, "\n  %-9s %s", m.Name, m.Short)
	}
	b.WriteString("\n\nA missed target is shown, and does not change the exit code; docs/benchmarks.md says how to read the figures")
	return b.String()
}

func benchNames() []string {
	var names []string
	for _, b := range bench.All() {
		names = append(names, b.Name)
	}
	return names
}

// benchJSON is one line of the list.
type benchJSON struct {
	Name  string `json:"name"`
	Short string `json:"short"`
	Long  string `json:"long"`
}

func listBenches(a *app) error {
	var items []benchJSON
	for _, b := range bench.All() {
		items = append(items, benchJSON{b.Name, b.Short, b.Long})
	}
	return list(a, items, func(t *table) {
		t.row("NAME", "MEASURES")
		for _, b := range items {
			t.row(b.Name, b.Short)
		}
	})
}

// runBench measures in a scratch directory of its own.
func runBench(cmd *cobra.Command, a *app, b bench.Bench, o bench.Options) (err error) {
	if o.Engine, err = os.Executable(); err != nil {
		return fmt.Errorf("find the engine's own binary: %w", err)
	}
	if o.Dir, err = os.MkdirTemp("", "bench"); err != nil {
		return fmt.Errorf("scratch directory: %w; point TMPDIR at a directory with a short path", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.Dir)) }()
	o.Stderr = a.stderr
	fmt.Fprintf(a.stderr, "%s: %s\n%s\n", b.Name, b.Long, bench.Machine())
	report, err := b.Measure(cmd.Context(), o)
	if err != nil {
		return err
	}
	return a.print(report, func(t *table) { benchRows(t, report) })
}

// benchRows is the table of a report.
func benchRows(t *table, report bench.Report) {
	t.row("FIGURE", "VALUE", "UNIT", "TARGET", "VERDICT", "REFERENCE", "ITS VALUE", "RATIO", "NOTE")
	for _, r := range report.Results {
		target, verdict := "", cell{}
		if met, ok := r.Met(); ok {
			sign := "<="
			if r.Better == bench.Higher {
				sign = ">="
			}
			target = sign + " " + figure(r.Target.Limit)
			if r.Target.Of == bench.OfRatio {
				target += "x"
			}
			if verdict = (cell{"met", green}); !met {
				verdict = cell{"missed", red}
			}
		}
		reference, its, ratio := "", "", ""
		if r.Reference != nil {
			reference, its = r.Reference.Name, figure(r.Reference.Value)
		}
		if r.Ratio != nil {
			ratio = figure(*r.Ratio) + "x"
		}
		t.row(r.Name, figure(r.Value), r.Unit, target, verdict, reference, its, ratio, r.Note)
	}
}

// figure writes a number with three significant digits, a large one in full.
func figure(v float64) string {
	if math.Abs(v) >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// benchChild is the whole program of a benchmark's own process.
func benchChild(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := bench.Child(ctx, args); err != nil {
		fmt.Fprintf(os.Stderr, "engine %s: %v\n", bench.ChildCommand, err)
		return exitFailed
	}
	return exitOK
}
