package flight

import (
	"fmt"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// rungs say what the pages of a destination wait for.
var rungs = [core.NumRungs]string{
	statemachine.Drain: "drained by the source's engine", core.RungReceiver: "the receiver's check", statemachine.Fence: "the fence of the source's plugin",
	statemachine.Quarantine: "no proof, quarantined", core.RungRetire: "the proof that the plugin's epoch is gone",
}

// EndNames are the public names of how operations end.
var EndNames = map[core.EndKind]string{core.EndDone: "done", core.EndFailed: "failed", core.EndSkipped: "skipped", core.EndAborted: "aborted"}

// What is an event in words.
func What(r *core.Record, peer string) string {
	switch r.Kind {
	case core.RecOpen:
		return "opened by the worker"
	case core.RecState:
		return "state " + r.State.String()
	case core.RecEnd:
		if r.Detail != "" {
			return fmt.Sprintf("ended: %s (%s)", r.Reason, r.Detail)
		}
		return "ended: " + r.Reason.String()
	case core.RecResidency:
		return "pages " + r.Residency.String()
	case core.RecFrameIn:
		return fmt.Sprintf("%s from %s", r.Frame, peer)
	case core.RecFrameOut:
		return fmt.Sprintf("%s to %s", r.Frame, peer)
	case core.RecOp:
		return fmt.Sprintf("operation of %d bytes submitted", r.Bytes)
	case core.RecOpEnd:
		how := EndNames[r.End]
		if r.Detail != "" {
			how += " (" + r.Detail + ")"
		}
		return "operation " + how
	case core.RecRung:
		if r.Rung == statemachine.NoRung {
			return fmt.Sprintf("off the fencing ladder: pages %s", r.Residency)
		}
		return fmt.Sprintf("rung %d of the fencing ladder: %s", r.Rung, rungs[r.Rung])
	case core.RecReleased:
		return "pages released to the worker"
	}
	return "a late message changed nothing"
}
