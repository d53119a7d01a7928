package node

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
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
		{pluginhost.StateBackoff, true, true, "gone"}, // what it said last is still in the inbox
	} {
		if got := epochState(c.state, c.live, c.serving); got != c.want {
			t.Errorf("%v, live %t, serving %t: %s, want %s", c.state, c.live, c.serving, got, c.want)
		}
	}
}

// A dead plugin was listed with process 0, an uptime (of its backoff) and a beat of 0s ago.
func TestDeadPluginHasNoUptimeAndNoBeat(t *testing.T) {
	since := time.Now().Add(-time.Minute)
	for _, c := range []struct {
		status     pluginhost.Status
		alive      bool
		exactJSON  string
		up, beaten bool
	}{
		{status: pluginhost.Status{State: pluginhost.StateBackoff, Since: since, Epoch: 3}, exactJSON: `{"epoch":3,"state":"gone","ops":2,"rooms":0}`},
		{status: pluginhost.Status{State: pluginhost.StateDown, Since: since, Epoch: 3, BeatAge: time.Hour, Busy: []*contract.Busy{{Kind: contract.BusyKind_BUSY_KIND_REGISTER, SinceNs: 3e9, Subject: 5}}}, exactJSON: `{"epoch":3,"state":"gone","ops":2,"rooms":0}`},
		{status: pluginhost.Status{State: pluginhost.StateStopping, Since: since, Epoch: 3, PID: 77}, exactJSON: `{"epoch":3,"state":"gone","pid":77,"ops":2,"rooms":0}`},
		{status: pluginhost.Status{State: pluginhost.StateStarting, Since: since, Epoch: 3, PID: 77}, up: true},
		{status: pluginhost.Status{State: pluginhost.StateUp, Since: since, Epoch: 3, PID: 77, BeatAge: time.Millisecond, Busy: []*contract.Busy{{Kind: contract.BusyKind_BUSY_KIND_REGISTER, SinceNs: 3e9, Subject: 5}}}, alive: true, up: true, beaten: true},
	} {
		e := epochInfo(&c.status, c.alive, c.alive, 2)
		b, err := json.Marshal(e)
		if err != nil || c.exactJSON != "" && string(b) != c.exactJSON {
			t.Errorf("%v: %s, %v", c.status.State, b, err)
		}
		if (e.Busy == "register 5 for 3s") != c.beaten {
			t.Errorf("%v: busy %q", c.status.State, e.Busy)
		}
		if (e.UptimeNS >= int64(time.Minute)) != c.up || (e.BeatAgeNS != 0) != c.beaten {
			t.Errorf("%v: %+v", c.status.State, e)
		}
	}
}
