// Package sdk is what the author of a backend imports. It speaks the frame protocol of
// plugins/sdk/contract, owns the process life cycle (handshake, host lease, beats, drain, stdio),
// keeps regions, pools, peers and plans, expands plans to bytes, and makes it impossible to forget an
// operation's end (rule R1).
//
// A plugin is a main function that calls Main with its backend:
//
//	func main() { sdk.Main(&backend{}) }
//
// plugins/sdk/example/loopback is a whole one; sdktest drives a backend in a unit test;
// docs/contract.md has the rules that the SDK keeps for you and those that only you can keep.
package sdk

import (
	"context"
	"encoding/json"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Info describes a backend. It is asked once, before Start.
type Info struct {
	Name        string // [a-z][a-z0-9-]*, at most 32 bytes
	Version     string
	Features    []string // see the Feature constants
	MemoryKinds []contract.MemoryKind
	Limits      *contract.Limits // nil: no limits of its own
	// Config is nil or a pointer to a struct that holds the defaults. The JSON Schema that the engine
	// checks the YAML options against is made from it, and the options are decoded into it, strictly,
	// before Start.
	Config any
	// Schema is for backends that host another author's code: the JSON Schema of options that the SDK
	// does not decode; Start checks them. Config must be nil then.
	Schema        json.RawMessage
	OpConcurrency int // goroutines that run Transfer at once; 0 means 64
}

// Features that the host knows. docs/contract.md says what each promises.
const (
	FeatureReceiverChecked = "receiver_checked"
	FeatureByteProgress    = "byte_progress"
	FeatureFencePeer       = "fence_peer"
	FeatureStrided         = "strided"
	FeatureLayerRange      = "layer_range"
	FeatureRepage          = "repage"
)

// Start is what Backend.Start gets.
type Start struct {
	Node        string
	Incarnation uint64
	Epoch       uint32
	HostID      string          // equal on two engines of one machine
	RuntimeDir  string          // private directory of this epoch
	Config      json.RawMessage // the options as they came; already decoded into Info.Config
	// Busy declares a long call (registering, connecting, first post) until done is called, so that
	// the host extends its beat bound to 120 s.
	Busy func(kind contract.BusyKind, subject uint64) (done func())
	Logf func(level contract.Log_Level, format string, args ...any)
	// Fatal ends the process with a Fault that the host shows. For what makes the epoch useless.
	Fatal func(err error)
	// Over is closed when the session ends: calls that wait for somebody else then return.
	Over <-chan struct{}
}

// Backend moves bytes. The SDK calls Start first and Close last; everything else may be called from
// several goroutines at once, but calls for one region or one peer never overlap, and no Transfer
// runs on a region or peer that is not added or is being removed.
type Backend interface {
	Info() Info
	// Start prepares the backend and returns its endpoint: opaque bytes that peers' plugins get in
	// AddPeer. An error is shown to the operator and not retried.
	Start(ctx context.Context, s Start) (endpoint []byte, err error)
	// AddRegion makes memory known. The SDK has mapped it (Region.Bytes), populated it and run the
	// canary. RegionReady follows a nil return.
	AddRegion(r *Region) error
	// RemoveRegion forgets it; the SDK unmaps afterwards. No op on it is unquiet. It returns when no other process
	// to which the backend gave the memory maps it any more, however long that takes, or when the session is over.
	RemoveRegion(r *Region)
	// AddPeer makes a remote plugin epoch known. It may connect now (declare Busy) or lazily.
	AddPeer(p *Peer) (contract.Lane, error)
	// RemovePeer closes what belongs to the peer; its ops have been aborted.
	RemovePeer(p *Peer)
	// Transfer does one op and ends it. It runs on a goroutine of its own; op.Context is done when the
	// host aborts the op or drops the peer. Exactly one of op.Done, Fail, Skip, Aborted must be
	// called; to end the op later from elsewhere, call op.Async before returning. What returns,
	// panics or drops the handle without an end is ended by the SDK as Failed(CAUSE_NO_TERMINAL),
	// quiet=false.
	Transfer(op *Op)
	// Close releases everything. The process exits afterwards.
	Close() error
}

// CounterLateRefused counts slices that were refused because their opener was revoked or unknown.
const CounterLateRefused = "late_refused"

// Accepter is a backend that knows its writers before they connect.
type Accepter interface {
	// Accept lets a writer epoch connect; an error is reported as PeerFailed. It only records and must
	// not block: every later Grant finds it done.
	Accept(p *Peer) error
	// Unaccept forgets the writer and closes its connections.
	Unaccept(p *Peer)
}

// Granter is a backend with FeatureReceiverChecked: it accepts a remote write only into pages that
// are granted to the write's destination opener.
type Granter interface {
	Accepter
	// Grant opens pages to an opener; returns when writes can be accepted.
	Grant(g *Grant) error
	// Revoke closes them for good and reports whether no byte of that opener can land any more.
	Revoke(g *Grant) (quiet bool)
}

// Fencer is a backend with FeatureFencePeer.
type Fencer interface {
	FencePeer(ctx context.Context, node string, incarnation uint64, epoch uint32) contract.FenceResult
}

// StatsReporter adds counters to Stats (at most 256, names of at most 64 bytes). CounterLateRefused
// also becomes Stats.late_refused. Called from one goroutine at a time.
type StatsReporter interface {
	Counters() map[string]uint64
}

// Planner is a backend that keeps pools and plans itself, because it hands ops on to code that the SDK
// does not serve.
type Planner interface {
	// Geometry gets PoolAdd, RemotePoolAdd and PlanAdd once the SDK has checked them, each before any op
	// that names it, and PoolRemove, RemotePoolRemove and PlanRemove; in order, from the loop: it must
	// not block. The event stays as it is. What belongs to a peer goes with RemovePeer, without events.
	Geometry(e *contract.HostEvent)
}

// Region is mapped memory of a local worker.
type Region struct {
	ID    uint64
	Kind  contract.MemoryKind
	Size  uint64
	Bytes []byte // the mapping, host memory only; nil after RemoveRegion
	FD    int    // the memory descriptor, owned by the SDK; valid until RemoveRegion returns
	// Lease is the descriptor to be held by every process that maps the region, so that its engine can
	// tell when nobody does. Owned by the SDK like FD; another process gets a duplicate along with FD.
	Lease int
	// Export may be set by AddRegion: what a peer's backend needs to write here (keys, an address), at
	// most 64 KiB. It reaches that backend as RemoteRegion.Export.
	Export []byte
}

// Importer is a backend whose regions export something.
type Importer interface {
	// AddRemoteRegion makes memory of a peer known; no op names it before a nil return.
	AddRemoteRegion(r *RemoteRegion) error
	// RemoveRemoteRegion forgets it; every op that named it is quiet. When the peer is removed its
	// regions go with it, without this call.
	RemoveRemoteRegion(r *RemoteRegion)
}

// RemoteRegion is memory of a peer's worker.
type RemoteRegion struct {
	Peer   *Peer
	ID     uint64
	Size   uint64
	Export []byte
	Data   any // the backend's own
}

// Peer is a plugin epoch of another engine: the target of ops (AddPeer) or an admitted writer (Accept).
type Peer struct {
	Handle      uint32
	Node        string
	Incarnation uint64
	Epoch       uint32
	Endpoint    []byte // may be empty for an admitted writer
	SameHost    bool
	RequireLane contract.Lane
	Token       []byte // 32 bytes, equal at both ends
	Data        any    // the backend's own
}

// Opener mirrors contract.Opener as a comparable value.
type Opener struct{ Incarnation, Sequence uint64 }

// Grant is the pages of one destination opener. Admits tells who may write them, Covers whether a byte range
// belongs to it.
type Grant struct {
	ID          uint64
	Destination Opener
	Parts       []GrantPart
	Writers     []string // nodes; none: every admitted writer
	Data        any      // the backend's own
}

// GrantPart is pages of one local pool.
type GrantPart struct {
	Pool  *Pool
	Pages PageSet
}

// Pool is tensors that share page ids.
type Pool struct {
	ID      uint64
	Pages   uint32
	Tensors []Tensor
}

// Tensor is one layer's K or V: page i occupies [Offset + i*PageStride, +PageBytes) of the region.
type Tensor struct {
	RegionID   uint64
	Region     *Region       // nil for a remote tensor
	Remote     *RemoteRegion // of a remote tensor whose region was announced (RemoteRegionAdd), else nil
	Offset     uint64
	PageStride uint64
	PageBytes  uint64
	Layer      uint32
}

// Copy is Len contiguous bytes from a local region to a remote one: what a plan expands to.
type Copy struct {
	Src       *Region
	SrcOff    uint64
	DstRegion uint64
	Dst       *RemoteRegion // nil when the region was not announced
	DstOff    uint64
	Len       uint64
}
