package client

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// page is the engine's status page, mapped read-only. Its numbers are little-endian; so are the
// machines that this client supports.
type page struct {
	mem   []byte
	slots int
	ring  uint64 // entries
	words int    // offsets
	plane int
	rings int
}

const (
	pageMagic   = 0x31505354 // "TSP1"
	offBeat     = 24
	offCounter  = 32
	ringMargin  = 64 // entries that the writer may overwrite while we look
	wantedSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
)

// mapPage maps a status page and checks its header. The descriptor stays the caller's.
func mapPage(fd int) (*page, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("status page: %w", err)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&wantedSeals != wantedSeals {
		return nil, fmt.Errorf("status page: seals %#x, want %#x: a page that can shrink could kill this process", seals, wantedSeals)
	}
	if st.Size < 64 || st.Size > 1<<24 {
		return nil, fmt.Errorf("status page: %d bytes", st.Size)
	}
	mem, err := unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("status page: map: %w", err)
	}
	p, err := parsePage(mem)
	if err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("status page: %w", err)
	}
	runtime.AddCleanup(p, func(m []byte) { unix.Munmap(m) }, mem)
	return p, nil
}

// parsePage checks that everything that the header promises lies inside the page.
func parsePage(mem []byte) (*page, error) {
	if len(mem) < 64 {
		return nil, fmt.Errorf("%d bytes, want at least 64", len(mem))
	}
	u32 := func(off int) int64 { return int64(binary.LittleEndian.Uint32(mem[off:])) }
	if u32(0) != pageMagic || u32(4) != 1 {
		return nil, fmt.Errorf("magic %#x, version %d: this client reads TSP1, version 1", u32(0), u32(4))
	}
	slots, ring, words, plane, rings, size := u32(8), u32(12), u32(40), u32(44), u32(48), u32(52)
	inside := func(off, n, align int64) bool { return off >= 64 && off%align == 0 && off+n <= int64(len(mem)) }
	if slots < 1 || slots > 65536 || ring != 2*slots || size > int64(len(mem)) ||
		!inside(words, 8*slots, 8) || !inside(plane, (slots+7)&^7, 8) || !inside(rings, 8*ring, 8) {
		return nil, fmt.Errorf("header does not fit: slots %d, ring %d, words at %d, plane at %d, ring at %d, size %d of %d", slots, ring, words, plane, rings, size, len(mem))
	}
	return &page{mem: mem, slots: int(slots), ring: uint64(ring), words: int(words), plane: int(plane), rings: int(rings)}, nil
}

// load reads one number. The page is unmapped when nobody holds it any more, hence KeepAlive.
func (p *page) load(off int) uint64 {
	v := atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.mem[off])))
	runtime.KeepAlive(p)
	return v
}

func (p *page) word(slot int32) uint64 { return p.load(p.words + 8*int(slot)) }
func (p *page) beat() uint64           { return p.load(offBeat) }
func (p *page) counter() uint64        { return p.load(offCounter) }

// entry returns the slot of change n (1, 2, …); ok is false when the writer has overtaken us or the
// entry is not visible yet.
func (p *page) entry(n uint64) (slot int32, ok bool) {
	e := p.load(p.rings + 8*int((n-1)%p.ring))
	slot = int32(e & 0xffffffff)
	return slot, e>>32 == n&0xffffffff && int(uint32(slot)) < p.slots
}

// planeWord returns the status bytes of slots 8*k to 8*k+7; bytes past the last slot are not statuses.
func (p *page) planeWord(k int) uint64 { return p.load(p.plane + 8*k) }

// cursor reads the change ring.
type cursor struct{ n uint64 }

// next calls fn for each slot that changed since the last call, or returns false when the ring was
// overrun: then every slot may have changed, and the cursor stands at a counter that was read before
// the caller looks at them.
func (c *cursor) next(p *page, fn func(slot int32)) bool {
	n := p.counter()
	if n == c.n {
		return true
	}
	if int64(n-c.n) > int64(p.ring)-ringMargin {
		c.n = n
		return false
	}
	for c.n != n {
		slot, ok := p.entry(c.n + 1)
		if !ok {
			c.n = p.counter()
			return false
		}
		c.n++
		fn(slot)
	}
	return true
}
