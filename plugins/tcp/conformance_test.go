package tcp_test

import (
	"flag"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/report"
)

var update = flag.Bool("update", false, "rewrite conformance.yaml")

// TestConformance: the plugin program keeps the contract, and the committed report says so.
func TestConformance(t *testing.T) {
	program := filepath.Join(t.TempDir(), "engine-plugin-tcp")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./engine-plugin-tcp").CombinedOutput(); err != nil {
		t.Fatalf("build the plugin: %v\n%s", err, out)
	}
	carrier := conformance.FromSpec("exec:engine-plugin-tcp", pluginhost.Spec{Name: "tcp", Exec: program})
	report.Check(t, conformance.Test(t, conformance.Config{Carrier: carrier, Seed: 1}), "conformance.yaml", *update)
}
