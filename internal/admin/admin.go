// Package admin is the engine's administrative API: HTTP and JSON on a unix socket, and its client. It is
// read-only unless the configuration enables mutations.
package admin

import (
	"context"
	"errors"
)

// APIVersion names the shape of the JSON; it changes when a field changes its meaning or goes away.
const APIVersion = "terminus/v1"

// MaxRooms bounds the answer of Engine.Rooms.
const MaxRooms = 10_000

// Engine is what the API shows. The node implements it; the server calls it from many goroutines. Calls
// return within their context; ErrNotFound and ErrRefused are told apart from other errors, which mean
// that the engine could not answer (its owner loop is stuck or gone).
type Engine interface {
	// Status tells who the engine is and why it is not ready, if it is not. It must answer even when
	// the owner loop is stuck: then Ready is false and a reason says so.
	Status(ctx context.Context) (Status, error)
	// Rooms lists records that match the filter, oldest first, at most f.Limit (0: MaxRooms). History is
	// left out.
	Rooms(ctx context.Context, f RoomFilter) ([]RoomInfo, error)
	// Room returns the records of one room with their history, one per role and attempt, newest last.
	// ErrNotFound when the engine knows none.
	Room(ctx context.Context, room int64) ([]RoomInfo, error)
	// Why returns one sentence per record of Room: state, since when, waiting on whom, what happens
	// at which deadline. ErrNotFound as Room.
	Why(ctx context.Context, room int64) ([]string, error)
	// AbortRoom ends the live records of a room as their workers would. role is "source",
	// "destination" or "" for both. ErrNotFound when no record is known; idempotent.
	AbortRoom(ctx context.Context, room int64, role string) (AbortResult, error)
	// WatchRooms sends a record without history for each change, of one room or of all (room < 0), and
	// first every present record of that room. The channel is closed when ctx ends or the engine stops.
	// It is buffered; when the reader is too slow the engine drops changes and sets Missed on
	// the next one that fits: the core never waits for a reader.
	WatchRooms(ctx context.Context, room int64) (<-chan RoomChange, error)
	// Plugins, Peers and Groups list what the names say, sorted by name.
	Plugins(ctx context.Context) ([]PluginInfo, error)
	Peers(ctx context.Context) ([]PeerInfo, error)
	Groups(ctx context.Context) ([]GroupInfo, error)
	// GroupWhy returns one sentence on a group, here or at peers, and one on each pair that it is in: what it
	// waits for, or why it is refused. ErrNotFound when no engine hosts a rank of it.
	GroupWhy(ctx context.Context, name string) ([]string, error)
	// UpgradePlugin starts the next process of a plugin beside the present one, of another program if u names
	// one, and lets it take over: the present one finishes what it has and is ended. The channel has the steps;
	// the last one has Done, and Error if it failed. Until the new one takes over nothing has changed, and the
	// end of ctx ends it; from then on it goes on. ErrNotFound and ErrRefused, if it was not begun.
	UpgradePlugin(ctx context.Context, name string, u Upgrade) (<-chan UpgradeStep, error)
	// Drain stops admission, tells the peers and waits until no room is left or the drain budget is
	// over; the engine then exits. It is the same as SIGTERM. When ctx ends first the drain goes on.
	Drain(ctx context.Context) (DrainResult, error)
}

// Sentinels of Engine.
var (
	// ErrNotFound: the engine holds no record of what was asked for.
	ErrNotFound = errors.New("not found")
	// ErrRefused: the engine is in a state in which it does not do what was asked for.
	ErrRefused = errors.New("refused")
)

// Status is who the engine is.
type Status struct {
	Version     string   `json:"version"`
	Node        string   `json:"node"`
	Incarnation uint64   `json:"incarnation"`
	PID         int      `json:"pid"`
	UptimeNS    int64    `json:"uptime_ns"`
	Ready       bool     `json:"ready"`
	NotReady    []string `json:"not_ready,omitempty"` // why, one sentence each; empty when ready
	Draining    bool     `json:"draining"`
	Frozen      string   `json:"membership_frozen,omitempty"` // why membership cannot be read; the known peers stay, and this is no reason not to be ready
	Rooms       int      `json:"rooms"`                       // not terminal
	Held        int      `json:"held"`                        // terminal, pages not reusable
	Sessions    int      `json:"sessions"`                    // workers
}

// RoomFilter selects records; zero fields select all.
type RoomFilter struct {
	Role      string // source, destination
	State     string // RoomInfo.State
	Status    string // RoomInfo.Status, such as Transferring
	Residency string
	Reason    string
	Peer      string // node
	Group     string // own or peer group
	Live      bool   // only those that are not terminal
	OlderNS   int64  // at least this long in their state
	Limit     int
}

// RoomInfo is one record: a room, on one side, of one attempt.
type RoomInfo struct {
	Room       int64    `json:"room"`
	Role       string   `json:"role"` // source, destination
	Attempt    uint64   `json:"attempt"`
	State      string   `json:"state"`            // of the protocol
	Status     string   `json:"status"`           // KVPoll
	Residency  string   `json:"residency"`        // of its pages
	Reason     string   `json:"reason,omitempty"` // of a terminal status
	SinceNS    int64    `json:"since_ns"`         // age of the state
	AgeNS      int64    `json:"age_ns"`           // since open
	Own        Opener   `json:"own"`
	Pair       Opener   `json:"pair"` // zero: not bound
	Peer       string   `json:"peer,omitempty"`
	Group      string   `json:"group"`
	PeerGroup  string   `json:"peer_group,omitempty"`
	Ranks      []int32  `json:"ranks"`       // of this engine that joined
	BytesTotal int64    `json:"bytes_total"` // 0: not known yet
	BytesDone  int64    `json:"bytes_done"`
	OpsOut     int      `json:"ops_outstanding"`
	OpsHeld    int      `json:"ops_held"`
	Clock      *Clock   `json:"clock,omitempty"` // that is due next; every live state has one
	Backend    string   `json:"backend,omitempty"`
	Lane       string   `json:"lane,omitempty"`
	Detail     string   `json:"detail,omitempty"`
	History    []Change `json:"history,omitempty"` // oldest first
}

// Opener is one open of a room: incarnation and sequence.
type Opener struct {
	Incarnation uint64 `json:"incarnation"`
	Sequence    uint64 `json:"sequence"`
}

// Clock is a running deadline.
type Clock struct {
	Name        string `json:"name"` // as under clocks in the configuration, or drain.budget
	RemainingNS int64  `json:"remaining_ns"`
}

// Change is one line of a record's history.
type Change struct {
	AgeNS int64  `json:"age_ns"`
	What  string `json:"what"`
}

// RoomChange is one event of WatchRooms.
type RoomChange struct {
	RoomInfo
	What   string `json:"what,omitempty"`   // what happened; empty for a present record
	Missed int    `json:"missed,omitempty"` // changes dropped before this one
}

// AbortResult tells what an abort did.
type AbortResult struct {
	Ended     int      `json:"ended"`             // records that this call ended
	Requested int      `json:"requested"`         // past RankEnd: the judge was asked
	Already   []string `json:"already,omitempty"` // verdicts of records that had ended before
}

// DrainResult tells how a drain went.
type DrainResult struct {
	Clean bool `json:"clean"` // nothing was cut
	Cut   int  `json:"cut"`   // rooms ended by the budget
	// Unreleased is the rooms that had ended and that their workers had not released when the budget was
	// over: their verdicts stand, aux records that were not fetched are gone.
	Unreleased int `json:"unreleased"`
}

// PluginInfo is one plugin, its newest epoch first in Epochs.
type PluginInfo struct {
	Name     string        `json:"name"`
	Kind     string        `json:"kind"` // transfer, collective
	Version  string        `json:"version,omitempty"`
	State    string        `json:"state"` // up, starting, backoff, down
	Detail   string        `json:"detail,omitempty"`
	Exec     string        `json:"exec"`
	SHA256   string        `json:"sha256,omitempty"`
	Restarts int           `json:"restarts"`
	Features []string      `json:"features,omitempty"`
	Epochs   []PluginEpoch `json:"epochs,omitempty"`
}

// Upgrade is the program of the next process of a plugin. Without Exec and Wasm it is the present one's, read
// anew.
type Upgrade struct {
	Exec   string // full path of a program
	Wasm   string // full path of a module
	SHA256 string // pin of either, or of the present one's
}

// UpgradeStep is a line of Engine.UpgradePlugin.
type UpgradeStep struct {
	What     string `json:"what,omitempty"`
	Epoch    uint32 `json:"epoch,omitempty"` // that it is about
	Rooms    int    `json:"rooms,omitempty"` // that the old epoch still has
	Ops      int    `json:"ops,omitempty"`
	EndsInNS int64  `json:"ends_in_ns,omitempty"` // it is ended then, whoever uses it
	Done     bool   `json:"done,omitempty"`
	Error    string `json:"error,omitempty"` // with Done
}

// PluginEpoch is one process of a plugin. What a process that is gone, or has not beaten yet, cannot have is
// left out.
type PluginEpoch struct {
	Epoch     uint32 `json:"epoch"`
	State     string `json:"state"` // starting, ready, retiring, gone
	PID       int    `json:"pid,omitempty"`
	UptimeNS  int64  `json:"uptime_ns,omitempty"`   // in its state: starting, or up
	BeatAgeNS int64  `json:"beat_age_ns,omitempty"` // age of the last beat
	Busy      string `json:"busy,omitempty"`        // declared long call
	Ops       int    `json:"ops"`                   // that are not quiet
	Rooms     int    `json:"rooms"`                 // destinations whose pages are registered with it
	EndsInNS  int64  `json:"ends_in_ns,omitempty"`  // retiring: when it is ended, whoever uses it
}

// PeerInfo is another engine.
type PeerInfo struct {
	Node        string   `json:"node"`
	Address     string   `json:"address"`
	Incarnation uint64   `json:"incarnation"`
	State       string   `json:"state"` // connecting, ready, suspect, dead, draining, refused
	SinceNS     int64    `json:"since_ns"`
	HeardNS     int64    `json:"heard_ns,omitempty"` // age of the last message; left out: none ever came
	SameHost    bool     `json:"same_host"`
	TLS         bool     `json:"tls"`
	Backends    []string `json:"backends,omitempty"`
	Rooms       int      `json:"rooms"`
	OpsOut      int      `json:"ops_outstanding"`
	Detail      string   `json:"detail,omitempty"`
}

// GroupInfo is what one engine hosts of a group: the ranks of one model instance with one role.
type GroupInfo struct {
	Name      string      `json:"name"`
	Role      string      `json:"role"`
	Node      string      `json:"node"`
	Here      bool        `json:"here"`                // Node is the engine that answers
	Size      int         `json:"size"`                // ranks of the group in all
	Ranks     []int32     `json:"ranks"`               // at this node
	Elsewhere []int32     `json:"elsewhere,omitempty"` // at other nodes
	Missing   []int32     `json:"missing,omitempty"`   // at none
	Complete  bool        `json:"complete"`
	Pools     int         `json:"pools"`            // known where Here
	Rooms     int         `json:"rooms"`            // of the group, at the engine that answers, that have not ended
	Pairs     []GroupPair `json:"pairs,omitempty"`  // one of the two groups is at the engine that answers
	Detail    string      `json:"detail,omitempty"` // why the group, or a pair, is refused
}

// GroupPair is a counterpart of a group, at one node.
type GroupPair struct {
	Group    string   `json:"group"`
	Node     string   `json:"node"`
	Verdict  string   `json:"verdict"`            // usable, waits, refused
	Backends []string `json:"backends,omitempty"` // not refused, in the destination's order
	Reason   string   `json:"reason,omitempty"`   // of a refusal, with the field and a sentence
	Field    string   `json:"field,omitempty"`
	Detail   string   `json:"detail,omitempty"` // also: what it waits for
	Rooms    int      `json:"rooms"`            // between the two groups, that have not ended
}

// Verdicts of a GroupPair.
const (
	PairUsable  = "usable"
	PairWaits   = "waits" // ranks of a group are not there yet, or their engine takes no new rooms, and so its rooms wait
	PairRefused = "refused"
)
