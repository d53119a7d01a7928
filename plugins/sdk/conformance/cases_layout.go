package conformance

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	for _, s := range []struct {
		name  string
		bytes uint64
		pages uint32
	}{{"1-byte", 1, 3000}, {"7-bytes", 7, 500}, {"4095-bytes", 4095, 64}, {"4096-bytes", 4096, 64}, {"4097-bytes", 4097, 64}, {"1-mib", 1 << 20, 12}} {
		register(Case{
			ID: "layout/pages-of-" + s.name, Rule: "R1", Profile: TransferLayout,
			Title: fmt.Sprintf("pages of %d bytes arrive, one alone and many in another order", s.bytes),
			Script: `
> Submit of one page, of the last page, of half of the pages shuffled
< Accepted, Done with the size, of each
= every byte is where it belongs; no neighbour has changed`,
			Run: func(t *T) { layoutPages(t, t.Connect(t.A(), t.B(), 0), s.pages, layoutTensor{bytes: s.bytes}) },
		})
	}
	register(
		Case{
			ID: "layout/gaps-between-pages", Rule: "R1", Profile: TransferLayout,
			Title: "what lies between the pages of a tensor stays as it is",
			Script: `
> pools whose page stride is larger than the page: by 1 byte, by 4 KiB
> Submit of all pages
< Done
= every page is there; every byte between two pages is as before`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				for _, gap := range []uint64{1, 4096} {
					layoutPages(t, p, 64, layoutTensor{bytes: 1000, gap: gap})
				}
			},
		},
		Case{
			ID: "layout/gaps-differ", Rule: "R1", Profile: TransferLayout,
			Title: "the two ends may space their pages differently",
			Script: `
> a source without gaps, a destination with gaps; then the other way round
> Submit of all pages
< Done
= each page by the stride of its own side`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				for _, gaps := range [][2]uint64{{0, 300}, {77, 0}} {
					src := layoutPool(t.A(), 40, layoutTensor{bytes: 512, gap: gaps[0]})
					dst := layoutPool(t.B(), 40, layoutTensor{bytes: 512, gap: gaps[1]})
					layoutPlan(p, src, dst, layoutWhole(src)...)
					p.Submit(Submit{Src: Pages(0, 40), Dst: Pages(0, 40)}).Done()
				}
			},
		},
		Case{
			ID: "layout/odd-offsets", Rule: "R1", Profile: TransferLayout,
			Title: "tensors and pages may start at any byte",
			Script: `
> tensors at odd offsets, slices that start and end at odd bytes of a page
> Submit
< Done
= to the byte`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				src := layoutPool(t.A(), 30, layoutTensor{bytes: 1003, gap: 2, layer: 0}, layoutTensor{bytes: 611, gap: 4, layer: 1})
				dst := layoutPool(t.B(), 30, layoutTensor{bytes: 907, gap: 0, layer: 0}, layoutTensor{bytes: 613, gap: 1, layer: 1})
				layoutPlan(p, src, dst,
					&contract.Slice{SrcTensor: 0, DstTensor: 0, SrcOff: 13, DstOff: 1, Len: 901, Count: 1},
					&contract.Slice{SrcTensor: 1, DstTensor: 1, SrcOff: 3, DstOff: 5, Len: 3, SrcStride: 7, DstStride: 11, Count: 53})
				p.Submit(Submit{Src: Pages(0, 30), Dst: Pages(0, 30)}).Done()
			},
		},
		Case{
			ID: "layout/64-mib-op", Rule: "R1", Profile: TransferLayout,
			Title: "an op of the largest size that a host makes, 64 MiB or the plugin's own limit, arrives",
			Script: `
> Submit of min(64 MiB, Limits.max_op_bytes) in pages of 1 MiB
< Accepted, Progress…, Done
= every byte`,
			Run: func(t *T) {
				size := uint64(64 << 20)
				if limit := t.A().Hello().GetLimits().GetMaxOpBytes(); limit != 0 {
					size = min(size, limit)
				}
				page := min(size, 1<<20)
				n := uint32(size / page)
				p := t.Path(Shape{Pages: n, PageBytes: page})
				p.Submit(Submit{Src: Pages(0, n), Dst: Pages(0, n)}).Done()
			},
		},
		Case{
			ID: "layout/sizes-by-octave", Rule: "R1", Profile: TransferLayout, Timeout: time.Minute,
			Title: "ops of two random sizes between each power of two and the next arrive, up to 64 MiB or the plugin's own limit",
			Script: `
> for each power of two below 64 MiB or Limits.max_op_bytes, by the seed: a Submit of one page, at most half as large
  again, and a Submit of several pages, larger than that and below the next power
< Accepted, Progress…, Done, of each
= every byte; nothing else has changed`,
			Run: layoutSizes,
		},
		Case{
			ID: "layout/thousands-of-runs", Rule: "R1", Profile: TransferLayout,
			Title: "an op of thousands of runs, cut differently on the two sides, puts every page in its place",
			Script: `
> Submit of 5000 pages (or Limits.max_runs): each a run of its own in the source, shuffled; runs of
  several pages in the destination
< Done
= page k of the source list is page k of the destination list`,
			Run: func(t *T) {
				n := uint32(5000)
				if limit := t.A().Hello().GetLimits().GetMaxRuns(); limit != 0 {
					n = min(n, limit)
				}
				p := t.Path(Shape{Pages: n, PageBytes: 192, Gap: 8})
				src := layoutSingles(layoutPerm(t, n, n))
				var dst []sdk.Run
				for at := uint32(0); at < n; { // consecutive pages in runs of 1 to 5
					count := min(n-at, 1+t.Rand().Uint32N(5))
					dst = append(dst, sdk.Run{Start: at, Count: count, Stride: 1})
					at += count
				}
				for i, j := range t.Rand().Perm(len(dst)) {
					dst[i], dst[j] = dst[j], dst[i]
				}
				p.Submit(Submit{Src: src, Dst: dst}).Done()
			},
		},
		Case{
			ID: "layout/runs-pair-in-order", Rule: "R1", Profile: TransferLayout,
			Title: "runs of unequal length pair page by page, not run by run",
			Script: `
> Submit of source runs 5+1+10 pages, destination runs 2+9+5 pages
< Done
= page k to page k`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 64, PageBytes: 256, Layers: 2})
				p.Submit(Submit{
					Src: []sdk.Run{{Start: 40, Count: 5, Stride: 1}, {Start: 3, Count: 1, Stride: 1}, {Start: 10, Count: 10, Stride: 1}},
					Dst: []sdk.Run{{Start: 62, Count: 2, Stride: 1}, {Start: 20, Count: 9, Stride: 1}, {Start: 0, Count: 5, Stride: 1}},
				}).Done()
			},
		},
		Case{
			ID: "layout/strided-runs", Rule: "R1", Profile: TransferLayout, Needs: []string{sdk.FeatureStrided},
			Title: "runs with a stride take every second, third … page",
			Script: `
> Submit with strides in the source, in the destination, in both
< Done (a plugin that declares strided must not answer CAUSE_UNSUPPORTED)
= the pages between are untouched`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 128, PageBytes: 320, Layers: 2, Gap: 16})
				for _, s := range []Submit{
					{Src: []sdk.Run{{Start: 1, Count: 20, Stride: 3}}, Dst: Pages(50, 20)},
					{Src: Pages(100, 20), Dst: []sdk.Run{{Start: 0, Count: 20, Stride: 2}}},
					{Src: []sdk.Run{{Start: 0, Count: 7, Stride: 5}, {Start: 90, Count: 9, Stride: 1}},
						Dst: []sdk.Run{{Start: 1, Count: 12, Stride: 4}, {Start: 80, Count: 4, Stride: 15}}},
					{Src: []sdk.Run{{Start: 0, Count: 128, Stride: 1}}, Dst: []sdk.Run{{Start: 1, Count: 64, Stride: 2}, {Start: 0, Count: 64, Stride: 2}}},
				} {
					p.Submit(s).Done()
				}
			},
		},
		Case{
			ID: "layout/layer-range", Rule: "R1", Profile: TransferLayout, Needs: []string{sdk.FeatureLayerRange},
			Title: "an op of a layer range moves these layers and leaves the others alone",
			Script: `
> Submit of layers [2,5) of 8, of [0,1), of [7,99)
< Done with the size of these layers
= the other layers are as before`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 32, PageBytes: 500, Layers: 8, Gap: 12})
				for i, l := range [][2]uint32{{2, 5}, {0, 1}, {7, 99}} {
					at := uint32(i) * 8
					p.Submit(Submit{Src: Pages(at, 8), Dst: Pages(24-at, 8), LayerFrom: l[0], LayerTo: l[1]}).Done()
				}
			},
		},
		Case{
			ID: "layout/sparse-layers", Rule: "R1", Profile: TransferLayout, Needs: []string{sdk.FeatureLayerRange},
			Title: "layers count by their number in the model, not by their place in the pool",
			Script: `
> pools of layers 3, 4, 10 and 30 (a pipeline stage)
> Submit of layers [4,11)
< Done with the size of layers 4 and 10
= layers 3 and 30 are as before`,
			Run: func(t *T) {
				p := t.Connect(t.A(), t.B(), 0)
				var tensors []layoutTensor
				for _, l := range []uint32{3, 4, 10, 30} {
					tensors = append(tensors, layoutTensor{bytes: 256, layer: l})
				}
				src, dst := layoutPool(t.A(), 16, tensors...), layoutPool(t.B(), 16, tensors...)
				layoutPlan(p, src, dst, layoutWhole(src)...)
				p.Submit(Submit{Src: Pages(0, 16), Dst: Pages(0, 16), LayerFrom: 4, LayerTo: 11}).Done()
			},
		},
		Case{
			ID: "layout/layer-by-layer", Rule: "R1", Profile: TransferLayout, Needs: []string{sdk.FeatureLayerRange},
			Title: "the layers of the same pages may be sent by several ops at once",
			Script: `
> 12 Submits in one frame: the same pages, one layer each
< Done, of each
= all layers of all pages are there, none twice`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 24, PageBytes: 2048, Layers: 12})
				var list []Submit
				for l := range uint32(12) {
					list = append(list, Submit{Src: Pages(4, 16), Dst: Pages(8, 16), LayerFrom: l, LayerTo: l + 1})
				}
				for ops := range slices.Chunk(list, stormWindow(t, len(list), 16*2048)) {
					layoutDone(p.SubmitAll(ops))
				}
			},
		},
		Case{
			ID: "layout/plan-removed", Rule: "R12", Profile: TransferLayout,
			Title: "an op of a plan that was removed is refused; the other plans go on",
			Script: `
> Submit of plan 1: Done
> PlanRemove of plan 1; Submit of plan 1
< Accepted, Failed(CAUSE_PROTOCOL, quiet=true)
> Submit of plan 2
< Done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 512})
				other := p.AddPlan(p.Src, p.Dst, 1, 1, &contract.Slice{Len: 100, Count: 1})
				p.Submit(Submit{Src: Pages(0, 2), Dst: Pages(2, 2)}).Done()
				p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_PlanRemove{PlanRemove: &contract.PlanRemove{Plan: p.Plan.ID}}})
				delete(p.plans, p.Plan.ID)
				layoutRefused(p.Submit(Submit{Src: Pages(0, 2), Dst: Pages(4, 2)}), contract.Cause_CAUSE_PROTOCOL)
				p.Submit(Submit{Plan: other, Src: Pages(0, 2), Dst: Pages(6, 2)}).Done()
			},
		},
		Case{
			ID: "layout/undeclared-features", Rule: "R12", Profile: TransferLayout,
			Title: "what the plugin does not declare it refuses by name: strides, layer ranges, page groups",
			Script: `
> for each of strided, layer_range and repage that is not declared: a Submit that needs it
< Accepted, Failed(CAUSE_UNSUPPORTED, quiet=true)
> a Submit that needs nothing
< Done
= nothing of the refused ops was written`,
			Run: layoutUndeclared,
		},
		Case{
			ID: "layout/random-geometry", Rule: "R1", Profile: TransferLayout, Storm: true,
			Title: "random pools, plans and runs arrive to the byte",
			Script: `
> 25 times, by the seed: pools with random tensors, pages and gaps in random regions, a plan of random
  strided slices, up to 4 ops of random runs and layers at once
< Done, of each
= to the byte; nothing else has changed`,
			Run: layoutRandom,
		},
	)
	register(layoutRepageCases()...)
}

// layoutTensor is one tensor of layoutPool. Tensors of the same region lie behind each other.
type layoutTensor struct {
	bytes, gap uint64 // of a page, and between two
	layer      uint32
	region     int
}

// layoutPool makes the regions and the pool of some tensors, an odd number of bytes between any two.
func layoutPool(n *Node, pages uint32, tensors ...layoutTensor) *Pool {
	const margin = 37
	size := map[int]uint64{}
	var offsets []uint64
	for _, t := range tensors {
		offsets = append(offsets, size[t.region]+margin)
		size[t.region] += margin + uint64(pages)*(t.bytes+t.gap)
	}
	regions := map[int]*Region{}
	var list []Tensor
	for i, t := range tensors {
		if regions[t.region] == nil {
			regions[t.region] = n.AddRegion(size[t.region] + margin)
		}
		list = append(list, Tensor{Region: regions[t.region], Offset: offsets[i], PageStride: t.bytes + t.gap, PageBytes: t.bytes, Layer: t.layer})
	}
	return n.AddPool(pages, list...)
}

// layoutWhole are the slices of an identity plan from a pool to one with the same tensors.
func layoutWhole(src *Pool) (list []*contract.Slice) {
	for i, t := range src.Tensors {
		list = append(list, &contract.Slice{SrcTensor: uint32(i), DstTensor: uint32(i), Len: t.PageBytes, Count: 1})
	}
	return list
}

// layoutPlan makes the plan, an opener and its grant of all pages of dst the path's own.
func layoutPlan(p *Path, src, dst *Pool, slices ...*contract.Slice) {
	layoutGroups(p, src, dst, 1, 1, slices...)
}

// layoutGroups is layoutPlan for groups of pages.
func layoutGroups(p *Path, src, dst *Pool, srcPages, dstPages uint32, slices ...*contract.Slice) {
	p.Src, p.Dst = src, dst
	p.Plan = p.AddPlan(src, dst, srcPages, dstPages, slices...)
	p.Generation = p.NewGeneration()
	p.Grant(p.Generation.Destination, dst, Pages(0, dst.Pages)...)
}

func layoutDone(ops []*Op) {
	for _, o := range ops {
		o.Done()
	}
}

// layoutRefused checks that an op was refused before anything of it was done.
func layoutRefused(o *Op, cause contract.Cause) {
	end := o.End()
	o.node.case_().Check(end.Kind == "failed" && end.Cause == cause && end.Quiet, "R12", fmt.Sprintf("op %d to end Failed(%v, quiet=true)", o.ID, cause), "%s", end)
}

// layoutPerm returns count of the pages below n, in random order.
func layoutPerm(t *T, n, count uint32) []uint32 {
	ids := make([]uint32, 0, n)
	for _, id := range t.Rand().Perm(int(n)) {
		ids = append(ids, uint32(id))
	}
	return ids[:count]
}

// layoutSingles is each page as a run of its own.
func layoutSingles(ids []uint32) (runs []sdk.Run) {
	for _, id := range ids {
		runs = append(runs, sdk.Run{Start: id, Count: 1, Stride: 1})
	}
	return runs
}

// layoutPages moves pages of one tensor: one, the last, many.
func layoutPages(t *T, p *Path, n uint32, tensor layoutTensor) {
	many := n / 2
	limits := t.A().Hello().GetLimits()
	for _, bytes := range []uint64{limits.GetMaxOpBytes(), limits.GetMaxBytesPerPeer()} {
		if bytes != 0 && bytes < tensor.bytes {
			t.Unsupported("an op of one page of %d bytes is more than the plugin's limit of %d bytes", tensor.bytes, bytes)
		}
		if bytes != 0 {
			many = uint32(min(uint64(many), bytes/tensor.bytes))
		}
	}
	if limit := limits.GetMaxRuns(); limit != 0 {
		many = min(many, limit)
	}
	src, dst := layoutPool(p.From, n, tensor), layoutPool(p.To, n, tensor)
	layoutPlan(p, src, dst, layoutWhole(src)...)
	p.Submit(Submit{Src: Pages(n/2, 1), Dst: Pages(1, 1)}).Done()
	p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(n-1, 1)}).Done()
	p.Submit(Submit{Src: layoutSingles(layoutPerm(t, n, many)), Dst: Pages(0, many)}).Done()
	p.Submit(Submit{Src: Pages(n-many, many), Dst: layoutSingles(layoutPerm(t, n, many))}).Done()
}

// layoutSizes is layout/sizes-by-octave. All ops are of the same memory, one after the other.
func layoutSizes(t *T) {
	const largest, margin = 64 << 20, 64
	limit := uint64(largest)
	l := t.A().Hello().GetLimits()
	for _, n := range []uint64{l.GetMaxOpBytes(), l.GetMaxBytesPerPeer()} {
		if n != 0 {
			limit = min(limit, n)
		}
	}
	p := t.Connect(t.A(), t.B(), 0)
	from, to := t.A().AddRegion(limit+2*margin), t.B().AddRegion(limit+2*margin)
	move := func(pages, bytes uint64) {
		tensor := func(r *Region) Tensor {
			return Tensor{Region: r, Offset: t.Rand().Uint64N(margin), PageStride: bytes, PageBytes: bytes}
		}
		src, dst := t.A().AddPool(uint32(pages), tensor(from)), t.B().AddPool(uint32(pages), tensor(to))
		layoutPlan(p, src, dst, layoutWhole(src)...)
		p.Submit(Submit{Src: Pages(0, uint32(pages)), Dst: Pages(0, uint32(pages))}).Done()
	}
	for octave := uint64(1); octave < largest && octave <= limit; octave *= 2 {
		half := max(1, octave/2)
		move(1, min(limit, octave+t.Rand().Uint64N(half)))
		size := min(limit, octave+half+t.Rand().Uint64N(half))
		pages := 1 + t.Rand().Uint64N(min(size, 32))
		move(pages, size/pages)
	}
}

func layoutUndeclared(t *T) {
	p := t.Path(Shape{Pages: 16, PageBytes: 512, Layers: 2})
	honest := func() { p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4)}).Done() }
	honest()
	refuse := func(feature string, s Submit) {
		if t.Has(feature) {
			return
		}
		layoutRefused(p.Submit(s), contract.Cause_CAUSE_UNSUPPORTED)
		honest()
	}
	refuse(sdk.FeatureStrided, Submit{Src: []sdk.Run{{Start: 0, Count: 4, Stride: 2}}, Dst: Pages(8, 4)})
	refuse(sdk.FeatureStrided, Submit{Src: Pages(8, 4), Dst: []sdk.Run{{Start: 0, Count: 4, Stride: 3}}})
	refuse(sdk.FeatureLayerRange, Submit{Src: Pages(0, 4), Dst: Pages(8, 4), LayerFrom: 1, LayerTo: 2})
	if !t.Has(sdk.FeatureRepage) {
		pair := p.AddPlan(p.Src, p.Dst, 2, 2,
			&contract.Slice{SrcPage: 0, DstPage: 1, Len: 512, Count: 1}, &contract.Slice{SrcPage: 1, DstPage: 0, Len: 512, Count: 1})
		refuse(sdk.FeatureRepage, Submit{Plan: pair, Src: Pages(0, 4), Dst: Pages(8, 4)})
	}
}

// layoutRandom is layout/random-geometry.
func layoutRandom(t *T) {
	r := t.Rand()
	p := t.Connect(t.A(), t.B(), 0)
	for range 25 {
		var from, to []layoutTensor
		var plan []*contract.Slice
		layer := uint32(0)
		for i := range 1 + r.Uint32N(5) { // tensors
			a := layoutTensor{gap: r.Uint64N(40), layer: layer, region: r.IntN(2)}
			b := layoutTensor{gap: r.Uint64N(40), layer: layer, region: r.IntN(3)}
			layer += r.Uint32N(3)
			for range 1 + r.IntN(3) { // slices, behind each other in both pages
				s := &contract.Slice{
					SrcTensor: i, DstTensor: i, SrcOff: a.bytes + r.Uint64N(9), DstOff: b.bytes + r.Uint64N(9),
					Len: 1 + r.Uint64N(300), Count: 1 + r.Uint32N(6),
				}
				s.SrcStride, s.DstStride = s.Len+r.Uint64N(2)*r.Uint64N(50), s.Len+r.Uint64N(2)*r.Uint64N(50)
				a.bytes = s.SrcOff + uint64(s.Count-1)*s.SrcStride + s.Len
				b.bytes = s.DstOff + uint64(s.Count-1)*s.DstStride + s.Len
				plan = append(plan, s)
			}
			from, to = append(from, a), append(to, b)
		}
		src, dst := layoutPool(t.A(), 1+r.Uint32N(150), from...), layoutPool(t.B(), 1+r.Uint32N(150), to...)
		layoutPlan(p, src, dst, plan...)
		free := layoutPerm(t, dst.Pages, dst.Pages) // no page is the destination of two ops at once
		var list []Submit
		for range 1 + r.IntN(stormWindow(t, 4, 1)) {
			n := min(uint32(len(free)), src.Pages, 1+r.Uint32N(60))
			if limit := t.A().Hello().GetLimits().GetMaxRuns(); limit != 0 {
				n = min(n, limit)
			}
			if n == 0 {
				break
			}
			s := Submit{Src: layoutCut(t, layoutPerm(t, src.Pages, n)), Dst: layoutCut(t, slices.Clone(free[:n])), Priority: int32(r.IntN(5)) - 2}
			free = free[n:]
			if t.Has(sdk.FeatureLayerRange) {
				one := from[r.IntN(len(from))].layer
				s.LayerFrom, s.LayerTo = r.Uint32N(one+1), one+1+r.Uint32N(3)
			}
			list = append(list, s)
		}
		layoutDone(p.SubmitAll(list))
	}
}

// layoutCut orders some of the pages and puts them into runs, with strides if the plugin serves them.
func layoutCut(t *T, ids []uint32) (runs []sdk.Run) {
	if t.Rand().IntN(3) > 0 {
		at := t.Rand().IntN(len(ids))
		slices.Sort(ids[at:])
	}
	for _, id := range ids {
		if k := len(runs) - 1; k >= 0 {
			last := &runs[k]
			step := id - last.Start - (last.Count-1)*last.Stride
			switch {
			case id <= last.Start+(last.Count-1)*last.Stride:
			case last.Count == 1 && (step == 1 || t.Has(sdk.FeatureStrided)), last.Count > 1 && step == last.Stride:
				last.Stride = step
				last.Count++
				continue
			}
		}
		runs = append(runs, sdk.Run{Start: id, Count: 1, Stride: 1})
	}
	return runs
}
