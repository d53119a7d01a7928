package tcp

import (
	"fmt"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// BenchmarkTransfer moves ops of 64 MiB made of pages of the given size, in random order of pages, two
// ops at a time. BenchmarkCopy is the bound: copy() of the same pages between the same mappings by one
// goroutine. Both report bytes over time, so `go test -bench . ` prints them side by side.
func BenchmarkTransfer(b *testing.B) {
	for _, l := range lanes {
		for _, size := range []uint64{4 << 10, 64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/page=%dKiB", l.name, size>>10), func(b *testing.B) {
				const total = 64 << 20
				pages := uint32(total / size)
				p := newPair(b, l.opts, pages, size)
				p.grantAll(pages)
				runs := sdktest.Pages(0, pages)
				if size < 1<<20 { // not contiguous at the destination
					runs = runs[:0]
					for i := range pages {
						runs = append(runs, sdktest.Pages(i^1, 1)...)
					}
				}
				wantDone(b, p.submit(sdktest.Pages(0, pages), runs).End(), l.lane)
				b.SetBytes(total)
				b.ResetTimer()
				var before *sdktest.Pending
				for range b.N {
					op := p.submit(sdktest.Pages(0, pages), runs)
					if before != nil {
						wantDone(b, before.End(), l.lane)
					}
					before = op
				}
				wantDone(b, before.End(), l.lane)
			})
		}
	}
}

func BenchmarkCopy(b *testing.B) {
	for _, size := range []int{4 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("page=%dKiB", size>>10), func(b *testing.B) {
			const total = 64 << 20
			p := newPair(b, options{}, 1, total)
			copy(p.dst.Bytes, p.src.Bytes)
			b.SetBytes(total)
			b.ResetTimer()
			for range b.N {
				for off := 0; off < total; off += size {
					to := off ^ size // swap neighbours
					copy(p.dst.Bytes[to:to+size], p.src.Bytes[off:off+size])
				}
			}
		})
	}
}

// BenchmarkSmallOp is the latency of an op of one page, one at a time.
func BenchmarkSmallOp(b *testing.B) {
	for _, l := range lanes {
		b.Run(l.name, func(b *testing.B) {
			p := newPair(b, l.opts, 16, 4096)
			p.grantAll(16)
			for range b.N {
				wantDone(b, p.submit(sdktest.Pages(0, 1), sdktest.Pages(0, 1)).End(), l.lane)
			}
		})
	}
}
