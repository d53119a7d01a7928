package conformance

import (
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// layoutRepageCases are for plugins that join and split pages.
func layoutRepageCases() []Case {
	needs := []string{sdk.FeatureRepage}
	return []Case{
		{
			ID: "layout/repage-up", Rule: "R1", Profile: TransferLayout, Needs: needs,
			Title: "small pages are joined to large ones",
			Script: `
> a plan of 4 source pages to 1 destination page, of 2 layers
> Submit of 12 pages, shuffled, to 3
< Done
= each quarter of a page is the source page of its turn`,
			Run: func(t *T) {
				p := layoutRepage(t, 24, 512, 12, 2048, 2)
				layoutGroups(p, p.Src, p.Dst, 4, 1, layoutEach(2, 4, func(i uint32) *contract.Slice {
					return &contract.Slice{SrcPage: i, DstOff: uint64(i) * 512, Len: 512, Count: 1}
				})...)
				p.Submit(Submit{Src: layoutSingles(layoutPerm(t, 24, 12)), Dst: layoutSingles(layoutPerm(t, 12, 3))}).Done()
				p.Submit(Submit{Src: Pages(3, 20), Dst: Pages(7, 5)}).Done()
			},
		},
		{
			ID: "layout/repage-down", Rule: "R1", Profile: TransferLayout, Needs: needs,
			Title: "large pages are split into small ones",
			Script: `
> a plan of 1 source page to 3 destination pages, of 2 layers
> Submit of 5 pages to 15, shuffled
< Done
= each third of a page is in the destination page of its turn`,
			Run: func(t *T) {
				p := layoutRepage(t, 8, 1800, 30, 600, 2)
				layoutGroups(p, p.Src, p.Dst, 1, 3, layoutEach(2, 3, func(i uint32) *contract.Slice {
					return &contract.Slice{DstPage: i, SrcOff: uint64(i) * 600, Len: 600, Count: 1}
				})...)
				p.Submit(Submit{Src: layoutSingles(layoutPerm(t, 8, 5)), Dst: layoutSingles(layoutPerm(t, 30, 15))}).Done()
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(6, 24)}).Done()
			},
		},
		{
			ID: "layout/repage-uneven", Rule: "R1", Profile: TransferLayout, Needs: needs,
			Title: "3 pages become 2, the middle one cut in half",
			Script: `
> a plan of 3 source pages of 400 bytes to 2 destination pages of 600
> Submit of 9 pages to 6
< Done`,
			Run: func(t *T) {
				p := layoutRepage(t, 12, 400, 8, 600, 1)
				layoutGroups(p, p.Src, p.Dst, 3, 2,
					&contract.Slice{SrcPage: 0, DstPage: 0, Len: 400, Count: 1},
					&contract.Slice{SrcPage: 1, DstPage: 0, DstOff: 400, Len: 200, Count: 1},
					&contract.Slice{SrcPage: 1, SrcOff: 200, DstPage: 1, Len: 200, Count: 1},
					&contract.Slice{SrcPage: 2, DstPage: 1, DstOff: 200, Len: 400, Count: 1})
				p.Submit(Submit{Src: layoutSingles(layoutPerm(t, 12, 9)), Dst: Pages(1, 6)}).Done()
			},
		},
		{
			ID: "layout/repage-strided", Rule: "R1", Profile: TransferLayout, Needs: needs,
			Title: "pages are joined and their heads sliced at once (page size and tensor parallelism differ)",
			Script: `
> two source pools of half of the heads, 2 pages of 8 tokens to 1 page of 16; a plan of each
> a Submit of each into the same pages, in one frame
< Done, of each
= token by token both halves`,
			Run: func(t *T) {
				const tokens, half = 8, 48
				p := layoutRepage(t, 1, 8, 6, 2*tokens*2*half, 1)
				p.Grant(p.Generation.Destination, p.Dst, Pages(0, 6)...)
				var list []Submit
				for rank := range uint64(2) {
					src := layoutPool(t.A(), 16, layoutTensor{bytes: tokens * half})
					plan := p.AddPlan(src, p.Dst, 2, 1, layoutEach(1, 2, func(i uint32) *contract.Slice {
						return &contract.Slice{SrcPage: i, DstOff: uint64(i)*tokens*2*half + rank*half, Len: half, SrcStride: half, DstStride: 2 * half, Count: tokens}
					})...)
					list = append(list, Submit{Plan: plan, Src: layoutSingles(layoutPerm(t, 16, 10)), Dst: Pages(1, 5)})
				}
				layoutDone(p.SubmitAll(list))
			},
		},
		{
			ID: "layout/repage-runs-across-groups", Rule: "R1", Profile: TransferLayout, Needs: needs,
			Title: "a run may end inside a group",
			Script: `
> a plan of 4 pages to 2; Submit whose source runs have 3, 6, 1 and 2 pages
< Done
= group by group, page by page`,
			Run: func(t *T) {
				p := layoutRepage(t, 32, 256, 16, 512, 1)
				layoutGroups(p, p.Src, p.Dst, 4, 2, layoutEach(1, 4, func(i uint32) *contract.Slice {
					return &contract.Slice{SrcPage: i, DstPage: i / 2, DstOff: uint64(i%2) * 256, Len: 256, Count: 1}
				})...)
				p.Submit(Submit{
					Src: []sdk.Run{{Start: 20, Count: 3, Stride: 1}, {Start: 2, Count: 6, Stride: 1}, {Start: 31, Count: 1, Stride: 1}, {Start: 0, Count: 2, Stride: 1}},
					Dst: []sdk.Run{{Start: 9, Count: 1, Stride: 1}, {Start: 1, Count: 4, Stride: 1}, {Start: 14, Count: 1, Stride: 1}},
				}).Done()
			},
		},
		{
			ID: "layout/repage-not-a-multiple", Rule: "R12", Profile: TransferLayout, Needs: needs,
			Title: "page lists that are no whole groups, or not as many groups, are refused",
			Script: `
> Submit of 3 pages under a plan of 2 to 1; of 4 pages to 1
< Accepted, Failed(CAUSE_PROTOCOL, quiet=true), of each
> Submit of 4 pages to 2
< Done`,
			Run: func(t *T) {
				p := layoutRepage(t, 16, 300, 8, 600, 1)
				layoutGroups(p, p.Src, p.Dst, 2, 1, layoutEach(1, 2, func(i uint32) *contract.Slice {
					return &contract.Slice{SrcPage: i, DstOff: uint64(i) * 300, Len: 300, Count: 1}
				})...)
				bad := func(src, dst uint32) {
					layoutRefused(p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 2), Change: func(m *contract.Submit) {
						m.Source, m.Destination = Runs(Pages(0, src)...), Runs(Pages(0, dst)...)
					}}), contract.Cause_CAUSE_PROTOCOL)
				}
				bad(3, 2)
				bad(4, 1)
				bad(5, 2)
				p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 2)}).Done()
			},
		},
	}
}

// layoutRepage is a path without a plan, between pools of different pages.
func layoutRepage(t *T, srcPages uint32, srcBytes uint64, dstPages uint32, dstBytes uint64, layers uint32) *Path {
	p := t.Connect(t.A(), t.B(), 0)
	var from, to []layoutTensor
	for l := range layers {
		from, to = append(from, layoutTensor{bytes: srcBytes, layer: l}), append(to, layoutTensor{bytes: dstBytes, layer: l})
	}
	p.Src, p.Dst = layoutPool(t.A(), srcPages, from...), layoutPool(t.B(), dstPages, to...)
	return p
}

// layoutEach makes the slices of every layer and page of a group.
func layoutEach(layers, group uint32, slice func(i uint32) *contract.Slice) (list []*contract.Slice) {
	for l := range layers {
		for i := range group {
			s := slice(i)
			s.SrcTensor, s.DstTensor = l, l
			list = append(list, s)
		}
	}
	return list
}
