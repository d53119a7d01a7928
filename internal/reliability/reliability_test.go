package reliability

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write RELIABILITY.md")

// TestReliability holds RELIABILITY.md to the results in docs/reliability.
func TestReliability(t *testing.T) {
	const file = "../../RELIABILITY.md"
	want, err := Render("../../docs/reliability")
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is not what docs/reliability says; write it with: go test ./internal/reliability -update", file)
	}
}

// TestFaultsHaveTests: the tests that the faults name are there.
func TestFaultsHaveTests(t *testing.T) {
	faults, err := readFaults("../../docs/reliability")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		dir, name, isTest := strings.Cut(f.Test, " ")
		if !isTest || !strings.HasPrefix(name, "Test") {
			if _, err := os.Stat(filepath.Join("../..", strings.ReplaceAll(f.Test, " ", "/"))); err != nil {
				t.Errorf("%s: %v", f.Test, err)
			}
			continue
		}
		wantTest(t, dir, name)
	}
}

// wantTest reports a test function that the package in dir does not have.
func wantTest(t *testing.T, dir, name string) {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join("../..", dir, "*_test.go"))
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), "func "+name+"(") {
			return
		}
	}
	t.Errorf("%s has no %s", dir, name)
}

// TestRenderTellsUnknownOutcomes: sources that lost their judge were counted and not printed.
func TestRenderTellsUnknownOutcomes(t *testing.T) {
	r := NetFaults{Faults: []NetFault{
		{Does: "one", Verdicts: map[string]int{"success": 5}, Unknown: 2},
		{Does: "none", Verdicts: map[string]int{"success": 5}},
	}}
	var b strings.Builder
	r.render(&b)
	for _, want := range []string{"| one | 0 | 0, 0 | success 5, at the source outcome_unknown 2 |", "| none | 0 | 0, 0 | success 5 |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, &b)
		}
	}
}

// TestHazardsHaveTests: each hazard in docs/supervision.md names its tests, and they are there: in the package that
// stands before the name, else in internal/pluginhost.
func TestHazardsHaveTests(t *testing.T) {
	text, err := os.ReadFile("../../docs/supervision.md")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(?:([a-z0-9/]+) )?((?:Test|Fuzz)[A-Za-z0-9]+)(?:/[^`]*)?`")
	hazards, inTable := 0, false
	for i, line := range strings.Split(string(text), "\n") {
		tests := named.FindAllStringSubmatch(line, -1)
		switch {
		case !strings.HasPrefix(line, "|"):
			inTable = false
		case strings.HasSuffix(line, "| test |"):
			inTable = true
		case inTable && !strings.HasPrefix(line, "|---"):
			if hazards++; len(tests) == 0 {
				t.Errorf("docs/supervision.md:%d is a hazard without a test: %s", i+1, line)
			}
		}
		for _, m := range tests {
			dir := m[1]
			if dir == "" {
				dir = "internal/pluginhost"
			}
			wantTest(t, dir, m[2])
		}
	}
	if hazards == 0 {
		t.Error("docs/supervision.md has no table of hazards")
	}
}
