package bench

import (
	"os/exec"
	"testing"
)

func TestPoll(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip(err)
	}
	report := measure(t, poll, "pass_1024", "one_room", "pass_1024_p50",
		"pass_1024_unchanged", "pass_1024_all", "pass_1024_each", "system_calls")
	if calls := report.Results[len(report.Results)-1]; calls.Value != 0 || calls.Samples < pollChurn {
		t.Errorf("polling is not free of system calls: %+v", calls)
	}
}
