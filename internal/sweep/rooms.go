package sweep

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
)

// The sides of a room, and of a cluster.
const (
	prefill = iota
	decode
)

var sides = [2]string{"prefill", "decode"}

// The workers' memory: a pool of poolPages pages, each of two tensors.
const (
	poolPages   = 320 // more than the rooms of a play hold together
	tensors     = 2
	tensorBytes = 4 << 10
	canary      = 0xc5
)

// room is one request of a play, known to both workers.
type room struct {
	ID     int64
	At     int // µs from the start of the play until its worker opens it
	Pages  int // that the source sends
	Prefix int // pages of the destination that hold their KV already
	Chunks int
	Aux    int    // bytes
	Abort  string // the side that aborts it, when its first chunk is out or its pages are registered
}

// roomsOfPlay is how many rooms a play has. The kinds come in turn, so that each is under way at any moment.
const roomsOfPlay = 24

// newPlay returns the rooms of a play: most with one chunk, some with several, some with a prefix that is cached, one
// that is cached as a whole, and two that are aborted, one by either side. From the second on they come in bursts of
// four, so that several are under way at once.
func newPlay(first int64) []room {
	rooms := make([]room, roomsOfPlay)
	for i := range rooms {
		r := room{ID: first + int64(i), At: i / 4 * 1500, Pages: 1 + i*5%8, Chunks: 1, Aux: i % 3 * 100}
		switch i % 12 {
		case 2, 5, 9:
			r.Pages, r.Chunks = 9, 3
		case 3:
			r.Prefix = 2
		case 6:
			r.Pages, r.Prefix = 0, 3
		case 7:
			r.Pages, r.Chunks, r.Abort = 6, 2, sides[i/12%2]
		case 10:
			r.Pages = 16
		}
		rooms[i] = r
	}
	return rooms
}

// memory is a worker's pages. A page that nobody holds is painted; paint that is damaged was written after the page
// had been given back.
type memory struct {
	bytes []byte
	free  []int32 // taken from the front, so that a page rests as long as it can
	held  [poolPages]bool
	paint []byte
}

func newMemory(b []byte) *memory {
	m := &memory{bytes: b, paint: bytes.Repeat([]byte{canary}, tensorBytes)}
	for id := range int32(poolPages) {
		m.free = append(m.free, id*7%poolPages) // neighbours in a list are no neighbours in memory
	}
	for _, id := range m.free {
		m.cover(id)
	}
	return m
}

func (m *memory) page(tensor int, id int32) []byte {
	at := (tensor*poolPages + int(id)) * tensorBytes
	return m.bytes[at : at+tensorBytes]
}

func (m *memory) cover(id int32) {
	for t := range tensors {
		copy(m.page(t, id), m.paint)
	}
}

// take returns n pages, and how many of them had been written since they were given back.
func (m *memory) take(n int) (ids []int32, written int, err error) {
	if n > len(m.free) {
		return nil, 0, fmt.Errorf("%d pages are wanted and %d are free", n, len(m.free))
	}
	ids = slices.Clone(m.free[:n])
	m.free = m.free[n:]
	for _, id := range ids {
		if !m.covered(id) {
			written++
		}
		m.held[id] = true
	}
	return ids, written, nil
}

func (m *memory) covered(id int32) bool {
	for t := range tensors {
		if !bytes.Equal(m.page(t, id), m.paint) {
			return false
		}
	}
	return true
}

func (m *memory) give(ids []int32) {
	for _, id := range ids {
		m.held[id] = false
		m.cover(id)
	}
	m.free = append(m.free, ids...)
}

// check returns how many pages that nobody holds were written, and paints them anew.
func (m *memory) check() (written int) {
	for _, id := range m.free {
		if !m.covered(id) {
			written++
			m.cover(id)
		}
	}
	return written
}

// word is what stands in each eight bytes of a page, plus its place: a function of all that names the page, so that
// another page of the room, or another room's, is told apart.
func word(room int64, page, tensor int) uint64 {
	x := uint64(room)<<24 ^ uint64(page)<<8 ^ uint64(tensor)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// fill writes what source page number page of a room holds.
func (m *memory) fill(id int32, room int64, page int) {
	for t := range tensors {
		w, b := word(room, page, t), m.page(t, id)
		for i := 0; i < tensorBytes; i += 8 {
			binary.LittleEndian.PutUint64(b[i:], w+uint64(i))
		}
	}
}

// holds says whether the page holds what fill wrote.
func (m *memory) holds(id int32, room int64, page int) bool {
	for t := range tensors {
		w, b := word(room, page, t), m.page(t, id)
		for i := 0; i < tensorBytes; i += 8 {
			if binary.LittleEndian.Uint64(b[i:]) != w+uint64(i) {
				return false
			}
		}
	}
	return true
}

// prefixPage is the number of a room's first page that the destination holds already; the source never sends it.
const prefixPage = 1 << 12

func auxOf(r room) []byte {
	return bytes.Repeat([]byte{byte(r.ID), byte(r.ID >> 8), 0xa5}, r.Aux/3)
}
