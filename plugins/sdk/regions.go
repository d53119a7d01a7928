package sdk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Error is an error of a backend that carries the cause to report. Without one AddRegion's errors are
// CAUSE_INTERNAL and AddPeer's CAUSE_PEER_UNREACHABLE.
type Error struct {
	Cause contract.Cause
	Err   error
}

func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the inner error.
func (e *Error) Unwrap() error { return e.Err }

func unsupported(format string, args ...any) error {
	return &Error{Cause: contract.Cause_CAUSE_UNSUPPORTED, Err: fmt.Errorf(format, args...)}
}

func breached(format string, args ...any) error {
	return &Error{Cause: contract.Cause_CAUSE_PROTOCOL, Err: fmt.Errorf(format, args...)}
}

// causeOf returns the cause that err carries, else other.
func causeOf(err error, other contract.Cause) contract.Cause {
	var e *Error
	if errors.As(err, &e) && known(contract.Cause_name, int32(e.Cause)) {
		return e.Cause
	}
	return other
}

// descriptors of a region, as they come on the control socketpair. Owned by whoever holds the value.
type descriptors struct {
	region        uint64
	memory, lease int
}

func (d descriptors) close() {
	unix.Close(d.memory)
	unix.Close(d.lease)
}

type regionState struct {
	Region
	add      *contract.RegionAdd
	fds      descriptors
	have     bool // fds arrived
	ready    bool
	busy     bool // a job runs
	removing bool // guarded by mu as well as written by the loop only
	unquiet  int  // ops not yet quiet; guarded by mu
}

// Descriptors hands the session the descriptors of a region; it owns them from here on. Called by the
// reader of the control socketpair, before or after the RegionAdd.
func (s *Session) Descriptors(region uint64, memory, lease int) {
	d := descriptors{region: region, memory: memory, lease: lease}
	select {
	case s.fds <- d:
	case <-s.over:
		d.close()
	}
}

func (s *Session) takeDescriptors(d descriptors) {
	r := s.regions[d.region]
	switch {
	case s.refused.has(d.region):
		d.close()
	case r != nil && !r.have:
		r.fds, r.have = d, true
		s.mapRegion(r)
	case r != nil:
		d.close()
		s.breach("descriptors of region %d came twice", d.region)
	case len(s.orphans) >= maxTable:
		d.close()
		s.breach("descriptors of region %d: %d others wait for their RegionAdd", d.region, len(s.orphans))
	default:
		if old, ok := s.orphans[d.region]; ok {
			old.close()
		}
		s.orphans[d.region] = d
	}
}

func (s *Session) regionAdd(m *contract.RegionAdd) {
	if s.regions[m.Region] != nil {
		s.breach("RegionAdd.region %d is in use", m.Region)
		return
	}
	r := &regionState{add: m}
	r.Region = Region{ID: m.Region, Kind: m.Kind, Size: m.Size, FD: -1, Lease: -1}
	if d, ok := s.orphans[m.Region]; ok {
		delete(s.orphans, m.Region)
		r.fds, r.have = d, true
	}
	if len(s.regions) >= maxTable || (s.info.Limits.GetMaxRegions() != 0 && len(s.regions) >= int(s.info.Limits.GetMaxRegions())) {
		s.regionFailed(r, &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("%d regions are the limit", len(s.regions))})
		return
	}
	if err := checkRegion(m); err != nil {
		s.regionFailed(r, err)
		return
	}
	s.regions[m.Region] = r
	if r.have {
		s.mapRegion(r)
	}
}

func checkRegion(m *contract.RegionAdd) error {
	switch m.Kind {
	case contract.MemoryKind_MEMORY_KIND_HOST_SHM:
	case contract.MemoryKind_MEMORY_KIND_CUDA_IPC, contract.MemoryKind_MEMORY_KIND_CUDA_VMM:
		return unsupported("RegionAdd.kind %v is not served by contract version %d", m.Kind, ContractVersion)
	default:
		return breached("RegionAdd.kind is %d", m.Kind)
	}
	if m.Size < 8 || m.Size > 1<<46 {
		return breached("RegionAdd.size is %d", m.Size)
	}
	if !fits(m.CanaryOffset, 0, 1, 8, m.Size) {
		return breached("RegionAdd.canary_offset %d leaves the region of %d bytes", m.CanaryOffset, m.Size)
	}
	return nil
}

// regionFailed forgets the region; descriptors that still come are closed.
func (s *Session) regionFailed(r *regionState, err error) {
	r.unmap()
	delete(s.regions, r.ID)
	s.refused.add(r.ID)
	detail := cut(err.Error(), MaxDetail)
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_RegionFailed{RegionFailed: &contract.RegionFailed{
		Region: r.ID, Cause: causeOf(err, contract.Cause_CAUSE_INTERNAL), Detail: detail,
	}}}, len(detail))
}

// mapRegion maps and registers beside the loop.
func (s *Session) mapRegion(r *regionState) {
	r.busy = true
	s.job(jobRegion, func() func() {
		done := s.declareBusy(contract.BusyKind_BUSY_KIND_REGISTER, r.ID)
		err := s.openRegion(r)
		done()
		return func() {
			r.busy = false
			if err != nil {
				s.regionFailed(r, err)
				if r.removing {
					s.regionRemoved(r.ID)
				}
				return
			}
			r.ready = true
			s.post(&contract.PluginEvent{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: r.ID, Export: r.Export}}}, len(r.Export))
			if r.removing {
				s.tryRemoveRegion(r)
			}
		}
	})
}

// openRegion does everything between descriptors and RegionReady. On error nothing is left.
func (s *Session) openRegion(r *regionState) (err error) {
	defer func() {
		if err != nil {
			r.unmap()
		}
	}()
	if err := CheckMemory(r.fds.memory, r.Size); err != nil {
		return err
	}
	mem, err := unix.Mmap(r.fds.memory, 0, int(r.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", r.Size, err)
	}
	r.Bytes, r.FD, r.Lease = mem, r.fds.memory, r.fds.lease
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		return fmt.Errorf("madvise DONTFORK: %w", err)
	}
	if err := prove(mem, r.add); err != nil {
		return err
	}
	if err := s.addRegion(&r.Region); err != nil {
		return err
	}
	if len(r.Export) > MaxEndpoint {
		_ = s.removeRegion(&r.Region)
		return fmt.Errorf("the backend exports %d bytes, at most %d are allowed", len(r.Export), MaxEndpoint)
	}
	return nil
}

func (s *Session) addRegion(r *Region) (err error) {
	defer recovered(&err, "AddRegion")
	return s.backend.AddRegion(r)
}

// hugetlbfsMagic is f_type of a hugetlb memfd.
const hugetlbfsMagic = 0x958458f6

// CheckMemory refuses what is not a sealed memfd of at least size bytes. The SDK has checked every
// Region; it is for backends that get memory from elsewhere, as from the plugin of a peer.
func CheckMemory(fd int, size uint64) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return fmt.Errorf("statfs of the memory descriptor: %w", err)
	}
	if uint32(fs.Type) == hugetlbfsMagic {
		return unsupported("the memory is hugetlb; use a plain memfd")
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return breached("the memory descriptor is no memfd (%v)", err)
	}
	if want := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL; seals&want != want {
		return breached("the memfd has seals %#x, it needs SHRINK|GROW|SEAL", seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat of the memory descriptor: %w", err)
	}
	if size > uint64(st.Size) {
		return breached("RegionAdd.size is %d, the memfd has %d bytes", size, st.Size)
	}
	return nil
}

// prove populates the mapping and runs the canary both ways, unless the region is in use already.
func prove(mem []byte, add *contract.RegionAdd) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("fault in the mapping: %v", r)
		}
	}()
	switch err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE); {
	case errors.Is(err, unix.EINVAL): // before Linux 5.14: reading a page of shared memory allocates it
		var sum byte
		for i := 0; i < len(mem); i += 4096 {
			sum += mem[i]
		}
		runtime.KeepAlive(sum)
	case err != nil:
		return fmt.Errorf("populate: %w", err)
	}
	if add.NoCanary {
		return nil
	}
	word := mem[add.CanaryOffset : add.CanaryOffset+8]
	if got := binary.LittleEndian.Uint64(word); got != add.Canary {
		return breached("canary %#x read as %#x: a private mapping, or another file", add.Canary, got)
	}
	binary.LittleEndian.PutUint64(word, ^add.Canary)
	return nil
}

func (r *regionState) unmap() {
	if r.Bytes != nil {
		_ = unix.Munmap(r.Bytes)
		r.Bytes = nil
	}
	if r.have {
		r.fds.close()
		r.have, r.FD, r.Lease = false, -1, -1
	}
}

func (s *Session) regionRemove(m *contract.RegionRemove) {
	r := s.regions[m.Region]
	if r == nil {
		if d, ok := s.orphans[m.Region]; ok {
			delete(s.orphans, m.Region)
			d.close()
		}
		s.regionRemoved(m.Region)
		return
	}
	s.mu.Lock()
	again, unquiet := r.removing, r.unquiet
	r.removing = true
	s.mu.Unlock()
	if again {
		return
	}
	if unquiet > 0 {
		s.breach("RegionRemove.region %d: %d ops on it are not quiet; it is removed after them", m.Region, unquiet)
	}
	s.tryRemoveRegion(r)
}

// tryRemoveRegion goes on with a removal when nothing holds the region any more.
func (s *Session) tryRemoveRegion(r *regionState) {
	s.mu.Lock()
	unquiet := r.unquiet
	s.mu.Unlock()
	if r.busy || unquiet > 0 {
		return
	}
	if !r.ready {
		r.unmap()
		delete(s.regions, r.ID)
		s.regionRemoved(r.ID)
		return
	}
	r.busy, r.ready = true, false
	s.job(jobRemove, func() func() {
		err := s.removeRegion(&r.Region)
		r.unmap()
		return func() {
			r.busy = false
			if err != nil {
				s.logf(contract.Log_LEVEL_ERROR, "region %d: %v", r.ID, err)
			}
			delete(s.regions, r.ID)
			s.regionRemoved(r.ID)
		}
	})
}

func (s *Session) removeRegion(r *Region) (err error) {
	defer recovered(&err, "RemoveRegion")
	s.backend.RemoveRegion(r)
	return nil
}

func (s *Session) regionRemoved(region uint64) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_RegionRemoved{RegionRemoved: &contract.RegionRemoved{Region: region}}}, 0)
}

// readyRegion resolves a tensor's region; nil when no op may name it.
func (s *Session) readyRegion(id uint64) *Region {
	if r := s.regions[id]; r != nil && r.ready && !r.removing {
		return &r.Region
	}
	return nil
}

// unmapAll is the end: no call of the backend runs any more.
func (s *Session) unmapAll() {
	for _, r := range s.regions {
		r.unmap()
	}
	for _, d := range s.orphans {
		d.close()
	}
	clear(s.regions)
	clear(s.orphans)
}
