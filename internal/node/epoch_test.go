package node

import (
	"testing"

	"github.com/terminus-kv/terminus/internal/pluginhost"
)

// A plugin's new process was called gone from its start until the first word from it.
func TestStartingEpochIsNotGone(t *testing.T) {
	for _, c := range []struct {
		state         pluginhost.State
		live, serving bool
		want          string
	}{
		{pluginhost.StateStarting, false, false, "starting"},
		{pluginhost.StateUp, false, false, "starting"},
		{pluginhost.StateUp, true, false, "starting"},
		{pluginhost.StateUp, true, true, "ready"},
		{pluginhost.StateBackoff, false, false, "gone"},
		{pluginhost.StateDown, false, false, "gone"},
	} {
		if got := epochState(c.state, c.live, c.serving); got != c.want {
			t.Errorf("%v, live %t, serving %t: %s, want %s", c.state, c.live, c.serving, got, c.want)
		}
	}
}
