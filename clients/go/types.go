// Package client is the Go client of the worker API (docs/worker-api.md): an inference process, one
// rank, uses it to hand the KV cache of a request (a room) to another process through the engine of
// its node.
//
//	c, err := client.Dial(ctx, client.Options{Socket: "/run/terminus/worker.sock", Group: "prefill-0", Role: client.Source, Size: 1, Layout: l})
//	region, err := c.CreateRegion(ctx, size)
//	pool, err := c.AddPool(ctx, client.Pool{Pages: n, Tensors: tensors})
//	room, err := c.Open(ctx, client.OpenOptions{Room: id})
//	err = room.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: pool, Pages: ids}}, Last: true, Aux: aux})
//	status, err := room.WaitTerminal(ctx)
//	err = room.WaitReusable(ctx)
//	err = room.Release(ctx)
//
// A terminal status is not permission to reuse pages: that is Residency (Reusable) or WaitReusable.
//
// When the engine is lost (Client.Done) every room that has not ended reads Failed (engine_lost), and the
// worker goes on with the next engine by Client.Redial.
package client

import (
	"errors"
	"fmt"
	"time"
)

// Role is the side of a group.
type Role string

// The two roles: prefill is the source of KV, decode its destination.
const (
	Source      Role = "source"
	Destination Role = "destination"
)

// Status is the field's KVPoll.
type Status uint8

// The five statuses. Failed and Success are terminal and never change.
const (
	Failed          Status = 0
	Bootstrapping   Status = 1
	WaitingForInput Status = 2
	Transferring    Status = 3
	Success         Status = 4
)

// Terminal reports whether the status can never change again.
func (s Status) Terminal() bool { return s == Failed || s == Success }

// String returns the field's name of the status.
func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return "invalid"
}

var statusNames = [...]string{"Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"}

// Residency says who may still touch a room's pages.
type Residency uint8

// The residencies.
const (
	NoPages     Residency = 0
	Armed       Residency = 1
	Quiescing   Residency = 2
	Quarantined Residency = 3
	Quiet       Residency = 4
	Fenced      Residency = 5
	Released    Residency = 6
)

// Reusable reports whether the worker may use the pages for something else.
func (r Residency) Reusable() bool {
	return r == NoPages || r == Quiet || r == Fenced || r == Released
}

// String returns the public name of the residency.
func (r Residency) String() string {
	if int(r) < len(residencyNames) {
		return residencyNames[r]
	}
	return "invalid"
}

var residencyNames = [...]string{"none", "armed", "quiescing", "quarantined", "quiet", "fenced", "released"}

// Reason is the public name of a verdict's reason, e.g. "peer_aborted"; "none" while not ended.
type Reason string

// ReasonEngineLost is the one reason that the client gives itself: the engine is gone.
const ReasonEngineLost Reason = "engine_lost"

// Failure explains a room.
type Failure struct {
	Status    Status
	Residency Residency
	Reason    Reason
	Doc       string // one sentence about the reason
	Detail    string // what is known beyond it; often empty
}

// Options describe the worker. Socket, Group, Role, Size and Layout are required.
type Options struct {
	Socket string
	Group  string // name of the model instance; one role a group
	Role   Role
	Rank   int // 0 … Size-1
	Size   int
	Layout Layout
	Slots  int  // rooms that can be open at once; default 1024, at most 65536
	Notify bool // ask for an eventfd: Wait* sleep in the kernel instead of polling memory every millisecond
	Window int  // requests that may be unanswered; default 1024
	// GroupList makes the ranks of a group act by one list, rank 0's: PollGroup there, ApplyGroup on all.
	// All ranks of a group or none.
	GroupList bool
	// How long the engine's beat may stand still, in this process's own running time: then it is
	// Unresponsive (default 2 s), then lost (default 12 s, longer than the engines' clocks.peer_dead).
	SuspectAfter, LostAfter time.Duration
}

// Layout says what the bytes of a page mean. It does not depend on the tensor-parallel size.
type Layout struct {
	DType      string `json:"dtype"`
	Layers     int    `json:"layers"`
	KVHeads    int    `json:"kv_heads"`
	HeadDim    int    `json:"head_dim"`
	PageTokens int    `json:"page_tokens"`
	Kind       string `json:"kind"` // "mha" or "mla"
	// Order of a tensor's page, "nhd" ([token][head][dim]) or "hnd". A pair of groups needs it when they differ in
	// ranks or page sizes; empty: not said.
	Order string `json:"order,omitempty"`
}

// Limits are the engine's, learnt at Dial.
type Limits struct {
	HeaderBytes  int   `json:"header_bytes"`
	PayloadBytes int   `json:"payload_bytes"`
	AuxBytes     int   `json:"aux_bytes"`
	Inflight     int   `json:"inflight"`
	Regions      int   `json:"regions"`
	Pools        int   `json:"pools"`
	RegionBytes  int64 `json:"region_bytes"` // 0: no limit
}

// Pool is tensors that share page ids.
type Pool struct {
	Pages int
	// State: the pages hold no tokens but state of a fixed size per request (Mamba and the like). They go from
	// rank r to rank r as they are, so both groups have equally many ranks.
	State   bool
	Tensors []Tensor
}

// Tensor is one layer's K or V: page i occupies [Offset+i*PageStride, +PageBytes) of the region.
type Tensor struct {
	Region     *Region
	Offset     int64
	PageStride int64 // 0: PageBytes
	PageBytes  int64
	Layer      int
}

// OpenOptions describe one attempt of one room.
type OpenOptions struct {
	Room      int64  // 0 … 2^63-1, equal on both sides
	Attempt   int64  // equal on both sides; 0 where a room id is used once, else the retry number
	PeerGroup string // required for a destination; a source without one binds to the first destination
	Priority  int
	Deadline  time.Duration // from now; 0: none. Rounded up to a millisecond
}

// Part is pages of one pool.
type Part struct {
	Pool  int // as AddPool returned
	Pages []int32
}

// RegisterPart is pages of one pool that a destination wants filled. The first Prefix of them hold
// their KV already; source page k goes to Pages[Prefix+k].
type RegisterPart struct {
	Pool   int
	Pages  []int32
	Prefix int
}

// Chunk is one send: pages that are complete in memory. Chunks of a room are sent in order.
type Chunk struct {
	Parts  []Part
	Layers [2]int // [from, to); zero: all layers
	Last   bool   // nothing follows; Aux only here
	Aux    []byte // handed to the destination worker with Success
}

// Change is one room whose status or residency changed.
type Change struct {
	Room      *Room
	Status    Status
	Residency Residency
}

// Error is an error answer of the engine.
type Error struct {
	Code    string
	Field   string
	Rule    string
	Message string
}

// Error returns "engine: code (field, rule): message".
func (e *Error) Error() string {
	where := e.Field
	if e.Field != "" && e.Rule != "" {
		where += ", "
	}
	if where += e.Rule; where != "" {
		where = " (" + where + ")"
	}
	return fmt.Sprintf("engine: %s%s: %s", e.Code, where, e.Message)
}

// EndedError answers a Register or Send on a room that has ended, and an Open of one that ended
// before this rank came. Nothing was armed.
type EndedError struct {
	Reason Reason
}

// Error names the verdict.
func (e *EndedError) Error() string { return "room has ended: " + string(e.Reason) }

// Sentinels.
var (
	// ErrEngineLost is returned by every call once the engine is gone.
	ErrEngineLost = errors.New("engine lost: see Client.Redial")
	// ErrClosed is returned after Client.Close.
	ErrClosed = errors.New("client closed")
	// ErrAlive is returned by Redial while the session lives.
	ErrAlive = errors.New("the session is alive")
	// ErrNotReusable: somebody may still touch the pages.
	ErrNotReusable = errors.New("pages are not reusable yet")
	// ErrReleased: the room was released; its slot may hold another by now. Only its status stays.
	ErrReleased = errors.New("room was released")
	// ErrNoPages: a Staging has fewer free pages than asked for.
	ErrNoPages = errors.New("no free staging pages")
)
