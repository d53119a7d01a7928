package mutate_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/mutate"
)

const gate = `package gate

type Light uint8

const (
	Off Light = iota + 1
	Red
	Amber
	Green
)

// Next has a test for every line.
func Next(l Light, fault bool) Light {
	if fault || l > Green {
		return Off
	}
	switch l {
	case Red:
		return Green
	case Green:
		return Amber
	default:
		return Red
	}
}

// Count has none for what it does above two.
func Count(list []Light) (n int) {
	for _, l := range list {
		if l == Green {
			n++
		}
	}
	if n > 2 {
		n = 2
	}
	return n
}

// At falls over when its check goes.
func At(list []Light, i int) Light {
	if i < len(list) {
		return list[i]
	}
	return Red
}
`

const gateTest = `package gate

import "testing"

func TestNext(t *testing.T) {
	for _, c := range []struct {
		l, want Light
		fault   bool
	}{{Red, Green, false}, {Green, Amber, false}, {Amber, Red, false}, {Green + 1, Off, false}, {Green + 2, Off, false}, {Red, Off, true}, {Amber, Off, true}} {
		t.Run("", func(t *testing.T) {
			if got := Next(c.l, c.fault); got != c.want {
				t.Errorf("%v", got)
			}
		})
	}
}

func TestCount(t *testing.T) {
	if Count(nil) != 0 || Count([]Light{Green, Red}) != 1 {
		t.Error("count")
	}
}

func TestAt(t *testing.T) {
	t.Run("in a goroutine of its own", func(t *testing.T) {
		if At([]Light{Green}, 0) != Green || At(nil, 0) != Red || At([]Light{Green}, 1) != Red {
			t.Error("at")
		}
	})
}
`

func fixture(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module gate\n\ngo 1.26\n"
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRun(t *testing.T) {
	dir := fixture(t, map[string]string{"gate.go": gate, "gate_test.go": gateTest})
	mutants, err := mutate.Run(t.Context(), mutate.Config{Dir: dir, Files: []string{"gate.go"}})
	if err != nil {
		t.Fatal(err)
	}
	var survivors, panics []string
	classes := map[string]int{}
	for _, m := range mutants {
		classes[m.Class]++
		switch m.KilledBy {
		case "":
			survivors = append(survivors, m.Func+": "+m.Change)
		case "panic or timeout":
			panics = append(panics, m.Func)
		case "TestNext", "TestCount", "TestAt":
		default:
			t.Errorf("%s killed by %s", m.Key(), m.KilledBy)
		}
	}
	t.Logf("%d mutants: %v; survivors %q", len(mutants), classes, survivors)
	for _, class := range []string{"drop statement", "force operand", "swap && and ||", "negate", "move bound", "replace constant"} {
		if classes[class] == 0 {
			t.Errorf("no mutant of class %q", class)
		}
	}
	// What the tests leave open: the three lines about more than two.
	for _, s := range survivors {
		if !strings.HasPrefix(s, "Count: ") {
			t.Errorf("survives: %s", s)
		}
	}
	for _, want := range []string{"Count: drop n = 2", "Count: > → >= in n > 2", "Count: 2 → 2+1"} {
		if !slices.Contains(survivors, want) {
			t.Errorf("killed, but by no test: %s", want)
		}
	}
	if !slices.Contains(panics, "At") {
		t.Errorf("a mutant that panics outside the test's goroutine: %q", panics)
	}
	if len(mutants) < 40 {
		t.Errorf("only %d mutants", len(mutants))
	}
}

func TestRunRefuses(t *testing.T) {
	broken := strings.Replace(gateTest, "Count(nil) != 0", "Count(nil) != 5", 1)
	for _, c := range []struct {
		name  string
		files map[string]string
		file  string
		says  string
	}{
		{"tests that fail as they are", map[string]string{"gate.go": gate, "gate_test.go": broken}, "gate.go", "TestCount fails without a mutant"},
		{"no such file", map[string]string{"gate.go": gate, "gate_test.go": gateTest}, "door.go", "no file door.go"},
		{"no tests", map[string]string{"gate.go": gate}, "gate.go", "has no tests"},
		{"no Go", map[string]string{"gate.go": "package gate\nfunc", "gate_test.go": gateTest}, "gate.go", "gate.go:2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := mutate.Run(t.Context(), mutate.Config{Dir: fixture(t, c.files), Files: []string{c.file}})
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %q", err, c.says)
			}
		})
	}
}
