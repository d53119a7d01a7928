package tcp

// streamFrom is the size from which copies bypass the cache: a page that was just transferred is read by
// another core or by a device, if at all, so caching it costs a read of the old contents for nothing.
const streamFrom = 4 << 10

// copyPage copies src to dst, which are of equal length.
func copyPage(dst, src []byte) {
	if len(dst) < streamFrom {
		copy(dst, src)
		return
	}
	stream(dst, src[:len(dst)])
}
