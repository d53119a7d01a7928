package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/sim"
)

func newSim(a *app) *cobra.Command {
	c := group(&cobra.Command{
		Use:   "sim",
		Short: "Run clusters of the shipped core on virtual time, under faults, and check every promise",
		Long:  simLong(),
		Example: `  engine sim run --schedules 100000
  engine sim repro 4711
  engine sim policies`,
	})
	c.AddCommand(newSimRun(a), newSimRepro(a), newSimPolicies(a))
	return c
}

func simLong() string {
	var b strings.Builder
	b.WriteString(`Each schedule is a cluster of two to eight engines with workers, plugins, links and a router, all drawn
from one seed: what they do, when, and what goes wrong. The engines run the shipped core, the rest is simulated.
The same seed gives the same history. Checked against what really happened:
`)
	for _, p := range sim.Promises() {
		fmt.Fprintf(&b, "\n  %-4s %s", p, p.Text())
	}
	return b.String()
}

func newSimRun(a *app) *cobra.Command {
	cfg := sim.Config{Schedules: 100_000, Seed: 1, Violations: 10}
	c := &cobra.Command{
		Use:   "run",
		Short: "Run many schedules; exit 1 if one breaks a promise",
		Example: `  engine sim run
  engine sim run --schedules 1000000 --seed 5000000 -o json`,
		Args:        arguments(0, 0, "no arguments"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Schedules < 1 {
				return &usageError{fmt.Errorf("--schedules %d: want at least 1", cfg.Schedules), cmd}
			}
			if cfg.Workers < 0 {
				return &usageError{fmt.Errorf("--parallel %d: want at least 1, or 0 for one a processor", cfg.Workers), cmd}
			}
			if cfg.Violations < 1 {
				return &usageError{fmt.Errorf("--violations %d: want at least 1", cfg.Violations), cmd}
			}
			if a.colour { // somebody is watching
				last := time.Now()
				cfg.Progress = func(done int) {
					if time.Since(last) > time.Second {
						last = time.Now()
						fmt.Fprintf(a.stderr, "\r%d of %d schedules", done, cfg.Schedules)
					}
				}
				defer fmt.Fprint(a.stderr, "\r\033[K")
			}
			res := sim.Run(cmd.Context(), cfg)
			res.Version, res.Command = thisBuild().Version, fmt.Sprintf("engine sim run --schedules %d --seed %d", cfg.Schedules, cfg.Seed)
			if err := a.print(res, func(t *table) { simRows(t, res) }); err != nil {
				return err
			}
			for i := range res.Broken {
				fmt.Fprintf(a.stderr, "%s\n  tell it: engine sim repro %d\n", &res.Broken[i], res.Broken[i].Seed)
			}
			switch {
			case res.Violations > 0:
				return &reported{exitFailed}
			case res.Schedules < cfg.Schedules:
				return fmt.Errorf("interrupted after %d of %d schedules", res.Schedules, cfg.Schedules)
			}
			return nil
		},
	}
	f := c.Flags()
	f.IntVar(&cfg.Schedules, "schedules", cfg.Schedules, "how many")
	f.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "of the first schedule; the others follow by ones")
	f.IntVar(&cfg.Workers, "parallel", 0, "schedules at once; 0: one a processor")
	f.IntVar(&cfg.Violations, "violations", cfg.Violations, "stop after so many schedules that break a promise")
	a.outputFlag(c)
	return c
}

func simRows(t *table, r *sim.Result) {
	t.row("FIGURE", "VALUE")
	n := func(name string, v any) { t.row(name, fmt.Sprint(v)) }
	n("schedules", r.Schedules)
	n("distinct histories", r.Distinct)
	n("events", r.Events)
	n("faults", r.Faults)
	n("rooms opened", r.Rooms)
	n("virtual time", time.Duration(r.Virtual*1e9).Round(time.Second))
	if r.Violations > 0 {
		t.row("violations", cell{strconv.Itoa(r.Violations), red})
	} else {
		t.row("violations", cell{"0", green})
	}
	for _, v := range slices.Sorted(maps.Keys(r.Verdicts)) {
		n("  verdict "+v, r.Verdicts[v])
	}
	for _, k := range slices.Sorted(maps.Keys(r.FaultKinds)) {
		n("  fault "+k, r.FaultKinds[k])
	}
	for _, k := range slices.Sorted(maps.Keys(r.Happened)) {
		n("  "+k, r.Happened[k])
	}
	n("hash", r.Hash)
}

func newSimRepro(a *app) *cobra.Command {
	var less sim.Less
	var shrink bool
	c := &cobra.Command{
		Use:   "repro SEED",
		Short: "Tell the story of one schedule; exit 1 if it breaks a promise",
		Long: `Tells what happens in the schedule of a seed, one line an event. A schedule that breaks a promise is told
without the faults and requests that do not matter for it (--shrink=false: whole)`,
		Example: `  engine sim repro 4711
  engine sim repro 4711 --without-faults 0,2`,
		Args:        arguments(1, 1, "one SEED"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, args []string) error {
			seed, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil {
				return &usageError{fmt.Errorf("SEED %q: want a number as engine sim run prints it", args[0]), cmd}
			}
			faults, requests := sim.Planned(seed)
			if err := errors.Join(planned(seed, "fault", less.Faults, faults), planned(seed, "request", less.Requests, requests)); err != nil {
				return &usageError{err, cmd}
			}
			if shrink && len(less.Faults)+len(less.Requests) == 0 {
				less, _ = sim.Shrink(seed)
			}
			v := sim.Repro(seed, less, a.stdout)
			if len(less.Faults)+len(less.Requests) > 0 {
				fmt.Fprintf(a.stderr, "left out:%s%s\n", numbers(" --without-faults ", less.Faults), numbers(" --without-requests ", less.Requests))
			}
			if v == nil {
				fmt.Fprintln(a.stdout, "This schedule breaks no promise.")
				return nil
			}
			return errors.New(v.String())
		},
	}
	f := c.Flags()
	f.BoolVar(&shrink, "shrink", true, "leave out what does not matter for the broken promise")
	f.IntSliceVar(&less.Faults, "without-faults", nil, "leave these faults out, by number")
	f.IntSliceVar(&less.Requests, "without-requests", nil, "leave these requests out, by number")
	return c
}

// planned refuses numbers that the schedule does not have; what is fault or request.
func planned(seed uint64, what string, list []int, have int) error {
	for _, n := range list {
		switch {
		case n >= 0 && n < have:
		case have == 0:
			return fmt.Errorf("--without-%ss %d: the schedule of seed %d has no %s", what, n, seed, what)
		default:
			return fmt.Errorf("--without-%ss %d: the schedule of seed %d has %ss 0 to %d", what, n, seed, what, have-1)
		}
	}
	return nil
}

func numbers(flag string, list []int) string {
	if len(list) == 0 {
		return ""
	}
	return flag + strings.Trim(strings.ReplaceAll(fmt.Sprint(list), " ", ","), "[]")
}
