package sdk

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func wire(runs ...Run) *contract.Runs {
	m := &contract.Runs{}
	for _, r := range runs {
		m.Start, m.Count, m.Stride = append(m.Start, r.Start), append(m.Count, r.Count), append(m.Stride, r.Stride)
	}
	return m
}

// layerMajor makes a pool in which each tensor is an array of pages; pageMajor one in which each page
// holds all tensors.
func layerMajor(region *Region, pages uint32, layers int, pageBytes uint64) *Pool {
	p := &Pool{Pages: pages}
	for l := range layers {
		p.Tensors = append(p.Tensors, Tensor{RegionID: region.ID, Region: region, Layer: uint32(l),
			Offset: uint64(l) * uint64(pages) * pageBytes, PageStride: pageBytes, PageBytes: pageBytes})
	}
	return p
}

func pageMajor(region *Region, pages uint32, layers int, pageBytes uint64) *Pool {
	p := &Pool{Pages: pages}
	for l := range layers {
		p.Tensors = append(p.Tensors, Tensor{RegionID: region.ID, Region: region, Layer: uint32(l),
			Offset: uint64(l) * pageBytes, PageStride: uint64(layers) * pageBytes, PageBytes: pageBytes})
	}
	return p
}

func identity(t testing.TB, src, dst *Pool) *Plan {
	m := &contract.PlanAdd{Plan: 1, SrcPages: 1, DstPages: 1}
	for i := range src.Tensors {
		m.Slices = append(m.Slices, &contract.Slice{SrcTensor: uint32(i), DstTensor: uint32(i), Len: src.Tensors[i].PageBytes, Count: 1})
	}
	plan, err := newPlan(m, src, dst, false)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func TestCopiesJoinNeighbours(t *testing.T) {
	a, b := &Region{ID: 1}, &Region{ID: 2}
	for _, tc := range []struct {
		name     string
		src, dst *Pool
		from, to uint32
		runs     [2][]Run
		want     int
	}{
		{"layer major, one run", layerMajor(a, 64, 4, 512), layerMajor(b, 64, 4, 512), 0, 4, [2][]Run{{{0, 8, 1}}, {{16, 8, 1}}}, 4},
		{"layer major, touching runs", layerMajor(a, 64, 4, 512), layerMajor(b, 64, 4, 512), 0, 4, [2][]Run{{{0, 4, 1}, {4, 4, 1}}, {{16, 8, 1}}}, 4},
		{"layer major, apart", layerMajor(a, 64, 4, 512), layerMajor(b, 64, 4, 512), 0, 4, [2][]Run{{{0, 4, 1}, {9, 4, 1}}, {{16, 8, 1}}}, 8},
		{"layer major, whole pool", layerMajor(a, 8, 4, 512), layerMajor(b, 8, 4, 512), 0, 4, [2][]Run{{{0, 8, 1}}, {{0, 8, 1}}}, 1},
		{"page major, one run", pageMajor(a, 64, 4, 512), pageMajor(b, 64, 4, 512), 0, 4, [2][]Run{{{0, 8, 1}}, {{16, 8, 1}}}, 1},
		{"page major, two layers", pageMajor(a, 64, 4, 512), pageMajor(b, 64, 4, 512), 1, 3, [2][]Run{{{0, 8, 1}}, {{16, 8, 1}}}, 8},
		{"page to layer", pageMajor(a, 64, 4, 512), layerMajor(b, 64, 4, 512), 0, 4, [2][]Run{{{0, 8, 1}}, {{16, 8, 1}}}, 32},
		{"strided", layerMajor(a, 64, 1, 512), layerMajor(b, 64, 1, 512), 0, 1, [2][]Run{{{0, 8, 2}}, {{16, 8, 1}}}, 8},
		{"nothing", layerMajor(a, 64, 4, 512), layerMajor(b, 64, 4, 512), 0, 4, [2][]Run{}, 0},
		{"no layer", layerMajor(a, 64, 4, 512), layerMajor(b, 64, 4, 512), 4, 9, [2][]Run{{{0, 8, 1}}, {{16, 8, 1}}}, 0},
	} {
		plan := identity(t, tc.src, tc.dst)
		n, size := 0, uint64(0)
		for c := range copies(plan.rows(wire(tc.runs[0]...), wire(tc.runs[1]...), tc.from, tc.to)) {
			n++
			size += c.Len
		}
		pages, _, _ := checkRuns("", wire(tc.runs[0]...), tc.src.Pages)
		if want := pages * plan.bytesPerGroup(tc.from, tc.to); n != tc.want || size != want {
			t.Errorf("%s: %d copies of %d bytes, want %d of %d", tc.name, n, size, tc.want, want)
		}
	}
}

// drawRuns names pages of a pool, each at most once, so that copies do not overlap.
func drawRuns(t *rapid.T, label string, pages uint32, n int) []Run {
	perm := rapid.Permutation(seq(pages)).Draw(t, label)[:n]
	var runs []Run
	for _, p := range perm {
		if k := len(runs) - 1; k >= 0 {
			last := &runs[k]
			if last.Count == 1 && p > last.Start {
				last.Stride, last.Count = p-last.Start, 2
				continue
			}
			if last.Start+last.Count*last.Stride == p {
				last.Count++
				continue
			}
		}
		runs = append(runs, Run{p, 1, 1})
	}
	return runs
}

func seq(n uint32) []uint32 {
	s := make([]uint32, n)
	for i := range s {
		s[i] = uint32(i)
	}
	return s
}

func (r Run) pages(into []uint32) []uint32 {
	for i := range r.Count {
		into = append(into, r.Start+i*r.Stride)
	}
	return into
}

// TestExpansion compares rows and copies with the definition in contract.Slice, byte by byte.
func TestExpansion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const pageBytes, layers = 96, 3
		pages := uint32(rapid.IntRange(1, 12).Draw(t, "pages"))
		src := &Region{ID: 1, Bytes: make([]byte, int(pages)*layers*pageBytes)}
		dst := &Region{ID: 2, Bytes: make([]byte, int(pages)*layers*pageBytes)}
		want := make([]byte, len(dst.Bytes))
		for i := 0; i+4 <= len(src.Bytes); i += 4 {
			binary.LittleEndian.PutUint32(src.Bytes[i:], rand.Uint32()|1)
		}
		shapes := []func(*Region, uint32, int, uint64) *Pool{layerMajor, pageMajor}
		a := shapes[rapid.IntRange(0, 1).Draw(t, "src shape")](src, pages, layers, pageBytes)
		b := shapes[rapid.IntRange(0, 1).Draw(t, "dst shape")](dst, pages, layers, pageBytes)
		m := &contract.PlanAdd{SrcPages: 1, DstPages: 1}
		for l := range uint32(layers) {
			for piece := range uint64(2) { // each half of a page by slices of its own
				n := rapid.SampledFrom([]uint64{4, 12, 24}).Draw(t, "len")
				count := uint32(48 / n)
				gap := uint64(0)
				if count > 1 && rapid.Bool().Draw(t, "gap") {
					n, gap = n/2, n/2
				}
				m.Slices = append(m.Slices, &contract.Slice{SrcTensor: l, DstTensor: l, Len: n, Count: count,
					SrcOff: piece * 48, DstOff: 48 - piece*48, SrcStride: n + gap, DstStride: n + gap})
			}
		}
		plan, err := newPlan(m, a, b, false)
		if err != nil {
			t.Fatal(err)
		}
		n := rapid.IntRange(0, int(pages)).Draw(t, "n")
		sr, dr := drawRuns(t, "source", pages, n), drawRuns(t, "destination", pages, n)
		from := uint32(rapid.IntRange(0, layers-1).Draw(t, "from"))
		to := uint32(rapid.IntRange(int(from)+1, layers).Draw(t, "to"))

		var sp, dp []uint32
		for _, r := range sr {
			sp = r.pages(sp)
		}
		for _, r := range dr {
			dp = r.pages(dp)
		}
		var size uint64
		for k := range sp {
			for _, s := range m.Slices {
				ta, tb := a.Tensors[s.SrcTensor], b.Tensors[s.DstTensor]
				if ta.Layer < from || ta.Layer >= to {
					continue
				}
				for i := range uint64(s.Count) {
					so := ta.Offset + uint64(sp[k])*ta.PageStride + s.SrcOff + i*s.SrcStride
					do := tb.Offset + uint64(dp[k])*tb.PageStride + s.DstOff + i*s.DstStride
					copy(want[do:do+s.Len], src.Bytes[so:])
					size += s.Len
				}
			}
		}
		if got := uint64(n) * plan.bytesPerGroup(from, to); got != size {
			t.Fatalf("bytesPerGroup gives %d, the definition %d", got, size)
		}
		rows := plan.rows(wire(sr...), wire(dr...), from, to)
		for _, form := range []string{"rows", "copies"} {
			clear(dst.Bytes)
			var got uint64
			if form == "rows" {
				for r := range rows {
					for i := range r.Count {
						so, do := r.SrcOff+i*r.SrcStride, r.DstOff+i*r.DstStride
						copy(dst.Bytes[do:do+r.Len], src.Bytes[so:])
						got += r.Len
					}
				}
			} else {
				for c := range copies(rows) {
					copy(dst.Bytes[c.DstOff:c.DstOff+c.Len], src.Bytes[c.SrcOff:])
					got += c.Len
				}
			}
			if got != size || !bytes.Equal(dst.Bytes, want) {
				t.Fatalf("%s: %d bytes of %d, equal %v", form, got, size, bytes.Equal(dst.Bytes, want))
			}
		}
	})
}

func TestCopiesStopEarly(t *testing.T) {
	plan := identity(t, layerMajor(&Region{}, 64, 4, 512), layerMajor(&Region{}, 64, 4, 512))
	n := 0
	for range copies(plan.rows(wire(Run{0, 8, 2}), wire(Run{0, 8, 1}), 0, 4)) {
		if n++; n == 3 {
			break
		}
	}
	if n != 3 {
		t.Errorf("%d copies", n)
	}
}

func TestCopiesAllocateNothingPerCopy(t *testing.T) {
	plan := identity(t, layerMajor(&Region{}, 1024, 8, 512), layerMajor(&Region{}, 1024, 8, 512))
	perOp := func(pages uint32) float64 {
		st := &opState{plan: plan, source: wire(Run{0, pages, 2}), dest: wire(Run{0, pages, 1}), layerTo: 8}
		op := &Op{st}
		var size uint64
		return testing.AllocsPerRun(20, func() {
			for c := range op.Copies() {
				size += c.Len
			}
		})
	}
	if few, many := perOp(4), perOp(512); many > few || many > 64 {
		t.Errorf("%v allocations for 32 copies, %v for 4096", few, many)
	}
}

func TestPlanIsChecked(t *testing.T) {
	src, dst := layerMajor(&Region{}, 8, 2, 64), layerMajor(&Region{}, 8, 2, 64)
	good := func() *contract.Slice {
		return &contract.Slice{SrcTensor: 1, DstTensor: 1, Len: 16, Count: 2, SrcStride: 32, DstStride: 32}
	}
	if _, err := newPlan(&contract.PlanAdd{SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{good()}}, src, dst, false); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*contract.Slice){
		"source tensor":      func(s *contract.Slice) { s.SrcTensor = 2 },
		"destination tensor": func(s *contract.Slice) { s.DstTensor = 1 << 31 },
		"layers differ":      func(s *contract.Slice) { s.DstTensor = 0 },
		"len 0":              func(s *contract.Slice) { s.Len = 0 },
		"count 0":            func(s *contract.Slice) { s.Count = 0 },
		"source end":         func(s *contract.Slice) { s.SrcOff = 17 },
		"destination end":    func(s *contract.Slice) { s.DstOff = 17 },
		"stride overflows":   func(s *contract.Slice) { s.SrcStride = 1<<64 - 1 },
		"offset overflows":   func(s *contract.Slice) { s.SrcOff = 1<<64 - 8 },
		"len overflows":      func(s *contract.Slice) { s.Len = 1<<64 - 8 },
		"pieces overlap":     func(s *contract.Slice) { s.DstStride = 8 },
	} {
		s := good()
		change(s)
		if _, err := newPlan(&contract.PlanAdd{SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{s}}, src, dst, false); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	for _, m := range []*contract.PlanAdd{{SrcPages: 2, DstPages: 1}, {}} {
		if _, err := newPlan(m, src, dst, false); causeOf(err, 0) != contract.Cause_CAUSE_UNSUPPORTED {
			t.Errorf("%v: %v", m, err)
		}
	}
}

func TestGrantCovers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := uint32(rapid.IntRange(1, 10).Draw(t, "pages"))
		shape := rapid.SampledFrom([]func(*Region, uint32, int, uint64) *Pool{layerMajor, pageMajor}).Draw(t, "shape")
		pool := shape(&Region{ID: 7}, pages, 2, 8)
		if rapid.Bool().Draw(t, "holes") {
			for i := range pool.Tensors {
				pool.Tensors[i].PageBytes = 5
			}
		}
		runs := drawRuns(t, "granted", pages, rapid.IntRange(0, int(pages)).Draw(t, "n"))
		set := NewPageSet(runs...)
		var list []uint32
		for _, r := range runs {
			list = r.pages(list)
		}
		if set.Len() != uint64(len(list)) {
			t.Fatalf("Len %d of %v", set.Len(), list)
		}
		covered := make([]bool, int(pages)*16+16)
		for _, p := range list {
			if !set.Contains(p) {
				t.Fatalf("page %d is missing in %v", p, set)
			}
			for _, tensor := range pool.Tensors {
				for i := range tensor.PageBytes {
					covered[tensor.Offset+uint64(p)*tensor.PageStride+i] = true
				}
			}
		}
		g := &Grant{Parts: []GrantPart{{Pool: pool, Pages: set}}}
		off := uint64(rapid.IntRange(0, len(covered)-1).Draw(t, "off"))
		n := uint64(rapid.IntRange(0, len(covered)-int(off)).Draw(t, "len"))
		want := true
		for _, ok := range covered[off : off+n] {
			want = want && ok
		}
		if got := g.Covers(7, off, n); got != want {
			t.Fatalf("Covers(%d,+%d) = %v with pages %v", off, n, got, list)
		}
		if n > 0 && (g.Covers(8, off, n) || g.Covers(7, 1<<64-1, n+1)) {
			t.Fatal("another region, or a range that wraps, is covered")
		}
	})
}

func BenchmarkCopies(b *testing.B) {
	plan := identity(b, layerMajor(&Region{}, 1<<16, 64, 4096), layerMajor(&Region{}, 1<<16, 64, 4096))
	st := &opState{plan: plan, source: wire(Run{0, 256, 3}), dest: wire(Run{0, 256, 1}), layerTo: 64}
	op := &Op{st}
	n := 0
	for b.Loop() {
		for range op.Copies() {
			n++
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/copy")
}
