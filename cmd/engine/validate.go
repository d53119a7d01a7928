package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/config"
)

func newValidate(a *app) *cobra.Command {
	var here, effective, probing bool
	c := &cobra.Command{
		Use:   "validate FILE...",
		Short: "Check configuration files, each by itself, and show every problem with its place and fix",
		Example: `  engine validate configs/*.yaml
  engine validate --here /etc/terminus/engine.yaml        this machine has what the file names
  engine validate --effective configs/prefill.yaml        every value and where it comes from
  engine validate --probe /etc/terminus/engine.yaml       the plugins start here and accept their options`,
		Args:        arguments(1, -1, "at least one file"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, files []string) error {
			return a.validate(cmd.Context(), files, here, effective, probing)
		},
	}
	c.Flags().BoolVar(&here, "here", false, "also check that this machine has the files, groups and programs that are named")
	c.Flags().BoolVar(&effective, "effective", false, "print the values of the files that are right")
	c.Flags().BoolVar(&probing, "probe", false, "also start each plugin that is named, up to its handshake, and check its options by its schema; implies --here")
	a.outputFlag(c)
	return c
}

// validated is the result of one file, for -o json and yaml.
type validated struct {
	File     string        `json:"file"`
	Valid    bool          `json:"valid"`
	Problems []problemJSON `json:"problems,omitempty"`
	Values   []valueJSON   `json:"values,omitempty"`
}

type valueJSON struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

func (a *app) validate(ctx context.Context, files []string, here, effective, probing bool) error {
	results := make([]validated, 0, len(files))
	var problems config.Problems
	broken := 0
	for _, f := range files {
		v, found := validateFile(ctx, f, here || probing, effective, probing)
		if !v.Valid {
			broken++
			problems = append(problems, found...)
		}
		results = append(results, v)
	}
	err := list(a, results, func(t *table) {
		for _, p := range problems {
			t.row(p.String())
		}
		if effective {
			for _, r := range results {
				for _, v := range r.Values {
					t.row(v.Key, v.Value, v.Source)
				}
			}
		}
	})
	if err != nil {
		return err
	}
	if broken > 0 {
		fmt.Fprintf(a.stderr, "%s in %d of %s\n", count(len(problems), "problem"), broken, count(len(files), "file"))
		return &reported{exitUsage}
	}
	fmt.Fprintf(a.stderr, "%s checked, no problem\n", count(len(files), "file"))
	return nil
}

// validateFile returns the result of one file, and its problems.
func validateFile(ctx context.Context, file string, here, effective, probing bool) (validated, config.Problems) {
	v := validated{File: file}
	cfg, err := config.Load(config.LoadOptions{Files: []string{file}, Elsewhere: !here})
	var ps config.Problems
	switch {
	case errors.As(err, &ps):
	case err != nil:
		ps = config.Problems{{Source: config.Source{Kind: config.FromFile, Name: file}, Msg: err.Error(), Fix: "report this"}}
	}
	if err == nil && probing {
		ps = probePlugins(ctx, cfg).Sorted([]string{file})
	}
	if len(ps) > 0 {
		for _, p := range ps {
			v.Problems = append(v.Problems, problemOf(p))
		}
		return v, ps
	}
	v.Valid = true
	if effective {
		for _, e := range cfg.Effective() {
			v.Values = append(v.Values, valueJSON{e.Key, e.Value, e.Source.String()})
		}
	}
	return v, nil
}
