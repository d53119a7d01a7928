package workerapi

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// page is one session's status page (docs/worker-api.md "Status page"). One goroutine writes words;
// the beat is written by another. Stores are atomic because the worker reads without a lock.
type page struct {
	mem   []byte
	fd    int // to hand out; -1 afterwards
	slots int
	ring  uint64 // entries
	words int    // offsets
	plane int
	rings int
	n     uint64 // changes written
}

const (
	pageMagic   = 0x31505354 // "TSP1"
	pageVersion = 1
	pageHeader  = 64
	offInc      = 16
	offBeat     = 24
	offCounter  = 32
	pageSeals   = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
)

// pageOffsets returns where the byte plane and the ring start, and the size of the page.
func pageOffsets(slots int) (plane, ring, size int) {
	plane = pageHeader + 8*slots
	ring = (plane + slots + 7) &^ 7
	return plane, ring, (ring + 16*slots + 4095) &^ 4095
}

// newPage makes, maps and seals a page: after that nobody can map it writable again, not even the
// engine.
func newPage(slots int) (*page, error) {
	plane, ring, size := pageOffsets(slots)
	fd, err := unix.MemfdCreate("terminus-status", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("status page: memfd: %w", err)
	}
	fail := func(err error) (*page, error) {
		unix.Close(fd)
		return nil, fmt.Errorf("status page of %d slots: %w", slots, err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return fail(err)
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return fail(err)
	}
	initPage(mem, slots, monotonic())
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, pageSeals); err != nil {
		unix.Munmap(mem)
		return fail(err)
	}
	return &page{mem: mem, fd: fd, slots: slots, ring: uint64(2 * slots), words: pageHeader, plane: plane, rings: ring}, nil
}

// initPage writes the header, all but the incarnation.
func initPage(mem []byte, slots int, beat uint64) {
	plane, ring, size := pageOffsets(slots)
	le := binary.LittleEndian
	for i, v := range []int{pageMagic, pageVersion, slots, 2 * slots} {
		le.PutUint32(mem[4*i:], uint32(v))
	}
	le.PutUint64(mem[offBeat:], beat)
	for i, v := range []int{pageHeader, plane, ring, size} {
		le.PutUint32(mem[40+4*i:], uint32(v))
	}
}

// set writes a word, its byte in the plane, the ring entry and the counter, in this order.
func (p *page) set(slot int32, w uint64) {
	p.store(p.words+8*int(slot), w)
	p.mem[p.plane+int(slot)] = byte(w)
	p.n++
	p.store(p.rings+8*int((p.n-1)%p.ring), p.n<<32|uint64(uint32(slot)))
	p.store(offCounter, p.n)
}

func (p *page) store(off int, v uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&p.mem[off])), v)
}

func (p *page) close() {
	if p.fd >= 0 {
		unix.Close(p.fd)
	}
	unix.Munmap(p.mem)
}

// word packs a status word, low to high: status 3, residency 3, 10 free, opener tag 48.
func word(status, residency uint8, opener uint64) uint64 {
	return uint64(status&7) | uint64(residency&7)<<3 | tag(opener)<<16
}

// tag is the part of an opener's sequence number that fits a status word.
func tag(seq uint64) uint64 { return seq & (1<<48 - 1) }
