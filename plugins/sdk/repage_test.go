package sdk

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// pagesOf lists the pages that runs name, in order.
func pagesOf(runs []Run) []uint32 {
	var list []uint32
	for _, r := range runs {
		list = r.pages(list)
	}
	return list
}

// TestRepage compares rows and copies of plans that pair groups of pages with a model that copies one
// token at a time: token i of a room stands in page i/tokens of either side's list, at its place there.
func TestRepage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const layers, token = 2, 4
		// A page has so many tokens; a group of n source pages holds as many as one of m destination pages.
		unit := rapid.IntRange(1, 3).Draw(t, "unit")
		n, m := rapid.IntRange(1, 5).Draw(t, "src_pages"), rapid.IntRange(1, 5).Draw(t, "dst_pages")
		srcTokens, dstTokens := unit*m, unit*n
		groups := rapid.IntRange(0, 4).Draw(t, "groups")
		srcPages := uint32(groups*n + rapid.IntRange(1, 3).Draw(t, "other source pages"))
		dstPages := uint32(groups*m + rapid.IntRange(1, 3).Draw(t, "other destination pages"))

		src := &Region{ID: 1, Bytes: make([]byte, int(srcPages)*layers*srcTokens*token)}
		dst := &Region{ID: 2, Bytes: make([]byte, int(dstPages)*layers*dstTokens*token)}
		for i := range src.Bytes {
			src.Bytes[i] = byte(i*7 + i>>8 + 1)
		}
		shapes := []func(*Region, uint32, int, uint64) *Pool{layerMajor, pageMajor}
		a := shapes[rapid.IntRange(0, 1).Draw(t, "src shape")](src, srcPages, layers, uint64(srcTokens*token))
		b := shapes[rapid.IntRange(0, 1).Draw(t, "dst shape")](dst, dstPages, layers, uint64(dstTokens*token))

		// The plan: each stretch of tokens that stays within one page of either side is a slice.
		add := &contract.PlanAdd{SrcPages: uint32(n), DstPages: uint32(m)}
		for l := range uint32(layers) {
			for at := 0; at < n*srcTokens; {
				k := min(srcTokens-at%srcTokens, dstTokens-at%dstTokens)
				add.Slices = append(add.Slices, &contract.Slice{SrcTensor: l, DstTensor: l, Len: token, Count: uint32(k), SrcStride: token, DstStride: token,
					SrcPage: uint32(at / srcTokens), SrcOff: uint64(at % srcTokens * token),
					DstPage: uint32(at / dstTokens), DstOff: uint64(at % dstTokens * token)})
				at += k
			}
		}
		plan, err := newPlan(add, a, b, true)
		if err != nil {
			t.Fatal(err)
		}
		sr, dr := drawRuns(t, "source", srcPages, groups*n), drawRuns(t, "destination", dstPages, groups*m)
		from := uint32(rapid.IntRange(0, layers-1).Draw(t, "from"))
		to := uint32(rapid.IntRange(int(from)+1, layers).Draw(t, "to"))

		want := make([]byte, len(dst.Bytes))
		sp, dp := pagesOf(sr), pagesOf(dr)
		var size uint64
		for l := from; l < to; l++ {
			for i := range groups * n * srcTokens {
				so := a.Tensors[l].Offset + uint64(sp[i/srcTokens])*a.Tensors[l].PageStride + uint64(i%srcTokens*token)
				do := b.Tensors[l].Offset + uint64(dp[i/dstTokens])*b.Tensors[l].PageStride + uint64(i%dstTokens*token)
				copy(want[do:do+token], src.Bytes[so:])
				size += token
			}
		}
		if got := uint64(groups) * plan.bytesPerGroup(from, to); got != size {
			t.Fatalf("bytesPerGroup gives %d, the model %d", got, size)
		}
		rows := plan.rows(wire(sr...), wire(dr...), from, to)
		for range 2 { // more than once
			clear(dst.Bytes)
			for r := range rows {
				for i := range r.Count {
					copy(dst.Bytes[r.DstOff+i*r.DstStride:][:r.Len], src.Bytes[r.SrcOff+i*r.SrcStride:])
				}
			}
			if !bytes.Equal(dst.Bytes, want) {
				t.Fatal("rows: the bytes differ")
			}
		}
		clear(dst.Bytes)
		var got uint64
		for c := range copies(rows) {
			copy(dst.Bytes[c.DstOff:c.DstOff+c.Len], src.Bytes[c.SrcOff:])
			got += c.Len
		}
		if got != size || !bytes.Equal(dst.Bytes, want) {
			t.Fatalf("copies: %d bytes of %d, equal %v", got, size, bytes.Equal(dst.Bytes, want))
		}
	})
}

func TestPicker(t *testing.T) {
	for _, tc := range []struct {
		name   string
		runs   []Run
		at, of uint64
		want   []Run
	}{
		{"all", []Run{{3, 4, 2}, {20, 1, 1}}, 0, 1, []Run{{3, 4, 2}, {20, 1, 1}}},
		{"every second", []Run{{0, 6, 1}}, 0, 2, []Run{{0, 3, 2}}},
		{"every second, the other ones", []Run{{0, 6, 1}}, 1, 2, []Run{{1, 3, 2}}},
		{"groups across runs", []Run{{10, 3, 1}, {20, 3, 1}}, 1, 2, []Run{{11, 1, 1}, {20, 2, 2}}},
		{"runs shorter than a group", []Run{{1, 1, 1}, {5, 1, 1}, {9, 1, 1}, {7, 1, 1}}, 2, 4, []Run{{9, 1, 1}}},
		{"a stride of their own", []Run{{0, 8, 3}}, 2, 4, []Run{{6, 2, 12}}},
		{"one page, a product beyond 32 bits", []Run{{0, 2, 1 << 31}}, 1, 4096, []Run{{1 << 31, 1, 1}}},
		{"nothing", nil, 3, 4, nil},
	} {
		p := picker{runs: wire(tc.runs...), at: tc.at, of: tc.of}
		var got []Run
		for r := p.run(); r.Count != 0; r = p.run() {
			got = append(got, r)
		}
		if len(got) != len(tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
			continue
		}
		for i := range got {
			if got[i] != tc.want[i] {
				t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
			}
		}
	}
}

// TestRepageIsChecked: what a plan of groups gets wrong, and that it needs the feature.
func TestRepageIsChecked(t *testing.T) {
	src, dst := layerMajor(&Region{}, 8, 1, 64), layerMajor(&Region{}, 8, 1, 128)
	halves := func() []*contract.Slice {
		return []*contract.Slice{{Len: 64, Count: 1}, {Len: 64, Count: 1, SrcPage: 1, DstOff: 64}}
	}
	for _, tc := range []struct {
		name     string
		m        *contract.PlanAdd
		repage   bool
		want     string
		unserved bool
	}{
		{"good", &contract.PlanAdd{SrcPages: 2, DstPages: 1, Slices: halves()}, true, "", false},
		{"without the feature", &contract.PlanAdd{SrcPages: 2, DstPages: 1, Slices: halves()}, false, "needs feature repage", true},
		{"no pages", &contract.PlanAdd{SrcPages: 0, DstPages: 1, Slices: halves()}, true, "each is from 1 to 4096", false},
		{"too many pages", &contract.PlanAdd{SrcPages: 1, DstPages: 4097, Slices: halves()}, true, "each is from 1 to 4096", false},
		{"page outside the group", &contract.PlanAdd{SrcPages: 1, DstPages: 1, Slices: halves()}, false, "slices[1]: src_page 1, dst_page 0; the groups have 1 and 1 pages", false},
		{"destination page outside the group", &contract.PlanAdd{SrcPages: 2, DstPages: 1, Slices: []*contract.Slice{{Len: 8, Count: 1, DstPage: 1}}}, true, "dst_page 1; the groups have 2 and 1 pages", false},
	} {
		_, err := newPlan(tc.m, src, dst, tc.repage)
		switch {
		case tc.want == "" && err != nil, tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		case (causeOf(err, 0) == contract.Cause_CAUSE_UNSUPPORTED) != tc.unserved:
			t.Errorf("%s: cause %v", tc.name, causeOf(err, 0))
		}
	}
}
