package layout

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func expand(runs []Run) []int32 {
	var ids []int32
	for _, r := range runs {
		for i := range r.Count {
			ids = append(ids, r.Start+i*r.Stride)
		}
	}
	return ids
}

// TestAppendIDs: runs describe exactly the ids, in order, whatever they are and however they come; and
// consecutive pages make one run.
func TestAppendIDs(t *testing.T) {
	if got := AppendIDs(nil, []int32{4, 5, 6, 7}); len(got) != 1 {
		t.Errorf("consecutive pages make %v", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.OneOf(rapid.Int32Range(0, 9), rapid.Int32Range(0, 1<<30)), 0, 50).Draw(t, "ids")
		k := rapid.IntRange(0, len(ids)).Draw(t, "k")
		runs := AppendIDs(AppendIDs(nil, ids[:k]), ids[k:])
		if got := expand(runs); !slices.Equal(got, ids) {
			t.Fatalf("%v became %v", ids, got)
		}
		if Pages(runs) != int64(len(ids)) {
			t.Fatalf("%d pages, want %d", Pages(runs), len(ids))
		}
		if err := Check(runs, 1<<30+1); err != nil {
			t.Fatal(err)
		}
		from := rapid.Int64Range(0, int64(len(ids))).Draw(t, "from")
		n := rapid.Int64Range(0, int64(len(ids))-from).Draw(t, "n")
		if got := expand(Cut(nil, runs, from, n)); !slices.Equal(got, ids[from:from+n]) {
			t.Fatalf("cut [%d, +%d) is %v", from, n, got)
		}
	})
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		r    Run
		want string // part of the error; empty: none
	}{
		{Run{0, 10, 1}, ""}, {Run{9, 1, 1 << 30}, ""}, {Run{1, 3, 4}, ""},
		{Run{0, 11, 1}, "page 10"}, {Run{-1, 2, 1}, "start -1"}, {Run{0, 0, 1}, "count 0"}, {Run{0, 2, 0}, "stride 0"},
		{Run{0, -5, 1}, "count -5"}, {Run{5, 2, -1}, "stride -1"},
		{Run{1<<31 - 1, 1<<31 - 1, 1<<31 - 1}, "outside the pool"}, // no overflow on the way
	} {
		err := Check([]Run{{0, 1, 1}, c.r}, 10)
		switch {
		case (err == nil) != (c.want == ""):
			t.Errorf("%+v: %v", c.r, err)
		case err != nil && (!strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "run 1")):
			t.Errorf("%+v: %q does not name the run and %q", c.r, err, c.want)
		}
	}
}

// TestIdentity: the plan covers each byte of a destination page exactly once, and layer ranges add up.
func TestIdentity(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var ts []Tensor
		var total int64
		for i := range rapid.IntRange(0, 12).Draw(t, "tensors") {
			n := rapid.Int64Range(1, 1<<20).Draw(t, "bytes")
			ts = append(ts, Tensor{int32(i / 2), n})
			total += n
		}
		plan, err := Identity(ts, slices.Clone(ts))
		if err != nil {
			t.Fatal(err)
		}
		seen := map[int]bool{}
		for _, s := range plan {
			if seen[s.Dst] || s.SrcOff != 0 || s.DstOff != 0 || s.Len != ts[s.Dst].PageBytes || s.Src != s.Dst {
				t.Fatalf("%+v", plan)
			}
			seen[s.Dst] = true
		}
		if len(seen) != len(ts) {
			t.Fatalf("%d of %d tensors are covered", len(seen), len(ts))
		}
		cut := rapid.Int32Range(0, 6).Draw(t, "cut")
		if a, b := Bytes(plan, ts, 0, cut), Bytes(plan, ts, cut, 100); a+b != total {
			t.Fatalf("%d + %d of %d bytes", a, b, total)
		}
		if len(ts) > 0 {
			other := slices.Clone(ts)
			i := rapid.IntRange(0, len(ts)-1).Draw(t, "i")
			other[i].PageBytes++
			var m *Mismatch
			if _, err := Identity(ts, other); !errors.As(err, &m) || !strings.HasPrefix(m.Field, "tensors[") {
				t.Fatal(err)
			}
			if _, err := Identity(ts, ts[1:]); !errors.As(err, &m) || m.Field != "tensors" {
				t.Fatal(err)
			}
		}
	})
}
