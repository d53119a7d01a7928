package conformance

import (
	"bytes"
	"cmp"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance/internal/cuda"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Region is memory of a worker, played by the suite. Behind host memory lies a guard page that nobody may write.
type Region struct {
	ID    uint64
	Kind  contract.MemoryKind
	Size  uint64
	Bytes []byte // the worker's mapping, Size bytes; of device memory a copy, see pull and push
	node  *Node
	t     *T
	gpu   *cuda.Memory // nil for host memory
	all   []byte       // Bytes and the guard
	fd    int          // the memfd
	mem   int          // what is handed out: a re-opened descriptor of it, one of device memory, -1 if that has a handle
	lease [2]int       // ours, and the one that is handed out, closed once it is
	dev   uint64
	inode uint64

	export  []byte
	added   bool
	removed time.Time // when RegionRemoved came
	checked time.Time // when check last began

	mu     sync.Mutex
	shadow []byte // what Bytes must be, outside of loose ranges
	open   map[*Op]bool
	used   bool // some op named it as its destination
}

const (
	guardBytes = 4096
	guardByte  = 0xA5
	canary     = 0xC0FFEE0DDF00D5
)

// NewMemory makes sealed memory of size bytes, filled at random, with a lease. It belongs to the case and
// is freed at its end.
func (n *Node) NewMemory(size uint64) *Region {
	return n.newMemory(size, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
}

func (n *Node) newMemory(size uint64, seals int) *Region {
	return n.memory(contract.MemoryKind_MEMORY_KIND_HOST_SHM, size, func(r *Region) error { return r.make(seals) })
}

// NewDeviceMemory is NewMemory on the GPU, of one of the CUDA kinds. Its size is rounded up to what the driver
// hands out.
func (n *Node) NewDeviceMemory(kind contract.MemoryKind, size uint64) *Region {
	return n.memory(kind, size, (*Region).makeOnDevice)
}

func (n *Node) memory(kind contract.MemoryKind, size uint64, alloc func(*Region) error) *Region {
	t := n.case_()
	r := &Region{Kind: kind, Size: size, node: n, t: t, fd: -1, mem: -1, lease: [2]int{-1, -1}, open: map[*Op]bool{}}
	t.run.keep(r)
	err := alloc(r)
	if err == nil {
		r.lease, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		t.broke("%v of %d bytes: %v", kind, size, err)
	}
	fill(r.Bytes, t.Rand())
	r.shadow = bytes.Clone(r.Bytes)
	r.push(0, r.Size)
	guard := r.all[r.Size:]
	for i := range guard {
		guard[i] = guardByte
	}
	return r
}

func (r *Region) make(seals int) (err error) {
	if r.fd, err = unix.MemfdCreate("terminus-region", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return fmt.Errorf("memfd: %w", err)
	}
	if err := unix.Ftruncate(r.fd, int64(r.Size)+guardBytes); err != nil {
		return fmt.Errorf("truncate memfd: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(r.fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal memfd: %w", err)
	}
	if r.all, err = unix.Mmap(r.fd, 0, int(r.Size)+guardBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map memfd: %w", err)
	}
	r.Bytes = r.all[:r.Size:r.Size]
	if r.mem, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", r.fd), unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("re-open memfd: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(r.fd, &st); err != nil {
		return fmt.Errorf("stat memfd: %w", err)
	}
	r.dev, r.inode = st.Dev, st.Ino
	return nil
}

func (r *Region) makeOnDevice() (err error) {
	if r.gpu, err = r.t.run.gpu.make(r.Kind, r.Size); err != nil {
		return err
	}
	r.Size = r.gpu.Size
	r.mem, r.gpu.FD = r.gpu.FD, -1 // a case may close it and put another in its place
	r.Bytes = make([]byte, r.Size)
	r.all = r.Bytes
	return nil
}

// pull brings Bytes[off:off+n] up to date before they are looked at, push makes a change of them true. Host
// memory needs neither.
func (r *Region) pull(off, n uint64) {
	if r.gpu != nil {
		r.moved(r.gpu.Read(r.Bytes[off:][:n], off))
	}
}

func (r *Region) push(off, n uint64) {
	if r.gpu != nil {
		r.moved(r.gpu.Write(r.Bytes[off:][:n], off))
	}
}

// moved notes that the suite cannot reach the memory of the device. It may be called from any goroutine.
func (r *Region) moved(err error) {
	if err != nil {
		r.t.errored("memory of the GPU: %v", err)
	}
}

// free gives everything back. Called once, by the runner.
func (r *Region) free() {
	if r.gpu != nil {
		r.moved(r.gpu.Free())
	} else if r.all != nil {
		_ = unix.Munmap(r.all)
	}
	r.all, r.Bytes = nil, nil
	r.closeAll()
}

// closeAll closes the descriptors of the region.
func (r *Region) closeAll() {
	for _, fd := range []*int{&r.fd, &r.mem, &r.lease[0], &r.lease[1]} {
		if *fd >= 0 {
			unix.Close(*fd)
		}
		*fd = -1
	}
}

// fill writes random bytes: AES in counter mode, which is faster than any generator of words and costs
// nothing more under the race detector.
func fill(b []byte, r *rand.Rand) {
	var key [16]byte
	binary.LittleEndian.PutUint64(key[:], r.Uint64())
	binary.LittleEndian.PutUint64(key[8:], r.Uint64())
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic(err) // a key of 16 bytes is one
	}
	clear(b)
	cipher.NewCTR(block, key[:]).XORKeyStream(b, b)
}

// AddRegion makes memory of size bytes (at least 8) known to the plugin and waits for RegionReady.
func (n *Node) AddRegion(size uint64) *Region {
	return n.addRegion(contract.MemoryKind_MEMORY_KIND_HOST_SHM, size)
}

func (n *Node) addRegion(kind contract.MemoryKind, size uint64) (r *Region) {
	if kind == contract.MemoryKind_MEMORY_KIND_HOST_SHM {
		r = n.NewMemory(size)
	} else {
		r = n.NewDeviceMemory(kind, size)
	}
	n.HandOver(r, nil)
	return r
}

// HandOver sends RegionAdd for r, changed by change, with the descriptors, and waits for the answer. It
// fails the case unless the answer is RegionReady and the canary was answered.
func (n *Node) HandOver(r *Region, change func(*contract.RegionAdd)) {
	n.sendRegion(r, change)
	n.registered(r)
}

// registered waits for the answer to sendRegion, which must be RegionReady with the canary answered.
func (n *Node) registered(r *Region) {
	t := n.case_()
	e := n.regionAnswer(r)
	if f := e.GetRegionFailed(); f != nil {
		t.Fail("R12", fmt.Sprintf("RegionReady of region %d", r.ID), "%s", Describe(f))
	}
	word := r.Bytes[r.Size-8:]
	r.pull(r.Size-8, 8)
	if got := binary.LittleEndian.Uint64(word); got != ^uint64(canary) {
		t.Fail("R4", fmt.Sprintf("the complement of the canary, %#x, before RegionReady", ^uint64(canary)), "%#x", got)
	}
	r.restore(r.Size - 8)
	r.export = e.GetRegionReady().GetExport()
	t.Check(len(r.export) <= 64<<10, "R12", "an export of at most 64 KiB", "%d bytes", len(r.export))
}

// OfferRegion is HandOver that returns whatever the answer is.
func (n *Node) OfferRegion(r *Region, change func(*contract.RegionAdd)) *contract.PluginEvent {
	n.sendRegion(r, change)
	return n.regionAnswer(r)
}

// sendRegion sends RegionAdd with the descriptors and does not wait.
func (n *Node) sendRegion(r *Region, change func(*contract.RegionAdd)) {
	r.ID = n.NewID()
	r.putCanary(r.Size - 8)
	add := &contract.RegionAdd{Region: r.ID, Kind: r.Kind, Size: r.Size, CanaryOffset: r.Size - 8, Canary: canary}
	if r.gpu != nil {
		add.Handle = r.gpu.Handle // Device stays 0: the first one is where the suite makes memory
	}
	if change != nil {
		change(add)
	}
	r.added = true
	if err := n.patiently(func() error { return n.plugin.SendRegion(r.ID, r.mem, r.lease[1]) }); err != nil {
		n.fail("R12", "the plugin to take descriptors on its control socket", "%v", err)
	}
	unix.Close(r.lease[1])
	r.lease[1] = -1
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: add}})
}

func (n *Node) regionAnswer(r *Region) *contract.PluginEvent {
	e := n.Until("R12", fmt.Sprintf("RegionReady or RegionFailed of region %d", r.ID), func(e *contract.PluginEvent) bool {
		return e.GetRegionReady() != nil && e.GetRegionReady().Region == r.ID || e.GetRegionFailed() != nil && e.GetRegionFailed().Region == r.ID
	})
	if e.GetRegionFailed() != nil {
		r.added = false
		r.restore(r.Size - 8)
	}
	return e
}

// putCanary puts the canary of RegionAdd at a place, restore what was there before.
func (r *Region) putCanary(at uint64) {
	binary.LittleEndian.PutUint64(r.Bytes[at:], canary)
	r.push(at, 8)
}

func (r *Region) restore(at uint64) {
	copy(r.Bytes[at:], r.shadow[at:at+8])
	r.push(at, 8)
}

// RemoveRegion sends RegionRemove and waits for RegionRemoved.
func (n *Node) RemoveRegion(r *Region) {
	if !r.added {
		return
	}
	r.added = false
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: r.ID}}})
	n.Until("R12", fmt.Sprintf("RegionRemoved of region %d", r.ID), func(e *contract.PluginEvent) bool {
		return e.GetRegionRemoved() != nil && e.GetRegionRemoved().Region == r.ID
	})
	r.removed = time.Now()
}

// LeaseEnded tells whether nobody holds the other end of the region's lease any more. A process that this one
// is just starting holds every descriptor until it executes its program; it is waited for until shortly before
// it lets go of them, so whoever looks at leases starts no processes at the same time.
func (r *Region) LeaseEnded() bool {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	p := []unix.PollFd{{Fd: int32(r.lease[0]), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLHUP != 0
}

// Rewrite changes the worker's memory as the worker would.
func (r *Region) Rewrite(off uint64, b []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	copy(r.Bytes[off:], b)
	copy(r.shadow[off:], b)
	r.push(off, uint64(len(b)))
}

// check compares memory with what it must be and says where it first differs, "" if nowhere.
func (r *Region) check() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		return ""
	}
	r.checked = time.Now()
	for i, b := range r.all[r.Size:] {
		if b != guardByte {
			return fmt.Sprintf("byte %d behind the end of region %d of %s was written", i, r.ID, r.node.Name)
		}
	}
	r.pull(0, r.Size)
	if bytes.Equal(r.Bytes, r.shadow) {
		return ""
	}
	const step = 4096
	open := r.inFlight()
	for off := 0; off < len(r.Bytes); off += step {
		end := min(off+step, len(r.Bytes))
		if bytes.Equal(r.Bytes[off:end], r.shadow[off:end]) {
			continue
		}
		for i := off; i < end; i++ {
			for len(open) > 0 && open[0].end <= uint64(i) {
				open = open[1:]
			}
			if r.Bytes[i] != r.shadow[i] && (len(open) == 0 || uint64(i) < open[0].start) {
				return fmt.Sprintf("byte %d of region %d of %s is %#02x, not %#02x", i, r.ID, r.node.Name, r.Bytes[i], r.shadow[i])
			}
		}
	}
	return ""
}

// extent is the bytes [start, end) of a region.
type extent struct{ start, end uint64 }

// inFlight returns what ops that are not quiet may write, in order and without overlaps. There may be
// thousands of them. Called with the region's lock held.
func (r *Region) inFlight() (list []extent) {
	for o := range r.open {
		for _, s := range o.spans {
			if s.dst == r {
				list = append(list, extent{s.dstOff, s.dstOff + s.n})
			}
		}
	}
	slices.SortFunc(list, func(a, b extent) int { return cmp.Compare(a.start, b.start) })
	merged := list[:0]
	for _, e := range list {
		if n := len(merged); n > 0 && e.start <= merged[n-1].end {
			merged[n-1].end = max(merged[n-1].end, e.end)
			continue
		}
		merged = append(merged, e)
	}
	return merged
}
