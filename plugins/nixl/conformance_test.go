package nixl_test

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/report"
)

var update = flag.Bool("update", false, "rewrite conformance.yaml")

// TestConformance: the plugin program keeps the contract with the real library, and the committed report says so.
func TestConformance(t *testing.T) {
	python, err := filepath.Abs("../../bin/nixl")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(python); err != nil {
		t.Skipf("%v; run `make nixl` first", err)
	}
	program := filepath.Join(t.TempDir(), "engine-plugin-nixl")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./engine-plugin-nixl")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the plugin: %v\n%s", err, out)
	}
	options, err := json.Marshal(map[string]string{"python": python})
	if err != nil {
		t.Fatal(err)
	}
	carrier := conformance.FromSpec("exec:engine-plugin-nixl", pluginhost.Spec{Name: "nixl", Exec: program, Options: options})
	report.Check(t, conformance.Test(t, conformance.Config{Carrier: carrier, Seed: 1}), "conformance.yaml", *update)
}
