package layout

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"
)

// holds is the reference for which heads a rank has: head by head, from how tensor parallelism cuts them.
func holds(kind string, rank, ranks, head, heads int32) bool {
	switch {
	case kind == MLA:
		return true
	case ranks <= heads:
		return head*ranks/heads == rank
	}
	return rank*heads/ranks == head
}

// place is the reference for where a byte lies in a page: by counting what lies before it.
func place(s Side, kind string, rank, head, token, b int32, row int32) int {
	heads := s.KVHeads
	if kind == MLA {
		heads = 1
	}
	at := 0
	for h := range heads {
		for t := range s.PageTokens {
			if !holds(kind, rank, s.Ranks, h, heads) {
				continue
			}
			before := h < head || h == head && t < token // hnd
			if s.Order != HND {
				before = t < token || t == token && h < head
			}
			if before {
				at += int(row)
			}
		}
	}
	return at + int(b)
}

func pageBytes(s Side, row int32) int64 {
	n := int64(0)
	heads := s.KVHeads
	if s.Kind == MLA {
		heads = 1
	}
	for h := range heads {
		if holds(s.Kind, 0, s.Ranks, h, heads) {
			n++
		}
	}
	return n * int64(s.PageTokens) * int64(row)
}

// checkMap carries a sequence of pages over, slice by slice, as ops would, and compares every byte of
// every destination page with the reference.
func checkMap(src, dst Side, from, pages int32) error {
	m, err := New(src, dst)
	if err != nil {
		return err
	}
	const row = 2 // head_dim 1, bf16
	a, b := m.Scale()
	srcPages := from + pages
	dstPages := (srcPages + a - 1) / a * b
	if b > 1 && dstPages > 1 {
		dstPages -= (srcPages*7 + 3) % b // the last source page is used in part
	}
	if !m.Fits(int64(srcPages), int64(dstPages)) {
		return fmt.Errorf("%d pages do not fit %d", srcPages, dstPages)
	}
	var srcShape, dstShape []Tensor
	for layer := range src.Layers {
		for range 2 { // K and V
			srcShape, dstShape = append(srcShape, Tensor{layer, pageBytes(src, row)}), append(dstShape, Tensor{layer, pageBytes(dst, row)})
		}
	}
	heads := src.KVHeads
	if src.Kind == MLA {
		heads = 1
	}
	// A byte has the name of what it is: tensor, head, token of the sequence, byte of the row.
	name := func(tensor, head, token, b int32) int64 {
		return 1 + int64(b) + row*(int64(token)+1000*(int64(head)+100*int64(tensor)))
	}
	fill := func(s Side, n int32, shape []Tensor, names bool) [][][][]int64 { // by rank, page, tensor
		all := make([][][][]int64, s.Ranks)
		for r := range s.Ranks {
			all[r] = make([][][]int64, n)
			for p := range n {
				all[r][p] = make([][]int64, len(shape))
				for i := range shape {
					page := make([]int64, shape[i].PageBytes)
					for h := range heads {
						for t := range s.PageTokens {
							for b := range int32(row) {
								if names && holds(s.Kind, r, s.Ranks, h, heads) {
									page[place(s, s.Kind, r, h, t, b, row)] = name(int32(i), h, p*s.PageTokens+t, b)
								}
							}
						}
					}
					all[r][p][i] = page
				}
			}
		}
		return all
	}
	have, want, got := fill(src, srcPages, srcShape, true), fill(dst, dstPages, dstShape, true), fill(dst, dstPages, dstShape, false)
	for r := range src.Ranks {
		var routes int32
		for q := range dst.Ranks {
			var moved int64
			for phase := range m.Phases() {
				plan, err := m.Plan(r, q, phase, srcShape, dstShape)
				if err != nil {
					return err
				}
				moved += Bytes(plan, srcShape, 0, src.Layers)
				if got, want := m.Bytes(r, q, srcShape[0].PageBytes*int64(len(srcShape)), 0, src.Layers), Bytes(plan, srcShape, 0, src.Layers); got != want {
					return fmt.Errorf("rank %d to %d moves %d bytes a page, Map.Bytes says %d", r, q, want, got)
				}
				for l := range src.Layers {
					if (m.Bytes(r, q, 1000, l, l+1) > 0) != (Bytes(plan, srcShape, l, l+1) > 0) {
						return fmt.Errorf("rank %d to %d: layer %d is there or not", r, q, l)
					}
				}
				for _, chunk := range [][2]int32{{0, from}, {from, pages}} { // two chunks of a room
					s := m.Steps(phase, chunk[0], chunk[1], dstPages)
					for i := range s.Count {
						sp, dp := chunk[0]+s.Src+i*s.SrcStep, s.Dst+i*s.DstStep
						if s.Src+i*s.SrcStep >= chunk[1] {
							return fmt.Errorf("page %d of a chunk of %d", s.Src+i*s.SrcStep, chunk[1])
						}
						for _, c := range plan {
							for j := range int64(c.Count) {
								for b := range c.Len {
									to := &got[q][dp][c.Dst][c.DstOff+j*c.DstStride+b]
									if *to != 0 {
										return fmt.Errorf("byte %d of tensor %d of page %d of rank %d is written twice", c.DstOff+j*c.DstStride+b, c.Dst, dp, q)
									}
									*to = have[r][sp][c.Src][c.SrcOff+j*c.SrcStride+b]
								}
							}
						}
					}
				}
			}
			if m.Writes(r, q) != (moved > 0) && src.Layers > src.Ranks { // with fewer layers than copies some have no turn
				return fmt.Errorf("rank %d to %d: writes %t, %d bytes", r, q, m.Writes(r, q), moved)
			}
			if m.Writes(r, q) {
				routes++
			}
		}
		if routes != m.Destinations(r) {
			return fmt.Errorf("rank %d writes to %d ranks, Map.Destinations says %d", r, routes, m.Destinations(r))
		}
	}
	for q := range got {
		for p := range got[q] {
			for i := range got[q][p] {
				w := slices.Clone(want[q][p][i])
				for b := range w { // tokens that no source page has
					if last := int64(srcPages) * int64(src.PageTokens); (w[b]-1)/row%1000 >= last {
						w[b] = 0
					}
				}
				if !slices.Equal(got[q][p][i], w) {
					return fmt.Errorf("rank %d, page %d, tensor %d:\n got %v\nwant %v", q, p, i, got[q][p][i], w)
				}
			}
		}
	}
	return nil
}

func side(kind, order string, ranks, heads, tokens, layers int32) Side {
	return Side{Cache{DType: "bf16", Layers: layers, KVHeads: heads, HeadDim: 1, PageTokens: tokens, Kind: kind, Order: order}, ranks}
}

// TestMapCovers: for every legal pair each byte of a destination page is written exactly once, by the
// byte of the source that the reference says; no slice leaves its pages.
func TestMapCovers(t *testing.T) {
	type pair struct{ n, m, heads int32 }
	for _, p := range []pair{
		{1, 1, 2}, {2, 4, 4}, {4, 2, 4}, {2, 4, 8}, {1, 2, 2}, {1, 4, 4}, {3, 6, 6}, {6, 4, 12}, {4, 6, 12}, // heads are cut
		{4, 2, 2}, {2, 4, 2}, {4, 1, 2}, {1, 4, 2}, {4, 8, 2}, {8, 4, 2}, {6, 4, 2}, {4, 6, 2}, {8, 2, 4}, {3, 1, 1}, {2, 3, 1}, // and repeated
	} {
		for _, kind := range []string{MHA, MLA} {
			for _, orders := range [][2]string{{NHD, NHD}, {HND, HND}, {NHD, HND}, {HND, NHD}} {
				for _, tokens := range [][2]int32{{2, 2}, {2, 6}, {4, 2}, {1, 3}, {4, 1}} {
					for _, chunk := range [][2]int32{{0, 1}, {1, 3}, {2, 4}} {
						src, dst := side(kind, orders[0], p.n, p.heads, tokens[0], 9), side(kind, orders[1], p.m, p.heads, tokens[1], 9)
						if err := checkMap(src, dst, chunk[0], chunk[1]); err != nil {
							t.Fatalf("%+v to %+v, pages %v: %v", src, dst, chunk, err)
						}
					}
				}
			}
		}
	}
}

// TestMapCoversAny is TestMapCovers for pairs at random.
func TestMapCoversAny(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := func(name string, most int32) int32 { return rapid.Int32Range(1, most).Draw(t, name) }
		kind, order := rapid.SampledFrom([]string{MHA, MHA, MLA}), rapid.SampledFrom([]string{NHD, HND})
		k := kind.Draw(t, "kind")
		heads, layers := n("heads", 12), n("layers", 5)
		src := side(k, order.Draw(t, "from"), n("sources", 12), heads, n("source page", 6), layers)
		dst := side(k, order.Draw(t, "to"), n("destinations", 12), heads, n("destination page", 6), layers)
		err := checkMap(src, dst, rapid.Int32Range(0, 3).Draw(t, "first"), n("pages", 4))
		var m *Mismatch
		if errors.As(err, &m) {
			if m.Field != "ranks" && m.Field != "page_tokens" {
				t.Fatal(err)
			}
			t.Skip()
		}
		if err != nil {
			t.Fatal(err)
		}
	})
}

// TestShare: ranks that have the same heads share the work of writing them.
func TestShare(t *testing.T) {
	for _, p := range [][3]int32{{4, 2, 2}, {8, 2, 2}, {8, 4, 2}, {8, 8, 2}, {8, 16, 2}, {4, 1, 4}} {
		m, err := New(side(MHA, NHD, p[0], p[2], 1, 8), side(MHA, NHD, p[1], p[2], 1, 8))
		if err != nil {
			t.Fatal(err)
		}
		if m.IsZero() {
			continue
		}
		for r := range p[0] {
			n := int32(0)
			for q := range p[1] {
				if m.Writes(r, q) {
					n += m.layers(r, q, 0, 8)
				}
			}
			if want := 8 * max(p[1], p[2]) / p[0]; n*max(1, p[2]/p[0]) != want {
				t.Errorf("%d to %d ranks of %d heads: rank %d writes %d layers, want %d", p[0], p[1], p[2], r, n, want)
			}
		}
	}
}

// TestMapGolden: testdata/maps.txt shows who writes to whom, and by which slices; and what is refused, by
// name.
func TestMapGolden(t *testing.T) {
	datadriven.RunTest(t, "testdata/maps.txt", func(t *testing.T, d *datadriven.TestData) string {
		src, dst := side(MHA, NHD, 1, 8, 16, 2), side(MHA, NHD, 1, 8, 16, 2)
		src.HeadDim, dst.HeadDim = 128, 128
		both := func(key string, a, b any) {
			if !d.HasArg(key) {
				return
			}
			var v string
			d.ScanArgs(t, key, &v)
			from, to, two := strings.Cut(v, ":")
			if !two {
				to = from
			}
			for _, x := range []struct {
				at any
				v  string
			}{{a, from}, {b, to}} {
				if s, ok := x.at.(*string); ok {
					*s = strings.ReplaceAll(x.v, "none", "")
				} else if _, err := fmt.Sscan(x.v, x.at); err != nil {
					t.Fatal(err)
				}
			}
		}
		both("ranks", &src.Ranks, &dst.Ranks)
		both("heads", &src.KVHeads, &dst.KVHeads)
		both("layers", &src.Layers, &dst.Layers)
		both("dim", &src.HeadDim, &dst.HeadDim)
		both("tokens", &src.PageTokens, &dst.PageTokens)
		both("dtype", &src.DType, &dst.DType)
		both("kind", &src.Kind, &dst.Kind)
		both("order", &src.Order, &dst.Order)
		m, err := New(src, dst)
		if err != nil {
			return err.Error() + "\n"
		}
		var out strings.Builder
		if m.IsZero() {
			out.WriteString("rank r to rank r, whole pages\n")
		} else if a, b := m.Scale(); a != b {
			fmt.Fprintf(&out, "%d source pages are %d destination pages\n", a, b)
		}
		shape := func(s Side) (ts []Tensor) {
			for l := range s.Layers {
				ts = append(ts, Tensor{l, pageBytes(s, s.HeadDim*2)}, Tensor{l, pageBytes(s, s.HeadDim*2)})
			}
			return ts
		}
		for q := range dst.Ranks {
			for r := range src.Ranks {
				if !m.Writes(r, q) {
					continue
				}
				for phase := range m.Phases() {
					plan, err := m.Plan(r, q, phase, shape(src), shape(dst))
					if err != nil {
						t.Fatal(err)
					}
					fmt.Fprintf(&out, "%d -> %d", r, q)
					if m.Phases() > 1 {
						fmt.Fprintf(&out, ", phase %d", phase)
					}
					for i, s := range plan {
						if s.Src > 0 && s.Src%2 == plan[0].Src%2 && i > 0 && s.Src != plan[0].Src || s.Src%2 == 1 {
							continue // V, and further layers, are as K of the first
						}
						fmt.Fprintf(&out, "; tensor %d: %d x %d bytes, %d +%d -> %d +%d", s.Src, s.Count, s.Len, s.SrcOff, s.SrcStride, s.DstOff, s.DstStride)
					}
					fmt.Fprintf(&out, "; %d of %d bytes\n", Bytes(plan, shape(src), 0, src.Layers), pageBytes(src, src.HeadDim*2)*int64(2*src.Layers))
				}
			}
		}
		return out.String()
	})
}

// TestPlanShape: a pool that is not what its layout says is refused, naming the tensor.
func TestPlanShape(t *testing.T) {
	src, dst := side(MHA, NHD, 1, 4, 2, 1), side(MHA, NHD, 2, 4, 2, 1)
	m, err := New(src, dst)
	if err != nil {
		t.Fatal(err)
	}
	good := func() ([]Tensor, []Tensor) { return []Tensor{{0, 16}, {0, 16}}, []Tensor{{0, 8}, {0, 8}} }
	if a, b := good(); true {
		if _, err := m.Plan(0, 1, 0, a, b); err != nil {
			t.Fatal(err)
		}
	}
	for name, change := range map[string]func(a, b []Tensor){
		"source page": func(a, _ []Tensor) { a[1].PageBytes = 18 }, "destination page": func(_, b []Tensor) { b[1].PageBytes = 16 },
		"layer": func(_, b []Tensor) { b[1].Layer = 1 },
	} {
		a, b := good()
		change(a, b)
		var mm *Mismatch
		if _, err := m.Plan(0, 1, 0, a, b); !errors.As(err, &mm) || mm.Field != "tensors[1]" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestCompatible: what cannot be mapped is refused, by the name of the field.
func TestCompatible(t *testing.T) {
	base := Side{Cache{"bf16", 32, 8, 128, 16, MHA, ""}, 2}
	if m, err := New(base, base); err != nil || !m.IsZero() {
		t.Error(m, err)
	}
	for field, change := range map[string]func(*Side){
		"dtype": func(s *Side) { s.DType = "fp8_e4m3" }, "layers": func(s *Side) { s.Layers = 64 }, "kv_heads": func(s *Side) { s.KVHeads = 4 },
		"head_dim": func(s *Side) { s.HeadDim = 64 }, "page_tokens": func(s *Side) { s.PageTokens = 24 }, "kind": func(s *Side) { s.Kind = MLA },
		"ranks": func(s *Side) { s.Ranks = 3 }, "order": func(s *Side) { s.Ranks = 4 },
	} {
		other := base
		change(&other)
		for _, pair := range [][2]Side{{base, other}, {other, base}} {
			var m *Mismatch
			if _, err := New(pair[0], pair[1]); !errors.As(err, &m) || m.Field != field || !strings.Contains(err.Error(), "layout."+field) {
				t.Errorf("%s: %v", field, err)
			}
		}
	}
}

// TestDiffer: the ranks of one group have one layout; what differs is named.
func TestDiffer(t *testing.T) {
	base := Cache{"bf16", 32, 8, 128, 16, MHA, NHD}
	if m := Differ(base, base); m != nil {
		t.Error(m)
	}
	for field, change := range map[string]func(*Cache){
		"dtype": func(c *Cache) { c.DType = "fp8_e4m3" }, "page_tokens": func(c *Cache) { c.PageTokens = 32 }, "order": func(c *Cache) { c.Order = "" },
	} {
		other := base
		change(&other)
		if m := Differ(base, other); m == nil || m.Field != field {
			t.Errorf("%s: %v", field, m)
		}
	}
}
