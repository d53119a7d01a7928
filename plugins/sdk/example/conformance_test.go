// Package example holds backends to learn from. Its test holds each to the contract and to its committed
// report.
package example

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/report"
)

var update = flag.Bool("update", false, "rewrite conformance.yaml of each example")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestConformance: each example keeps the contract, and the report that is committed beside it says so.
func TestConformance(t *testing.T) {
	dir := t.TempDir()
	engine := filepath.Join(dir, "engine")
	build(t, nil, "go", "build", "-o", engine, "../../../cmd/engine")
	python, err := filepath.Abs("../../../bin/venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(python); err != nil {
		t.Fatalf("%v; `make venv` makes it", err)
	}
	for _, e := range []struct {
		name  string
		file  string
		env   []string
		build []string
	}{
		{name: "copy", file: "engine-plugin-copy", build: []string{"go", "build", "-o", "engine-plugin-copy", "./copy"}},
		{name: "repage", file: "repage.wasm", env: []string{"GOOS=wasip1", "GOARCH=wasm"},
			build: []string{"go", "build", "-ldflags", "-s -w", "-buildmode=c-shared", "-o", "repage.wasm", "./repage"}},
		{name: "rawguest", file: "rawguest.wasm",
			build: []string{python, "-m", "ziglang", "cc", "-target", "wasm32-freestanding", "-O2", "-nostdlib", "-fno-builtin",
				"-Wl,--no-entry", "-o", "rawguest.wasm", "rawguest/rawguest.c"}},
	} {
		t.Run(e.name, func(t *testing.T) {
			file := filepath.Join(dir, e.file)
			for i, arg := range e.build {
				if arg == e.file {
					e.build[i] = file
				}
			}
			build(t, e.env, e.build...)
			spec, ref := pluginhost.Spec{Name: e.name, Exec: file}, "exec:"+e.file
			if filepath.Ext(file) == ".wasm" {
				spec = pluginhost.Spec{Name: e.name, Exec: engine, Wasm: file, WasmCache: filepath.Join(dir, "cache")}
				ref = "wasm:" + e.file
			}
			results := conformance.Test(t, conformance.Config{Carrier: conformance.FromSpec(ref, spec), Seed: 1})
			report.Check(t, results, filepath.Join(e.name, "conformance.yaml"), *update)
		})
	}
}

func build(t *testing.T, env []string, command ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
}
