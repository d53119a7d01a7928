package explore

import "github.com/terminus-kv/terminus/core/statemachine"

// graph looks at the whole set of edges: whether a run can go on for ever, and whether two fresh
// attempts can always succeed.
func (x *explorer) graph(r *Result) {
	n := x.met.n
	x.offsets = append(x.offsets, uint64(len(x.edges)))
	// Kahn: without a cycle every state is removed once what leads to it is.
	in := make([]uint32, n)
	for _, to := range x.edges {
		in[to]++
	}
	var queue []uint32
	for i := range in {
		if in[i] == 0 {
			queue = append(queue, uint32(i))
		}
	}
	removed := 0
	for ; len(queue) > 0; removed++ {
		s := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		for _, to := range x.edges[x.offsets[s]:x.offsets[s+1]] {
			if in[to]--; in[to] == 0 {
				queue = append(queue, to)
			}
		}
	}
	r.Cyclic = removed < n

	// For each destination opener, the states from which its Success can be reached; backwards in
	// breadth-first order until nothing changes (one pass when there is no cycle and depth grows).
	can := make([]uint8, n)
	for i := range can {
		st := x.load(uint32(i))
		for k := range st.d {
			if st.d[k].end == endSuccess {
				can[i] |= 1 << k
			}
		}
	}
	for changed := true; changed; {
		changed = false
		for i := n - 1; i >= 0; i-- {
			c := can[i]
			for _, to := range x.edges[x.offsets[i]:x.offsets[i+1]] {
				c |= can[to]
			}
			if c != can[i] {
				can[i], changed = c, true
			}
		}
	}
	for i := range n {
		st := x.load(uint32(i))
		if k, ok := x.fresh(&st); ok {
			r.Fresh++
			if can[i]&(1<<k) == 0 {
				r.Stuck++
				if r.Trace == nil {
					r.Trace = x.trace(uint32(i))
				}
			}
		}
	}
}

// fresh reports whether both sides have a live open of the same attempt that has met no other.
func (x *explorer) fresh(st *state) (d int, ok bool) {
	for e := range x.Sources {
		for i := range x.Openers {
			s := x.record(st, e, &st.s[e][i])
			if s == nil || !s.state.Live() || st.s[e][i].flags&workerGone != 0 || s.state == statemachine.Committed {
				continue
			}
			for k := range x.Openers {
				q := x.record(st, x.Sources, &st.d[k])
				if q == nil || !q.state.Live() || st.d[k].flags&workerGone != 0 || st.d[k].attempt != st.s[e][i].attempt || x.room(i) != x.room(k) {
					continue
				}
				_, ps := x.resolve(st, s.pair)
				_, pd := x.resolve(st, q.pair)
				if (s.pair.IsZero() || int(ps) == k+1) && (q.pair.IsZero() || int(pd) == i+1) {
					return k, true
				}
			}
		}
	}
	return 0, false
}
