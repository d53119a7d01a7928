package core

import (
	"container/heap"
	"slices"
	"time"
)

// Policy decides which room submits its next op. Rooms are added when they have something to submit
// and removed when they have not; a policy holds nothing else. Implementations are deterministic.
type Policy interface {
	// Add says that room has remaining bytes to submit towards peer. A room that is there already is
	// updated and keeps its age.
	Add(room int32, peer PeerID, remaining int64, priority int32, now int64)
	// Remove forgets the room, if it is there.
	Remove(room int32)
	// Next picks a room among the peers that w says are open.
	Next(now int64, w Windows) (room int32, ok bool)
	// Charge accounts an op of the given size to the peer.
	Charge(peer PeerID, bytes int64)
	// Len is the number of rooms held.
	Len() int
	// Clone returns an independent copy.
	Clone() Policy
}

// Windows says whether a peer's window has room for another op.
type Windows interface{ Open(PeerID) bool }

// SRF is the default policy: deficit round-robin over peers by bytes; within a peer the highest
// priority, then the shortest remaining bytes, first; a room that waited longer than AgeBound goes
// before all.
type SRF struct {
	Quantum  int64 // bytes a peer may submit in its turn
	AgeBound time.Duration

	peers []peerQueue
	order []PeerID // peers with rooms, in turn
	turn  int
	where map[int32]PeerID
	seq   uint64
}

// NewSRF returns the default policy.
func NewSRF() *SRF {
	return &SRF{Quantum: 16 << 20, AgeBound: 2 * time.Second, where: map[int32]PeerID{}}
}

type queued struct {
	room      int32
	priority  int32
	remaining int64
	added     int64
	seq       uint64
}

// peerQueue is the rooms of one peer: a heap by (priority, remaining) and, for the age bound, the
// rooms in order of arrival.
type peerQueue struct {
	heap    []queued
	pos     map[int32]int
	fifo    []int32 // arrival order; rooms that left are skipped
	deficit int64
}

func (q *peerQueue) Len() int { return len(q.heap) }
func (q *peerQueue) Less(i, j int) bool {
	a, b := &q.heap[i], &q.heap[j]
	if a.priority != b.priority {
		return a.priority > b.priority
	}
	if a.remaining != b.remaining {
		return a.remaining < b.remaining
	}
	return a.seq < b.seq
}
func (q *peerQueue) Swap(i, j int) {
	q.heap[i], q.heap[j] = q.heap[j], q.heap[i]
	q.pos[q.heap[i].room], q.pos[q.heap[j].room] = i, j
}
func (q *peerQueue) Push(x any) {
	e := x.(queued)
	q.pos[e.room] = len(q.heap)
	q.heap = append(q.heap, e)
}
func (q *peerQueue) Pop() any {
	n := len(q.heap) - 1
	e := q.heap[n]
	q.heap = q.heap[:n]
	delete(q.pos, e.room)
	return e
}

// oldest returns the room that arrived first, dropping from the list those that left.
func (q *peerQueue) oldest() (queued, bool) {
	for len(q.fifo) > 0 {
		if i, ok := q.pos[q.fifo[0]]; ok {
			return q.heap[i], true
		}
		q.fifo = q.fifo[1:]
	}
	return queued{}, false
}

func (s *SRF) queue(p PeerID) *peerQueue {
	for int(p) >= len(s.peers) {
		s.peers = append(s.peers, peerQueue{})
	}
	q := &s.peers[p]
	if q.pos == nil {
		q.pos = map[int32]int{}
	}
	return q
}

// Add implements Policy.
func (s *SRF) Add(room int32, peer PeerID, remaining int64, priority int32, now int64) {
	if p, ok := s.where[room]; ok && p != peer {
		s.Remove(room)
	}
	q := s.queue(peer)
	if i, ok := q.pos[room]; ok {
		q.heap[i].remaining, q.heap[i].priority = remaining, priority
		heap.Fix(q, i)
		return
	}
	s.seq++
	heap.Push(q, queued{room, priority, remaining, now, s.seq})
	if len(q.fifo) > 2*len(q.heap)+16 { // mostly rooms that left
		q.fifo = slices.DeleteFunc(q.fifo, func(r int32) bool { _, ok := q.pos[r]; return !ok || r == room })
	}
	q.fifo = append(q.fifo, room)
	s.where[room] = peer
	if len(q.heap) == 1 {
		s.order = append(s.order, peer)
	}
}

// Remove implements Policy.
func (s *SRF) Remove(room int32) {
	p, ok := s.where[room]
	if !ok {
		return
	}
	delete(s.where, room)
	q := s.queue(p)
	heap.Remove(q, q.pos[room])
	if len(q.heap) == 0 {
		q.deficit, q.fifo = 0, q.fifo[:0]
		i := slices.Index(s.order, p)
		s.order = slices.Delete(s.order, i, i+1)
		if s.turn > i {
			s.turn--
		}
	}
}

// Next implements Policy.
func (s *SRF) Next(now int64, w Windows) (int32, bool) {
	// Each round gives an open peer in debt one quantum; an op is at most a few quanta long.
	for range 32 * len(s.order) {
		if s.turn >= len(s.order) {
			s.turn = 0
		}
		p := s.order[s.turn]
		q := s.queue(p)
		if !w.Open(p) {
			q.deficit = 0 // a peer that cannot take bytes saves none up
			s.turn++
			continue
		}
		if q.deficit <= 0 {
			if q.deficit += s.Quantum; q.deficit <= 0 {
				s.turn++
				continue
			}
		}
		if e, ok := q.oldest(); ok && now-e.added > int64(s.AgeBound) {
			return e.room, true
		}
		return q.heap[0].room, true
	}
	return nil32, false
}

// Charge implements Policy.
func (s *SRF) Charge(peer PeerID, bytes int64) {
	q := s.queue(peer)
	if q.deficit -= bytes; q.deficit <= 0 {
		s.turn++
	}
}

// Len implements Policy.
func (s *SRF) Len() int { return len(s.where) }

// Clone implements Policy.
func (s *SRF) Clone() Policy {
	c := *s
	c.peers = make([]peerQueue, len(s.peers))
	for i := range s.peers {
		q := &s.peers[i]
		c.peers[i] = peerQueue{heap: slices.Clone(q.heap), fifo: slices.Clone(q.fifo), deficit: q.deficit, pos: make(map[int32]int, len(q.pos))}
		for k, v := range q.pos {
			c.peers[i].pos[k] = v
		}
	}
	c.order = slices.Clone(s.order)
	c.where = make(map[int32]PeerID, len(s.where))
	for k, v := range s.where {
		c.where[k] = v
	}
	return &c
}

// FIFO submits rooms in order of arrival, whatever their size or peer. It is kept for comparison.
type FIFO struct {
	rooms []queued
	peer  map[int32]PeerID
}

// NewFIFO returns an empty FIFO.
func NewFIFO() *FIFO { return &FIFO{peer: map[int32]PeerID{}} }

// Add implements Policy.
func (f *FIFO) Add(room int32, peer PeerID, _ int64, _ int32, now int64) {
	if _, ok := f.peer[room]; !ok {
		f.rooms = append(f.rooms, queued{room: room, added: now})
	}
	f.peer[room] = peer
}

// Remove implements Policy.
func (f *FIFO) Remove(room int32) {
	if _, ok := f.peer[room]; ok {
		delete(f.peer, room)
		f.rooms = slices.DeleteFunc(f.rooms, func(e queued) bool { return e.room == room })
	}
}

// Next implements Policy: the first room waits for its peer's window, and all behind it with it.
func (f *FIFO) Next(_ int64, w Windows) (int32, bool) {
	if len(f.rooms) > 0 && w.Open(f.peer[f.rooms[0].room]) {
		return f.rooms[0].room, true
	}
	return nil32, false
}

// Charge implements Policy.
func (f *FIFO) Charge(PeerID, int64) {}

// Len implements Policy.
func (f *FIFO) Len() int { return len(f.rooms) }

// Clone implements Policy.
func (f *FIFO) Clone() Policy {
	c := &FIFO{rooms: slices.Clone(f.rooms), peer: make(map[int32]PeerID, len(f.peer))}
	for k, v := range f.peer {
		c.peer[k] = v
	}
	return c
}

var (
	_ Policy = (*SRF)(nil)
	_ Policy = (*FIFO)(nil)
)
