package mutate

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// Change is one of a mutant that is written by hand: the shipped core with one rule off. It replaces Old, which must
// be once in File (a path from the root of the module), by New. ON in New stands for the mutant's switch.
type Change struct{ File, Old, New string }

// BuildCore makes the test binary of a package, named by its path from root, that holds all mutants of the core. The
// product carries no switches: they are in copies of its source. The package must have a variable
// `beMutant func(i int)`, which the binary sets: it becomes the mutant of that number.
func BuildCore(t *testing.T, root, pkg string, mutants [][]Change) string {
	t.Helper()
	root, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	sources := map[string]string{}
	for i, changes := range mutants {
		for _, c := range changes {
			src, ok := sources[c.File]
			if !ok {
				b, err := os.ReadFile(filepath.Join(root, c.File))
				if err != nil {
					t.Fatal(err)
				}
				src = string(b)
			}
			sources[c.File] = applyChange(t, src, i, c)
		}
	}
	sources["core/statemachine/mutant.go"] = "package statemachine\n\n// Mutant is the rule that is switched off, -1 for none.\nvar Mutant = -1\n"
	sources[path.Join(pkg, "be_mutant_test.go")] = "package " + path.Base(pkg) + "\n\nimport \"github.com/terminus-kv/terminus/core/statemachine\"\n\nfunc init() { beMutant = func(i int) { statemachine.Mutant = i } }\n"
	bin := filepath.Join(dir, "mutants.test")
	cmd := exec.Command("go", "test", "-c", "-overlay", writeOverlay(t, root, dir, sources), "-o", bin, "./"+pkg)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the mutants: %v\n%s", err, out)
	}
	return bin
}

// processSwitch is put into each package that Processes changes.
const processSwitch = `package %s

import (
	"os"
	"time"
)

func mutantOn(name string) bool {
	_, err := os.Stat(%q + name)
	return err == nil
}

func mutantLater(f func()) { time.AfterFunc(20*time.Millisecond, f) }
`

// Processes returns the file that the go command takes with -overlay to build the product with bugs, one change each. A
// process has the bug for which there is a file in its working directory, named by prefix and the bug. New of a change
// may have mutantLater(f) call f in 20 ms.
func Processes(t *testing.T, root, prefix string, bugs map[string]Change) string {
	t.Helper()
	root, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{}
	for name, c := range bugs {
		text, changed := sources[c.File]
		if !changed {
			b, err := os.ReadFile(filepath.Join(root, c.File))
			if err != nil {
				t.Fatal(err)
			}
			text = string(b)
		}
		if n := strings.Count(text, c.Old); n != 1 {
			t.Fatalf("%s: the text to change is %d times in %s, must be there once", name, n, c.File)
		}
		sources[c.File] = strings.Replace(text, c.Old, strings.ReplaceAll(c.New, "ON", fmt.Sprintf("mutantOn(%q)", name)), 1)
		pkg := path.Dir(c.File)
		sources[pkg+"/mutant.go"] = fmt.Sprintf(processSwitch, path.Base(pkg), prefix)
	}
	return writeOverlay(t, root, t.TempDir(), sources)
}

// writeOverlay puts sources, by their paths from root, into dir, and returns the file that -overlay takes.
func writeOverlay(t *testing.T, root, dir string, sources map[string]string) string {
	t.Helper()
	replace := map[string]string{}
	put := func(name string, text []byte) string {
		at := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
		if err := os.WriteFile(at, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return at
	}
	for file, text := range sources {
		replace[filepath.Join(root, file)] = put(file, []byte(text))
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	return put("overlay.json", b)
}

// applyChange puts a change behind its switch.
func applyChange(t *testing.T, src string, i int, c Change) string {
	t.Helper()
	if n := strings.Count(src, c.Old); n != 1 {
		t.Fatalf("mutant %d: the text to change is %d times in %s, must be there once:\n%s", i, n, c.File, c.Old)
	}
	on := fmt.Sprintf("(Mutant == %d)", i)
	if !strings.Contains(c.File, "statemachine") {
		on = fmt.Sprintf("(statemachine.Mutant == %d)", i)
	}
	return strings.Replace(src, c.Old, strings.ReplaceAll(c.New, "ON", on), 1)
}
