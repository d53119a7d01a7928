package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// TestExplainRule: a rule in place of a case gives its sentence and its cases.
func TestExplainRule(t *testing.T) {
	code, out, errOut := command(t, nil, "conformance", "explain", "R4")
	if code != exitOK || !strings.Contains(out, "Never on a timer.") || errOut != "" {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	for _, c := range conformance.Cases() {
		if got, want := strings.Contains(out, c.ID+" "), c.Rule == "R4"; got != want {
			t.Errorf("%s of rule %s is listed: %v", c.ID, c.Rule, got)
		}
	}
	code, out, _ = command(t, nil, "conformance", "explain", "r11", "-o", "json")
	var r ruleJSON
	if err := json.Unmarshal([]byte(out), &r); code != exitOK || err != nil || r.Rule != "R11" || r.Sentence == "" || r.Cases == nil {
		t.Errorf("exit %d, %v: %s", code, err, out)
	}
	if code, out, _ = command(t, nil, "conformance", "explain", "R11"); code != exitOK || !strings.Contains(out, "it binds the engine") {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, _, errOut = command(t, nil, "conformance", "explain", "R13"); code != exitUsage || !strings.Contains(errOut, `no case "R13"`) {
		t.Errorf("exit %d: %s", code, errOut)
	}
}
