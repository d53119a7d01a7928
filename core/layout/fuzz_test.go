package layout

import (
	"encoding/binary"
	"slices"
	"testing"
)

// FuzzRuns: whatever page ids a worker names, their runs describe them exactly; and whatever runs a
// peer names, those that pass Check stay inside the pool, however they are cut.
func FuzzRuns(f *testing.F) {
	ids := func(list ...int32) (b []byte) {
		for _, id := range list {
			b = binary.LittleEndian.AppendUint32(b, uint32(id))
		}
		return b
	}
	f.Add(ids(1, 2, 3, 9, 10, 4, 4), int32(11), int64(1), int64(3))
	f.Add(ids(0, 1<<31-1, -1, -1<<31), int32(1<<31-1), int64(0), int64(4))
	f.Add(ids(5, 1, 3, 0, 4, 2), int32(6), int64(2), int64(9))
	f.Fuzz(func(t *testing.T, b []byte, pages int32, from, n int64) {
		b = b[:min(len(b), 4*600)]
		var list []int32
		for ; len(b) >= 4; b = b[4:] {
			list = append(list, int32(binary.LittleEndian.Uint32(b)))
		}
		runs := AppendIDs(nil, list)
		if got := Pages(runs); got != int64(len(list)) {
			t.Fatalf("%d pages of %d", got, len(list))
		}
		inside := !slices.ContainsFunc(list, func(id int32) bool { return id < 0 || id >= pages })
		if err := Check(runs, pages); (err == nil) != inside {
			t.Fatalf("ids inside %d pages: %v; Check: %v (%v)", pages, inside, err, runs)
		}
		if inside && !slices.Equal(expand(runs), list) {
			t.Fatalf("%v became %v", list, runs)
		}
		// The same numbers as runs of a peer.
		var theirs []Run
		for ; len(list) >= 3; list = list[3:] {
			theirs = append(theirs, Run{list[0], list[1], list[2]})
		}
		if Check(theirs, pages) != nil {
			return
		}
		from, n = max(from, 0), max(n, 0)
		all := Pages(theirs)
		cut := Cut(nil, theirs, from, n)
		if err := Check(cut, pages); err != nil {
			t.Fatalf("cut of good runs: %v", err)
		}
		if want := min(n, max(0, all-from)); Pages(cut) != want {
			t.Fatalf("cut [%d, +%d) of %d pages has %d, want %d", from, n, all, Pages(cut), want)
		}
	})
}
