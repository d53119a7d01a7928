package core

import (
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// room is one record: one open of a room at this engine. Pointer-free.
type room struct {
	sm     statemachine.Record
	pairs  int32 // the engines at the other side, in the order of their lowest ranks; then those of the own group
	id     int64
	gen    uint32 // of this slab entry, part of GrantID
	next   int32  // next record of the same room and role
	ranks  int32  // ranks that joined
	dst    int32  // destination pages by (rank, ordinal): own at D, the peers' at P
	ops    int32  // P: ops known to a plugin
	aux    int32  // aux record: P's own, or that of RankEnd at D
	detail int32  // why it ended, in words
	layout int32  // how source pages become destination pages; nil32: rank r to rank r, whole
	timers [numTimers]timer
	class  [numTimers]class // of the timers

	peerQueued  bool // the counterpart said Queued
	outstanding bool // of any pair
	whole       bool // all engines of the other group are known; pairs stay as they are
	counted     bool // in the live counts
	buried      bool // a tombstone, in its peer's list
	pinned      bool // D: its pages are accounted against the limits
	rested      bool // D: its pages are accounted as quarantined
	aged        bool // D: they rested for longer than Quarantine.Age
	grant       grantState
	rungArmed   statemachine.Rung
	clockLog2   uint8
	deadline    uint8 // log2 + 1; 0: none
	stage       Stage

	peer             PeerID // of the first pair; nilPeer: not known yet
	group, peerGroup int32  // interned names
	backend          int32  // interned; nil32: not placed. At P that of the first pair
	epoch            uint32 // plugin epoch of the destination's pages, at D
	priority         int32
	size             int16 // ranks of the group here
	local            int16 // of those, ranks whose workers are this engine's
	joined           int16
	paged            int16 // ranks that registered (D) or sent their last (P)

	total  int64 // bytes of the room as far as known
	held   int64 // P: bytes not submitted yet, to all pairs
	moved  int64 // bytes that are done (P), reported (D)
	flight int64 // P: bytes of open ops that progressed
	opened int64
	since  int64 // of the state
	staged int64 // since when it is in its stage
	rung   int64 // D: since when its pages stand on their rung
}

// pair is a record and one other engine, see statemachine.Pair.
type pair struct {
	sm         statemachine.Pair
	room, next int32
	gen        uint32 // part of the id of FencePeer
	peer       PeerID // nilPeer: not known yet
	set        int32  // the ranks there, see Machine.sets; nil32: all
	said       int32  // D: what RankEnd said, until all have come

	havePages   bool // P: the room's dst holds the peer's pages
	wantPages   bool // D: Confirm must repeat the pages
	confirmOwed bool // D: Confirm waits for the grant
	outstanding bool // ops outstanding: own at P, by Progress at D
	told        bool // P: last Progress said outstanding
	untold      bool // D: ended unbound, and the engine has not been told
	parked      bool // P: left the scheduler because its backend is not up

	backend int32  // P: interned; where the peer's pages are registered
	epoch   uint32 // P: plugin epoch there
	held    int64  // P: bytes not submitted yet
	moved   int64  // bytes that are done (P), reported (D)
	flight  int64  // P: bytes of open ops that progressed
	toldAt  int64
}

// said is what RankEnd said of one pool of one source rank; ordinal -1: that it reported.
type said struct {
	next, rank, ordinal int32
	pages               int64
}

type grantState uint8

const (
	noGrant grantState = iota
	grantAsked
	granted
)

// rank is one local rank of an opener: a worker's slot.
type rank struct {
	session SessionID
	sess    int32 // its record; nil32 once the rank is released and the session may be gone
	room    int32
	next    int32
	slot    int32
	rank    int32
	cursors int32 // P: cursor list
	head    int32 // P: chunks that are not submitted to every engine
	tail    int32
	lanes   int32 // P: how far they are submitted, by pair
	chunks  int32 // P: chunks sent
	ops     statemachine.Counts
	need    need   // D: what it registered
	word    uint16 // last published: status | residency<<3 | 1<<15
	paged   bool   // D: registered; P: sent its last
	armed   bool   // holds pages
	marked  bool   // D: its pages are marked in its pools
	gone    bool   // its worker is gone
	done    bool   // released, or gone and reusable
}

// part is the destination pages of one (rank, ordinal).
type part struct {
	next, runs    int32
	rank          int32
	ordinal       int16
	state         bool // of a pool of kind state
	pages, prefix int32
	pool          uint64
}

// cursor is how far a source rank has sent one pool: pages before page are complete, of the chunk
// [page, page+chunk) the layers below layer.
type cursor struct {
	next, ordinal      int32
	page, chunk, layer int32
}

// chunk is pages of one part that wait to be submitted.
type chunk struct {
	next, runs         int32
	lanes              int32 // of its rank that have not passed it
	ordinal            int32
	from, pages        int32 // source page index, count
	layerFrom, layerTo int32
	state              bool // of a pool of kind state
	pool               uint64
	pageBytes          int64 // of the layers of this chunk
}

// lane is how far the chunks of one rank are submitted to one engine.
type lane struct {
	next, pair     int32
	at             int32 // chunk; nil32: all are
	to, phase, off int32 // of it what is next: destination rank, phase of the map, pages of it already submitted
}

// op is a submission that is not known to be quiet.
type op struct {
	room, rank, next int32
	pair             int32
	gen              uint32
	backend          int32
	epoch            uint32
	state            opState
	bytes, progress  int64
	peer             PeerID
}

type opState uint8

const (
	opOpen opState = iota + 1
	opLinger
	opDead
)

const nilPeer = PeerID(-1)

type peer struct {
	node     string
	inc      uint64
	known    bool
	ready    bool // Hello was exchanged on the present link
	dead     bool
	draining bool
	suspect  bool
	heard    int64
	moved    int64 // when a byte counter of it last grew
	ops      int32
	bytes    int64
	tombs    graves
	marks    int32 // abort marks
	holds    int32 // placeholders

	shutInc     uint64 // its incarnation that an epoch here refuses for good (rung 3), else 0
	shutBackend int32  // that epoch
	shutEpoch   uint32
}

type session struct {
	id         SessionID
	group      int32
	role       statemachine.Role
	rank, size int32
	slots      []int32 // rank record by slot
	pools      []pool
	armed      []bitmap // by pool: pages of a destination that may still be written
	live       int32    // ranks of rooms that have not ended
	queued     int32    // of those, waiting for admission
	pinned     int32    // rank records that are not released
	held       need     // pages accounted
	registered int64    // bytes of all pools
	rested     int64    // bytes of pages in quarantine
	down       bool
}

type pool struct {
	id        uint64
	pages     int32
	layers    int32
	pageBytes int64
	state     bool // of kind state: rank r to rank r as it is, whatever the layouts are
}

// groupPair is a group here and the group at a peer that it works with, as interned names.
type groupPair struct{ own, peer int32 }

// group is replaced, never changed.
type group struct {
	hosts    []host // by their lowest ranks
	role     statemachine.Role
	size     int32
	layout   layout.Map
	backends []int32
	reason   statemachine.Reason
	detail   string
}

// host is an engine and the ranks of a group whose workers are its own.
type host struct {
	peer   PeerID
	set    int32 // see Machine.sets; nil32: all
	lowest int32
	n      int32
}

// plugin is the newest epoch of a backend: it takes the new rooms and all new ops.
type plugin struct {
	backend         int32
	epoch           uint32
	up, down        bool
	receiverChecked bool
	maxOp           int64
	lost            bool  // it ended
	asked           bool  // the host was asked to replace it
	retryAt         int64 // it could not; not asked again before
}

// retiree is an epoch that is up beside a newer one of its backend: it takes nothing new.
type retiree struct {
	backend int32
	epoch   uint32
	users   int32 // live destinations that are registered with it, and ops of it that are not quiet
	due     int64 // when it is ended whoever uses it
	killed  bool  // the host was asked to end it
}

// lostEpoch ended, and it is not proven that nothing of it writes any more.
type lostEpoch struct {
	backend int32
	epoch   uint32
	at      int64
}

// roomKey is a room at one side: its id, of 63 bits, and whether this is the destination.
type roomKey uint64

func keyOf(id int64, role statemachine.Role) roomKey {
	return roomKey(id)<<1 | roomKey(role-statemachine.Source)
}

type markKey struct {
	roomKey
	att  uint64
	peer PeerID
}

type mark struct {
	due     int64
	seq     uint64
	sibling bool // said by an engine of the own group
}

type holdKey struct {
	room int64
	peer PeerID
}

type placeholder struct {
	d     statemachine.Opener
	att   uint64
	group string // of d
	wants string // the group that d waits for; empty: any
	seq   uint64
}

type remotePool struct {
	peer PeerID
	pool uint64
}
