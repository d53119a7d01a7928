package statemachine_test

import (
	"bufio"
	"os"
	"sort"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/mutate"
)

// TestMutantsOfTransitionFunction changes the transition function and the record in every small way
// that internal/mutate knows, one at a time. The tests of this package must notice at least 95 % of
// them. Those that no test can notice, because the change does not change what the function does, are
// listed in testdata/equivalent.txt, each with the reason.
func TestMutantsOfTransitionFunction(t *testing.T) {
	mutants, err := mutate.Run(t.Context(), mutate.Config{
		Dir: ".", Files: []string{"machine.go", "record.go"},
		Args: []string{"-rapid.seed=1", "-rapid.nofailfile", "-rapid.shrinktime=0s"},
	})
	if err != nil {
		t.Fatal(err)
	}
	equivalent := equivalents(t)
	type score struct{ killed, total, equivalent int }
	classes := map[string]*score{}
	all := &score{}
	for _, m := range mutants {
		c := classes[m.Class]
		if c == nil {
			c = &score{}
			classes[m.Class] = c
		}
		_, listed := equivalent[m.Key()]
		delete(equivalent, m.Key())
		switch {
		case m.KilledBy != "" && listed:
			t.Errorf("testdata/equivalent.txt: %s is no equivalent, %s fails", m.Key(), m.KilledBy)
			fallthrough
		case m.KilledBy != "":
			c.killed++
			all.killed++
		case listed:
			c.equivalent++
			all.equivalent++
		default:
			t.Logf("survives: %s:%d: %s", m.Pos.Filename, m.Pos.Line, m.Key())
		}
		c.total++
		all.total++
	}
	for key := range equivalent {
		t.Errorf("testdata/equivalent.txt: no such mutant: %s", key)
	}
	names := make([]string, 0, len(classes))
	for name := range classes {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		c := classes[name]
		t.Logf("%-18s %3d of %3d killed, %d equivalent", name, c.killed, c.total, c.equivalent)
	}
	rate := float64(all.killed) / float64(all.total-all.equivalent)
	t.Logf("%-18s %3d of %3d killed, %d equivalent: %.1f %%", "all", all.killed, all.total, all.equivalent, 100*rate)
	if rate < 0.95 {
		t.Errorf("the tests notice %.1f %% of the mutants, want 95 %%", 100*rate)
	}
	if all.total < 400 {
		t.Errorf("only %d mutants were made", all.total)
	}
}

// equivalents reads testdata/equivalent.txt: a line "# reason" speaks for the keys below it.
func equivalents(t *testing.T) map[string]string {
	f, err := os.Open("testdata/equivalent.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	keys := map[string]string{}
	reason := ""
	for lines := bufio.NewScanner(f); lines.Scan(); {
		switch line := strings.TrimSpace(lines.Text()); {
		case line == "":
		case strings.HasPrefix(line, "#"):
			reason = strings.TrimSpace(strings.TrimPrefix(line, "#"))
		case reason == "":
			t.Errorf("testdata/equivalent.txt: no reason for %s", line)
		case keys[line] != "":
			t.Errorf("testdata/equivalent.txt: %s stands there twice", line)
		default:
			keys[line] = reason
		}
	}
	return keys
}
