package sim

import (
	"container/heap"
	"math"
)

// oraclePolicy is the name of a policy that no engine can have: see oracle.
const oraclePolicy = "oracle"

// oracle replays what a replay has, over a link of the same rate that peers share equally in the same way, in the
// order that is best for the mean of a link that one peer has alone: the room with the least left goes first, to the
// byte, whatever is on the way already. No window or limit holds a room back, and none is aged. It writes how long the rooms took.
func (r *replay) oracle() {
	peers := make([]remaining, len(r.wire.peers))
	now, arrived, done := 0.0, 0, 0
	for done < len(r.rooms) {
		busy, least := 0.0, math.Inf(1)
		for _, q := range peers {
			if len(q) > 0 {
				busy++
				least = min(least, q[0].left)
			}
		}
		next := now + least*busy
		if busy == 0 {
			next = math.Inf(1)
		}
		arrives := arrived < len(r.rooms) && float64(r.rooms[arrived].at) <= next
		if arrives {
			next = float64(r.rooms[arrived].at)
		}
		for p := range peers {
			q := &peers[p]
			if len(*q) == 0 {
				continue
			}
			if (*q)[0].left -= (next - now) / busy; !arrives && (*q)[0].left < 0.5 { // ns: less is rounding
				r.rooms[heap.Pop(q).(leftover).room].took = int64(next)
				done++
			}
		}
		now = next
		if arrives {
			left := float64(r.rooms[arrived].tokens) * float64(r.page) * 1e9 / float64(r.wire.rate)
			heap.Push(&peers[r.peer(arrived)], leftover{left, arrived})
			arrived++
		}
	}
	for i := range r.rooms { // until here: when it ended
		r.rooms[i].took -= r.rooms[i].at
	}
}

// leftover is a room with the time, in ns, that the whole link would need for what is left of it.
type leftover struct {
	left float64
	room int
}

// remaining is the rooms of a peer, the one with the least left first.
type remaining []leftover

func (q remaining) Len() int { return len(q) }
func (q remaining) Less(i, j int) bool {
	return q[i].left < q[j].left || q[i].left == q[j].left && q[i].room < q[j].room
}
func (q remaining) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *remaining) Push(x any)   { *q = append(*q, x.(leftover)) }
func (q *remaining) Pop() any {
	last := len(*q) - 1
	x := (*q)[last]
	*q = (*q)[:last]
	return x
}
