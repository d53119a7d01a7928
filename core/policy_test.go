package core

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

type open map[PeerID]bool

func (o open) Open(p PeerID) bool { return !o[p] } // the map names closed peers

// serve takes n ops of size bytes from the policy and returns their rooms.
func serve(p Policy, n int, size int64, left map[int32]int64, peer func(int32) PeerID, w Windows) []int32 {
	var order []int32
	for range n {
		room, ok := p.Next(0, w)
		if !ok {
			break
		}
		order = append(order, room)
		left[room] -= size
		p.Charge(peer(room), size)
		if left[room] > 0 {
			p.Add(room, peer(room), left[room], 0, 0)
		} else {
			p.Remove(room)
		}
	}
	return order
}

// TestSRFShortestFirst: within a peer the room with the fewest bytes left goes first, a higher priority
// before that, and equal ones in order of arrival.
func TestSRFShortestFirst(t *testing.T) {
	p := NewSRF()
	for room, bytes := range []int64{30, 10, 20, 10} {
		p.Add(int32(room), 0, bytes, 0, 0)
	}
	p.Add(4, 0, 100, 1, 0)
	left := map[int32]int64{0: 30, 1: 10, 2: 20, 3: 10, 4: 100}
	got := serve(p, 99, 100, left, func(int32) PeerID { return 0 }, open{})
	if want := []int32{4, 1, 3, 2, 0}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
	if p.Len() != 0 {
		t.Errorf("%d rooms left", p.Len())
	}
}

// TestSRFFairness: peers share by bytes, whatever the number and size of their rooms: a peer with many
// short rooms costs one with a long room nothing.
func TestSRFFairness(t *testing.T) {
	p := NewSRF()
	p.Quantum = 100
	left := map[int32]int64{}
	peer := func(room int32) PeerID { return PeerID(min(room, 2)) }
	for room := range int32(40) {
		left[room] = 100_000
		p.Add(room, peer(room), left[room], 0, 0)
	}
	bytes := map[PeerID]int64{}
	for _, room := range serve(p, 3000, 40, left, peer, open{}) {
		bytes[peer(room)] += 40
	}
	for id, n := range bytes {
		if n < 39_000 || n > 41_000 {
			t.Errorf("peer %d got %d of 120000 bytes: %v", id, n, bytes)
		}
	}
}

// TestSRFClosedPeer: a peer whose window is full is passed over, saves nothing up, and takes its turn
// when it opens.
func TestSRFClosedPeer(t *testing.T) {
	p := NewSRF()
	p.Quantum = 100
	peer := func(room int32) PeerID { return PeerID(room) }
	left := map[int32]int64{0: 1e6, 1: 1e6}
	p.Add(0, 0, 1e6, 0, 0)
	p.Add(1, 1, 1e6, 0, 0)
	if got := serve(p, 100, 100, left, peer, open{0: true}); slices.Contains(got, 0) || len(got) != 100 {
		t.Fatalf("served %v", got)
	}
	n := 0
	for _, room := range serve(p, 100, 100, left, peer, open{}) {
		n += int(1 - room)
	}
	if n < 49 || n > 51 {
		t.Errorf("peer 0 got %d of 100 turns after it opened", n)
	}
	if _, ok := p.Next(0, open{0: true, 1: true}); ok {
		t.Error("a room is picked although every window is full")
	}
}

// TestSRFAgeBound: a long room that waited longer than the age bound goes before shorter ones.
func TestSRFAgeBound(t *testing.T) {
	p := NewSRF()
	p.Add(0, 0, 1e9, 0, 0)
	now := int64(p.AgeBound)
	p.Add(1, 0, 10, 5, now)
	if room, _ := p.Next(now, open{}); room != 1 {
		t.Errorf("room %d at the age bound, want the short one", room)
	}
	if room, _ := p.Next(now+1, open{}); room != 0 {
		t.Errorf("room %d beyond the age bound, want the old one", room)
	}
	p.Add(0, 0, 1e8, 0, now) // an update keeps the age
	if room, _ := p.Next(now+1, open{}); room != 0 {
		t.Errorf("room %d after an update, want the old one", room)
	}
}

// TestSRFAgeShare: a stream of short rooms that never ends leaves an old room a third of the bytes, and that old
// room leaves the short ones two thirds.
func TestSRFAgeShare(t *testing.T) {
	p := NewSRF()
	const op, old = 100, 3000
	left := int64(old)
	p.Add(0, 0, left, 0, 0)
	now := int64(p.AgeBound) + 1
	for n := int32(1); left > 0; n++ {
		p.Add(n, 0, op, 1, now)
		room, ok := p.Next(now, open{})
		if !ok {
			t.Fatal("nothing is picked")
		}
		p.Charge(0, op)
		if room != 0 {
			p.Remove(room)
		} else if left -= op; left > 0 {
			p.Add(0, 0, left, 0, now)
		} else {
			p.Remove(0)
		}
		if got, want := old-left, int64(n)*op/3; got < want-2*op || got > want+2*op {
			t.Fatalf("of %d bytes the old room got %d", int64(n)*op, got)
		}
	}
}

// TestSRFLargeOp: an op that is many quanta long delays its peer's next turn, and nobody starves.
func TestSRFLargeOp(t *testing.T) {
	p := NewSRF()
	p.Add(0, 0, 1<<40, 0, 0)
	p.Charge(0, 20*p.Quantum)
	if room, ok := p.Next(0, open{}); !ok || room != 0 {
		t.Errorf("room %d, %v: the only peer pays its debt and goes on", room, ok)
	}
}

func TestFIFO(t *testing.T) {
	p := NewFIFO()
	p.Add(7, 0, 100, 0, 0)
	p.Add(8, 1, 1, 9, 0)
	p.Add(9, 1, 1, 9, 0)
	p.Add(7, 0, 50, 0, time.Hour.Nanoseconds()) // an update keeps its place
	if room, ok := p.Next(0, open{}); !ok || room != 7 {
		t.Errorf("room %d", room)
	}
	if _, ok := p.Next(0, open{0: true}); ok {
		t.Error("a room overtakes the first")
	}
	p.Remove(7)
	p.Remove(7)
	if room, ok := p.Next(0, open{0: true}); !ok || room != 8 || p.Len() != 2 {
		t.Errorf("room %d, %d left", room, p.Len())
	}
}

// TestPolicyModel: random use of both policies; the room that is picked is always one that is there and
// whose peer is open, none is lost, and a clone goes on like the original.
func TestPolicyModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p Policy = NewSRF()
		if rapid.Bool().Draw(t, "fifo") {
			p = NewFIFO()
		}
		rooms := map[int32]PeerID{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			room := int32(rapid.IntRange(0, 9).Draw(t, "room"))
			peer := PeerID(rapid.IntRange(0, 3).Draw(t, "peer"))
			bytes := rapid.Int64Range(1, 1<<27).Draw(t, "bytes")
			switch rapid.IntRange(0, 3).Draw(t, "do") {
			case 0, 1:
				if at, ok := rooms[room]; ok {
					peer = at
				}
				p.Add(room, peer, bytes, int32(bytes%3), bytes)
				rooms[room] = peer
			case 2:
				p.Remove(room)
				delete(rooms, room)
			case 3:
				w := open{peer: true}
				c := p.Clone()
				picked, ok := p.Next(bytes, w)
				if cp, cok := c.Next(bytes, w); cp != picked || cok != ok {
					t.Fatalf("a clone picks %d (%v), the original %d (%v)", cp, cok, picked, ok)
				}
				if ok {
					at, there := rooms[picked]
					if !there || at == peer {
						t.Fatalf("picked %d: there %v, peer %d, closed %d", picked, there, at, peer)
					}
					p.Charge(at, bytes)
				} else if _, srf := p.(*SRF); srf {
					for r, at := range rooms {
						if at != peer {
							t.Fatalf("room %d of open peer %d is not served", r, at)
						}
					}
				}
			}
			if p.Len() != len(rooms) {
				t.Fatalf("%d rooms, want %d", p.Len(), len(rooms))
			}
		}
	})
}

// TestFIFOOrder: rooms go in order of arrival; one that left and came again goes last.
func TestFIFOOrder(t *testing.T) {
	p := NewFIFO()
	for room := range int32(200) {
		p.Add(room, 0, 1, 0, 0)
	}
	for room := range int32(199) {
		if room != 7 {
			p.Remove(room)
		}
	}
	p.Add(3, 0, 1, 0, 0)
	left := map[int32]int64{}
	c := p.Clone()
	want := []int32{7, 199, 3}
	if got := serve(p, 99, 1, left, func(int32) PeerID { return 0 }, open{}); !slices.Equal(got, want) || p.Len() != 0 {
		t.Errorf("order %v, %d left, want %v", got, p.Len(), want)
	}
	if got := serve(c, 99, 1, left, func(int32) PeerID { return 0 }, open{}); !slices.Equal(got, want) {
		t.Errorf("the clone's order is %v, want %v", got, want)
	}
	for range 10_000 {
		p.Add(1, 0, 1, 0, 0)
		p.Remove(1)
	}
	if len(p.queue) > 100 {
		t.Errorf("%d entries of rooms that left", len(p.queue))
	}
}

// TestSRFAgeAfterReturn: a room that waited longer than the bound goes before shorter ones, also when rooms that
// came before it have left and come again.
func TestSRFAgeAfterReturn(t *testing.T) {
	p := NewSRF()
	p.Add(0, 0, 10, 0, 0)
	p.Add(1, 0, 1000, 0, 1)
	p.Remove(0)
	late := int64(p.AgeBound) + 2
	p.Add(0, 0, 10, 0, late)
	if room, ok := p.Next(late, open{}); !ok || room != 1 {
		t.Errorf("room %d goes first", room)
	}
}
