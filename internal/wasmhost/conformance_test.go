package wasmhost

import (
	"testing"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// TestConformance runs what the suite says of plans and aborts, against a guest of either language, each in a
// process of its own. `engine conformance run wasm:FILE` runs all of it.
func TestConformance(t *testing.T) {
	t.Run("repage", func(t *testing.T) { conform(t, repage) })
	t.Run("rawguest", func(t *testing.T) {
		file, err := rawguest()
		if err != nil {
			t.Fatal(err)
		}
		conform(t, file)
	})
}

func conform(t *testing.T, file string) {
	results := conformance.Test(t, conformance.Config{
		Carrier: conformance.FromSpec("wasm:"+file, pluginhost.Spec{Name: "guest", Wasm: file, WasmCache: cacheDir()}),
		Run:     []string{"layout/repage-*", "layout/random-geometry", "layout/strided-runs", "layout/layer-range", "abort/mid-transfer"}, Seed: 1,
	})
	if v := results.Verdict(); v != conformance.Partial && v != conformance.NotConformant {
		t.Errorf("a part of the suite is %s", v)
	}
}
