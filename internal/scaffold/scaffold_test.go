package scaffold

import (
	"context"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// tree is the source tree of this test.
func tree(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// The program of a new project is the example of its language, under another name.
func TestProjectsAreTheExamples(t *testing.T) {
	for _, c := range []struct {
		lang, file, example string
		change              *strings.Replacer // from the project to the example
		begin               string            // what is before it differs
	}{
		{"go", "main.go", "plugins/sdk/example/copy/main.go", strings.NewReplacer(`"0.1.0"`, `"1.0.0"`), "package main"},
		{"python", "backend.py", "plugins/sdk/python/example/copy_backend.py", strings.NewReplacer(`"0.1.0"`, `"1.0.0"`), "\n\nimport "},
		{"wasm-go", "main.go", "plugins/sdk/example/repage/main.go", strings.NewReplacer(`"0.1.0"`, `"1.0.0"`, `"copy"`, `"repage"`, "backend{}", "repage{}",
			"(backend)", "(repage)", "type backend", "type repage"), "package main"},
	} {
		t.Run(c.lang, func(t *testing.T) {
			dir := t.TempDir()
			if _, err := New(Options{Name: "copy", Lang: c.lang, Dir: dir}); err != nil {
				t.Fatal(err)
			}
			_, got, _ := strings.Cut(read(t, dir, c.file), c.begin)
			_, want, _ := strings.Cut(read(t, tree(t), c.example), c.begin)
			if got = c.change.Replace(got); got != want || got == "" {
				t.Errorf("the template of %s and %s differ; make them the same\n%s", c.file, c.example, got)
			}
			files, _ := filepath.Glob(filepath.Join(dir, "*.go"))
			for _, f := range files {
				text, _ := os.ReadFile(f)
				if formatted, err := format.Source(text); err != nil || string(formatted) != string(text) {
					t.Errorf("%s is not formatted: %v", f, err)
				}
			}
		})
	}
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A new project of each language builds and passes its own checks, without a network.
func TestGoProjectBuilds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "my project")
	p, err := New(Options{Name: "my-backend", Lang: "go", Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if p.Dir != dir || p.SDK != tree(t) {
		t.Errorf("written to %s with the SDK of %s", p.Dir, p.SDK)
	}
	run(t, dir, "make", "build")
	if _, err := os.Stat(filepath.Join(dir, "my-backend")); err != nil {
		t.Error(err)
	}
	// The cases about the program by hand fail when the suite is given a test program in its place.
	run(t, dir, "go", "test", "-vet=off", "-run", "^(TestCopy|TestConformance)$/^(cli|transfer)$", ".")
	if out := run(t, dir, "./my-backend", "info"); !strings.Contains(out, `"name": "my-backend"`) {
		t.Errorf("info says %s", out)
	}
}

func TestWasmProjectBuilds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "project")
	if _, err := New(Options{Name: "mine", Lang: "wasm-go", Dir: dir}); err != nil {
		t.Fatal(err)
	}
	run(t, dir, "make", "build")
	if head := read(t, dir, "mine.wasm"); !strings.HasPrefix(head, "\x00asm") {
		t.Errorf("mine.wasm begins with %q", head[:min(4, len(head))])
	}
}

// The environment is that of this tree, so that nothing is downloaded.
func TestPythonProjectRuns(t *testing.T) {
	venv := filepath.Join(tree(t), "bin/venv")
	if _, err := os.Stat(filepath.Join(venv, "bin/python")); err != nil {
		t.Fatalf("%v; make it with: make venv", err)
	}
	dir := filepath.Join(t.TempDir(), "project")
	p, err := New(Options{Name: "mine", Lang: "python", Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	packages, err := filepath.Glob(filepath.Join(venv, "lib/python*/site-packages"))
	if err != nil || len(packages) != 1 {
		t.Fatal(packages, err)
	}
	run(t, dir, filepath.Join(venv, "bin/python"), "-m", "venv", "--without-pip", ".venv")
	own, err := filepath.Glob(filepath.Join(dir, ".venv/lib/python*/site-packages"))
	if err != nil || len(own) != 1 {
		t.Fatal(own, err)
	}
	for name, text := range map[string]string{
		filepath.Join(own[0], "tree.pth"):    packages[0] + "\n" + filepath.Join(p.SDK, "plugins/sdk/python") + "\n",
		filepath.Join(dir, ".venv", "ready"): "",
	} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run(t, dir, "make", "test")
}

func run(t *testing.T, dir string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.WaitDelay = dir, 10*time.Second
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=", "GOWORK=off")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestNewRefuses(t *testing.T) {
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "go.mod"), []byte("module example.com/other\n\ngo 1.26\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	nameless := t.TempDir()
	if err := os.WriteFile(filepath.Join(nameless, "go.mod"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o    Options
		says string
	}{
		{Options{Name: "Mine", Lang: "go"}, "lower-case"},
		{Options{Name: "", Lang: "go"}, "lower-case"},
		{Options{Name: "../x", Lang: "go"}, "lower-case"},
		{Options{Name: "tcp", Lang: "go"}, "choose another"},
		{Options{Name: "mine", Lang: "rust"}, "want one of"},
		{Options{Name: "mine", Lang: "go", SDK: other}, "is of module example.com/other"},
		{Options{Name: "mine", Lang: "go", SDK: nameless}, "names no module"},
		{Options{Name: "mine", Lang: "go", SDK: "/nowhere"}, "--sdk /nowhere"},
	} {
		c.o.Dir = filepath.Join(t.TempDir(), "project")
		_, err := New(c.o)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.says)
		}
		if _, err := os.Stat(c.o.Dir); err == nil {
			t.Errorf("%+v: the directory was made", c.o)
		}
	}
}

// What is in the way stays as it is, and then nothing is written.
func TestNewOverwritesNothing(t *testing.T) {
	for _, lang := range Languages() {
		p, err := New(Options{Name: "mine", Lang: lang, Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range p.Files {
			dir := t.TempDir()
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("/nowhere", filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			if _, err := New(Options{Name: "mine", Lang: lang, Dir: dir}); err == nil || !strings.Contains(err.Error(), name+" exists") {
				t.Errorf("%s: %v", name, err)
			}
			if files, _ := os.ReadDir(dir); len(files) != 1 {
				t.Errorf("%s is in the way: %d files", name, len(files))
			}
		}
	}
}

func TestParsePins(t *testing.T) {
	if got := strings.Join(parsePins([]byte("# x\ngrpcio==1.2 # why\nziglang==3\nprotobuf==4.5\n")), ";"); got != "grpcio==1.2;protobuf==4.5" {
		t.Errorf("%q", got)
	}
}

func TestParseMod(t *testing.T) {
	version, requires := parseMod([]byte("module x\n\ngo 1.26.0\n\nrequire a.b/c v1.0.0\n\nrequire (\n\td.e/f v2.0.0 // indirect\n\n\ta.a/a v0.1.0\n)\nreplace x => y\n"))
	if version != "1.26.0" || strings.Join(requires, ";") != "a.a/a v0.1.0 // indirect;a.b/c v1.0.0 // indirect;d.e/f v2.0.0 // indirect" {
		t.Errorf("%s %q", version, requires)
	}
}
