package tcp

import (
	"iter"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// xfer is one op on its way to a peer.
type xfer struct {
	op     *sdk.Op
	total  uint64
	until  time.Time   // it waits for a connection no longer than this
	unhook func() bool // takes back the watch on the op's context

	// Guarded by peer.mu.
	c          *outbound // nil while it waits for a connection
	id         uint64    // its number on c, 0 until it is picked to begin
	queued     bool      // in c.ready
	pending    bool      // in peer.pending
	writing    bool      // c's pump reads its source now
	cancelled  bool      // the host wants it to end
	asked      bool      // frameCancel is queued or sent
	ended      bool      // its end was reported; it is here only to become quiet
	tries      int       // connections that were lost before it began
	sent       uint64    // bytes given to the pump
	acked      uint64    // bytes that the receiver has copied
	progress   time.Time // of the last report
	late       ending    // end that came while writing
	why        ending    // what a cancel that we asked for ourselves means
	abortTimer *time.Timer

	// told orders an unquiet end and its Quiesced, which two goroutines may deliver at once.
	told atomic.Uint32

	// Of the pump while writing, else guarded by peer.mu.
	begun bool
	limit uint64 // bytes of sent that the pump has not written yet
	next  func() (sdk.Copy, bool)
	stop  func()
	cur   sdk.Copy
	dry   bool // the copies ended
}

// peek makes cur the next bytes to send; false when there are none.
func (x *xfer) peek() bool {
	if x.cur.Len > 0 {
		return true
	}
	if x.next == nil {
		x.next, x.stop = iter.Pull(x.op.Copies())
	}
	var ok bool
	if x.cur, ok = x.next(); !ok {
		x.dry = true
	}
	return ok
}

// take cuts at most n bytes off cur.
func (x *xfer) take(n uint64) sdk.Copy {
	c := x.cur
	c.Len = min(c.Len, n)
	x.cur.SrcOff += c.Len
	x.cur.DstOff += c.Len
	x.cur.Len -= c.Len
	x.limit -= c.Len
	return c
}

// rewind makes x as it was before it began. The pump does not have it.
func (x *xfer) rewind() {
	if x.stop != nil {
		x.stop()
	}
	x.next, x.stop, x.cur, x.dry = nil, nil, sdk.Copy{}, false
	x.c, x.id, x.begun, x.asked = nil, 0, false, false
	x.sent, x.acked, x.limit = 0, 0, 0
}

type endingKind uint8

const (
	endProgress endingKind = iota + 1
	endDone
	endFailed
	endAborted
	endQuiesced
	endMove // not told to the host: begin again on another lane
)

// ending is something to tell the SDK about an op, after the locks are given back.
type ending struct {
	x      *xfer
	kind   endingKind
	quiet  bool
	cause  contract.Cause
	lane   contract.Lane
	bytes  uint64
	detail string
}

func (e *ending) deliver() {
	x := e.x
	if e.kind == endProgress {
		x.op.Progress(e.bytes)
		return
	}
	if x.unhook != nil {
		x.unhook()
	}
	switch e.kind {
	case endDone:
		x.op.Done(e.lane)
	case endFailed:
		x.op.Fail(e.cause, e.quiet, "%s", e.detail)
	case endAborted:
		x.op.Aborted(e.quiet)
	case endQuiesced:
		if x.told.Or(toldQuiet)&toldEnd != 0 {
			x.op.Quiesced()
		}
		return
	}
	if !e.quiet && x.told.Or(toldEnd)&toldQuiet != 0 {
		x.op.Quiesced()
	}
}

// Bits of xfer.told.
const (
	toldEnd   = 1 // the SDK has the end, which was not quiet
	toldQuiet = 2 // it is quiet now
)

// deliver tells the SDK, in order, and returns the emptied list.
func deliver(list []ending) []ending {
	for i := range list {
		list[i].deliver()
		list[i] = ending{}
	}
	return list[:0]
}
