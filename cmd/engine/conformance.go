package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/regular"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

func newConformance(a *app) *cobra.Command {
	c := group(&cobra.Command{
		Use:   "conformance",
		Short: "Find out whether a plugin keeps the contract",
		Example: `  engine conformance run exec:bin/engine-plugin-mine
  engine conformance list
  engine conformance explain abort/unknown`,
	})
	c.AddCommand(newConformanceRun(a), newConformanceList(a), newConformanceExplain(a), newConformanceReplay(a))
	return c
}

// caseJSON is a case for -o json and yaml.
type caseJSON struct {
	ID       string   `json:"id"`
	Title    string   `json:"title"`
	Profile  string   `json:"profile"`
	Rule     string   `json:"rule"`
	Sentence string   `json:"sentence,omitempty"` // of the rule
	Needs    []string `json:"needs,omitempty"`
	Incident string   `json:"incident,omitempty"`
	Storm    bool     `json:"storm,omitempty"`
	Script   []string `json:"script,omitempty"`
}

func caseOf(c conformance.Case) caseJSON {
	return caseJSON{ID: c.ID, Title: c.Title, Profile: string(c.Profile), Rule: c.Rule, Needs: c.Needs, Incident: c.Incident, Storm: c.Storm}
}

func profileNames() (names []string) {
	for _, p := range conformance.Profiles() {
		names = append(names, string(p))
	}
	return names
}

func newConformanceList(a *app) *cobra.Command {
	var profile string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the cases of the suite",
		Example: `  engine conformance list
  engine conformance list --profile transfer-abort
  engine conformance list -o json`,
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(*cobra.Command, []string) error {
			var items []caseJSON
			for _, c := range conformance.Cases() {
				if profile == "" || profile == string(c.Profile) {
					items = append(items, caseOf(c))
				}
			}
			return list(a, items, func(t *table) {
				t.row("ID", "PROFILE", "RULE", "NEEDS", "TITLE")
				for _, c := range items {
					t.row(c.ID, c.Profile, c.Rule, strings.Join(c.Needs, ","), c.Title)
				}
			})
		},
	}
	c.Flags().Var(&choice{&profile, profileNames()}, "profile", "only the cases of one profile")
	_ = c.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions(profileNames(), cobra.ShellCompDirectiveNoFileComp))
	a.outputFlag(c)
	return c
}

func newConformanceExplain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "explain ID|RULE",
		Short: "Tell what a case demands of a plugin: the rule, the conversation, the incident behind it; or list the cases of a rule",
		Example: `  engine conformance explain abort/unknown
  engine conformance explain R4
  engine conformance explain skip/empty-range -o yaml`,
		Args:              arguments(1, 1, "one case ID or rule"),
		ValidArgsFunction: completeCases,
		Annotations:       effect(readOnly),
		RunE: func(cmd *cobra.Command, args []string) error {
			if r := ruleOf(strings.ToUpper(args[0])); r.Sentence != "" {
				return a.print(r, r.table)
			}
			c, err := findCase(args[0])
			if err != nil {
				return &usageError{err, cmd}
			}
			j := caseOf(c)
			j.Sentence, j.Script = conformance.Rule(c.Rule), strings.Split(c.Script, "\n")
			if a.output == "table" {
				return a.explain(j)
			}
			return a.print(j, nil)
		},
	}
	a.outputFlag(c)
	return c
}

// ruleJSON is a rule of the contract with its cases.
type ruleJSON struct {
	Rule     string     `json:"rule"`
	Sentence string     `json:"sentence"`
	Cases    []caseJSON `json:"cases"`
}

// ruleOf has no sentence when there is no such rule.
func ruleOf(rule string) *ruleJSON {
	r := &ruleJSON{Rule: rule, Sentence: conformance.Rule(rule), Cases: []caseJSON{}}
	for _, c := range conformance.Cases() {
		if c.Rule == rule {
			r.Cases = append(r.Cases, caseOf(c))
		}
	}
	return r
}

func (r *ruleJSON) table(t *table) {
	t.row(r.Rule, r.Sentence)
	for _, c := range r.Cases {
		t.row(c.ID, c.Title)
	}
	if len(r.Cases) == 0 {
		t.row("no case", "it binds the engine, not a plugin: docs/contract.md")
	}
}

func completeCases(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return caseIDs(), cobra.ShellCompDirectiveNoFileComp
}

func caseIDs() (ids []string) {
	for _, c := range conformance.Cases() {
		ids = append(ids, c.ID)
	}
	return ids
}

// findCase returns a case, or an error that names the nearest ones.
func findCase(id string) (conformance.Case, error) {
	cases := conformance.Cases()
	if i := slices.IndexFunc(cases, func(c conformance.Case) bool { return c.ID == id }); i >= 0 {
		return cases[i], nil
	}
	var near []string
	if s := config.Suggest(id, caseIDs()); s != "" {
		near = append(near, s)
	}
	for _, c := range cases {
		const shown = 8
		if id != "" && len(near) < shown && strings.Contains(c.ID, id) && !slices.Contains(near, c.ID) {
			near = append(near, c.ID)
		}
	}
	if len(near) == 0 {
		return conformance.Case{}, fmt.Errorf("no case %q; engine conformance list shows them all", id)
	}
	return conformance.Case{}, fmt.Errorf("no case %q; did you mean %s?", id, strings.Join(near, ", "))
}

func (a *app) explain(c caseJSON) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n  %s\n\n", c.ID, c.Title)
	fmt.Fprintf(&b, "  profile   %s\n", c.Profile)
	if len(c.Needs) > 0 {
		fmt.Fprintf(&b, "  needs     %s\n", strings.Join(c.Needs, ", "))
	}
	fmt.Fprintf(&b, "  rule %-3s  %s\n", c.Rule, c.Sentence)
	if c.Incident != "" {
		fmt.Fprintf(&b, "  incident  %s\n", c.Incident)
	}
	if c.Storm {
		b.WriteString("  random    by the seed of the run (--seed)\n")
	}
	b.WriteString("\n  > from the host, < from the plugin, = what is checked\n")
	for _, s := range c.Script {
		fmt.Fprintf(&b, "    %s\n", s)
	}
	b.WriteString("\n  What is checked after every case: docs/conformance.md.\n")
	_, err := fmt.Fprint(a.stdout, b.String())
	return err
}

func newConformanceReplay(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "replay TRACE",
		Short: "Print the trace of a case and judge the order of its events again",
		Long: `Print the trace of a case and judge the order of its events again: each operation accepted first, ended once,
quiet once. What needs the memory of the run is not judged again; the marks of the run show it.
Exit code 1 when the trace breaks a rule, 2 when the file is not a trace, 4 when the result cannot be written`,
		Example:     `  engine conformance replay results/traces/abort/mid-transfer.jsonl`,
		Args:        arguments(1, 1, "one trace file"),
		Annotations: effect(readOnly),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.replay(args[0])
		},
	}
}

func (a *app) replay(name string) error {
	f, err := regular.Open(name)
	if err != nil {
		fmt.Fprintf(a.stderr, "engine: trace: %s\n", printable(err.Error(), ""))
		return &reported{exitUsage}
	}
	defer f.Close()
	trace, err := conformance.ReadTrace(f)
	var breaches []conformance.Breach
	var unjudged int
	if err == nil {
		breaches, unjudged, err = conformance.Replay(trace.Entries)
	}
	if errors.Is(err, conformance.ErrTrace) {
		fmt.Fprintf(a.stderr, "engine: %s: %s\n", name, printable(err.Error(), ""))
		return &reported{exitUsage}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s  %s, contract %d, seed %d\n", trace.Case, trace.Outcome, trace.Plugin, trace.Contract, trace.Seed)
	for i, e := range trace.Entries {
		fmt.Fprintf(&b, "  %s\n", e)
		for _, r := range breaches {
			if r.Entry == i {
				fmt.Fprintf(&b, "      ^ %s: expected %s; got %s\n", r.Rule, r.Expected, r.Got)
			}
		}
	}
	for _, r := range breaches {
		if r.Entry < 0 {
			fmt.Fprintf(&b, "  at the end: %s\n", r)
		}
	}
	if unjudged > 0 {
		fmt.Fprintf(&b, "%s of operations whose Submit is not in the trace: not judged\n", count(unjudged, "event"))
	}
	switch len(breaches) {
	case 0:
		fmt.Fprintf(&b, "%s, no breach of the order of events\n", count(len(trace.Entries), "event"))
	case 1:
		fmt.Fprintf(&b, "%s, 1 breach\n", count(len(trace.Entries), "event"))
	default:
		fmt.Fprintf(&b, "%s, %d breaches\n", count(len(trace.Entries), "event"), len(breaches))
	}
	if _, err := fmt.Fprint(a.stdout, printable(b.String(), "\n")); err != nil {
		return a.unwritten(err)
	}
	if len(breaches) > 0 {
		return &reported{exitFailed}
	}
	return nil
}
