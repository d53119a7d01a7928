package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestWasm measures the guest in C, which is small: the compiler of modules is slow under the race detector.
func TestWasm(t *testing.T) {
	o := testOptions(t)
	o.Module = filepath.Join(t.TempDir(), "rawguest.wasm")
	python := "../../bin/venv/bin/python"
	if _, err := os.Stat(python); err != nil {
		python = "python3"
	}
	build := exec.Command(python, "-m", "ziglang", "cc", "-target", "wasm32-freestanding", "-O2", "-nostdlib", "-fno-builtin",
		"-Wl,--no-entry", "-o", o.Module, "../../plugins/sdk/example/rawguest/rawguest.c")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest in C (make venv installs ziglang): %v\n%s", err, out)
	}
	report := measureWith(t, wasm, o, "event", "ping_pong_p50", "ping_pong_p99", "mib")
	for _, r := range report.Results {
		if r.Value <= 0 || r.Reference == nil {
			t.Errorf("%+v", r)
		}
	}
}
