// Package reliability renders RELIABILITY.md from the results of the runs that it is about, as
// `make sim` and its like write them to docs/reliability.
package reliability

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/terminus-kv/terminus/internal/sim"
)

// Fault is one that these means found, and that was mended.
type Fault struct {
	Fault string `yaml:"fault"` // what went wrong, for whom
	By    string `yaml:"by"`    // the means that found it
	Test  string `yaml:"test"`  // that fails without the mend
}

// Render returns RELIABILITY.md from the files in dir: a JSON file for each kind of run, and faults.yaml.
func Render(dir string) (string, error) {
	var (
		simulated sim.Result
		swept     sweeps
		fuzzed    Fuzz
		network   NetFaults
	)
	for _, r := range []struct {
		file string
		into any
	}{{"sim.json", &simulated}, {"sweep.json", &swept}, {"fuzz.json", &fuzzed}, {"netfaults.json", &network}} {
		file := filepath.Join(dir, r.file)
		text, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, r.into)
		}
		if err != nil {
			return "", fmt.Errorf("%s: %w", file, err)
		}
	}
	faults, err := readFaults(dir)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(`# Reliability

What was run, and what it found. This file is written by a test from docs/reliability; do not edit it
(` + "`go test ./internal/reliability -update`" + `).
`)
	renderSim(&b, &simulated)
	swept.render(&b)
	network.render(&b)
	fuzzed.render(&b)
	renderFaults(&b, faults)
	return b.String(), nil
}

func renderSim(b *strings.Builder, run *sim.Result) {
	b.WriteString(`
## Simulated clusters

Two to eight engines of the shipped core on virtual time, with workers, plugins, links and a router, under faults
(` + "`engine sim`" + `, [what it is and is not](docs/rationale.md)).

| | |
|---|---|
`)
	row := func(name string, format string, args ...any) {
		fmt.Fprintf(b, "| %s | %s |\n", name, fmt.Sprintf(format, args...))
	}
	row("schedules", "%d, of which %d have histories of their own", run.Schedules, run.Distinct)
	row("events", "%d, %.0f a schedule", run.Events, float64(run.Events)/float64(max(run.Schedules, 1)))
	row("faults", "%d, %.1f a schedule", run.Faults, float64(run.Faults)/float64(max(run.Schedules, 1)))
	row("rooms opened", "%d", run.Rooms)
	row("virtual time", "%.1f years", run.Virtual/(365*24*3600))
	row("violations", "**%d**", run.Violations)
	row("seeds", "%d to %d", run.Seed, run.Seed+uint64(max(run.Schedules, 1))-1)
	row("version, date", "%s, %s", run.Version, run.Began.Format(time.DateOnly))
	row("again", "`%s`, history hash %s", run.Command, run.Hash)
	b.WriteString("\n| promise | checked in each | broken |\n|---|---|---|\n")
	for _, p := range sim.Promises() {
		fmt.Fprintf(b, "| %s | %s | %d |\n", p, p.Text(), run.Promises[p])
	}
	b.WriteString(`
Each promise has a mutant of the core, with the promise's rule off, that its checker finds (` + "`go test ./internal/sim -run Mutants -v`" + `).
`)
}

func renderFaults(b *strings.Builder, faults []Fault) {
	b.WriteString(`
## Faults found

Found by these means and by the explorer, the hammers and the conformance suite, in this product, before anybody met them.

| fault | found by | test |
|---|---|---|
`)
	for _, f := range faults {
		fmt.Fprintf(b, "| %s | %s | `%s` |\n", f.Fault, f.By, f.Test)
	}
}

func readFaults(dir string) ([]Fault, error) {
	file := filepath.Join(dir, "faults.yaml")
	var faults []Fault
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.UnmarshalWithOptions(text, &faults, yaml.Strict())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for i, f := range faults {
		if f.Fault == "" || f.By == "" || f.Test == "" {
			return nil, fmt.Errorf("%s: entry %d: fault, by and test are needed", file, i+1)
		}
	}
	return faults, nil
}
