// Package layout maps the KV-cache layout of one group onto that of another: which slice of a source
// page goes to which slice of a destination page. It is pure: no I/O, no clock, no state.
package layout

import "fmt"

// Run is Count pages of one pool: Start, Start+Stride, Start+2*Stride, … Stride is 1 for consecutive
// pages and never 0.
type Run struct {
	Start, Count, Stride int32
}

// Pages returns the number of pages in runs.
func Pages(runs []Run) int64 {
	var n int64
	for _, r := range runs {
		n += int64(r.Count)
	}
	return n
}

// Check reports the first run that is malformed or names a page outside [0, pages).
func Check(runs []Run, pages int32) error {
	for i, r := range runs {
		if r.Count < 1 || r.Stride < 1 || r.Start < 0 {
			return fmt.Errorf("run %d: start %d, count %d, stride %d: start must be at least 0, count and stride at least 1", i, r.Start, r.Count, r.Stride)
		}
		if last := int64(r.Start) + int64(r.Count-1)*int64(r.Stride); last >= int64(pages) {
			return fmt.Errorf("run %d: page %d is outside the pool of %d pages", i, last, pages)
		}
	}
	return nil
}

// AppendIDs appends page ids to runs, merging equally spaced neighbours. Ids must be checked by the
// caller or afterwards with Check.
func AppendIDs(runs []Run, ids []int32) []Run {
	for _, id := range ids {
		if n := len(runs); n > 0 {
			r := &runs[n-1]
			switch {
			case r.Count == 1 && id > r.Start:
				// A pair of pages can start a strided run, but joining two unrelated pages would
				// cost the next run its first page; only close neighbours are joined.
				if d := id - r.Start; d == 1 {
					r.Stride, r.Count = d, 2
					continue
				}
			case r.Count > 1 && id == r.Start+r.Count*r.Stride:
				r.Count++
				continue
			}
		}
		runs = append(runs, Run{Start: id, Count: 1, Stride: 1})
	}
	return runs
}

// Cut appends to dst the pages [from, from+n) of the sequence that runs describes.
func Cut(dst, runs []Run, from, n int64) []Run {
	for _, r := range runs {
		if n == 0 {
			break
		}
		c := int64(r.Count)
		if from >= c {
			from -= c
			continue
		}
		take := min(c-from, n)
		dst = append(dst, Run{Start: r.Start + int32(from)*r.Stride, Count: int32(take), Stride: r.Stride})
		n -= take
		from = 0
	}
	return dst
}
