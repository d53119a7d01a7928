package sdktest

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Region is worker memory: the harness holds the worker's mapping.
type Region struct {
	ID    uint64
	Bytes []byte
	// Export is what the backend exported for it (RegionReady.export).
	Export []byte
	fd     int
	lease  int // the worker's end of the lease
}

// Free gives back what the harness holds of memory from NewMemory. AddRegion's is freed by Host.Close.
func (r *Region) Free() {
	_ = unix.Munmap(r.Bytes)
	unix.Close(r.fd)
	unix.Close(r.lease)
}

// LeaseEnded tells whether the plugin (and everybody else) has closed its end of the region's lease.
func (r *Region) LeaseEnded() bool {
	p := []unix.PollFd{{Fd: int32(r.lease), Events: unix.POLLIN | unix.POLLHUP}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLHUP != 0
}

// Tensor describes pages of pageBytes from off, side by side, as layer 0.
func (r *Region) Tensor(off, pageBytes uint64) sdk.Tensor {
	return sdk.Tensor{RegionID: r.ID, Offset: off, PageStride: pageBytes, PageBytes: pageBytes}
}

// canary of test regions, in their last 8 bytes.
const canary = 0xC0FFEE0DDF00D5

// NewMemory makes a memfd of size bytes with the seals that the contract demands, maps it and returns
// a re-opened descriptor as an engine hands it out, with a lease.
func NewMemory(size int) (r *Region, memory, lease int, err error) {
	fd, err := unix.MemfdCreate("terminus-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, -1, -1, fmt.Errorf("memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, -1, -1, fmt.Errorf("truncate memfd: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return nil, -1, -1, fmt.Errorf("seal memfd: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, -1, -1, fmt.Errorf("map memfd: %w", err)
	}
	memory, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, -1, -1, fmt.Errorf("re-open memfd: %w", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, -1, fmt.Errorf("lease: %w", err)
	}
	return &Region{Bytes: mem, fd: fd, lease: pair[0]}, memory, pair[1], nil
}

// AddRegion makes memory of size bytes (at least 8) known and waits for RegionReady. The last 8 bytes
// carry the canary; they are zeroed again.
func (h *Host) AddRegion(size int) *Region {
	h.t.Helper()
	r, memory, lease, err := NewMemory(size)
	if err != nil {
		h.t.Fatal(err)
	}
	r.ID = h.id()
	h.mu.Lock()
	h.regions[r.ID] = r
	h.mu.Unlock()
	word := r.Bytes[size-8:]
	binary.LittleEndian.PutUint64(word, canary)
	h.Session.Descriptors(r.ID, memory, lease)
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
		Region: r.ID, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: uint64(size),
		CanaryOffset: uint64(size - 8), Canary: canary,
	}}})
	e := h.Until("RegionReady", func(e *contract.PluginEvent) bool {
		return e.GetRegionReady().GetRegion() == r.ID || e.GetRegionFailed().GetRegion() == r.ID
	})
	if f := e.GetRegionFailed(); f != nil {
		h.t.Fatalf("%s: region %d: %v: %s", h.node, r.ID, f.Cause, f.Detail)
	}
	if got := binary.LittleEndian.Uint64(word); got != ^uint64(canary) {
		h.t.Fatalf("%s: region %d: the plugin left %#x for the canary", h.node, r.ID, got)
	}
	binary.LittleEndian.PutUint64(word, 0)
	r.Export = e.GetRegionReady().GetExport()
	return r
}

// RemoveRegion removes it and waits for RegionRemoved.
func (h *Host) RemoveRegion(r *Region) {
	h.t.Helper()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: r.ID}}})
	h.Until("RegionRemoved", func(e *contract.PluginEvent) bool { return e.GetRegionRemoved().GetRegion() == r.ID })
}

// AddPool makes a pool of the session's own memory known and returns its id.
func (h *Host) AddPool(pages uint32, tensors ...sdk.Tensor) uint64 {
	h.t.Helper()
	m := &contract.PoolAdd{Pool: h.id(), Pages: pages}
	for _, t := range tensors {
		m.Tensors = append(m.Tensors, &contract.Tensor{
			Region: t.RegionID, Offset: t.Offset, PageStride: t.PageStride, PageBytes: t.PageBytes, Layer: t.Layer,
		})
	}
	h.mu.Lock()
	h.pools[m.Pool] = m
	h.mu.Unlock()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: m}})
	return m.Pool
}
