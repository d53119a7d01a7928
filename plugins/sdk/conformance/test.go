package conformance

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Test runs the suite as subtests of t: one for each case, named by its id, so that `go test -run` chooses
// among them. For an author's own `go test`. Cases are skipped in the sense of go test when they are
// Unsupported or left out. The results are those of Run; a run of which go test chose only a part is
// Partial.
func Test(t *testing.T, cfg Config) *Results {
	t.Helper()
	if cfg.Seed == 0 {
		cfg.Seed = drawSeed()
	}
	cfg.OnStart = nil
	cfg.each = func(c *Case, run func() *Result) {
		t.Run(c.ID, func(t *testing.T) {
			r := run()
			switch {
			case !r.Good():
				t.Error("\n" + r.Text(fmt.Sprintf("go test -run '%s' with conformance.Config{Seed: %d}", anchored(t.Name()), cfg.Seed)))
			case r.Expected:
				t.Logf("failed, as the list of known failures says: %s", r.Why())
			case r.Outcome != Passed:
				t.Skip(r.Why())
			}
		})
	}
	res, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res.Late { // their subtests have ended
		if !r.Good() {
			t.Error("\n" + r.Text(fmt.Sprintf("go test -run '%s' with conformance.Config{Seed: %d}", anchored(t.Name()), cfg.Seed)))
		}
	}
	for _, p := range res.complaints() {
		t.Error(p)
	}
	for _, n := range res.Notes {
		t.Log(n)
	}
	return res
}

// complaints is what is wrong with a run as a whole. A run of which no case met the plugin proves nothing, unless go test
// chose the cases.
func (r *Results) complaints() []string {
	if why := r.NothingRan(); why != "" && r.Chosen() {
		return append(slices.Clone(r.Problems), "no case met the plugin: "+why)
	}
	return r.Problems
}

// anchored is the -run pattern of one subtest.
func anchored(name string) string { return "^" + strings.ReplaceAll(name, "/", "$/^") + "$" }

// Chosen tells whether go test ran every case: false under a -run that names some.
func (r *Results) Chosen() bool {
	for _, c := range r.Cases {
		if c.Outcome == Skipped && c.Reason == notChosen {
			return false
		}
	}
	return true
}

// NotReady tells whether Run's error means that the plugin never became ready.
func NotReady(err error) bool { return errors.Is(err, ErrNotReady) }
