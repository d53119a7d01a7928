// Package peer keeps one ordered stream to every other engine and carries the peer protocol on it:
// Hello, announcements of groups, pools and plugin endpoints, the room frames of package core, and
// beats.
//
// A Links dials the peers that membership names, accepts those that dial, keeps exactly one stream a
// pair, and redials for ever. A lost stream proves nothing about the peer. Everything that arrives
// is handed to Config.Sink in stream order: for each peer Hello, then anything else, then Down. What was
// sent on an older stream arrives before the newer Hello, or never.
package peer

import (
	"log/slog"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Config describes this engine to its peers. Zero durations and sizes take the defaults.
type Config struct {
	Node        string
	Incarnation uint64
	HostID      string
	// Listen is "unix:/path" or "host:port". A TCP address that is not loopback needs TLS, or
	// InsecureListen.
	Listen string
	// TLS, when set, is used both ways on TCP, wherever this engine itself listens. Unix sockets never
	// use it: there the peer's credentials must be those of this user or of root.
	TLS *TLS
	// InsecureListen allows a non-loopback listener without TLS. It must be InsecureWords.
	InsecureListen string
	// Backends in order of preference. SetBackends replaces them.
	Backends []Backend
	// Features that this engine has; peers see them in Hello.
	Features []string
	// Sink receives everything that happens, one call at a time a peer. It must return in bounded
	// time: while it blocks, that peer's stream is not read. It may call the methods of Links but
	// Close and SetPeers.
	Sink func(Event)
	Log  *slog.Logger // nil: discard
	// Alive, when not nil, is asked before each beat: an engine whose owner goroutine is stuck must
	// become silent to its peers.
	Alive func() bool
	// Look, when not nil, is told that a peer has dialled that membership does not name: its record may be newer than
	// what was read last. It comes at most once a second, and must not wait.
	Look func()

	Beat        time.Duration // 500 ms
	Silence     time.Duration // a stream without a frame for so long is closed; 5 s
	Handshake   time.Duration // dial, TLS and both Hellos; 3 s
	NameWait    time.Duration // of it, how long a peer that dials may wait until membership names it; 2 s
	RedialMin   time.Duration // 50 ms
	RedialMax   time.Duration // 1 s
	RefusedWait time.Duration // redial after a refusal that only a change of configuration heals; 5 s
	QueueFrames int           // frames that may wait for one peer, urgent and others each; 16384
	QueueBytes  int           // and their bytes; 64 MiB
}

// InsecureWords is what Config.InsecureListen must say.
const InsecureWords = "i accept that anyone who reaches this port can read and write KV cache"

// TLS names the PEM files for mutual TLS 1.3. They are read again when they change.
type TLS struct {
	Cert, Key, CA string
}

// Backend is a backend that an engine has, with the plugin epoch that takes new work; 0: it is down.
type Backend struct {
	Name  string `json:"name"`
	Epoch uint32 `json:"epoch"`
}

// EventKind tells which fields of an Event are set. Node and Incarnation always are.
type EventKind uint8

// The events.
const (
	// Hello: a stream is up. Conn, HostID, Backends, Features. The peer's announcements follow.
	// Frames sent with this Conn go to this stream or nowhere.
	Hello EventKind = iota + 1
	// Down: that stream is gone. Detail. It precedes the next Hello of the peer.
	Down
	// Heard: a beat arrived. Every other event but Down and Refused implies it.
	Heard
	// GroupUp: Group, new or changed; repeated after each Hello. GroupGone: Group.Name and Group.Role.
	// What went while there was no stream is reported gone after the next Hello of that incarnation;
	// a new incarnation starts with nothing.
	GroupUp
	GroupGone
	// PoolUp: Pool. PoolGone: Pool.ID.
	PoolUp
	PoolGone
	// EndpointUp: Endpoint, its envelope verified, with the token for this pair of engines.
	EndpointUp
	// Lost: the peer's plugin epoch Endpoint.Epoch of Endpoint.Backend is gone.
	Lost
	// Draining: the peer admits no new rooms.
	Draining
	// Frame: Frame, checked.
	Frame
	// BadFrame: a room frame that broke the protocol was dropped. Frame has Kind, Room, S and D as far
	// as they could be read; Detail names the field.
	BadFrame
	// Refused: the peer refuses this engine or one of its groups. Refusal. Without a group the stream
	// never came up or is going down.
	Refused
)

// Event is something that arrived from a peer. Slices belong to the receiver.
type Event struct {
	Kind        EventKind
	Node        string
	Incarnation uint64
	Conn        uint64
	HostID      string
	Backends    []Backend
	Features    []string
	Group       Group
	Pool        Pool
	Endpoint    Endpoint
	Frame       core.Frame
	Refusal     Refusal
	Detail      string
}

// Layout is what the bytes of a group's pages mean. It does not depend on the tensor-parallel size.
type Layout layout.Cache

// Group is the ranks of one model instance with one role, as far as they are on one engine.
type Group struct {
	Name   string            `json:"name"`
	Role   statemachine.Role `json:"role"`
	Size   int32             `json:"size"`
	Ranks  []int32           `json:"ranks"` // present here, ascending
	Layout Layout            `json:"layout"`
}

// Pool is tensors that share page ids, of one rank of a group.
type Pool struct {
	ID      uint64 // never reused within an engine incarnation
	Group   string
	Role    statemachine.Role
	Rank    int32
	Ordinal int32
	Pages   int32
	Layers  int32
	State   bool // not pages of tokens but state of a fixed size per request
	Tensors []Tensor
}

// Tensor is one layer's K or V of a pool: page i is [Offset+i*PageStride, +PageBytes) of the region.
type Tensor struct {
	Region     uint64
	Offset     uint64
	PageStride uint64
	PageBytes  uint64
	Layer      uint32
}

// Endpoint is how the plugins of peers reach one plugin epoch of this engine.
type Endpoint struct {
	Backend string
	Epoch   uint32
	Blob    []byte // opaque, at most 64 KiB
	// Secret, when announcing: 32 random bytes from which the token of each peer is derived. It is
	// never sent. The announcing host computes the same token with PairToken for PeerAccept.
	Secret []byte
	// Token, in events: 32 bytes that this pair of engines shares, for PeerAdd.
	Token []byte
}

// RefusalCode says why an engine refuses a peer or one of its groups. The set is closed.
type RefusalCode uint8

// The codes.
const (
	RefusedVersion     RefusalCode = iota + 1 // no wire version in common
	RefusedNode                               // the certificate, or the dialled name, is not the node that Hello claims
	RefusedUnknown                            // membership does not name the node
	RefusedStale                              // a newer incarnation of the node is known
	RefusedDuplicate                          // a later stream of this pair came first; not a fault
	RefusedHello                              // Hello is malformed; Field
	RefusedFingerprint                        // a group's layout cannot be mapped; Group, PeerGroup, Field
	RefusedClosing                            // the engine is stopping
	RefusedSelf                               // the node is this engine itself
	RefusedCertificate                        // TLS: the certificate is not acceptable; not sent, TLS itself tells
)

var refusalNames = [...]string{"", "version", "node", "unknown_peer", "stale_incarnation", "duplicate", "bad_hello", "fingerprint", "closing", "self", "certificate"}

// String returns the code's public name, e.g. "unknown_peer".
func (c RefusalCode) String() string {
	if int(c) < len(refusalNames) && c != 0 {
		return refusalNames[c]
	}
	return "invalid"
}

// MarshalText writes the public name.
func (c RefusalCode) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Refusal is why, in a form for programs and people.
type Refusal struct {
	Code      RefusalCode `json:"code"`
	Field     string      `json:"field,omitempty"`
	Group     string      `json:"group,omitempty"`      // the refusing engine's group
	PeerGroup string      `json:"peer_group,omitempty"` // the refused engine's group
	Detail    string      `json:"detail"`
	// ByPeer is true when the peer refused us, false when we refused it.
	ByPeer bool `json:"by_peer"`
}

// Status is a snapshot for `engine peers`.
type Status struct {
	Node        string       `json:"node"`
	Incarnation uint64       `json:"incarnation"`
	Listen      string       `json:"listen"`
	TLS         bool         `json:"tls"`
	TLSError    string       `json:"tls_error,omitempty"` // the files changed and the new ones are unusable
	Peers       []PeerStatus `json:"peers"`
	// Rejected counts inbound streams refused before they named a peer.
	Rejected uint64 `json:"rejected"`
}

// PeerStatus is one peer. State is up, connecting, refused, or waiting (nothing to dial: the peer
// must dial us).
type PeerStatus struct {
	Node        string        `json:"node"`
	Address     string        `json:"address"`
	State       string        `json:"state"`
	Since       time.Time     `json:"since"`
	Incarnation uint64        `json:"incarnation"`
	HostID      string        `json:"host_id"`
	SameHost    bool          `json:"same_host"`
	Named       bool          `json:"named"` // membership names it
	Dialled     bool          `json:"dialled"`
	Version     uint32        `json:"version"`
	Credentials string        `json:"credentials,omitempty"` // "uid 0 pid 4711", or the certificate's subject
	Backends    []Backend     `json:"backends,omitempty"`
	Features    []string      `json:"features,omitempty"`
	HeardAgo    time.Duration `json:"heard_ago_ns"` // on this stream or the one before; 0: never
	Attempts    uint64        `json:"attempts"`     // dials since the last Hello
	LastError   string        `json:"last_error,omitempty"`
	Refusals    []Refusal     `json:"refusals,omitempty"`
	Counters    Counters      `json:"counters"`
}

// Counters of one peer since this engine started; they never go back.
type Counters struct {
	Sent      uint64 `json:"sent"`      // frames written to the stream
	Received  uint64 `json:"received"`  // frames read
	Dropped   uint64 `json:"dropped"`   // frames not sent: no stream, or a Conn that is gone
	Bad       uint64 `json:"bad"`       // frames that broke the protocol
	Unknown   uint64 `json:"unknown"`   // frames of a kind that this version does not know
	Hellos    uint64 `json:"hellos"`    // streams that came up
	Overflows uint64 `json:"overflows"` // streams closed because the peer read too slowly
	Queued    int    `json:"queued"`    // frames waiting now
}
