package wasmhost

import (
	"math/rand/v2"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk"
)

// TestTarget compares the spans of random pages with a map of the region, byte by byte.
func TestTarget(t *testing.T) {
	const size = 512
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		var open [size]bool
		var goal target
		for range 1 + random.IntN(3) {
			bytes := 1 + random.Uint64N(8)
			tensor := &sdk.Tensor{Offset: random.Uint64N(32), PageBytes: bytes, PageStride: bytes + random.Uint64N(2)*random.Uint64N(8)}
			for range 1 + random.IntN(3) {
				r := sdk.Run{Start: random.Uint32N(4), Count: 1 + random.Uint32N(6), Stride: 1 + random.Uint32N(3)}
				goal.spans = appendPages(goal.spans, tensor, r)
				for i := range r.Count {
					page := tensor.Offset + uint64(r.Start+i*r.Stride)*tensor.PageStride
					for at := page; at < page+bytes; at++ {
						open[at] = true
					}
				}
			}
		}
		goal.spans = merge(goal.spans)
		for from := range uint64(size) {
			want := true
			for to := from; to <= size; to++ {
				if to > from {
					want = want && open[to-1]
				}
				if goal.covers(from, to-from) != want {
					t.Fatalf("%v covers [%d, %d): %v", goal.spans, from, to, !want)
				}
			}
		}
	}
}
