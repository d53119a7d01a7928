package conformance

import "github.com/terminus-kv/terminus/plugins/sdk/contract"

func init() {
	register(
		Case{
			ID: "layout/several-tensors-a-layer", Rule: "R1", Profile: TransferLayout,
			Title: "K and V of a layer go each to its own tensor",
			Script: `
> pools with K and V in each of 3 layers; page sizes of K and V differ
> Submit of all layers
< Done
= no K in a V`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				var tensors []layoutTensor
				for l := range uint32(3) {
					tensors = append(tensors, layoutTensor{bytes: 384, layer: l}, layoutTensor{bytes: 160, layer: l})
				}
				src, dst := layoutPool(t.A(), 20, tensors...), layoutPool(t.B(), 20, tensors...)
				layoutPlan(p, src, dst, layoutWhole(src)...)
				p.Submit(Submit{Src: Pages(2, 16), Dst: Pages(0, 16)}).Done()
			},
		},
		Case{
			ID: "layout/fused-to-separate", Rule: "R1", Profile: TransferLayout,
			Title: "one tensor may be taken apart into two, and two be joined to one",
			Script: `
> a source with K and V fused in one page; a destination with K and V apart; and the way back
> Submit
< Done
= each half in its tensor`,
			Run: func(t *T) {
				fused := []layoutTensor{{bytes: 1024}}
				apart := []layoutTensor{{bytes: 512}, {bytes: 512}}
				p := t.Connect(t.A(), t.B(), 0)
				layoutPlan(p, layoutPool(t.A(), 8, fused...), layoutPool(t.B(), 8, apart...),
					&contract.Slice{DstTensor: 0, Len: 512, Count: 1}, &contract.Slice{SrcOff: 512, DstTensor: 1, Len: 512, Count: 1})
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
				layoutPlan(p, layoutPool(t.A(), 8, apart...), layoutPool(t.B(), 8, fused...),
					&contract.Slice{SrcTensor: 0, Len: 512, Count: 1}, &contract.Slice{SrcTensor: 1, DstOff: 512, Len: 512, Count: 1})
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
		Case{
			ID: "layout/several-regions-a-pool", Rule: "R1", Profile: TransferLayout,
			Title: "the tensors of a pool may lie in several regions",
			Script: `
> RegionAdd, one for each of 4 tensors, at both ends
> Submit of all layers
< Done
= each tensor in its own region`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				var tensors []layoutTensor
				for l := range uint32(4) {
					tensors = append(tensors, layoutTensor{bytes: 768, layer: l, region: int(l)})
				}
				src, dst := layoutPool(t.A(), 16, tensors...), layoutPool(t.B(), 16, tensors...)
				layoutPlan(p, src, dst, layoutWhole(src)...)
				p.Submit(Submit{Src: Pages(0, 16), Dst: Pages(0, 16)}).Done()
			},
		},
		Case{
			ID: "layout/several-pools-a-region", Rule: "R1", Profile: TransferLayout,
			Title: "several pools in one region do not get in each other's way",
			Script: `
> one region at each end, 3 pools in it
> one Submit a pool, all in one frame, the pools of the two ends paired crosswise
< Done, of each
= each pool has its own pages`,
			Run: func(t *T) {
				const pages, bytes = 16, 600
				p := t.Connect(t.A(), t.B(), 0)
				from, to := t.A().AddRegion(3*pages*bytes+8), t.B().AddRegion(3*pages*bytes+8)
				var list []Submit
				for i := range uint64(3) {
					src := t.A().AddPool(pages, Tensor{Region: from, Offset: i * pages * bytes, PageStride: bytes, PageBytes: bytes})
					dst := t.B().AddPool(pages, Tensor{Region: to, Offset: (2 - i) * pages * bytes, PageStride: bytes, PageBytes: bytes})
					layoutPlan(p, src, dst, layoutWhole(src)...)
					list = append(list, Submit{Plan: p.Plan, Generation: p.Generation, Src: Pages(0, pages), Dst: Pages(0, pages)})
				}
				layoutDone(p.SubmitAll(list))
			},
		},
		Case{
			ID: "layout/tensors-in-any-place", Rule: "R1", Profile: TransferLayout,
			Title: "layers may lie in a region in any order, and their pages may interleave",
			Script: `
> a source whose last layer lies first; a destination in which page i of all layers lie together
> Submit
< Done
= layer by layer`,
			Run: func(t *T) {
				const pages, bytes, layers = 12, 320, 5
				p := t.Connect(t.A(), t.B(), 0)
				from, to := t.A().AddRegion(pages*bytes*layers+8), t.B().AddRegion(pages*bytes*layers+8)
				var a, b []Tensor
				for l := range uint64(layers) {
					a = append(a, Tensor{Region: from, Offset: (layers - 1 - l) * pages * bytes, PageStride: bytes, PageBytes: bytes, Layer: uint32(l)})
					b = append(b, Tensor{Region: to, Offset: l * bytes, PageStride: layers * bytes, PageBytes: bytes, Layer: uint32(l)})
				}
				src, dst := t.A().AddPool(pages, a...), t.B().AddPool(pages, b...)
				layoutPlan(p, src, dst, layoutWhole(src)...)
				p.Submit(Submit{Src: Pages(0, 6), Dst: Pages(6, 6)}).Done()
				p.Submit(Submit{Src: Pages(6, 6), Dst: Pages(0, 6)}).Done()
			},
		},
		Case{
			ID: "layout/partial-pages", Rule: "R1", Profile: TransferLayout,
			Title: "what no slice of the plan names is left alone",
			Script: `
> a plan of slices with holes: the head, the tail and 3 pieces in the middle of a page stay out
> Submit
< Done with the size of the slices
= the holes are as before`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				src, dst := layoutPool(t.A(), 16, layoutTensor{bytes: 4096}), layoutPool(t.B(), 16, layoutTensor{bytes: 4096})
				layoutPlan(p, src, dst,
					&contract.Slice{SrcOff: 100, DstOff: 100, Len: 900, Count: 1},
					&contract.Slice{SrcOff: 1100, DstOff: 1200, Len: 100, SrcStride: 500, DstStride: 300, Count: 4},
					&contract.Slice{SrcOff: 3000, DstOff: 3500, Len: 1, Count: 1})
				p.Submit(Submit{Src: Pages(0, 16), Dst: Pages(0, 16)}).Done()
			},
		},
		Case{
			ID: "layout/head-slices-join", Rule: "R1", Profile: TransferLayout,
			Title: "two ranks write their heads into the same pages (tensor parallel 2 to 1)",
			Script: `
> two source pools with half of the heads; a plan of each: every token's half
> one Submit of each into the same pages, in one frame
< Done, of each
= token by token the heads of rank 0, then those of rank 1`,
			Run: func(t *T) {
				const tokens, half = 16, 96
				p := t.Connect(t.A(), t.B(), 0)
				dst := layoutPool(t.B(), 10, layoutTensor{bytes: tokens * 2 * half}, layoutTensor{bytes: tokens * 2 * half, layer: 1})
				p.Grant(p.Generation.Destination, dst, Pages(0, 10)...)
				var list []Submit
				for rank := range uint64(2) {
					src := layoutPool(t.A(), 10, layoutTensor{bytes: tokens * half}, layoutTensor{bytes: tokens * half, layer: 1})
					var heads []*contract.Slice
					for l := range uint32(2) {
						heads = append(heads, &contract.Slice{SrcTensor: l, DstTensor: l, DstOff: rank * half, Len: half, SrcStride: half, DstStride: 2 * half, Count: tokens})
					}
					list = append(list, Submit{Plan: p.AddPlan(src, dst, 1, 1, heads...), Src: Pages(1, 8), Dst: Pages(2, 8)})
				}
				layoutDone(p.SubmitAll(list))
			},
		},
		Case{
			ID: "layout/head-slices-part", Rule: "R1", Profile: TransferLayout,
			Title: "one rank sends two ranks their heads (tensor parallel 1 to 2)",
			Script: `
> one source pool, two destination pools with half of the heads each
> one Submit to each, in one frame
< Done, of each
= each rank has its own half of every token`,
			Run: func(t *T) {
				const tokens, half = 16, 80
				p := t.Connect(t.A(), t.B(), 0)
				src := layoutPool(t.A(), 10, layoutTensor{bytes: tokens * 2 * half})
				var list []Submit
				for rank := range uint64(2) {
					dst := layoutPool(t.B(), 10, layoutTensor{bytes: tokens * half})
					layoutPlan(p, src, dst, &contract.Slice{SrcOff: rank * half, Len: half, SrcStride: 2 * half, DstStride: half, Count: tokens})
					list = append(list, Submit{Plan: p.Plan, Generation: p.Generation, Src: Pages(0, 10), Dst: Pages(0, 10)})
				}
				layoutDone(p.SubmitAll(list))
			},
		},
		Case{
			ID: "layout/many-slices", Rule: "R1", Profile: TransferLayout,
			Title: "a plan of a thousand slices is carried out to the last",
			Script: `
> 64 layers of K and V, 8 slices in each page, their order turned around
> Submit of 5 pages
< Done
= 5120 pieces, each in its place`,
			Run: func(t *T) {
				const layers, parts, bytes = 64, 8, 24
				p := t.Connect(t.A(), t.B(), 0)
				var tensors []layoutTensor
				for l := range uint32(layers) {
					tensors = append(tensors, layoutTensor{bytes: parts * bytes, layer: l}, layoutTensor{bytes: parts * bytes, layer: l})
				}
				src, dst := layoutPool(t.A(), 6, tensors...), layoutPool(t.B(), 6, tensors...)
				var plan []*contract.Slice
				for i := range uint32(len(tensors)) {
					for k := range uint64(parts) {
						plan = append(plan, &contract.Slice{SrcTensor: i, DstTensor: i, SrcOff: k * bytes, DstOff: (parts - 1 - k) * bytes, Len: bytes, Count: 1})
					}
				}
				layoutPlan(p, src, dst, plan...)
				p.Submit(Submit{Src: Pages(0, 5), Dst: Pages(1, 5)}).Done()
			},
		},
		Case{
			ID: "layout/different-pool-sizes", Rule: "R1", Profile: TransferLayout,
			Title: "page numbers count in their own pool: a small pool and a large one go together",
			Script: `
> a source of 8 pages, a destination of 20000; and the other way round
> Submit to and from the last pages
< Done`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				for _, n := range [][2]uint32{{8, 20000}, {20000, 8}} {
					src, dst := layoutPool(t.A(), n[0], layoutTensor{bytes: 96}), layoutPool(t.B(), n[1], layoutTensor{bytes: 96})
					layoutPlan(p, src, dst, layoutWhole(src)...)
					p.Submit(Submit{Src: Pages(n[0]-8, 8), Dst: Pages(n[1]-8, 8)}).Done()
				}
			},
		},
		Case{
			ID: "layout/several-plans-a-pool-pair", Rule: "R1", Profile: TransferLayout,
			Title: "an op follows the plan that it names, not another of the same pools",
			Script: `
> two plans of one pool pair: the first halves of pages, the second halves
> a Submit of each plan, in one frame, to different pages
< Done, of each
= only the half that the plan names has changed`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 16, PageBytes: 1000, NoPlan: true})
				first := p.AddPlan(p.Src, p.Dst, 1, 1, &contract.Slice{Len: 500, Count: 1})
				second := p.AddPlan(p.Src, p.Dst, 1, 1, &contract.Slice{SrcOff: 500, DstOff: 500, Len: 500, Count: 1})
				layoutDone(p.SubmitAll([]Submit{
					{Plan: first, Src: Pages(0, 4), Dst: Pages(8, 4)},
					{Plan: second, Src: Pages(4, 4), Dst: Pages(12, 4)},
					{Plan: second, Src: Pages(8, 4), Dst: Pages(0, 4)},
				}))
			},
		},
	)
}
