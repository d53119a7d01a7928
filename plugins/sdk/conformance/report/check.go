package report

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// Check compares a run with the YAML report that is committed beside the plugin, and with update writes that
// file instead. A report is stale when the contract version, the plugin's name, kinds, memory kinds, features or
// limits, the ids of the cases or their outcomes differ; digest, versions, seed, date and times are not compared. A run of
// which `go test -run` chose only a part is not compared, nor one that failed.
func Check(t testing.TB, res *conformance.Results, file string, update bool) {
	t.Helper()
	if !res.Chosen() {
		t.Logf("%s is not compared: go test ran a part of the suite only", file)
		return
	}
	if t.Failed() {
		t.Logf("%s is not compared: the run failed", file)
		return
	}
	r := &Report{Results: res, Engine: suiteVersion()}
	if update {
		if v := res.Verdict(); v != conformance.Conformant {
			t.Fatalf("%s is not written: the run was %s", file, v)
		}
		if err := writeFile(file, r.YAML); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.compare(file); err != nil {
		t.Errorf("%v\nwrite it anew with: go test -run '^%s$' -update", err, t.Name())
	}
}

// suiteVersion is the version of this module in the test binary.
func suiteVersion() string {
	const module = "github.com/terminus-kv/terminus"
	version := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == module {
				version = strings.Trim(m.Version, "()")
			}
		}
	}
	if version == "" {
		return "devel"
	}
	return version
}

// ErrStale: a committed report says something else than a run does.
var ErrStale = errors.New("the committed conformance report is stale")

// compare returns ErrStale with every difference that matters.
func (r *Report) compare(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStale, err)
	}
	var old Summary
	if err := yaml.Unmarshal(b, &old); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrStale, file, err)
	}
	now := r.Summary()
	var diffs []string
	differ := func(what string, was, is any) {
		if fmt.Sprint(was) != fmt.Sprint(is) {
			diffs = append(diffs, fmt.Sprintf("%s: it says %v, the run %v", what, was, is))
		}
	}
	differ("contract", old.Contract, now.Contract)
	differ("plugin.name", old.Plugin.Name, now.Plugin.Name)
	differ("plugin.kinds", old.Plugin.Kinds, now.Plugin.Kinds)
	differ("plugin.memory", old.Plugin.Memory, now.Plugin.Memory)
	differ("plugin.features", old.Plugin.Features, now.Plugin.Features)
	differ("plugin.limits", old.Plugin.Limits, now.Plugin.Limits)
	differ("verdict", old.Verdict, now.Verdict)
	was, is := old.Cases.outcomes(), now.Cases.outcomes()
	for _, id := range sortedIDs(was, is) {
		switch w, i := was[id], is[id]; {
		case w == i:
		case w == "":
			diffs = append(diffs, fmt.Sprintf("case %s: it does not have it, the run says %s", id, i))
		case i == "":
			diffs = append(diffs, fmt.Sprintf("case %s: it says %s, the suite has no such case", id, w))
		default:
			diffs = append(diffs, fmt.Sprintf("case %s: it says %s, the run %s", id, w, i))
		}
	}
	if len(diffs) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s\n  %s", ErrStale, file, strings.Join(diffs, "\n  "))
}

// outcomes is the outcome of each id.
func (c *Cases) outcomes() map[string]string {
	m := make(map[string]string)
	for _, l := range []struct {
		what string
		ids  []string
	}{
		{"passed", c.Passed}, {"unsupported", c.Unsupported}, {"skipped", c.Skipped}, {"known failing", c.KnownFailing},
		{"failed", c.Failed}, {"errored", c.Errored},
	} {
		for _, id := range l.ids {
			m[id] = l.what
		}
	}
	return m
}

func sortedIDs(maps ...map[string]string) (ids []string) {
	for _, m := range maps {
		for id := range m {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}
