package report

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// WriteDir writes every report into dir, which it makes: report.txt, results.jsonl, junit.xml, report.yaml,
// report.html, and traces/ID.jsonl of the cases that are not good, or of all with allTraces. Files of an
// earlier run with these names are replaced; its traces are removed.
func (r *Report) WriteDir(dir string, allTraces bool) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	for _, f := range []struct {
		name  string
		write func(io.Writer) error
	}{
		{"report.txt", r.Text}, {"results.jsonl", r.JSONLines}, {"junit.xml", r.JUnit}, {"report.yaml", r.YAML}, {"report.html", r.HTML},
	} {
		if err := writeFile(filepath.Join(dir, f.name), f.write); err != nil {
			return err
		}
	}
	traces := filepath.Join(dir, "traces")
	if err := os.RemoveAll(traces); err != nil {
		return fmt.Errorf("results: remove the traces of an earlier run: %w", err)
	}
	for _, c := range r.Cases {
		if len(c.Trace) == 0 || c.Good() && !allTraces {
			continue
		}
		name := filepath.Join(traces, filepath.FromSlash(c.Case.ID)+".jsonl")
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return fmt.Errorf("results: %w", err)
		}
		if err := writeFile(name, func(w io.Writer) error { return conformance.WriteTrace(w, r.trace(c)) }); err != nil {
			return err
		}
	}
	return nil
}

func (r *Report) trace(c *conformance.Result) conformance.Trace {
	return conformance.Trace{
		TraceHeader: conformance.TraceHeader{
			Case: c.Case.ID, Rule: c.Case.Rule, Outcome: c.Outcome, Plugin: r.Plugin, Contract: r.Hello.GetVersion(), Seed: r.Seed,
		},
		Entries: c.Trace,
	}
}

func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() { // a pipe would be waited for
		f.Close()
		return fmt.Errorf("results: %s is no regular file; remove it", name)
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		return fmt.Errorf("results: %s: %w", name, err)
	}
	return nil
}
