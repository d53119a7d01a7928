package workerapi

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// hugetlbfs is the f_type of a file system of huge pages.
const hugetlbfs = 0x958458f6

// regionSeals is what a worker must have set. SEAL is among them, or somebody could later add
// FUTURE_WRITE and keep the next plugin from mapping the region.
const regionSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// checkMemory reports why fd is not memory that a backend can map for good: a sealed memfd of exactly
// size bytes, open for reading and writing.
func checkMemory(fd int, size int64) *Error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return bad(BadMemory, "memory", RuleMemory, "the descriptor cannot be examined: %v", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return bad(BadFD, "memory", RuleMemory, "the first descriptor is no file; it must be a re-opened memfd")
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err == nil && fs.Type == hugetlbfs {
		return bad(BadMemory, "memory", RuleMemory, "huge-page memory is not supported: sealed or not, a touch beyond the pool kills the mapper; use a plain memfd")
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return bad(BadMemory, "memory", RuleMemory, "the file has no seals (%v); use memfd_create with MFD_ALLOW_SEALING", err)
	}
	switch {
	case seals&regionSeals != regionSeals:
		return bad(BadMemory, "memory", RuleMemory, "seals are %#x; SHRINK, GROW and SEAL (%#x) must be set (files of /dev/shm and of disks cannot)", seals, regionSeals)
	case seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0:
		return bad(BadMemory, "memory", RuleMemory, "seals are %#x; WRITE and FUTURE_WRITE keep backends from mapping the region", seals)
	case st.Size != size:
		return bad(BadMemory, "size", RuleMemory, "the file has %d bytes, the header says %d", st.Size, size)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_ACCMODE != unix.O_RDWR || flags&unix.O_PATH != 0 {
		return bad(BadMemory, "memory", RuleMemory, "the descriptor is not open for reading and writing; re-open the memfd with O_RDWR")
	}
	return nil
}

// checkLease reports why fd is no lease: one end of a unix socketpair.
func checkLease(fd int) *Error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil || domain != unix.AF_UNIX {
		return bad(BadFD, "lease", RuleFDs, "the second descriptor is not one end of a unix socketpair")
	}
	return nil
}

// checkTensor reports why a tensor of pages pages does not lie inside its region of size bytes.
func checkTensor(i int, t tensorHeader, pages, size int64) *Error {
	field := func(name string) string { return fmt.Sprintf("tensors[%d].%s", i, name) }
	switch {
	case t.PageBytes < 1 || t.PageBytes > size:
		return bad(BadField, field("page_bytes"), RulePools, "page_bytes is %d; 1 to the region's %d bytes are possible", t.PageBytes, size)
	case t.PageStride < t.PageBytes || t.PageStride > size:
		return bad(BadField, field("page_stride"), RulePools, "page_stride is %d; at least page_bytes (%d), or pages would overlap, and at most the region's %d bytes", t.PageStride, t.PageBytes, size)
	case t.Layer < 0 || t.Layer > math.MaxInt32:
		return bad(BadField, field("layer"), RulePools, "layer is %d", t.Layer)
	case t.Offset < 0 || t.Offset > size-t.PageBytes:
		return bad(BadField, field("offset"), RulePools, "offset %d and one page of %d bytes do not fit the region's %d bytes", t.Offset, t.PageBytes, size)
	case pages-1 > (size-t.PageBytes-t.Offset)/t.PageStride:
		return bad(BadField, field("offset"), RulePools, "page %d would end outside the region: it has %d bytes; offset %d, page_stride %d, page_bytes %d", pages-1, size, t.Offset, t.PageStride, t.PageBytes)
	}
	return nil
}
