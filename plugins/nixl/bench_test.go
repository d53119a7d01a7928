package nixl

import (
	"fmt"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// shapes are ops to another process: bytes of an op, of a piece, and ops in flight.
var shapes = []struct {
	bytes, piece uint64
	depth        int
}{
	{4 << 10, 4 << 10, 1},
	{1 << 20, 1 << 20, 8},
	{64 << 20, 64 << 20, 2},
	{64 << 20, 16 << 10, 2},
}

func shapeName(bytes, piece uint64, depth int) string {
	return fmt.Sprintf("op=%dKiB/piece=%dKiB/depth=%d", bytes>>10, piece>>10, depth)
}

// BenchmarkTransfer is the plugin's ops, from Submit to Done. BenchmarkLibrary is the same writes by the library alone.
func BenchmarkTransfer(b *testing.B) {
	for _, s := range shapes {
		b.Run(shapeName(s.bytes, s.piece, s.depth), func(b *testing.B) {
			library := wheel(b, venvName)
			c, w := startChild(b, library), newSender(b, library)
			page := min(s.piece, childPage)
			p := w.connectPages(c, page)
			pages := uint32(s.bytes / page)
			src, dst := sdktest.Pages(0, pages), sdktest.Pages(0, pages)
			if s.piece < s.bytes { // neighbours change places, so that nothing can be joined
				dst = dst[:0:0]
				for i := range pages {
					dst = append(dst, sdk.Run{Start: i ^ 1, Count: 1, Stride: 1})
				}
			}
			wantDone(b, p.submitRuns(src, dst).End())
			b.SetBytes(int64(s.bytes))
			b.ResetTimer()
			var open []*sdktest.Pending
			for range b.N {
				if len(open) == s.depth {
					wantDone(b, open[0].End())
					open = open[1:]
				}
				open = append(open, p.submitRuns(src, dst))
			}
			for _, op := range open {
				wantDone(b, op.End())
			}
		})
	}
}

// BenchmarkLibrary posts the same writes, each as one request made beforehand, and asks after them without a pause.
func BenchmarkLibrary(b *testing.B) {
	for _, s := range shapes {
		b.Run(shapeName(s.bytes, s.piece, s.depth), func(b *testing.B) {
			library := wheel(b, venvName)
			c, w := startChild(b, library), newSender(b, library)
			p := w.connect(c)
			wantDone(b, p.submit(childPages).End())
			name, base, op := p.raw(c)
			c.goOn()
			wantDone(b, op.End())
			a, region := w.b.driver.agent, w.b.region(w.src.ID)
			var pieces []piece
			for off := uint64(0); off < s.bytes; off += s.piece {
				to := off
				if s.piece < s.bytes {
					to = off ^ s.piece
				}
				pieces = append(pieces, piece{address(region.bytes) + uintptr(off), base + uintptr(to), s.piece})
			}
			requests := make([]*request, s.depth)
			for i := range requests {
				var err error
				if requests[i], err = a.write(name, pieces); err != nil {
					b.Fatal(err)
				}
			}
			wait := func(r *request) {
				for {
					switch st := a.status(r); {
					case st < 0:
						b.Fatal(st)
					case st == statusDone:
						return
					}
				}
			}
			b.SetBytes(int64(s.bytes))
			b.ResetTimer()
			for i := range b.N {
				r := requests[i%s.depth]
				if i >= s.depth {
					wait(r)
				}
				if st := a.post(r); st < 0 {
					b.Fatal(st)
				}
			}
			for i := range min(b.N, s.depth) {
				wait(requests[i])
			}
			b.StopTimer()
			for _, r := range requests {
				a.release(r)
			}
		})
	}
}
