package sdk

import (
	"context"
	"errors"
	"iter"
	"runtime"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Causes of an op's Context.
var (
	// ErrAborted: the host aborted the op (AbortOp). End it with Aborted, or with what it had become.
	ErrAborted = errors.New("op aborted by the host")
	// ErrPeerRemoved: the host drops the op's peer.
	ErrPeerRemoved = errors.New("peer removed by the host")
	// ErrSessionOver: the host is gone or the plugin stops.
	ErrSessionOver = errors.New("session over")
)

// Generation is the pair of openers between which an op moves bytes.
type Generation struct{ Source, Destination Opener }

// Op is the handle of one accepted operation. It ends exactly once, by Done, DoneUnquiet, Fail, Skip or
// Aborted; a second end changes nothing, is counted and logged. All methods may be called from any
// goroutine.
type Op struct {
	st *opState
}

// ID returns the op's number, unique within the plugin epoch.
func (o *Op) ID() uint64 { return o.st.id }

// Generation returns the openers. A receiver checks Destination.
func (o *Op) Generation() Generation { return o.st.gen }

// Peer returns the target.
func (o *Op) Peer() *Peer { return &o.st.peer.Peer }

// Plan returns the plan with its slices, for backends that build their own descriptors.
func (o *Op) Plan() *Plan { return o.st.plan }

// SrcPool returns the local pool.
func (o *Op) SrcPool() *Pool { return o.st.plan.Src }

// DstPool returns the peer's pool.
func (o *Op) DstPool() *Pool { return o.st.plan.Dst }

// Bytes returns the size of the op: the sum of Len over Copies.
func (o *Op) Bytes() uint64 { return o.st.bytes }

// Priority returns the urgency; larger is more urgent, 0 is normal.
func (o *Op) Priority() int32 { return o.st.priority }

// Deadline returns when the host will abort the op, the zero time for never. A hint for ordering: the
// host judges (R5).
func (o *Op) Deadline() time.Time { return o.st.deadline }

// Layers returns the range [from, to) of model layers that the op moves.
func (o *Op) Layers() (from, to uint32) { return o.st.layerFrom, o.st.layerTo }

// Trace returns the W3C traceparent of the request, or "".
func (o *Op) Trace() string { return o.st.trace }

// Context is done when the op should end early; context.Cause tells why (ErrAborted, ErrPeerRemoved,
// ErrSessionOver). It is also done after the op's end.
func (o *Op) Context() context.Context { return o.st.context() }

// Copies yields the contiguous copies of the op, neighbours joined. It allocates nothing per copy and
// may be ranged over more than once.
func (o *Op) Copies() iter.Seq[Copy] { return copies(o.Rows()) }

// Pieces yields the copies of the op cut to at most `most` bytes each (0: uncut), for backends that copy
// with the CPU: between two pieces they look at the Context and report Progress.
func (o *Op) Pieces(most uint64) iter.Seq[Copy] {
	return func(yield func(Copy) bool) {
		for c := range o.Copies() {
			rest := c.Len
			for most != 0 && rest > most {
				c.Len = most
				if !yield(c) {
					return
				}
				c.SrcOff, c.DstOff, rest = c.SrcOff+most, c.DstOff+most, rest-most
			}
			c.Len = rest
			if !yield(c) {
				return
			}
		}
	}
}

// Rows yields the op as strided rows, for libraries that take them.
func (o *Op) Rows() iter.Seq[Row] {
	st := o.st
	return st.plan.rows(st.source, st.dest, st.layerFrom, st.layerTo)
}

// Runs yields the page runs in pairs of equal count: source pages, destination pages. It is for plans
// that pair page with page; with FeatureRepage see Source and Destination.
func (o *Op) Runs() iter.Seq2[Run, Run] {
	return pairRuns(picker{runs: o.st.source, of: 1}, picker{runs: o.st.dest, of: 1})
}

// Source returns the source pages in order; Plan.SrcPages at a time are a group.
func (o *Op) Source() []Run { return runList(o.st.source) }

// Destination returns the destination pages in order; Plan.DstPages at a time are a group.
func (o *Op) Destination() []Run { return runList(o.st.dest) }

// Progress reports the bytes moved so far. It never goes back (R8) and is sent at most once a
// millisecond; calling it after every piece is cheap. Ignored after the end.
func (o *Op) Progress(bytes uint64) { o.st.s.opProgress(o.st, bytes) }

// Done ends the op: every byte is visible to the destination worker, and none can land any more. lane
// is the path that the bytes took, never LANE_ANY.
func (o *Op) Done(lane contract.Lane) {
	o.st.s.opEnd(o.st, opEnd{kind: endDone, quiet: true, lane: lane})
}

// DoneUnquiet is Done when a duplicate may still land. Quiesced must follow.
func (o *Op) DoneUnquiet(lane contract.Lane) {
	o.st.s.opEnd(o.st, opEnd{kind: endDone, lane: lane})
}

// Fail ends the op. quiet says that no access of it can land any more, at either end; if false,
// Quiesced must follow when that becomes true. The detail (format, args) is cut to 256 bytes.
func (o *Op) Fail(cause contract.Cause, quiet bool, format string, args ...any) {
	o.st.s.opEnd(o.st, opEnd{kind: endFailed, cause: cause, quiet: quiet, format: format, args: args})
}

// FailErr is Fail with the cause that err carries (Error), else CAUSE_TRANSPORT. An err that is the end of
// the op's own Context (ErrAborted, ErrPeerRemoved) ends it as Aborted does.
func (o *Op) FailErr(quiet bool, err error) {
	if errors.Is(err, ErrAborted) || errors.Is(err, ErrPeerRemoved) {
		o.Aborted(quiet)
		return
	}
	o.Fail(causeOf(err, contract.Cause_CAUSE_TRANSPORT), quiet, "%v", err)
}

// Skip ends the op because the backend decided not to do it. Nothing to do is Done, not Skip.
func (o *Op) Skip(cause contract.Cause, quiet bool, format string, args ...any) {
	o.st.s.opEnd(o.st, opEnd{kind: endSkipped, cause: cause, quiet: quiet, format: format, args: args})
}

// Aborted ends the op because its Context was done.
func (o *Op) Aborted(quiet bool) {
	o.st.s.opEnd(o.st, opEnd{kind: endAborted, quiet: quiet})
}

// Quiesced says, after an end with quiet=false, that no access of the op can land any more.
func (o *Op) Quiesced() { o.st.s.opQuiesced(o.st) }

// Async lets Transfer return before the op has ended: keep the handle and end it later. A handle that
// becomes unreachable without an end is ended as Failed(CAUSE_NO_TERMINAL) at the next garbage
// collection.
func (o *Op) Async() {
	if !o.st.async.Swap(true) {
		runtime.AddCleanup(o, func(st *opState) { st.s.opDropped(st) }, o.st)
	}
}
