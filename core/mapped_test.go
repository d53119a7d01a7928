package core_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/coretest"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// mapped is a room between two groups whose ranks or page sizes differ, with the memory of all workers.
// A byte of it has the name of what it means: (layer, head, token, byte of the row).
type mapped struct {
	env      *coretest.Env
	src, dst layout.Side
	pages    [2][][]int32 // of P and D, by rank: page ids in the order of the sequence
	prefix   int32        // of every destination rank
	tokens   int32        // that the source sends
}

const mappedLayers, mappedRow = 3, 2

func (m *mapped) heads(s layout.Side, rank int32) (list []int32) {
	for h := range s.KVHeads {
		if s.Kind == layout.MLA || s.Ranks <= s.KVHeads && h*s.Ranks/s.KVHeads == rank || s.Ranks > s.KVHeads && rank*s.KVHeads/s.Ranks == h {
			list = append(list, h)
		}
	}
	if s.Kind == layout.MLA {
		list = list[:1]
	}
	return list
}

// bytes calls fn for every byte that a rank has of the sequence: the page by its place in the list, the
// place in it, and the byte's name.
func (m *mapped) bytes(s layout.Side, rank, layer int32, fn func(page, at int32, name int64)) {
	heads := m.heads(s, rank)
	for t := range m.tokens {
		for i, h := range heads {
			for b := range int32(mappedRow) {
				slot := (t%s.PageTokens)*int32(len(heads)) + int32(i)
				if s.Order == layout.HND {
					slot = int32(i)*s.PageTokens + t%s.PageTokens
				}
				fn(t/s.PageTokens, slot*mappedRow+b, 1+int64(b)+mappedRow*(int64(t)+1000*(int64(h)+100*int64(layer))))
			}
		}
	}
}

type place struct{ rank, page, layer, at int32 }

// check carries out all ops and compares the destination's memory with what it must hold.
func (m *mapped) check() error {
	have, want, got := map[place]int64{}, map[place]int64{}, map[place]int64{}
	for layer := range int32(mappedLayers) {
		for r := range m.src.Ranks {
			m.bytes(m.src, r, layer, func(p, at int32, name int64) { have[place{r, m.pages[0][r][p], layer, at}] = name })
		}
		for q := range m.dst.Ranks {
			m.bytes(m.dst, q, layer, func(p, at int32, name int64) { want[place{q, m.pages[1][q][m.prefix+p], layer, at}] = name })
		}
	}
	var srcShape, dstShape []layout.Tensor
	for layer := range int32(mappedLayers) {
		for _, s := range []struct {
			side  layout.Side
			shape *[]layout.Tensor
		}{{m.src, &srcShape}, {m.dst, &dstShape}} {
			*s.shape = append(*s.shape, layout.Tensor{Layer: layer, PageBytes: int64(len(m.heads(s.side, 0))) * int64(s.side.PageTokens) * mappedRow})
		}
	}
	for _, o := range m.env.P.Ops {
		if o.SrcPool != uint64(o.SrcRank)+1 || o.DstPool != uint64(o.DstRank)+1 {
			return fmt.Errorf("op from pool %d to pool %d says ranks %d and %d", o.SrcPool, o.DstPool, o.SrcRank, o.DstRank)
		}
		plan, err := o.Map.Plan(o.SrcRank, o.DstRank, o.Phase, srcShape, dstShape)
		if err != nil {
			return err
		}
		from, to := expandRuns(o.Source), expandRuns(o.Destination)
		if len(from) != len(to) || o.Bytes != int64(len(from))*layout.Bytes(plan, srcShape, o.LayerFrom, o.LayerTo) {
			return fmt.Errorf("%d to %d pages in %d bytes, %d bytes a page", len(from), len(to), o.Bytes, layout.Bytes(plan, srcShape, o.LayerFrom, o.LayerTo))
		}
		for _, s := range plan {
			layer := srcShape[s.Src].Layer
			if layer < o.LayerFrom || layer >= o.LayerTo {
				continue
			}
			for i := range from {
				for j := range int64(s.Count) {
					for b := range s.Len {
						at := place{o.DstRank, to[i], layer, int32(s.DstOff + j*s.DstStride + b)}
						if got[at] != 0 {
							return fmt.Errorf("%+v is written twice", at)
						}
						if v := have[place{o.SrcRank, from[i], layer, int32(s.SrcOff + j*s.SrcStride + b)}]; v != 0 { // 0: beyond the last token
							got[at] = v
						}
					}
				}
			}
		}
	}
	for at, v := range want {
		if got[at] != v {
			return fmt.Errorf("%+v has %d, want %d", at, got[at], v)
		}
	}
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes were written, want %d", len(got), len(want))
	}
	return nil
}

func expandRuns(runs []layout.Run) (ids []int32) {
	for _, r := range runs {
		for i := range r.Count {
			ids = append(ids, r.Start+i*r.Stride)
		}
	}
	return ids
}

// TestMappedBytes: whatever the ranks, page sizes and orders of two groups that can be mapped, however the source
// cuts its pages into chunks and layers and the core cuts those into ops, a room ends in Success with
// every byte of every destination rank written once, by the byte that belongs there. One page more or
// less is no Success.
func TestMappedBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := func(name string, least, most int32) int32 { return rapid.Int32Range(least, most).Draw(t, name) }
		kind := rapid.SampledFrom([]string{layout.MHA, layout.MHA, layout.MLA}).Draw(t, "kind")
		heads := rapid.SampledFrom([]int32{1, 2, 4, 6}).Draw(t, "heads")
		if kind == layout.MLA {
			heads = 1
		}
		side := func(name string) layout.Side {
			order := rapid.SampledFrom([]string{layout.NHD, layout.HND}).Draw(t, name+" order")
			return layout.Side{Ranks: n(name+" ranks", 1, 6), Cache: layout.Cache{
				DType: "fp8", Layers: mappedLayers, KVHeads: heads, HeadDim: mappedRow, PageTokens: rapid.SampledFrom([]int32{1, 2, 4, 6}).Draw(t, name+" page"), Kind: kind, Order: order,
			}}
		}
		m := &mapped{src: side("source"), dst: side("destination")}
		lm, err := layout.New(m.src, m.dst)
		if mm := (*layout.Mismatch)(nil); errors.As(err, &mm) {
			t.Skip()
		}
		cfg := coretest.Config{
			Core:  core.Config{Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()},
			Ranks: m.src.Ranks, DRanks: m.dst.Ranks, Map: lm, Plain: true, Layers: mappedLayers,
			PageBytes: mappedLayers * int64(len(m.heads(m.src, 0))) * int64(m.src.PageTokens) * mappedRow,
		}
		cfg.Core.Limits.OpBytes = int64(n("op bytes", 1, 300))
		cfg.Core.Limits.OpRuns = n("op runs", 1, 3)
		if m.env, err = coretest.New(cfg, nil); err != nil {
			t.Fatal(err)
		}
		// How many pages: whole source pages, or destination pages that use the last one in part.
		a, b := lm.Scale()
		srcPages := n("pages", 1, 6)
		dstPages := (srcPages + a - 1) / a * b
		if b > 1 {
			dstPages -= n("unused", 0, b-1)
		}
		m.tokens = min(srcPages*m.src.PageTokens, dstPages*m.dst.PageTokens)
		m.prefix = b * n("prefix", 0, 1)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "page ids"), 0))
		ids := func(n int32) (list []int32) {
			for _, id := range rng.Perm(64)[:n] {
				list = append(list, int32(id))
			}
			if rng.IntN(2) == 0 {
				slices.Sort(list)
			}
			return list
		}
		for range m.src.Ranks {
			m.pages[0] = append(m.pages[0], ids(srcPages))
		}
		for range m.dst.Ranks {
			m.pages[1] = append(m.pages[1], ids(m.prefix+dstPages))
		}
		wrong := rapid.SampledFrom([]int32{0, 0, 0, -1, 1}).Draw(t, "wrong")
		e := m.env
		send := func(r int32) {
			for at := int32(0); ; {
				chunk := min(n("chunk", 0, 4), srcPages-at)
				layers := [][2]int32{{0, 0}}
				if chunk > 0 && rapid.Bool().Draw(t, "layer-wise") {
					layers = [][2]int32{{0, 1}, {1, mappedLayers}}
				}
				for i, l := range layers {
					last := at+chunk == srcPages && i == len(layers)-1
					e.Request(e.P, r, core.Send, 1, func(ev *core.Event) {
						if chunk > 0 {
							ev.Parts = coretest.Parts(m.pages[0][r][at : at+chunk])
						}
						ev.LayerFrom, ev.LayerTo, ev.Last = l[0], l[1], last
					})
					if code := e.P.Replies[len(e.P.Replies)-1]; code.Code != core.OK && (wrong == 0 || code.Code != core.Ended) {
						t.Fatalf("send: %+v", code)
					}
				}
				if at += chunk; at == srcPages {
					return
				}
			}
		}
		early, late := rapid.Bool().Draw(t, "sent before bind"), rapid.Bool().Draw(t, "source opens last")
		open := func() {
			for r := range m.src.Ranks {
				e.Open(e.P, r, core.Event{Room: 1})
				if early {
					send(r)
				}
			}
		}
		if !late {
			open()
		}
		for q := range m.dst.Ranks {
			e.Open(e.D, q, core.Event{Room: 1})
			e.Request(e.D, q, core.Register, 1, func(ev *core.Event) {
				list := m.pages[1][q]
				if wrong < 0 { // a whole page of the side with the larger ones
					list = list[:max(m.prefix, int32(len(list))-b)]
				} else if wrong > 0 {
					for id := int32(0); len(list) < len(m.pages[1][q])+int(b); id++ {
						if !slices.Contains(list, id) {
							list = append(slices.Clone(list), id)
						}
					}
				}
				ev.Parts = coretest.Parts(list)
				ev.Parts[0].Prefix = m.prefix
			})
		}
		e.Settle()
		if late { // it finds a placeholder, and Confirm brings the pages
			open()
			e.Settle()
		}
		for r := range m.src.Ranks {
			if !early {
				send(r)
			}
		}
		for i := 0; i < len(e.P.Ops); i++ {
			e.EndOp(e.P, i+1, core.EndDone, true, statemachine.None)
		}
		e.Settle()
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
		for _, g := range e.Engines() {
			v := g.M.Room(1)[0]
			if wrong != 0 {
				if v.State != statemachine.Ended || v.Reason == statemachine.Success {
					t.Fatalf("%s, with %d pages more than fit", v.Why(), wrong)
				}
				continue
			}
			if v.Reason != statemachine.Success {
				t.Fatalf("%s: %s", g.Name, v.Why())
			}
			if v.Held != 0 || v.Moved != v.Total && g == e.P {
				t.Fatalf("%s: %d held, %d of %d moved", g.Name, v.Held, v.Moved, v.Total)
			}
		}
		if wrong != 0 {
			return
		}
		if err := m.check(); err != nil {
			t.Fatal(err)
		}
	})
}
