package python

import (
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

func TestConformance(t *testing.T) {
	conformance.Test(t, conformance.Config{Carrier: conformance.FromSpec("exec:python", example(t)), Seed: 1})
}
