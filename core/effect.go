package core

import (
	"slices"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Effects is the output of one Step, in the order in which it must be carried out within each list.
// The lists are independent of each other except that Words precede Replies (a worker that reads its
// reply finds its word written) and Auxes precede Words (aux is there when Success is seen).
//
// The lists, and the slices inside them (runs, ranks and parts), are cut from buffers that Reset takes
// back: the host carries them out or copies them before the next Step. A frame that is kept is copied by
// Frame.Clone. Aux bytes and strings are never overwritten.
type Effects struct {
	Auxes   []AuxEffect
	Words   []WordEffect
	Replies []Reply
	Frames  []FrameEffect
	Plugin  []PluginEffect
	Records []Record
	Stages  []StageEffect
	// Gone lists sessions that are down and of which no page is touched by anybody any more: the host
	// may drop their memory.
	Gone []SessionID
	// Drained is set when a drain was begun and no room is left.
	Drained bool

	// What the slices inside the lists are cut from.
	runs       []layout.Run
	ranks      []RankPages
	parts      []PartPages
	sent       []RankSent
	sentParts  []PartSent
	sources    []statemachine.Opener
	grantParts []GrantPart
	writers    []PeerID
}

// Reset empties the buffers and keeps their memory, unless a burst has made them very large.
func (e *Effects) Reset() {
	e.Auxes, e.Words, e.Replies, e.Frames, e.Plugin = empty(e.Auxes), empty(e.Words), empty(e.Replies), empty(e.Frames), empty(e.Plugin)
	e.Records, e.Stages, e.Gone, e.Drained = empty(e.Records), empty(e.Stages), empty(e.Gone), false
	e.runs, e.ranks, e.parts = empty(e.runs), empty(e.ranks), empty(e.parts)
	e.sent, e.sentParts, e.sources = empty(e.sent), empty(e.sentParts), empty(e.sources)
	e.grantParts, e.writers = empty(e.grantParts), empty(e.writers)
}

// maxKept is the capacity beyond which Reset lets a buffer go.
const maxKept = 1 << 16

func empty[T any](s []T) []T {
	if cap(s) > maxKept {
		return nil
	}
	return s[:0]
}

// next appends a zero element to s and returns it. It is built in place: effects are large.
func next[T any](s *[]T) *T {
	n := len(*s)
	if n == cap(*s) {
		*s = slices.Grow(*s, 1)
	}
	*s = (*s)[:n+1]
	e := &(*s)[n]
	var zero T
	*e = zero
	return e
}

// tail is what was appended to s since it had n elements; appending to it does not touch s.
func tail[T any](s []T, n int) []T { return s[n:len(s):len(s)] }

// WordEffect sets the status word of a slot.
type WordEffect struct {
	Session   SessionID
	Slot      int32
	Status    statemachine.KVPoll
	Residency statemachine.Residency
	Opener    statemachine.Opener
	Reason    statemachine.Reason // of a terminal status; for Failure(room)
	Detail    string              // of a terminal status: what is known beyond the reason, often empty
}

// Reply answers a worker's request.
type Reply struct {
	Session SessionID
	Seq     uint64
	Slot    int32
	Code    ReplyCode
	Opener  statemachine.Opener // Open
	Reason  statemachine.Reason // Ended: the verdict
	Detail  string              // a refusal: what is wrong and the fix
}

// ReplyCode is the outcome of a worker's request.
type ReplyCode uint8

// Reply codes.
const (
	OK      ReplyCode = iota + 1
	Ended             // the room has ended; Reason is its verdict; nothing changed
	Refused           // nothing changed; Detail says why
	Freed             // Release: the slot may be used again
)

// FrameEffect sends a frame to a peer whose link is ready.
type FrameEffect struct {
	Peer  PeerID
	Frame Frame
	// Urgent frames (Abort, Verdict) may overtake the others.
	Urgent bool
}

// PluginKind tells what a PluginEffect asks for.
type PluginKind uint8

// Requests to a plugin.
const (
	PluginSubmit PluginKind = iota + 1
	PluginAbort
	PluginGrant
	PluginRevoke
	PluginFencePeer
	// PluginReplace: too many pages rest with Epoch of Backend, or it refuses a living peer for good. The host
	// starts the next epoch beside it and answers PluginUp of that, or PluginKept. If the epoch ends meanwhile
	// no answer is needed.
	PluginReplace
	// PluginEnd: nothing uses Epoch of Backend any more, or for too long, and a newer one serves. The host
	// ends it; PluginLost and, with the proof, PluginFenced follow.
	PluginEnd
)

// PluginEffect is a request to a plugin epoch. If that epoch is gone the host drops it: PluginLost
// follows.
type PluginEffect struct {
	Kind    PluginKind
	Backend string
	Epoch   uint32

	Op          OpID // Submit, Abort
	S, D        statemachine.Opener
	Room        int64
	Peer        PeerID
	PeerInc     uint64
	PeerEpoch   uint32 // epoch of Backend at the peer that the pages are registered with
	SrcPool     uint64
	DstPool     uint64 // the peer's pool id
	SrcRank     int32
	DstRank     int32
	Map         layout.Map // what is copied: Map.Plan(SrcRank, DstRank, Phase, …)
	Phase       int32
	Source      []layout.Run
	Destination []layout.Run
	LayerFrom   int32
	LayerTo     int32
	Priority    int32
	DeadlineIn  int64 // ns, 0: none
	Bytes       int64

	Grant   GrantID // Grant, Revoke, FencePeer
	Parts   []GrantPart
	Writers []PeerID // Grant: the engines that host the source group
}

// GrantPart is pages of one local pool that a destination opener may write.
type GrantPart struct {
	Pool uint64
	Runs []layout.Run
}

// AuxEffect hands the aux record of a room to a destination worker. It precedes the Success word.
type AuxEffect struct {
	Session SessionID
	Slot    int32
	Room    int64
	Aux     []byte
}

// RecordKind is what happened to a room, for the flight recorder, logs and metrics.
type RecordKind uint8

// Kinds of records.
const (
	RecOpen RecordKind = iota + 1
	RecState
	RecBound
	RecEnd       // Reason
	RecResidency // pages moved to Residency
	RecFrameIn   // Frame kind arrived
	RecFrameOut
	RecOp       // an op was submitted
	RecOpEnd    // End, Reason
	RecDropped  // a late or impossible message changed nothing
	RecReleased // the worker took the pages back
	RecRung     // the pages moved to Rung of the fencing ladder; NoRung: off it, to Residency
)

// Record is one line of a room's history.
type Record struct {
	Kind      RecordKind
	Role      statemachine.Role
	State     statemachine.State
	Residency statemachine.Residency
	Rung      statemachine.Rung
	Reason    statemachine.Reason
	Frame     FrameKind
	End       EndKind
	Peer      PeerID
	Room      int64
	Own       statemachine.Opener
	Pair      statemachine.Opener
	Op        OpID
	Bytes     int64
	Detail    string
}
