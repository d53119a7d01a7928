package core_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// scenarioIndex says which test answers each public report of a fault in a serving stack. Its numbers are
// ids, stable and not contiguous.
const scenarioIndex = "testdata/scenarios/index.txt"

// scenarioNumbers are the reports, by what went wrong in them.
var scenarioNumbers = map[string][]int{
	"no terminal state":       {1, 3, 4, 5, 7, 8, 9},
	"abort races":             {10, 11, 13, 14, 16, 17, 18, 20},
	"room ids":                {21, 22, 23, 25},
	"death and identity":      {27, 29, 30, 31, 33, 34, 36, 37},
	"bootstrap and handshake": {38, 39, 41, 43, 44, 46},
	"chunks":                  {47, 49, 50, 52, 53, 55},
	"unequal ranks":           {57, 59, 60, 62, 64},
	"pages":                   {65, 66, 67, 68, 70, 71},
	"corruption":              {74, 76, 78},
	"memory registration":     {80, 81, 82},
	"plugin process":          {85, 86, 87, 89, 92, 93, 94},
	"wasm":                    {96, 98, 100, 101, 103, 104},
	"collectives":             {105, 107, 108, 110, 111, 113, 115, 117},
	"configuration":           {118, 119, 122},
	"metrics":                 {123, 124, 126},
	"overload":                {128, 130, 131, 132},
	"security":                {134, 135, 137},
}

// laterScenarios are the groups that what is not built yet will answer; missingScenarios the reports whose
// fault would be ours, too, or that nothing here tests.
var (
	laterScenarios   = []string{"collectives"}
	missingScenarios []int // none
)

// TestScenarioIndex holds the index to the reports, to the files beside it and to the tests that it names.
func TestScenarioIndex(t *testing.T) {
	later := map[int]string{}
	open := map[int]bool{} // not seen yet
	for group, numbers := range scenarioNumbers {
		for _, n := range numbers {
			if open[n] {
				t.Fatalf("%d is in two groups", n)
			}
			open[n] = true
			if slices.Contains(laterScenarios, group) {
				later[n] = group
			}
		}
	}
	text, err := os.ReadFile(scenarioIndex)
	if err != nil {
		t.Fatal(err)
	}
	scripts := map[string]bool{}
	cases := conformanceCases(t)
	funcs := testFuncs{}
	last := 0
	for i, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		bad := func(format string, args ...any) {
			t.Errorf("%s:%d: %s", scenarioIndex, i+1, fmt.Sprintf(format, args...))
		}
		f := strings.Split(line, "|")
		if len(f) != 5 {
			bad("%d columns, want number | report | level | tests | rule", len(f))
			continue
		}
		for i := range f {
			if f[i] = strings.TrimSpace(f[i]); f[i] == "" {
				bad("column %d is empty", i+1)
			}
		}
		level, tests, rule := f[2], strings.Split(f[3], ", "), f[4]
		n, err := strconv.Atoi(f[0])
		switch {
		case err != nil || !open[n]:
			bad("%q is no report, or stands here twice", f[0])
		case n <= last:
			bad("%d comes after %d", n, last)
		}
		last = n
		delete(open, n)
		for _, report := range strings.Split(f[1], ", ") {
			if !regexp.MustCompile(`^[A-Za-z0-9.-]+#\d+$`).MatchString(report) {
				bad("%q is not project#number", report)
			}
		}
		for _, r := range regexp.MustCompile(`\bR\d+\b`).FindAllString(rule, -1) {
			if k, _ := strconv.Atoi(r[1:]); k < 1 || k > 12 {
				bad("there is no rule %s", r)
			}
		}
		if group, ok := later[n]; ok || level == "later" {
			if level != "later" || f[3] != group {
				bad("a report of %s is \"later | %s\", and only such a one", group, group)
			}
			continue
		}
		if missing := slices.Contains(missingScenarios, n); missing || level == "missing" {
			if !missing || level != "missing" || f[3] != "-" {
				bad("a missing answer is \"missing | -\", and known to this test")
			}
			continue
		}
		for i, name := range tests {
			kind := ""
			switch pkg, fn, ok := strings.Cut(name, "."); {
			case strings.HasPrefix(name, "scenarios/"):
				kind = "scenario"
				scripts[name] = true
				if !strings.HasPrefix(name, fmt.Sprintf("scenarios/%03d_", n)) {
					bad("%s does not begin with its number", name)
				}
				fallthrough
			case ok && fn == "txt":
				if kind == "" {
					kind = "interaction"
				}
				if _, err := os.Stat(filepath.Join("testdata", name)); err != nil {
					bad("%v", err)
				}
			case ok:
				kind = "test"
				if !funcs.has(t, pkg, fn) {
					bad("%s has no test %s", pkg, fn)
				}
			default:
				kind = "conformance"
				if !cases[name] {
					bad("there is no conformance case %s", name)
				}
			}
			if i == 0 && kind != level {
				bad("%s is of level %s, not %s", name, kind, level)
			}
		}
	}
	for n := range open {
		t.Errorf("%s: nothing answers report %d", scenarioIndex, n)
	}
	files, err := filepath.Glob("testdata/scenarios/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if name := strings.TrimPrefix(file, "testdata/"); file != scenarioIndex && !scripts[name] {
			t.Errorf("%s is not in %s", name, scenarioIndex)
		}
	}
}

// conformanceCases are the ids in the list of docs/conformance.md, which a test of the suite keeps.
func conformanceCases(t *testing.T) map[string]bool {
	text, err := os.ReadFile("../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9-]+/[a-z0-9-]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		ids[m[1]] = true
	}
	return ids
}

// testFuncs are the test functions of a package's directory, read when it is first asked for.
type testFuncs map[string]map[string]bool

func (f testFuncs) has(t *testing.T, pkg, name string) bool {
	if f[pkg] == nil {
		f[pkg] = map[string]bool{}
		files, err := filepath.Glob(filepath.Join("..", pkg, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range parsed.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
					f[pkg][fn.Name.Name] = true
				}
			}
		}
	}
	return f[pkg][name] && regexp.MustCompile(`^(Test|Fuzz)[A-Z]`).MatchString(name)
}
