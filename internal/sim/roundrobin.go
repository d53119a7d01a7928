package sim

import (
	"slices"

	"github.com/terminus-kv/terminus/core"
)

// roundRobin lets rooms take turns, an op each, whatever their size or peer. It is what the shipped policy
// is compared with, beside core.FIFO.
type roundRobin struct {
	rooms  []turn
	picked int // by Next, for Charge
}

type turn struct {
	room int32
	peer core.PeerID
}

// at is where a room stands, -1 when it is not there. It is most often the last: its turn has just been.
func (r *roundRobin) at(room int32) int {
	for i := len(r.rooms) - 1; i >= 0; i-- {
		if r.rooms[i].room == room {
			return i
		}
	}
	return -1
}

// Add implements core.Policy.
func (r *roundRobin) Add(room int32, peer core.PeerID, _ int64, _ int32, _ int64) {
	if i := r.at(room); i >= 0 {
		r.rooms[i].peer = peer
		return
	}
	r.rooms = append(r.rooms, turn{room, peer})
}

// Remove implements core.Policy.
func (r *roundRobin) Remove(room int32) {
	if i := r.at(room); i >= 0 {
		r.rooms = slices.Delete(r.rooms, i, i+1)
	}
}

// Next implements core.Policy.
func (r *roundRobin) Next(_ int64, w core.Windows) (int32, bool) {
	r.picked = slices.IndexFunc(r.rooms, func(t turn) bool { return w.Open(t.peer) })
	if r.picked < 0 {
		return 0, false
	}
	return r.rooms[r.picked].room, true
}

// Charge implements core.Policy: the room that was picked had its turn.
func (r *roundRobin) Charge(core.PeerID, int64) {
	t := r.rooms[r.picked]
	r.rooms = append(slices.Delete(r.rooms, r.picked, r.picked+1), t)
}

// Len implements core.Policy.
func (r *roundRobin) Len() int { return len(r.rooms) }

// Hash implements core.Policy.
func (r *roundRobin) Hash(name func(room int32) uint64) uint64 {
	var h uint64
	for _, t := range r.rooms {
		h = mix(h ^ name(t.room) ^ uint64(t.peer)<<32)
	}
	return h
}

// Clone implements core.Policy.
func (r *roundRobin) Clone() core.Policy {
	return &roundRobin{rooms: slices.Clone(r.rooms), picked: r.picked}
}
