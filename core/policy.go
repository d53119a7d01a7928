package core

import (
	"maps"
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
	// Hash is of all that decides what Next returns, except times. Rooms go by the names that name gives:
	// the same rooms may have other numbers in another core.
	Hash(name func(room int32) uint64) uint64
	// Clone returns an independent copy.
	Clone() Policy
}

// Windows says whether a peer's window has room for another op.
type Windows interface{ Open(PeerID) bool }

// SRF is the default policy: deficit round-robin over peers by bytes; within a peer the highest
// priority, then the shortest remaining bytes, first. Rooms that waited longer than AgeBound get a third of
// their peer's bytes, the oldest first, whatever their size and priority: so a room that a peer serves at
// some rate ends in about three times what it would take in order of arrival, and short rooms do not wait
// for all the old ones, as they would if those went before all.
type SRF struct {
	Quantum  int64 // bytes a peer may submit in its turn
	AgeBound time.Duration

	peers []peerQueue
	order []PeerID // peers with rooms, in turn
	turn  int
	items slab[queued]
	where []int32 // by room: its item plus one, 0 when it is not queued
	seq   uint64
}

// NewSRF returns the default policy.
func NewSRF() *SRF { return &SRF{Quantum: 4 << 20, AgeBound: 2 * time.Second} }

// queued is a room that has something to submit.
type queued struct {
	room      int32
	peer      PeerID
	pos       int32 // in the peer's heap
	newer     int32 // neighbours in the order of arrival
	older     int32
	priority  int32
	remaining int64
	added     int64
	seq       uint64
}

func (a *queued) before(b *queued) bool {
	if a.priority != b.priority {
		return a.priority > b.priority
	}
	if a.remaining != b.remaining {
		return a.remaining < b.remaining
	}
	return a.seq < b.seq
}

// peerQueue is the rooms of one peer: a heap by (priority, remaining) and, for the age bound, a list in
// the order of arrival.
type peerQueue struct {
	heap           []int32
	oldest, newest int32
	deficit        int64
	pick           pick
	owed           int64 // to old rooms: what others got before them, less twice what they got
}

// pick is whose op Next chose.
type pick uint8

const (
	nobodyOld pick = iota // no room is older than the bound, or the oldest is the first of the heap too
	others                // before an old one
	oldest
)

func (s *SRF) queue(p PeerID) *peerQueue {
	for int(p) >= len(s.peers) {
		s.peers = append(s.peers, peerQueue{oldest: nil32, newest: nil32})
	}
	return &s.peers[p]
}

func (s *SRF) item(room int32) int32 {
	if int(room) >= len(s.where) {
		return nil32
	}
	return s.where[room] - 1
}

// fix moves the item at position i of a heap to where it belongs.
func (s *SRF) fix(heap []int32, i int) {
	set := func(i int, x int32) {
		heap[i] = x
		s.items.at(x).pos = int32(i)
	}
	x := heap[i]
	for i > 0 && s.items.at(x).before(s.items.at(heap[(i-1)/2])) {
		set(i, heap[(i-1)/2])
		i = (i - 1) / 2
	}
	for {
		c := 2*i + 1
		if c+1 < len(heap) && s.items.at(heap[c+1]).before(s.items.at(heap[c])) {
			c++
		}
		if c >= len(heap) || !s.items.at(heap[c]).before(s.items.at(x)) {
			break
		}
		set(i, heap[c])
		i = c
	}
	set(i, x)
}

// Add implements Policy.
func (s *SRF) Add(room int32, peer PeerID, remaining int64, priority int32, now int64) {
	if x := s.item(room); x != nil32 {
		if it := s.items.at(x); it.peer == peer {
			it.remaining, it.priority = remaining, priority
			s.fix(s.queue(peer).heap, int(it.pos))
			return
		}
		s.Remove(room)
	}
	for int(room) >= len(s.where) {
		s.where = append(s.where, 0)
	}
	q := s.queue(peer)
	s.seq++
	x := s.items.add(queued{room: room, peer: peer, priority: priority, remaining: remaining, added: now, seq: s.seq, older: q.newest, newer: nil32})
	s.where[room] = x + 1
	if q.newest != nil32 {
		s.items.at(q.newest).newer = x
	} else {
		q.oldest = x
	}
	q.newest = x
	q.heap = append(q.heap, x)
	s.fix(q.heap, len(q.heap)-1)
	if len(q.heap) == 1 {
		s.order = append(s.order, peer)
	}
}

// Remove implements Policy.
func (s *SRF) Remove(room int32) {
	x := s.item(room)
	if x == nil32 {
		return
	}
	it := *s.items.at(x)
	s.items.del(x)
	s.where[room] = 0
	q := s.queue(it.peer)
	if it.older != nil32 {
		s.items.at(it.older).newer = it.newer
	} else {
		q.oldest = it.newer
	}
	if it.newer != nil32 {
		s.items.at(it.newer).older = it.older
	} else {
		q.newest = it.older
	}
	n := len(q.heap) - 1
	last := q.heap[n]
	q.heap = q.heap[:n]
	if int(it.pos) < n {
		q.heap[it.pos] = last
		s.fix(q.heap, int(it.pos))
	}
	if n > 0 {
		return
	}
	q.deficit, q.owed = 0, 0
	i := slices.Index(s.order, it.peer)
	s.order = slices.Delete(s.order, i, i+1)
	if s.turn > i {
		s.turn--
	}
	if len(s.order) == 0 {
		s.turn = 0
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
		q.pick = nobodyOld
		if q.oldest != q.heap[0] && now-s.items.at(q.oldest).added > int64(s.AgeBound) {
			if q.pick = others; q.owed >= 0 {
				q.pick = oldest
				return s.items.at(q.oldest).room, true
			}
		}
		return s.items.at(q.heap[0]).room, true
	}
	return nil32, false
}

// Charge implements Policy.
func (s *SRF) Charge(peer PeerID, bytes int64) {
	q := s.queue(peer)
	switch q.pick {
	case others:
		q.owed += bytes
	case oldest:
		q.owed -= 2 * bytes
	}
	if q.deficit -= bytes; q.deficit <= 0 {
		s.turn++
	}
}

// Len implements Policy.
func (s *SRF) Len() int { return s.items.used() }

// Hash implements Policy: the turns, and the rooms of each peer in the order of arrival.
func (s *SRF) Hash(name func(room int32) uint64) uint64 {
	h := hash(9)
	for i := range s.order {
		p := s.order[(s.turn+i)%len(s.order)]
		q := &s.peers[p]
		h.put(uint64(p), uint64(q.owed))
		if len(s.order) > 1 { // alone it is always its turn
			h.put(uint64(q.deficit))
		}
		for x := q.oldest; x != nil32; x = s.items.at(x).newer {
			it := s.items.at(x)
			h.put(name(it.room), uint64(it.priority), uint64(it.remaining))
		}
	}
	return h.end()
}

// Clone implements Policy.
func (s *SRF) Clone() Policy {
	c := *s
	c.peers, c.order, c.where, c.items = slices.Clone(s.peers), slices.Clone(s.order), slices.Clone(s.where), s.items.clone()
	for i := range c.peers {
		c.peers[i].heap = slices.Clone(c.peers[i].heap)
	}
	return &c
}

// FIFO submits rooms in order of arrival, whatever their size or peer. It is kept for comparison.
type FIFO struct {
	queue []arrival // rooms that left are skipped
	where map[int32]arrival
	seq   uint64
}

type arrival struct {
	room int32
	peer PeerID
	seq  uint64
}

// NewFIFO returns an empty FIFO.
func NewFIFO() *FIFO { return &FIFO{where: map[int32]arrival{}} }

// Add implements Policy.
func (f *FIFO) Add(room int32, peer PeerID, _ int64, _ int32, _ int64) {
	a, ok := f.where[room]
	a.room, a.peer = room, peer
	if !ok {
		f.seq++
		a.seq = f.seq
		if len(f.queue) > 2*len(f.where)+64 { // mostly rooms that left
			f.queue = slices.DeleteFunc(f.queue, f.left)
		}
		f.queue = append(f.queue, a)
	}
	f.where[room] = a
}

// left reports whether a room is no longer, or again, in the queue.
func (f *FIFO) left(a arrival) bool { return f.where[a.room].seq != a.seq }

// Remove implements Policy.
func (f *FIFO) Remove(room int32) { delete(f.where, room) }

// Next implements Policy: the first room waits for its peer's window, and all behind it with it.
func (f *FIFO) Next(_ int64, w Windows) (int32, bool) {
	for len(f.queue) > 0 && f.left(f.queue[0]) {
		f.queue = f.queue[1:]
	}
	if len(f.queue) > 0 && w.Open(f.where[f.queue[0].room].peer) {
		return f.queue[0].room, true
	}
	return nil32, false
}

// Charge implements Policy.
func (f *FIFO) Charge(PeerID, int64) {}

// Len implements Policy.
func (f *FIFO) Len() int { return len(f.where) }

// Hash implements Policy.
func (f *FIFO) Hash(name func(room int32) uint64) uint64 {
	h := hash(10)
	for _, a := range f.queue {
		if !f.left(a) {
			h.put(name(a.room), uint64(f.where[a.room].peer))
		}
	}
	return h.end()
}

// Clone implements Policy.
func (f *FIFO) Clone() Policy {
	return &FIFO{queue: slices.Clone(f.queue), where: maps.Clone(f.where), seq: f.seq}
}

var (
	_ Policy = (*SRF)(nil)
	_ Policy = (*FIFO)(nil)
)
