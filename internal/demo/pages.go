package demo

import (
	"bytes"
	"fmt"
	"math/rand/v2"
)

// memory is a worker's KV pool: tensors one after the other, each an array of pages.
type memory struct {
	bytes   []byte
	tensors int
	pages   int
	size    int // of one tensor's page
}

// poolBytes is how much memory a pool of h takes.
func (h PlanHeader) poolBytes() int64 { return int64(h.PoolPages) * h.PageBytesAll() }

func newMemory(b []byte, h PlanHeader) memory {
	return memory{bytes: b[:h.poolBytes()], tensors: h.Tensors, pages: h.PoolPages, size: h.PageBytes}
}

// offset of one tensor in the pool's memory.
func (m memory) offset(tensor int) int { return tensor * m.pages * m.size }

// page returns one tensor's part of a page.
func (m memory) page(tensor int, id int32) []byte {
	at := m.offset(tensor) + int(id)*m.size
	return m.bytes[at : at+m.size : at+m.size]
}

// canaryByte fills a page that nobody holds.
const canaryByte = 0xc5

// allocator hands out the pages of a pool, in the order in which they came back, so that a page rests
// as long as it can. A page that is given back is painted with a canary, which must still be there when
// the page is handed out again and at the end: a damaged one was written after it was released.
type allocator struct {
	mem     memory
	free    []int32 // a queue: taken from the front
	held    []bool  // by page id
	canary  []byte
	written int64 // pages whose canary was damaged
}

// newAllocator paints all pages. Blocks of pages start out shuffled, as after a long run: the pages of
// a room are rarely neighbours for longer than a block.
func newAllocator(mem memory, blockPages int, seed uint64) *allocator {
	a := &allocator{mem: mem, held: make([]bool, mem.pages), canary: bytes.Repeat([]byte{canaryByte}, mem.size)}
	rng := rand.New(rand.NewPCG(seed, 0x7061_6765))
	blocks := (mem.pages + blockPages - 1) / blockPages
	for _, b := range rng.Perm(blocks) {
		for id := b * blockPages; id < min((b+1)*blockPages, mem.pages); id++ {
			a.free = append(a.free, int32(id))
			a.paint(int32(id))
		}
	}
	return a
}

func (a *allocator) paint(id int32) {
	for t := range a.mem.tensors {
		copy(a.mem.page(t, id), a.canary)
	}
}

func (a *allocator) painted(id int32) bool {
	for t := range a.mem.tensors {
		if !bytes.Equal(a.mem.page(t, id), a.canary) {
			return false
		}
	}
	return true
}

// available is how many pages take can hand out.
func (a *allocator) available() int { return len(a.free) }

// take returns n pages, or nil if there are not as many.
func (a *allocator) take(n int) []int32 {
	if n > len(a.free) {
		return nil
	}
	ids := append(make([]int32, 0, n), a.free[:n]...)
	a.free = a.free[n:]
	for _, id := range ids {
		if !a.painted(id) {
			a.written++
		}
		a.held[id] = true
	}
	return ids
}

// give takes pages back. Giving back what is not held is the worker's own error.
func (a *allocator) give(ids []int32) error {
	for _, id := range ids {
		if id < 0 || int(id) >= len(a.held) || !a.held[id] {
			return fmt.Errorf("page %d was given back but is not held", id)
		}
		a.held[id] = false
		a.paint(id)
		a.free = append(a.free, id)
	}
	return nil
}

// finish checks the canary of all pages that nobody holds, and returns how many pages were written
// after release in all, and how many did not come back.
func (a *allocator) finish() (written, leaked int64) {
	for _, id := range a.free {
		if !a.painted(id) {
			a.written++
			a.paint(id)
		}
	}
	return a.written, int64(a.mem.pages - len(a.free))
}
