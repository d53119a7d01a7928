package main

import (
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/admin/admintest"
)

// An upgrade that fails says why, with exit code 1, and the paths reach the engine as full ones.
func TestUpgradeFails(t *testing.T) {
	e := admintest.Sample()
	e.Steps = []admin.UpgradeStep{{What: "starting"}, {Done: true, Error: "plugin tcp: it lacks receiver_checked, which the present one has"}}
	socket := serve(t, runtimeDir(t), "n", e, true)
	code, out, errOut := command(t, nil, "plugins", "upgrade", "tcp", "--exec", "./mine", "--socket", socket)
	if code != exitFailed || out != "" || !strings.HasPrefix(errOut, "starting\n") || !strings.Contains(errOut, "it lacks receiver_checked") {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	calls := e.Calls()
	if len(calls) != 1 || !strings.HasPrefix(calls[0], "upgrade tcp {Exec:/") || !strings.Contains(calls[0], "/cmd/engine/mine ") {
		t.Errorf("%q", calls)
	}
	e.Steps = e.Steps[:1] // the engine is gone before the end
	if code, _, errOut = command(t, nil, "plugins", "upgrade", "tcp", "--socket", socket); code != exitFailed || !strings.Contains(errOut, "ended the answer") {
		t.Errorf("exit %d: %s", code, errOut)
	}
	readOnly := serve(t, runtimeDir(t), "n", admintest.Sample(), false)
	if code, _, errOut = command(t, nil, "plugins", "upgrade", "tcp", "--socket", readOnly); code != exitFailed || !strings.Contains(errOut, "enable_mutations") {
		t.Errorf("exit %d: %s", code, errOut)
	}
}
