package conformance

import (
	"fmt"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// End is how an op ended.
type End struct {
	Kind   string // "done", "failed", "skipped", "aborted"
	Cause  contract.Cause
	Detail string
	Quiet  bool
	Bytes  uint64
	Lane   contract.Lane
	At     time.Time
}

func (e End) String() string {
	s := e.Kind
	if e.Cause != 0 {
		s += "(" + e.Cause.String() + ")"
	}
	if e.Detail != "" {
		s += fmt.Sprintf(" %q", e.Detail)
	}
	return fmt.Sprintf("%s quiet=%v", s, e.Quiet)
}

// opEvent reads an event of an op; ok is false for every other event.
func opEvent(e *contract.PluginEvent) (op uint64, end *End, ok bool) {
	switch e := e.GetEvent().(type) {
	case *contract.PluginEvent_Accepted:
		return e.Accepted.Op, nil, true
	case *contract.PluginEvent_Progress:
		return e.Progress.Op, nil, true
	case *contract.PluginEvent_Quiesced:
		return e.Quiesced.Op, nil, true
	case *contract.PluginEvent_Done:
		return e.Done.Op, &End{Kind: "done", Quiet: e.Done.Quiet, Bytes: e.Done.Bytes, Lane: e.Done.Lane}, true
	case *contract.PluginEvent_Failed:
		return e.Failed.Op, &End{Kind: "failed", Cause: e.Failed.Cause, Detail: e.Failed.Detail, Quiet: e.Failed.Quiet}, true
	case *contract.PluginEvent_Skipped:
		return e.Skipped.Op, &End{Kind: "skipped", Cause: e.Skipped.Cause, Detail: e.Skipped.Detail, Quiet: e.Skipped.Quiet}, true
	case *contract.PluginEvent_Aborted:
		return e.Aborted.Op, &End{Kind: "aborted", Quiet: e.Aborted.Quiet}, true
	}
	return 0, nil, false
}

// opState is what the order of events allows next for one op: rules R1, R4 and R8. It is used live and
// by Replay.
type opState struct {
	size     uint64
	accepted bool
	first    uint64 // Progress
	progress uint64 // the highest
	end      *End
	quiet    bool
}

// step takes one event of the op and returns the breach, if it is one.
func (o *opState) step(e *contract.PluginEvent, end *End) (rule, expected, got string) {
	switch ev := e.GetEvent().(type) {
	case *contract.PluginEvent_Accepted:
		if o.end != nil {
			return "R8", "Accepted before all other events of an op", "Accepted after its end"
		}
		if o.accepted {
			return "R8", "Accepted once", "a second Accepted"
		}
		o.accepted = true
	case *contract.PluginEvent_Progress:
		switch b := ev.Progress.Bytes; {
		case !o.accepted:
			return "R8", "Accepted before all other events of an op", "Progress before Accepted"
		case o.end != nil:
			return "R8", "no Progress after the end", fmt.Sprintf("Progress(%d) after %s", b, o.end)
		case b <= o.progress:
			return "R8", fmt.Sprintf("Progress above %d", o.progress), fmt.Sprintf("Progress(%d)", b)
		case b > o.size:
			return "R9", fmt.Sprintf("Progress up to the size of the op, %d bytes", o.size), fmt.Sprintf("Progress(%d)", b)
		default:
			o.progress = b
			if o.first == 0 {
				o.first = b
			}
		}
	case *contract.PluginEvent_Quiesced:
		switch {
		case o.end == nil:
			return "R4", "Quiesced only after an end", "Quiesced of an op that has not ended"
		case o.end.Quiet:
			return "R4", "no Quiesced after an end that was quiet", "Quiesced after " + o.end.String()
		case o.quiet:
			return "R4", "Quiesced once", "a second Quiesced"
		}
		o.quiet = true
	default:
		switch {
		case end == nil:
			return "", "", ""
		case !o.accepted:
			return "R8", "Accepted before all other events of an op", end.Kind + " before Accepted"
		case o.end != nil:
			return "R1", "exactly one end", fmt.Sprintf("%s after %s", end, o.end)
		}
		o.end, o.quiet = end, end.Quiet
		if end.Kind == "done" && end.Bytes != o.size {
			return "R1", fmt.Sprintf("Done with the size of the op, %d bytes", o.size), fmt.Sprintf("Done with %d bytes", end.Bytes)
		}
		if len(end.Detail) > maxDetail {
			return "R12", fmt.Sprintf("a detail of at most %d bytes", maxDetail), fmt.Sprintf("one of %d bytes", len(end.Detail))
		}
	}
	return "", "", ""
}

const maxDetail = 256 // contract: Failed.detail
