package node

import (
	"reflect"
	"testing"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/config"
)

// TestDefaults: without configuration the core runs with its own defaults, which are those that the simulator
// measures; only what destinations may hold is bounded further.
func TestDefaults(t *testing.T) {
	c := config.Default()
	got := coreConfig(&c, 1)
	want := core.DefaultLimits()
	want.RoomBytes, want.RoomPages, want.SessionBytes, want.SessionPages = got.Limits.RoomBytes, got.Limits.RoomPages, got.Limits.SessionBytes, got.Limits.SessionPages
	if got.Limits != want {
		t.Errorf("limits %+v, want %+v", got.Limits, want)
	}
	if got.Clocks != core.DefaultClocks() {
		t.Errorf("clocks %+v", got.Clocks)
	}
	if !reflect.DeepEqual(got.Policy, core.Policy(core.NewSRF())) {
		t.Errorf("policy %+v", got.Policy)
	}
}
