package flight

import (
	"fmt"

	"github.com/terminus-kv/terminus/core"
)

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
	case core.RecReleased:
		return "pages released to the worker"
	}
	return "a late message changed nothing"
}
