// Package report writes what a run of the conformance suite found: for people (Text, HTML), for programs
// (JSONLines, JUnit), and to be committed beside the plugin (YAML, Check).
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Report is a run and what its results do not know of it.
type Report struct {
	*conformance.Results
	// Engine is the version of the engine that ran the suite; "" where none did (go test).
	Engine string
	// Flags are those of the command line that are needed to reproduce a case, besides --run and --seed.
	Flags []string
	// Before are the earlier runs of the same command, oldest first, all of them good: that of this report came
	// after the last. JSONLines and JUnit, which programs add up, have them; the others show this run.
	Before []*Report
}

// Summary is a run in short: the YAML report, and the first and last line of JSONLines.
type Summary struct {
	Verdict  conformance.Verdict `json:"verdict"`
	Plugin   Plugin              `json:"plugin"`
	Contract uint32              `json:"contract"`
	Engine   string              `json:"engine,omitempty"`
	Seed     uint64              `json:"seed"`
	Date     string              `json:"date"`
	Took     string              `json:"took"`
	Profiles []Profile           `json:"profiles"`
	Cases    Cases               `json:"cases"`
	Problems []string            `json:"problems,omitempty"`
	Notes    []string            `json:"notes,omitempty"`
}

// Plugin is what the plugin says of itself, and what was executed.
type Plugin struct {
	Name     string   `json:"name"`
	Version  string   `json:"version"`
	Run      string   `json:"run"`              // as PLUGIN was named
	SHA256   string   `json:"sha256,omitempty"` // of the program, script or module
	SDK      string   `json:"sdk"`
	Kinds    []string `json:"kinds"`
	Memory   []string `json:"memory"`
	Features []string `json:"features"`
	// Limits that it declares, by the names of the contract.
	Limits map[string]uint64 `json:"limits,omitempty"`
}

// Profile is the outcome of one profile.
type Profile struct {
	Name string `json:"name"`
	// Result is that of the worst case, "partial" when none failed and one was left out, and "unsupported"
	// when none could run.
	Result string `json:"result"`
	Counts
}

// Counts are numbers of cases.
type Counts struct {
	Passed       int `json:"passed"`
	Unsupported  int `json:"unsupported,omitempty"`
	Skipped      int `json:"skipped,omitempty"`
	KnownFailing int `json:"known_failing,omitempty"`
	Failed       int `json:"failed"`
	Errored      int `json:"errored,omitempty"`
}

// Cases are the ids of the cases by outcome, sorted.
type Cases struct {
	Passed       []string `json:"passed"`
	Unsupported  []string `json:"unsupported,omitempty"`
	Skipped      []string `json:"skipped,omitempty"`
	KnownFailing []string `json:"known_failing,omitempty"`
	Failed       []string `json:"failed,omitempty"`
	Errored      []string `json:"errored,omitempty"`
}

// list is where a result belongs. A listed failure that passes is a failure of the list.
func (c *Cases) list(r *conformance.Result) *[]string {
	switch {
	case r.Outcome == conformance.Failed && r.Expected:
		return &c.KnownFailing
	case r.Outcome == conformance.Failed, r.Outcome == conformance.Passed && r.Expected:
		return &c.Failed
	case r.Outcome == conformance.Errored:
		return &c.Errored
	case r.Outcome == conformance.Passed:
		return &c.Passed
	case r.Outcome == conformance.Unsupported:
		return &c.Unsupported
	}
	return &c.Skipped
}

func (c *Cases) counts() Counts {
	return Counts{len(c.Passed), len(c.Unsupported), len(c.Skipped), len(c.KnownFailing), len(c.Failed), len(c.Errored)}
}

func casesOf(results []*conformance.Result) (c Cases) {
	c.Passed = []string{}
	for _, r := range results {
		l := c.list(r)
		*l = append(*l, r.Case.ID)
	}
	for _, l := range []*[]string{&c.Passed, &c.Unsupported, &c.Skipped, &c.KnownFailing, &c.Failed, &c.Errored} {
		slices.Sort(*l)
	}
	return c
}

// String is "81 passed, 2 unsupported, 0 failed".
func (c Counts) String() string {
	parts := []string{fmt.Sprintf("%d passed", c.Passed)}
	for _, p := range []struct {
		n    int
		what string
	}{{c.Unsupported, "unsupported"}, {c.Skipped, "skipped"}, {c.KnownFailing, "known failing"}, {c.Errored, "errored"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	return strings.Join(append(parts, fmt.Sprintf("%d failed", c.Failed)), ", ")
}

// result is Profile.Result.
func (c Counts) result() string {
	switch {
	case c.Errored > 0:
		return conformance.Errored.String()
	case c.Failed > 0:
		return conformance.Failed.String()
	case c.Skipped > 0:
		return string(conformance.Partial)
	case c.KnownFailing > 0:
		return "known failing"
	case c.Passed > 0:
		return conformance.Passed.String()
	}
	return conformance.Unsupported.String()
}

// Summary of the run.
func (r *Report) Summary() Summary {
	s := Summary{
		Verdict: r.Verdict(), Engine: r.Engine, Seed: r.Seed, Contract: r.Hello.GetVersion(),
		Date: r.Began.UTC().Format(time.RFC3339), Took: conformance.Took(r.Took), Cases: casesOf(r.Cases), Problems: r.Problems, Notes: r.Notes,
		Plugin: Plugin{
			Name: clean(r.Hello.GetName()), Version: clean(r.Hello.GetPluginVersion()), Run: r.Plugin, SHA256: r.SHA256,
			SDK: clean(strings.TrimSpace(r.Hello.GetSdk().GetLanguage() + " " + r.Hello.GetSdk().GetVersion())),
		},
	}
	for _, k := range r.Hello.GetKinds() {
		s.Plugin.Kinds = append(s.Plugin.Kinds, enumName(k.String(), "KIND_"))
	}
	for _, k := range r.Hello.GetMemoryKinds() {
		s.Plugin.Memory = append(s.Plugin.Memory, enumName(k.String(), "MEMORY_KIND_"))
	}
	s.Plugin.Features = slices.Sorted(slices.Values(r.Hello.GetFeatures()))
	for i := range s.Plugin.Features {
		s.Plugin.Features[i] = clean(s.Plugin.Features[i])
	}
	s.Plugin.Limits = limitsOf(r.Hello.GetLimits())
	for _, p := range r.profiles() {
		c := casesOf(p.cases)
		s.Profiles = append(s.Profiles, Profile{Name: string(p.name), Result: c.counts().result(), Counts: c.counts()})
	}
	return s
}

func limitsOf(l *contract.Limits) map[string]uint64 {
	limits := map[string]uint64{}
	l.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		limits[string(f.Name())] = v.Uint()
		return true
	})
	return limits
}

func enumName(name, prefix string) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, prefix)), "_", "-")
}

// profile is the cases of one, in the order in which they ran.
type profile struct {
	name  conformance.Profile
	cases []*conformance.Result
}

func (r *Report) profiles() (list []profile) {
	for _, name := range conformance.Profiles() {
		p := profile{name: name}
		for _, c := range r.Cases {
			if c.Case.Profile == name {
				p.cases = append(p.cases, c)
			}
		}
		if len(p.cases) > 0 {
			list = append(list, p)
		}
	}
	return list
}

// Reproduce is the command line that runs one case again.
func (r *Report) Reproduce(c *conformance.Result) string {
	ref, args, _ := strings.Cut(r.Plugin, " -- ")
	words := []string{"engine", "conformance", "run", Quote(ref), "--run", c.Case.ID, "--seed", strconv.FormatUint(r.Seed, 10)}
	for _, f := range r.Flags {
		words = append(words, Quote(f))
	}
	if args != "" {
		words = append(words, "--", args)
	}
	return strings.Join(words, " ")
}

// Quote makes one word of the shell.
func Quote(s string) string {
	safe := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:=,@+%", r)
	}
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return !safe(r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// YAML writes the summary, the file that is committed beside a plugin.
func (r *Report) YAML(w io.Writer) error {
	j, err := json.Marshal(r.Summary())
	if err != nil {
		return fmt.Errorf("write the YAML report: %w", err)
	}
	y, err := yaml.JSONToYAML(j)
	if err != nil {
		return fmt.Errorf("write the YAML report: %w", err)
	}
	if _, err := fmt.Fprintf(w, "# Report of the conformance suite on a plugin; see docs/conformance.md.\n%s", y); err != nil {
		return fmt.Errorf("write the YAML report: %w", err)
	}
	return nil
}
