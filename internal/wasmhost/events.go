package wasmhost

import (
	"errors"
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// take carries out one event of the guest, on the loop. An error is a violation.
func (b *Backend) take(e *contract.PluginEvent) error {
	if b.looped == nil {
		return errors.New("emitted an event before it got any")
	}
	switch e := e.GetEvent().(type) {
	case *contract.PluginEvent_RegionReady:
		if len(e.RegionReady.Export) > 0 {
			return fmt.Errorf("RegionReady %d with an export; a guest exports nothing", e.RegionReady.Region)
		}
		return b.answer(question{"RegionAdd", e.RegionReady.Region}, nil)
	case *contract.PluginEvent_RegionFailed:
		return b.answerFailed(question{"RegionAdd", e.RegionFailed.Region}, e.RegionFailed.Cause, e.RegionFailed.Detail)
	case *contract.PluginEvent_RegionRemoved:
		return b.answer(question{"RegionRemove", e.RegionRemoved.Region}, nil)
	case *contract.PluginEvent_PeerReady:
		if e.PeerReady.Lane != contract.Lane_LANE_SHM {
			return fmt.Errorf("PeerReady %d with lane %v; the host's is LANE_SHM", e.PeerReady.Peer, e.PeerReady.Lane)
		}
		return b.answer(question{"PeerAdd", uint64(e.PeerReady.Peer)}, nil)
	case *contract.PluginEvent_PeerFailed:
		return b.answerFailed(question{"PeerAdd", uint64(e.PeerFailed.Peer)}, e.PeerFailed.Cause, e.PeerFailed.Detail)
	case *contract.PluginEvent_PeerRemoved:
		return b.answer(question{"PeerRemove", uint64(e.PeerRemoved.Peer)}, nil)
	case *contract.PluginEvent_Accepted:
		return b.accepted(e.Accepted.Op)
	case *contract.PluginEvent_Progress:
		return b.progress(e.Progress)
	case *contract.PluginEvent_Done:
		return b.done(e.Done)
	case *contract.PluginEvent_Failed:
		return b.failed(e.Failed)
	case *contract.PluginEvent_Skipped:
		return b.skipped(e.Skipped)
	case *contract.PluginEvent_Aborted:
		return b.aborted(e.Aborted)
	case *contract.PluginEvent_Quiesced:
		return b.quiesced(e.Quiesced.Op)
	case *contract.PluginEvent_Log:
		if e.Log.Level < contract.Log_LEVEL_DEBUG || e.Log.Level > contract.Log_LEVEL_ERROR {
			return fmt.Errorf("Log.level is %d; 1 to 4 are legal", e.Log.Level)
		}
		b.logf(e.Log.Level, "%s", e.Log.Message)
		return nil
	case *contract.PluginEvent_Fault:
		return fmt.Errorf("gave up: %s", e.Fault.Detail)
	case nil:
		return errors.New("emitted an event of no known kind")
	default:
		return fmt.Errorf("emitted %T, which is not an event of a guest", e)
	}
}

func (b *Backend) logf(level contract.Log_Level, format string, args ...any) {
	if b.start.Logf != nil {
		b.start.Logf(level, format, args...)
	}
}

// answer gives the guest's answer to whoever asked.
func (b *Backend) answer(q question, err error) error {
	b.mu.Lock()
	asked := b.asked[q]
	delete(b.asked, q)
	b.mu.Unlock()
	if asked == nil {
		return fmt.Errorf("answered %v, which was not asked", q)
	}
	asked <- err
	return nil
}

func (b *Backend) answerFailed(q question, cause contract.Cause, detail string) error {
	if err := checkCause(q.String(), cause); err != nil {
		return err
	}
	return b.answer(q, &sdk.Error{Cause: cause, Err: errors.New(detail)})
}

func checkCause(of string, cause contract.Cause) error {
	if _, known := contract.Cause_name[int32(cause)]; !known || cause == 0 {
		return fmt.Errorf("%s with cause %d; enum values start at 1 and end at %d", of, cause, contract.Cause_CAUSE_POISONED)
	}
	return nil
}

// openOp finds an op that the guest names, in the order that the contract demands.
func (b *Backend) openOp(event string, id uint64) (*openOp, error) {
	o := b.ops[id]
	switch {
	case o == nil:
		return nil, fmt.Errorf("%s of op %d, which is not open: it is over, or was never submitted (R1)", event, id)
	case !o.accepted && event != "Accepted":
		return nil, fmt.Errorf("%s of op %d before Accepted (R8)", event, id)
	case o.accepted && event == "Accepted":
		return nil, fmt.Errorf("op %d accepted twice (R8)", id)
	case o.ended && event != "Quiesced":
		return nil, fmt.Errorf("%s of op %d after its end (R1)", event, id)
	case !o.ended && event == "Quiesced":
		return nil, fmt.Errorf("Quiesced of op %d before its end (R4)", id)
	}
	return o, nil
}

func (b *Backend) accepted(id uint64) error {
	o, err := b.openOp("Accepted", id)
	if err == nil {
		o.accepted = true
	}
	return err
}

func (b *Backend) progress(m *contract.Progress) error {
	o, err := b.openOp("Progress", m.Op)
	switch {
	case err != nil:
		return err
	case m.Bytes <= o.progress:
		return fmt.Errorf("Progress %d of op %d after %d: it has to grow (R8)", m.Bytes, m.Op, o.progress)
	case m.Bytes > o.op.Bytes():
		return fmt.Errorf("Progress %d of op %d, which has %d bytes (R9)", m.Bytes, m.Op, o.op.Bytes())
	}
	o.progress = m.Bytes
	o.op.Progress(m.Bytes)
	return nil
}

// end is what all ends share; report tells the SDK.
func (b *Backend) end(o *openOp, quiet bool, report func()) error {
	o.ended = true
	o.unwatch()
	if quiet {
		b.shut(o)
	}
	report()
	return nil
}

func (b *Backend) done(m *contract.Done) error {
	o, err := b.openOp("Done", m.Op)
	switch {
	case err != nil:
		return err
	case m.Bytes != o.op.Bytes():
		return fmt.Errorf("Done of op %d with %d bytes; it has %d", m.Op, m.Bytes, o.op.Bytes())
	case m.Lane != contract.Lane_LANE_SHM:
		return fmt.Errorf("Done of op %d with lane %v; the host's is LANE_SHM", m.Op, m.Lane)
	}
	return b.end(o, m.Quiet, func() {
		if m.Quiet {
			o.op.Done(m.Lane)
		} else {
			o.op.DoneUnquiet(m.Lane)
		}
	})
}

func (b *Backend) failed(m *contract.Failed) error {
	o, err := b.openOp("Failed", m.Op)
	if err == nil {
		err = checkCause(fmt.Sprintf("Failed of op %d", m.Op), m.Cause)
	}
	if err != nil {
		return err
	}
	return b.end(o, m.Quiet, func() { o.op.Fail(m.Cause, m.Quiet, "%s", m.Detail) })
}

func (b *Backend) skipped(m *contract.Skipped) error {
	o, err := b.openOp("Skipped", m.Op)
	if err == nil {
		err = checkCause(fmt.Sprintf("Skipped of op %d", m.Op), m.Cause)
	}
	if err != nil {
		return err
	}
	return b.end(o, m.Quiet, func() { o.op.Skip(m.Cause, m.Quiet, "%s", m.Detail) })
}

func (b *Backend) aborted(m *contract.Aborted) error {
	o, err := b.openOp("Aborted", m.Op)
	if err == nil && o.abortBy.IsZero() {
		err = fmt.Errorf("Aborted of op %d, which nobody aborted", m.Op)
	}
	if err != nil {
		return err
	}
	return b.end(o, m.Quiet, func() { o.op.Aborted(m.Quiet) })
}

func (b *Backend) quiesced(id uint64) error {
	o, err := b.openOp("Quiesced", id)
	if err != nil {
		return err
	}
	b.shut(o)
	o.op.Quiesced()
	return nil
}
