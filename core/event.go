package core

import (
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// SessionID names a worker's connection. The host mints it; it is never reused.
type SessionID uint64

// PeerID names another engine by its node name, across its incarnations. The host mints it.
type PeerID int32

// OpID names one submission to a plugin. The core mints it; it is never reused.
type OpID uint64

// GrantID names one Grant to a receiver-checking plugin. The core mints it.
type GrantID uint64

// EventKind tells which fields of an Event are set.
type EventKind uint8

// Events of workers. Session is always set. Open, Register, Send, Abort and Release are requests: each
// is answered by exactly one Reply effect with the same Seq, in the same Step.
const (
	// SessionUp: a worker said Hello. Group, Role, Rank, Size, Slots.
	SessionUp EventKind = iota + 1
	// PoolUp: a pool of the session is ready with every backend. Pool, Ordinal, Pages, Layers, PageBytes, State.
	PoolUp
	// SessionDown: the worker is gone (socket EOF or process exit).
	SessionDown
	// Open: Seq, Room, Att, Slot, PeerGroup, Priority, Deadline (0: none).
	Open
	// Register: Seq, Slot, Parts. Destination only, once an open.
	Register
	// Send: Seq, Slot, Parts, LayerFrom, LayerTo, Last, Aux. Source only. Parts may be empty when Last.
	Send
	// Abort: Seq, Slot. Idempotent; an unknown or ended slot is answered and nothing changes (R7).
	Abort
	// Release: Seq, Slot. The worker takes its pages back: refused while they are not reusable.
	Release
)

// Events of peers. Peer is always set.
const (
	// PeerHello: the link is up and the peer said Hello. Node, Inc. The core ends what an older
	// incarnation leaves and re-sends what Resync says (docs/protocol.md).
	PeerHello EventKind = iota + 32
	// PeerDown: the link broke. Proves nothing.
	PeerDown
	// PeerHeard: something arrived on the link (at least every beat).
	PeerHeard
	// PeerGone: proof that incarnation Inc of the peer is dead (same host: its lock is free).
	PeerGone
	// PeerGroup: the peer hosts the ranks Ranks (ascending) of group Group, which has Size ranks in all
	// and Role, a counterpart for group PeerGroup of this engine; Map maps the pages of the source's group to
	// those of the destination's. Backends lists the pair's usable backends in the destination's order; empty
	// when Reason says why the pair is refused (LayoutMismatch, BackendDown), Detail how. A group whose ranks
	// sit on several engines comes as one event a peer; where Group is PeerGroup it tells of the own group's
	// ranks at another engine, and Backends is empty. Size 0: the peer hosts none of the group's ranks any
	// more.
	PeerGroup
	// PeerPool: a pool at the peer. Pool, Ordinal, Pages (0: the pool is gone), Layers, PageBytes, State.
	PeerPool
	// PeerDraining: the peer admits no new rooms.
	PeerDraining
	// PeerLost: the peer's plugin epoch Epoch of Backend is gone (frame Lost). Input to rung 3.
	PeerLost
	// PeerFrame: Frame.
	PeerFrame
	// PeerBadFrame: a frame that broke the wire protocol; Frame has Kind, Room, S and D as far as they
	// could be read, Detail says what is wrong. It ends the room that it names (R12).
	PeerBadFrame
)

// Events of plugins. Backend and Epoch name the plugin process.
const (
	// PluginUp: epoch Epoch of Backend is ready. ReceiverChecked, MaxOpBytes. If an older one is up it
	// retires: it gets nothing new, and PluginEnd asks for its end when what it has is over, or after
	// Clocks.Retire. So a host that starts an epoch beside another, to upgrade it, has nothing else to say.
	PluginUp EventKind = iota + 64
	// PluginLost: that epoch ended (exit, stream end, beats). Its ops without an end are lost (R6).
	PluginLost
	// PluginFenced: the conditions of rung 5 (docs/protocol.md) hold for that epoch: nothing of it can
	// write any more.
	PluginFenced
	// PluginDown: Backend is down for good on this engine (its restart budget is spent).
	PluginDown
	// OpAccepted, OpProgress (Bytes), OpQuiesced: Op.
	OpAccepted
	OpProgress
	// OpEnd: Op, End, Reason (not for Done), Quiet, Bytes, Detail.
	OpEnd
	OpQuiesced
	// Granted: Grant. The plugin accepts writes of the opener. GrantFailed: Grant, Detail.
	Granted
	GrantFailed
	// Revoked: Grant, Quiet.
	Revoked
	// Fenced: Grant (the id given in FencePeer), Quiet (false: unknown).
	Fenced
	// PluginKept: PluginReplace of Epoch of Backend failed, Detail says why; the epoch serves on and is not
	// replaced before a minute is over.
	PluginKept
)

// Events of the engine.
const (
	// Tick: time passed; clocks that are due fire. Every Step judges clocks last, after all other
	// events of its batch (R5), so an empty batch does as well.
	Tick EventKind = iota + 96
	// DrainBegin: admit nothing new, tell peers. DrainEnd: end what is left, Failed(draining).
	DrainBegin
	DrainEnd
	// AdminAbort: Room, Role (0: both). An operator ends the room as its worker would.
	AdminAbort
)

// EndKind is how an op ended.
type EndKind uint8

// The four ends of an op (R1).
const (
	EndDone EndKind = iota + 1
	EndFailed
	EndSkipped
	EndAborted
)

// Part is pages of one pool of the session, named by the pool's ordinal.
type Part struct {
	Ordinal int32
	Prefix  int32 // Register: pages that the destination already holds, at the front of Runs
	Runs    []layout.Run
}

// Event is one input of the core. Kind says which fields are set. The core keeps none of the slices
// after Step returns, except Aux and Frame.Aux.
type Event struct {
	Kind    EventKind
	Role    statemachine.Role
	End     EndKind
	Last    bool
	Quiet   bool
	Reason  statemachine.Reason
	Session SessionID
	Seq     uint64 // request id, echoed in Reply
	Slot    int32  // of the session's status page
	Peer    PeerID
	Rank    int32
	Size    int32
	Slots   int32
	Ordinal int32
	Pages   int32
	Layers  int32
	Epoch   uint32
	Op      OpID
	Grant   GrantID
	Room    int64
	Att     uint64
	Pool    uint64
	Inc     uint64
	Bytes   int64 // OpProgress, OpEnd: bytes so far
	// PageBytes is the size of one page over all tensors of the pool.
	PageBytes int64
	// State: the pool holds state of a fixed size per request, not pages of tokens: its pages go from rank
	// r to rank r as they are.
	State           bool
	Map             layout.Map
	MaxOpBytes      int64
	ReceiverChecked bool
	LayerFrom       int32
	LayerTo         int32
	Priority        int32
	Deadline        int64 // ns from now
	Group           string
	PeerGroup       string
	Node            string
	Backend         string
	Backends        []string
	Ranks           []int32
	Detail          string
	Parts           []Part
	Aux             []byte
	Frame           Frame
}
