package core

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/terminus-kv/terminus/core/layout"
)

// TestSlab: an index is in use by one record at a time, and a clone is independent.
func TestSlab(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s slab[int]
		held := map[int32]int{}
		for i := range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(held) > 0 && rapid.Bool().Draw(t, "del") {
				var keys []int32
				for k := range held {
					keys = append(keys, k)
				}
				slices.Sort(keys)
				k := rapid.SampledFrom(keys).Draw(t, "index")
				s.del(k)
				delete(held, k)
				continue
			}
			k := s.add(i + 1)
			if _, used := held[k]; used {
				t.Fatalf("index %d is in use", k)
			}
			held[k] = i + 1
		}
		c := s.clone()
		s.add(-1)
		for k, v := range held {
			*s.at(k) = 0
			if *c.at(k) != v {
				t.Fatalf("clone: %d at %d, want %d", *c.at(k), k, v)
			}
		}
		if c.used() != len(held) {
			t.Fatalf("%d used, want %d", c.used(), len(held))
		}
	})
}

func expand(runs []layout.Run) []int32 {
	var ids []int32
	for _, r := range runs {
		for i := range r.Count {
			ids = append(ids, r.Start+i*r.Stride)
		}
	}
	return ids
}

// TestStoredRuns: a page list goes in and comes out unchanged, any piece of it can be cut with a bound
// on runs, and nothing is left behind.
func TestStoredRuns(t *testing.T) {
	m := &Machine{}
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.Int32Range(0, 40), 0, 40).Draw(t, "ids")
		runs := layout.AppendIDs(nil, ids)
		head := m.putRuns(runs)
		if got := m.getRuns(nil, head); !slices.Equal(got, runs) {
			t.Fatalf("%v came back as %v", runs, got)
		}
		from := rapid.Int32Range(0, int32(len(ids))).Draw(t, "from")
		n := rapid.Int32Range(0, int32(len(ids))-from).Draw(t, "n")
		limit := rapid.Int32Range(1, 5).Draw(t, "limit")
		step := rapid.SampledFrom([]int32{1, 1, 2, 3, 7}).Draw(t, "step")
		n = min(n, (int32(len(ids))-from+step-1)/step)
		got, took := m.cut(nil, head, from, step, n, limit)
		if len(got) > int(limit) || took > n || (took < n && len(got) < int(limit)) || (n > 0 && took == 0) {
			t.Fatalf("cut(%d, %d, %d, %d) took %d pages in %d runs", from, step, n, limit, took, len(got))
		}
		var want []int32
		for i := range took {
			want = append(want, ids[from+i*step])
		}
		if !slices.Equal(expand(got), want) {
			t.Fatalf("cut %v, want %v", expand(got), want)
		}
		m.freeRuns(head)
		if m.runs.used() != 0 {
			t.Fatalf("%d blocks are left", m.runs.used())
		}
	})
}
