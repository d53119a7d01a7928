package statemachine

// State is where a room's record stands at one engine. The letters are those of docs/protocol.md.
type State uint8

// The states. Absent is the column "–" of docs/protocol.md: no record.
const (
	Absent     State = iota
	Unbound          // source B: open, no pair
	Offered          // source O: Bound sent, Confirm awaited
	Confirmed        // source W: the pair is agreed, ops may be submitted
	Committed        // source C: RankEnd sent, the judge decides
	Opened           // destination Q: open, no pages
	Registered       // destination R: pages registered, unbound
	Bound            // destination W: bound to the pair
	Ended            // both T: keeps verdict, pair and attempt
	Voted            // destination V: every RankEnd is in and the group's judge has been told; it decides
	NumStates
)

var stateNames = [NumStates]string{"absent", "unbound", "offered", "confirmed", "committed", "opened", "registered", "bound", "ended", "voted"}

// String returns the state's public name.
func (s State) String() string {
	if s < NumStates {
		return stateNames[s]
	}
	return "invalid"
}

// Live reports whether the state belongs to an open that has not ended.
func (s State) Live() bool { return s != Absent && s != Ended }

// Rung is the proof that a bound destination's pages wait for after the end.
type Rung uint8

// The rungs of the ladder that a record can stand on. Rung 2 (receiver check) runs beside rung 1.
const (
	NoRung     Rung = 0
	Drain      Rung = 1 // Drained from the source engine
	Fence      Rung = 3 // FencePeer
	Quarantine Rung = 4 // none could be had; Drained, Revoked, a late fence and retire still end it
)

// Counts are the ops of a pair, of a source record, or of one of its ranks, by what is known of them.
type Counts struct {
	Open   int32 // submitted, not ended
	Linger int32 // ended with quiet=no, Quiesced awaited
	Dead   int32 // their writer epoch ended first; its means are not yet proven gone
	Lost   int32 // their writer epoch is proven gone: quiet here, never quiet at the destination
}

// QuietLocal reports whether no access of the ops can touch the source's pages any more.
func (c Counts) QuietLocal() bool { return c.Open == 0 && c.Linger == 0 && c.Dead == 0 }

// QuietRemote reports whether no access of the ops can land at the destination any more. A dead
// writer is no proof of that.
func (c Counts) QuietRemote() bool { return c.QuietLocal() && c.Lost == 0 }

// Add returns the sum of two counts.
func (c Counts) Add(d Counts) Counts {
	return Counts{c.Open + d.Open, c.Linger + d.Linger, c.Dead + d.Dead, c.Lost + d.Lost}
}

// Record is one engine's record of one open of a room, without its pairs. It is comparable and holds no
// pointer.
type Record struct {
	Role   Role
	State  State // of all pairs together: while live it is that of the one that is behind
	Reason Reason
	ByPeer bool // the reason, of an Ended record, came from another engine

	Admitted bool // false: accepted, waiting for admission at this engine
	Started  bool // the first op was submitted (source) or reported (destination)
	Armed    bool // the room holds pages

	Own   Opener
	Att   uint64
	Pages Residency // destination; of a source it is SourceResidency
	Rung  Rung      // destination
}

// Pair is what a record keeps of another engine. A source has one for each engine of the destination group,
// a destination one for each engine of the source group, with its own Register, Bound, Confirm and Drained.
// Where a destination group spans engines, they form a star around the one of rank 0, the judge: it has a
// sibling for each other engine, and each of those has it.
type Pair struct {
	Other Opener // of the opener there, zero while unbound; of a sibling that voted, its opener

	Sibling   bool // an engine of the own destination group
	Judge     bool // the engine of destination rank 0
	Told      bool // at an open that finds an abort mark: this engine needs no word of it
	Confirmed bool // source: the destination agreed

	RankEnded bool // destination: RankEnd has come
	RankQuiet bool // source: RankEnd said quiet=yes

	SourceEnded bool // destination: the source will submit nothing any more
	Quiet       bool // destination: nothing of the source can land in the pages
	DrainedSent bool // source

	Ops Counts // source: ops to this destination
}

// Status is the KVPoll word of the record: a pure function of it.
func (r *Record) Status() KVPoll {
	switch r.State {
	case Confirmed, Bound:
		if r.Started {
			return Transferring
		}
		return WaitingForInput
	case Committed, Voted:
		return Transferring
	case Ended:
		if r.Reason == Success {
			return Succeeded
		}
		return Failed
	}
	return Bootstrapping
}

// SourceResidency is the residency of pages that a source record, or one rank of it, has handed over.
func SourceResidency(s State, armed bool, c Counts) Residency {
	switch {
	case !armed:
		return NoPages
	case s != Committed && s != Ended:
		return Armed
	case !c.QuietLocal():
		if s == Committed {
			return Armed
		}
		return Quiescing
	case c.Lost > 0:
		return Fenced
	}
	return Quiet
}

// FrameKind is the kind of a peer frame that concerns a room. P is the source engine, D the
// destination engine.
type FrameKind uint8

// The room frames of the protocol.
const (
	FrameQueued       FrameKind = iota + 1 // D→P: the destination is open and waits for memory
	FrameRegister                          // D→P: pages are registered; asks P to bind
	FrameBound                             // P→D: offer of the pair (s, d)
	FrameConfirm                           // D→P: the pair is agreed; P may submit
	FrameProgress                          // P→D: bytes so far, and whether ops are outstanding
	FrameRankEnd                           // P→D: every rank of P sent its last; carries Commit's aux when P hosts rank 0
	FrameVerdict                           // D→P: the judge's word on (s, d)
	FrameAbort                             // both ways: S or D may be zero, see docs/protocol.md
	FrameDrained                           // P→D: no access of s can land in d's pages any more
	FrameReady                             // D_j→D_1: every RankEnd is in; D_j has voted
	FrameGroupVerdict                      // D_1→D_j: the judge's word on d_j
	FrameGroupAbort                        // both ways between D_1 and D_j: the attempt has ended, or is asked to end
	NumFrameKinds
)

var frameNames = [NumFrameKinds]string{"", "Queued", "Register", "Bound", "Confirm", "Progress", "RankEnd", "Verdict", "Abort", "Drained", "Ready", "GroupVerdict", "GroupAbort"}

// String returns the frame's name in the protocol.
func (k FrameKind) String() string {
	if k > 0 && k < NumFrameKinds {
		return frameNames[k]
	}
	return "invalid"
}

// Outcome is the judge's word in a Verdict.
type Outcome uint8

// Outcomes of a Verdict frame.
const (
	JudgeSuccess Outcome = iota + 1
	JudgeFailed
	JudgeUnknown // the judge holds no record of d: never "failed"
)

// Kind is the kind of an event.
type Kind uint8

// Events. The frames come from other engines; all else is local. Those marked * are about one pair.
const (
	OnOpen         Kind = iota // Role, Own, Att, Admitted; D: a placeholder of this attempt, or Marked: an abort mark of it, of the pair
	OnAdmit                    // a record that waited is admitted; D as in OnOpen
	OnHeld                     // * source, after OnOpen or OnAdmit: D, a placeholder of another pair
	OnPages                    // destination: every local rank registered its pages
	OnSend                     // source: the worker handed over pages (armed)
	OnSubmit                   // * source: an op was submitted (Counts moved by the caller)
	OnOps                      // source: the caller moved Counts
	OnOpFailed                 // * source: an op ended badly; Reason
	OnComplete                 // source: every local rank sent its last and every op is Done
	OnAbort                    // the worker, or an operator, aborts
	OnClock                    // a clock of a live record expired; Reason
	OnWorkerLost               // the worker is gone
	OnPluginLost               // the plugin epoch that holds the pair's ops (*), or the record's pages, ended
	OnPeerDead                 // * that engine's incarnation is dead by clock or proof
	OnHelloNewer               // * that engine came back with a newer incarnation
	OnDrainClock               // destination, Ended: the rung's clock expired
	OnFenced                   // * destination, Ended: FencePeer answered; Quiet
	OnRevoked                  // destination, Ended: the plugin refuses d for good; Quiet
	OnPluginFenced             // destination: the plugin epoch of the pages is provably gone
	OnFrame                    // * Frame and its fields
	NumKinds
)

// Event is one input of Step.
type Event struct {
	Kind     Kind
	Role     Role
	Frame    FrameKind
	Outcome  Outcome
	Reason   Reason
	Marked   bool
	Admitted bool
	Quiet    bool
	Complete bool // RankEnd: rule R11 holds, as far as the RankEnds that are in can say. Ready: it names the sources that this record is bound to
	OwnInc   bool // frame for a record that is absent: S is of this engine's incarnation
	Unproven bool // with OwnInc: an op of S may have been lost with its writer, so S is not known to be drained
	Own      Opener
	S, D     Opener
	Att      uint64
}

// Send is one frame that Step asks for.
type Send struct {
	Kind    FrameKind
	Outcome Outcome
	Reason  Reason
	Quiet   bool
	At      int // of the pair whose engine it goes to
	S, D    Opener
	Att     uint64
}

// Do is a set of actions that Step asks for.
type Do uint16

// Actions.
const (
	DoSubmit          Do = 1 << iota // release the held chunks to the scheduler
	DoCancel                         // drop held chunks, abort submitted ops
	DoMark                           // remember that the attempt was aborted (abort mark of Att)
	DoPlaceholder                    // remember the registered destination D of Att
	DoDropPlaceholder                // forget the placeholder D
	DoRevoke                         // withdraw the grant of the pages
	DoFence                          // ask the plugin to fence the writer epochs of the sources in Out.Fence
	DoDrop                           // the event changed nothing: count it
)

// Out is what Step asks the caller to do. The caller keeps it for the next Step, see Reset.
type Out struct {
	Sends []Send
	Fence []int // pairs
	Do    Do
}

// Reset empties o and keeps its memory.
func (o *Out) Reset() { o.Sends, o.Fence, o.Do = o.Sends[:0], o.Fence[:0], 0 }
