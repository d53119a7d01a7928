package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/internal/regular"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/report"
)

// exitBroken: the conformance suite itself broke, or what it has to say could not be written.
const exitBroken = 4

// unwritten says why a report is missing or cut short. Whatever the verdict is, it has not arrived.
func (a *app) unwritten(err error) error {
	fmt.Fprintf(a.stderr, "engine: %s\n", printable(err.Error(), ""))
	return &reported{exitBroken}
}

// conformanceRun is one command line.
type conformanceRun struct {
	plugin    pluginRef
	profiles  []string
	run, skip []string
	known     []string
	seed      uint64
	scale     float64
	repeat    int
	fresh     bool
	results   string
	traces    bool
	format    string
}

var runFormats = []string{"text", "json", "junit", "yaml", "html"}

func newConformanceRun(a *app) *cobra.Command {
	o := conformanceRun{scale: 1, repeat: 1, format: "text"}
	c := &cobra.Command{
		Use:   "run PLUGIN [-- ARGS...]",
		Short: "Run the conformance suite against a plugin",
		Long: `Run the conformance suite against a plugin: two processes of it, real memory, every frame and byte checked.
PLUGIN is ` + pluginhost.RefUsage + `.
The report goes to stdout, progress to stderr.

Exit codes:
  0  conformant; also when cases were left out (--run, --skip, --profile) and no other failed: the report then
     says PARTIAL, which decides nothing
  1  not conformant, or interrupted
  2  wrong usage or configuration, or no case is left to run
  3  the plugin never became ready
  4  the suite itself broke, or a report could not be written

--known-failing names cases that must fail: they run, and a pass, or a pattern that matches no case, makes the
plugin not conformant. A pattern is a case ID in which * stands for any text within a word and ** for any words`,
		Example: `  engine conformance run exec:bin/engine-plugin-mine
  engine conformance run tcp --results results
  engine conformance run exec:./backend --run 'abort/*' --seed 7 -- --verbose
  engine conformance run mine -c engine.yaml --known-failing @known-failing.txt -o junit >junit.xml
  engine conformance run wasm:backend.wasm --profile transfer-core,transfer-layout`,
		Args:        onePlugin,
		Annotations: effect(starts),
		RunE:        func(cmd *cobra.Command, args []string) error { return o.do(cmd, a, args) },
	}
	f := c.Flags()
	f.StringSliceVar(&o.profiles, "profile", nil, "profiles to run: "+strings.Join(profileNames(), ", "))
	f.StringSliceVar(&o.run, "run", nil, "patterns of cases to run; the others are left out")
	f.StringSliceVar(&o.skip, "skip", nil, "patterns of cases to leave out")
	f.StringArrayVar(&o.known, "known-failing", nil, "pattern of cases that must fail, or @FILE with one a line; # starts a comment")
	f.Uint64Var(&o.seed, "seed", 0, "of everything that is random; 0 draws one")
	f.Float64Var(&o.scale, "scale", o.scale, "multiplies every bound, for slow machines")
	f.IntVar(&o.repeat, "repeat", o.repeat, "runs, each with the next seed; the first that is not good is the last; JSON and JUnit report all, the others the last")
	f.BoolVar(&o.fresh, "fresh", false, "give every case plugin processes of its own")
	f.StringVar(&o.results, "results", "", "directory for report.txt, results.jsonl, junit.xml, report.yaml, report.html and traces of failures")
	f.BoolVar(&o.traces, "trace", false, "keep the traces of all cases in --results")
	f.StringVar(&o.plugin.options, "options", "", "options of the plugin as a JSON object, in place of the configuration's")
	f.StringSliceVarP(&o.plugin.configs, "config", "c", nil, "configuration files of an engine; PLUGIN may be a name under plugins")
	f.VarP(&choice{&o.format, runFormats}, "output", "o", strings.Join(runFormats, ", "))
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(runFormats, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions(profileNames(), cobra.ShellCompDirectiveNoFileComp))
	for _, name := range []string{"run", "skip", "known-failing"} {
		_ = c.RegisterFlagCompletionFunc(name, completeCases)
	}
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	_ = c.MarkFlagDirname("results")
	return c
}

// do runs the suite, writes what was asked for and returns what gives the exit code.
func (o *conformanceRun) do(cmd *cobra.Command, a *app, args []string) error {
	cfg, err := o.suite()
	for _, name := range []string{"run", "skip", "profile"} {
		if values, _ := cmd.Flags().GetStringSlice(name); err == nil && cmd.Flags().Changed(name) && len(values) == 0 {
			err = fmt.Errorf("--%s is empty, which would leave nothing out; leave the flag away if that is meant", name)
		}
	}
	if err != nil {
		return &usageError{err, cmd}
	}
	spec, err := o.plugin.spec(a, cmd, args)
	if err != nil {
		return err
	}
	ref := args[0]
	for i, arg := range args[1:] {
		if i == 0 {
			ref += " --"
		}
		ref += " " + report.Quote(arg)
	}
	cfg.Carrier = conformance.FromSpec(ref, spec)
	p := &progress{w: a.stderr, terminal: isTerminal(a.stderr), total: len(conformance.Cases())}
	cfg.OnStart, cfg.OnResult = p.start, p.result
	var rep *report.Report
	var before []*report.Report
	for i := range o.repeat {
		p.n = 0
		res, err := conformance.Run(cmd.Context(), cfg)
		p.clear()
		switch {
		case conformance.NotReady(err):
			return a.notReady(errors.New(strings.Join(strings.Fields(err.Error()), " ")))
		case errors.Is(err, context.Canceled):
			return errors.New("interrupted before the first case")
		case err != nil:
			return &usageError{err, cmd}
		}
		if why := res.NothingRan(); why != "" && !res.Interrupted {
			return &usageError{fmt.Errorf("no case is left to run: none of those that were chosen can run here (%s)", printable(why, "")), cmd}
		}
		rep = &report.Report{Results: res, Engine: thisBuild().Version, Flags: o.flags(), Before: before}
		if o.repeat > 1 {
			fmt.Fprintf(a.stderr, "run %d of %d: %s", i+1, o.repeat, rep.Conclusion())
		}
		if verdictCode(rep) != exitOK {
			break
		}
		cfg.Seed = res.Seed + 1
		for _, c := range res.Cases {
			c.Trace = nil // of a good run that is not the last: no report shows it, and there may be many
		}
		before = append(before, rep)
	}
	if o.results != "" {
		if err := rep.WriteDir(o.results, o.traces); err != nil {
			return a.unwritten(err)
		}
		fmt.Fprintf(a.stderr, "reports are in %s\n", o.results)
	}
	if err := o.print(a, rep); err != nil {
		return a.unwritten(err)
	}
	if code := verdictCode(rep); code != exitOK {
		return &reported{code}
	}
	return nil
}

func (o *conformanceRun) print(a *app, r *report.Report) error {
	switch o.format {
	case "json":
		return r.JSONLines(a.stdout)
	case "junit":
		return r.JUnit(a.stdout)
	case "yaml":
		return r.YAML(a.stdout)
	case "html":
		return r.HTML(a.stdout)
	}
	return r.Text(a.stdout)
}

func verdictCode(r *report.Report) int {
	switch v := r.Verdict(); {
	case v == conformance.Broken:
		return exitBroken
	case v == conformance.NotConformant, r.Interrupted:
		return exitFailed
	}
	return exitOK
}

// suite makes the configuration of the run, all but the plugin. An error is one of usage.
func (o *conformanceRun) suite() (conformance.Config, error) {
	cfg := conformance.Config{Run: o.run, Skip: o.skip, Seed: o.seed, Scale: o.scale, Fresh: o.fresh}
	switch {
	case o.scale < 0.1 || o.scale > 1000 || math.IsNaN(o.scale):
		return cfg, fmt.Errorf("--scale %v: want 0.1 to 1000", o.scale)
	case o.repeat < 1:
		return cfg, fmt.Errorf("--repeat %d: want at least 1", o.repeat)
	case o.traces && o.results == "":
		return cfg, errors.New("--trace needs --results DIR")
	}
	if o.results != "" { // before the run, so that it is not in vain
		if err := os.MkdirAll(o.results, 0o755); err != nil {
			return cfg, fmt.Errorf("--results: %w", err)
		}
	}
	for _, p := range o.profiles {
		cfg.Profiles = append(cfg.Profiles, conformance.Profile(p))
	}
	for _, k := range o.known {
		patterns, err := knownFailing(k)
		if err != nil {
			return cfg, err
		}
		cfg.KnownFailing = append(cfg.KnownFailing, patterns...)
	}
	return cfg, nil
}

// knownFailing reads one value of --known-failing.
func knownFailing(value string) (patterns []string, err error) {
	name, isFile := strings.CutPrefix(value, "@")
	if !isFile {
		return []string{value}, nil
	}
	f, err := regular.Open(name)
	if err != nil {
		return nil, fmt.Errorf("--known-failing: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		if line = strings.TrimSpace(line); line != "" {
			patterns = append(patterns, line)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("--known-failing %s: %w", name, err)
	}
	return patterns, nil
}

// flags are those that reproduce a case, besides --run and --seed.
func (o *conformanceRun) flags() (flags []string) {
	for _, f := range o.plugin.configs {
		flags = append(flags, "-c", f)
	}
	if o.plugin.options != "" {
		flags = append(flags, "--options", o.plugin.options)
	}
	if o.scale != 1 {
		flags = append(flags, "--scale", strconv.FormatFloat(o.scale, 'g', -1, 64))
	}
	if o.fresh {
		flags = append(flags, "--fresh")
	}
	return flags
}

// progress tells on stderr how far a run is: on a terminal a line that is written over, and everywhere the
// cases that are not good, when they end.
type progress struct {
	w        io.Writer
	terminal bool
	total, n int // cases, and how many are over
	bad      int
	shown    bool
}

func (p *progress) start(c *conformance.Case) {
	if !p.terminal {
		return
	}
	bad := ""
	if p.bad > 0 {
		bad = fmt.Sprintf(", %d failed", p.bad)
	}
	fmt.Fprintf(p.w, "\r\x1b[K%d of %d%s  %s", p.n+1, p.total, bad, c.ID)
	p.shown = true
}

func (p *progress) result(r *conformance.Result) {
	p.n++
	if r.Good() {
		return
	}
	p.bad++
	p.clear()
	fmt.Fprint(p.w, printable(report.Line(r), "\n"))
}

func (p *progress) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}
