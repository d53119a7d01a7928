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
	overlay := map[string]string{}
	put := func(file, text string) {
		at := filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		overlay[filepath.Join(root, file)] = at
	}
	for file, src := range sources {
		put(file, src)
	}
	put("core/statemachine/mutant.go", "package statemachine\n\n// Mutant is the rule that is switched off, -1 for none.\nvar Mutant = -1\n")
	put(path.Join(pkg, "be_mutant_test.go"), "package "+path.Base(pkg)+"\n\nimport \"github.com/terminus-kv/terminus/core/statemachine\"\n\nfunc init() { beMutant = func(i int) { statemachine.Mutant = i } }\n")
	b, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	put("overlay.json", string(b))
	bin := filepath.Join(dir, "mutants.test")
	cmd := exec.Command("go", "test", "-c", "-overlay", overlay[filepath.Join(root, "overlay.json")], "-o", bin, "./"+pkg)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the mutants: %v\n%s", err, out)
	}
	return bin
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
