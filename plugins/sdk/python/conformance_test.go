package python

import (
	"flag"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/report"
)

var update = flag.Bool("update", false, "rewrite example/conformance.yaml")

// TestConformance: the example keeps the contract, and the report that is committed beside it says so.
func TestConformance(t *testing.T) {
	carrier := conformance.FromSpec("exec:python3 -- copy_backend.py", example(t))
	report.Check(t, conformance.Test(t, conformance.Config{Carrier: carrier, Seed: 1}), "example/conformance.yaml", *update)
}
