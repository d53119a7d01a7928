package mutate

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Config says what to change and how to test it.
type Config struct {
	Dir   string   // of the package
	Files []string // of it, by base name, that are changed
	Args  []string // for the test binary
}

// Run makes the mutants of the files and runs the package's own tests (those in its package, not in
// PACKAGE_test) against each until one fails. It needs the go command. An error means that the package
// does not build or that its tests fail as it is.
func Run(ctx context.Context, cfg Config) ([]*Mutant, error) {
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, err
	}
	work, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)

	s, files, err := load(dir)
	if err != nil {
		return nil, err
	}
	overlay := map[string]string{}
	add := func(name string, text []byte) error {
		path := filepath.Join(work, name)
		overlay[filepath.Join(dir, name)] = path
		return os.WriteFile(path, text, 0o600)
	}
	pkg := ""
	for _, name := range cfg.Files {
		f := files[name]
		if f == nil {
			return nil, fmt.Errorf("mutate %s: no file %s", dir, name)
		}
		pkg = f.Name.Name
		text, err := s.rewrite(name, f)
		if err != nil {
			return nil, err
		}
		if err := add(name, text); err != nil {
			return nil, err
		}
	}
	tests, err := testsOf(dir, pkg)
	if err != nil {
		return nil, err
	}
	if err := add("mutant_switch.go", []byte("package "+pkg+runtimeSource)); err != nil {
		return nil, err
	}
	if err := add("mutant_switch_test.go", driver(pkg, tests)); err != nil {
		return nil, err
	}
	binary := filepath.Join(work, "mutants.test")
	if err := build(ctx, dir, work, binary, overlay); err != nil {
		return nil, err
	}

	// As many processes as there are processors share the mutants.
	n := min(runtime.GOMAXPROCS(0), 4)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		var mine []*Mutant
		for j := i; j < len(s.mutants); j += n {
			mine = append(mine, s.mutants[j])
		}
		wg.Go(func() {
			errs[i] = judge(ctx, cfg.Args, dir, binary, filepath.Join(work, strconv.Itoa(i)), mine)
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return s.mutants, nil
}

func build(ctx context.Context, dir, work, binary string, overlay map[string]string) error {
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		return err
	}
	file := filepath.Join(work, "overlay.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-overlay", file, "-o", binary, ".")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the mutants of %s: %w\n%s", dir, err, bytes.TrimSpace(out))
	}
	return nil
}

// judge runs the mutants in one process, and in a new one behind each that brings it down.
func judge(ctx context.Context, args []string, dir, binary, out string, mutants []*Mutant) error {
	for len(mutants) > 0 {
		ids := make([]string, len(mutants))
		for i, m := range mutants {
			ids[i] = strconv.Itoa(m.ID)
		}
		cmd := exec.CommandContext(ctx, binary, append([]string{"-test.run=^TestOfMutants$"}, args...)...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "MUTANTS="+strings.Join(ids, ","), "MUTANTS_OUT="+out)
		runErr := cmd.Run()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		text, err := os.ReadFile(out)
		if err != nil {
			return fmt.Errorf("the test binary wrote no result: %w", runErr)
		}
		began := false
		for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
			word, by, done := strings.Cut(lines.Text(), " ")
			switch {
			case word == "broken":
				return fmt.Errorf("%s fails without a mutant", by)
			case word == "begin":
				began = true
			case done && len(mutants) > 0 && word == strconv.Itoa(mutants[0].ID):
				mutants[0].KilledBy = by
				mutants = mutants[1:]
			default:
				return fmt.Errorf("unexpected result %q of the test binary", lines.Text())
			}
		}
		if !began {
			return fmt.Errorf("the tests do not pass without a mutant: %w", runErr)
		}
		if len(mutants) > 0 {
			mutants[0].KilledBy = "panic or timeout"
			mutants = mutants[1:]
		}
	}
	return nil
}

// testsOf returns the names of the Test functions of the package, TestMain and those of PACKAGE_test
// left out.
func testsOf(dir, pkg string) (tests []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		if f.Name.Name != pkg {
			continue
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") && fn.Name.Name != "TestMain" {
				tests = append(tests, fn.Name.Name)
			}
		}
	}
	if len(tests) == 0 {
		return nil, fmt.Errorf("mutate %s: package %s has no tests", dir, pkg)
	}
	slices.Sort(tests)
	return tests, nil
}

// driver is the test that runs in the child: the tests without a mutant, then against each mutant, the
// fastest first, until one fails.
func driver(pkg string, tests []string) []byte {
	var list strings.Builder
	for _, name := range tests {
		fmt.Fprintf(&list, "\t\t{Name: %q, F: %s},\n", name, name)
	}
	return []byte("package " + pkg + `

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestOfMutants(t *testing.T) {
	out, err := os.Create(os.Getenv("MUTANTS_OUT"))
	if err != nil {
		t.Fatal(err)
	}
	tests := []testing.InternalTest{
` + list.String() + `	}
	passes := func(test testing.InternalTest, within time.Duration) bool {
		dog := time.AfterFunc(within, func() { os.Exit(1) })
		defer dog.Stop()
		body := test.F
		test.F = func(t *testing.T) {
			defer func() {
				if p := recover(); p != nil {
					t.Error(p)
				}
			}()
			body(t)
		}
		return testing.RunTests(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{test})
	}
	took := map[string]time.Duration{}
	for _, test := range tests {
		began := time.Now()
		if !passes(test, 5*time.Minute) {
			fmt.Fprintln(out, "broken", test.Name)
			return
		}
		took[test.Name] = time.Since(began)
	}
	slices.SortStableFunc(tests, func(a, b testing.InternalTest) int { return int(took[a.Name] - took[b.Name]) })
	fmt.Fprintln(out, "begin")
	for _, word := range strings.Split(os.Getenv("MUTANTS"), ",") {
		id, err := strconv.Atoi(word)
		if err != nil {
			t.Fatal(err)
		}
		mutantOn = id
		by := ""
		for _, test := range tests {
			if !passes(test, 10*time.Second+10*took[test.Name]) { // on a busy machine the tests are slow without a mutant, too
				by = test.Name
				break
			}
		}
		mutantOn = 0
		fmt.Fprintln(out, id, by)
	}
}
`)
}
