package tcp

import "unsafe"

const streamBlock = 64

// streamBlocks copies n bytes, a positive multiple of streamBlock, by stores that bypass the cache. dst is
// aligned to 16 bytes. All stores are visible to others when it returns.
//
//go:noescape
func streamBlocks(dst, src *byte, n uintptr)

// stream copies src to dst, which are of equal length and not empty.
func stream(dst, src []byte) {
	head := min(int(-uintptr(unsafe.Pointer(&dst[0]))%streamBlock), len(dst))
	copy(dst[:head], src)
	dst, src = dst[head:], src[head:]
	n := len(dst) &^ (streamBlock - 1)
	if n > 0 {
		streamBlocks(&dst[0], &src[0], uintptr(n))
	}
	copy(dst[n:], src[n:])
}
