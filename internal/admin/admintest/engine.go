// Package admintest has an engine for tests of what stands on the admin API.
package admintest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
)

// Engine is an admin.Engine with fixed answers. Set its fields before it is used.
type Engine struct {
	State   admin.Status
	Records []admin.RoomInfo
	Reasons map[int64][]string // answers of Why
	Changes []admin.RoomChange // what a watch sends before it stays silent
	Plugs   []admin.PluginInfo
	Engines []admin.PeerInfo
	Models  []admin.GroupInfo
	Grounds map[string][]string // why of a group
	Drained admin.DrainResult
	Steps   []admin.UpgradeStep // of an upgrade
	Err     error               // of every call

	mu    sync.Mutex
	calls []string
}

var _ admin.Engine = (*Engine)(nil)

// Calls lists the mutations that arrived.
func (e *Engine) Calls() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.calls)
}

func (e *Engine) called(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls = append(e.calls, fmt.Sprintf(format, args...))
}

// Status returns State.
func (e *Engine) Status(context.Context) (admin.Status, error) { return e.State, e.Err }

// Rooms filters Records by the text fields, Live and Limit.
func (e *Engine) Rooms(_ context.Context, f admin.RoomFilter) ([]admin.RoomInfo, error) {
	out := []admin.RoomInfo{}
	for _, r := range e.Records {
		terminal := r.Status == "Failed" || r.Status == "Success"
		if (f.Role != "" && f.Role != r.Role) || (f.Status != "" && f.Status != r.Status) || (f.State != "" && f.State != r.State) ||
			(f.Peer != "" && f.Peer != r.Peer) || (f.Reason != "" && f.Reason != r.Reason) || (f.Residency != "" && f.Residency != r.Residency) ||
			(f.Group != "" && f.Group != r.Group && f.Group != r.PeerGroup) || (f.Live && terminal) || r.SinceNS < f.OlderNS {
			continue
		}
		r.History = nil
		if out = append(out, r); len(out) == f.Limit {
			break
		}
	}
	return out, e.Err
}

// Room returns the Records of a room.
func (e *Engine) Room(_ context.Context, room int64) ([]admin.RoomInfo, error) {
	out := []admin.RoomInfo{}
	for _, r := range e.Records {
		if r.Room == room {
			out = append(out, r)
		}
	}
	if len(out) == 0 && e.Err == nil {
		return nil, fmt.Errorf("room %d: %w", room, admin.ErrNotFound)
	}
	return out, e.Err
}

// Why answers from Reasons.
func (e *Engine) Why(_ context.Context, room int64) ([]string, error) {
	w, ok := e.Reasons[room]
	if !ok && e.Err == nil {
		return nil, fmt.Errorf("room %d: %w", room, admin.ErrNotFound)
	}
	return w, e.Err
}

// AbortRoom ends every record of the room that is not terminal.
func (e *Engine) AbortRoom(ctx context.Context, room int64, role string) (admin.AbortResult, error) {
	e.called("abort %d %q", room, role)
	rs, err := e.Room(ctx, room)
	var res admin.AbortResult
	for _, r := range rs {
		switch {
		case role != "" && r.Role != role:
		case r.Reason != "":
			res.Already = append(res.Already, r.Reason)
		default:
			res.Ended++
		}
	}
	return res, err
}

// WatchRooms sends Changes, then nothing until ctx ends.
func (e *Engine) WatchRooms(ctx context.Context, room int64) (<-chan admin.RoomChange, error) {
	if e.Err != nil {
		return nil, e.Err
	}
	ch := make(chan admin.RoomChange, len(e.Changes))
	for _, c := range e.Changes {
		if room < 0 || c.Room == room {
			ch <- c
		}
	}
	context.AfterFunc(ctx, func() { close(ch) })
	return ch, nil
}

// Plugins returns Plugs.
func (e *Engine) Plugins(context.Context) ([]admin.PluginInfo, error) { return e.Plugs, e.Err }

// Peers returns Engines.
func (e *Engine) Peers(context.Context) ([]admin.PeerInfo, error) { return e.Engines, e.Err }

// Groups returns Models.
func (e *Engine) Groups(context.Context) ([]admin.GroupInfo, error) { return e.Models, e.Err }

// GroupWhy answers from Grounds.
func (e *Engine) GroupWhy(_ context.Context, name string) ([]string, error) {
	w, ok := e.Grounds[name]
	if !ok && e.Err == nil {
		return nil, fmt.Errorf("group %q: %w", name, admin.ErrNotFound)
	}
	return w, e.Err
}

// UpgradePlugin sends Steps.
func (e *Engine) UpgradePlugin(_ context.Context, name string, u admin.Upgrade) (<-chan admin.UpgradeStep, error) {
	e.called("upgrade %s %+v", name, u)
	if e.Err != nil {
		return nil, e.Err
	}
	ch := make(chan admin.UpgradeStep, len(e.Steps))
	for _, s := range e.Steps {
		ch <- s
	}
	close(ch)
	return ch, nil
}

// Drain returns Drained.
func (e *Engine) Drain(context.Context) (admin.DrainResult, error) {
	e.called("drain")
	return e.Drained, e.Err
}

// Sample returns an engine with a few rooms, for goldens: every age is fixed.
func Sample() *Engine {
	ns := func(d time.Duration) int64 { return int64(d) }
	return &Engine{
		State: admin.Status{Version: "v0.0.0-test", Node: "prefill-0", Incarnation: 7, PID: 4121, UptimeNS: ns(3*time.Hour + 2*time.Minute), Ready: true, Rooms: 2, Held: 1, Sessions: 1},
		Records: []admin.RoomInfo{
			{Room: 8131776411, Role: "source", Attempt: 0, State: "confirmed", Status: "Transferring", Residency: "armed", SinceNS: ns(12400 * time.Millisecond), AgeNS: ns(14 * time.Second),
				Own: admin.Opener{Incarnation: 7, Sequence: 41}, Pair: admin.Opener{Incarnation: 9, Sequence: 12}, Peer: "decode-0", Group: "llama-p", PeerGroup: "llama-d", Ranks: []int32{0},
				BytesTotal: 283 << 20, BytesDone: 100 << 20, OpsOut: 3, OpsHeld: 2, Clock: &admin.Clock{Name: "stall", RemainingNS: ns(2600 * time.Millisecond)}, Backend: "tcp", Lane: "shm",
				History: []admin.Change{{AgeNS: ns(14 * time.Second), What: "opened"}, {AgeNS: ns(12400 * time.Millisecond), What: "first op submitted"}}},
			{Room: 9223372036854775807, Role: "source", Attempt: 1, State: "unbound", Status: "Bootstrapping", Residency: "none", SinceNS: ns(90 * time.Second), AgeNS: ns(90 * time.Second),
				Own: admin.Opener{Incarnation: 7, Sequence: 40}, Group: "llama-p", Ranks: []int32{0}, Clock: &admin.Clock{Name: "bootstrap", RemainingNS: ns(210 * time.Second)}},
			{Room: 77, Role: "destination", State: "ended", Status: "Failed", Residency: "quarantined", Reason: "peer_lost", SinceNS: ns(40 * time.Minute), AgeNS: ns(41 * time.Minute),
				Own: admin.Opener{Incarnation: 7, Sequence: 3}, Pair: admin.Opener{Incarnation: 2, Sequence: 1}, Peer: "prefill-3", Group: "llama-d", PeerGroup: "llama-p", Ranks: []int32{0, 1}, BytesTotal: 1 << 20, Backend: "tcp", Detail: "10s without a beat"},
		},
		Reasons: map[int64][]string{
			8131776411: {"source room 8131776411 is Transferring for 12.4s and waits for plugin tcp (epoch 2) to end 3 operations towards decode-0; in 2.6s the stall clock ends it as Failed(stalled)."},
		},
		Plugs: []admin.PluginInfo{{Name: "tcp", Kind: "transfer", Version: "0.1.0", State: "up", Exec: "built in", Restarts: 1, Features: []string{"receiver_checked", "byte_progress"},
			Epochs: []admin.PluginEpoch{{Epoch: 2, State: "ready", PID: 4130, UptimeNS: ns(time.Hour), BeatAgeNS: ns(300 * time.Millisecond), Ops: 3},
				{Epoch: 1, State: "retiring", PID: 4127, UptimeNS: ns(3 * time.Hour), BeatAgeNS: ns(100 * time.Millisecond), Rooms: 1, EndsInNS: ns(299 * time.Second)}}}},
		Engines: []admin.PeerInfo{{Node: "decode-0", Address: "unix:/run/terminus/decode-0/peer.sock", Incarnation: 9, State: "ready", SinceNS: ns(3 * time.Hour), HeardNS: ns(200 * time.Millisecond), SameHost: true, Backends: []string{"tcp"}, Rooms: 1, OpsOut: 3}},
		Models: []admin.GroupInfo{
			{Name: "llama-d", Role: "destination", Node: "decode-0", Size: 4, Ranks: []int32{0, 1}, Elsewhere: []int32{3}, Missing: []int32{2}},
			{Name: "llama-d", Role: "destination", Node: "decode-1", Size: 4, Ranks: []int32{3}, Elsewhere: []int32{0, 1}, Missing: []int32{2}},
			{Name: "llama-p", Role: "source", Node: "prefill-0", Here: true, Size: 1, Ranks: []int32{0}, Complete: true, Pools: 1, Rooms: 2, Pairs: []admin.GroupPair{
				{Group: "llama-e", Node: "decode-2", Verdict: admin.PairUsable, Backends: []string{"tcp"}, Rooms: 2},
				{Group: "mixtral-d", Node: "decode-3", Verdict: admin.PairRefused, Reason: "layout_mismatch", Field: "layout.page_tokens", Detail: "layout.page_tokens: source has 16, destination has 32"},
			}, Detail: "with mixtral-d: layout_mismatch: layout.page_tokens: source has 16, destination has 32"},
		},
		Grounds: map[string][]string{"llama-d": {"group \"llama-d\" (destination, 4 ranks) waits for rank 2 to connect, with ranks 0 and 1 at \"decode-0\", rank 3 at \"decode-1\"."}},
		Drained: admin.DrainResult{Clean: true},
		Steps: []admin.UpgradeStep{
			{What: "starting the next process of tcp beside epoch 2"}, {Epoch: 2, What: "epoch 2 has 1 rooms and 0 operations left, and at most 5m0s", Rooms: 1, EndsInNS: ns(5 * time.Minute)},
			{Epoch: 2, What: "epoch 2 is gone, no process of it is left"}, {Done: true},
		},
	}
}
