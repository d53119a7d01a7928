package wasmhost

import (
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// BenchmarkOp is one small op at a time through a guest, without a process boundary.
func BenchmarkOp(b *testing.B) {
	h := sdktest.New(b, load(b, repage, Limits{}))
	o := sdktest.New(b, &owner{})
	src, dst := h.AddRegion(1<<20), o.AddRegion(1<<20)
	peer := sdktest.Connect(h, o)
	plan := peer.IdentityPlan(h.AddPool(256, src.Tensor(0, 4096)), o.AddPool(256, dst.Tensor(0, 4096)))
	for _, pages := range []uint32{1, 256} {
		name := "1 page"
		if pages > 1 {
			name = "256 pages"
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				var last *sdktest.Pending
				for range 16 {
					last = peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, pages), Dst: sdktest.Pages(0, pages)})
				}
				_ = last
				h.Stats()
			}
		})
	}
}
