package core

import "github.com/terminus-kv/terminus/core/layout"

// bitmap marks pages of one destination pool that some room has armed: whoever writes to them is not
// proven quiet yet. It is what makes R4 hold against a worker's own allocator: pages that a write may
// still reach cannot be registered again.
type bitmap []uint64

// arm marks the pages of runs after the first skip ones. At the first page that is marked already it
// takes back what it marked and returns that page; -1 when there is none.
func (b *bitmap) arm(runs []layout.Run, skip, pages int32) int32 {
	if *b == nil {
		*b = make(bitmap, (pages+63)/64)
	}
	at := int32(0)
	for _, r := range runs {
		for i := int32(0); i < r.Count; i, at = i+1, at+1 {
			if at < skip {
				continue
			}
			p := r.Start + i*r.Stride
			if (*b)[p/64]&(1<<(p%64)) != 0 {
				b.disarm(runs, skip, at)
				return p
			}
			(*b)[p/64] |= 1 << (p % 64)
		}
	}
	return -1
}

// disarm clears the pages [skip, end) of the sequence that runs describes.
func (b bitmap) disarm(runs []layout.Run, skip, end int32) {
	at := int32(0)
	for _, r := range runs {
		for i := int32(0); i < r.Count; i, at = i+1, at+1 {
			if at >= end {
				return
			}
			if at >= skip {
				p := r.Start + i*r.Stride
				b[p/64] &^= 1 << (p % 64)
			}
		}
	}
}

// armPages marks the pages of a request's parts, all or none. It returns the part and the page that is
// armed already; part -1 when none is.
func (s *session) armPages(parts []Part) (part int, page int32) {
	for i := range parts {
		p := &parts[i]
		pl := &s.pools[p.Ordinal]
		if page := s.armed[p.Ordinal].arm(p.Runs, p.Prefix, pl.pages); page >= 0 {
			for j := range i {
				q := &parts[j]
				s.armed[q.Ordinal].disarm(q.Runs, q.Prefix, int32(layout.Pages(q.Runs)))
			}
			return i, page
		}
	}
	return -1, -1
}

// disarmRank clears the marks of a destination rank whose pages have become reusable.
func (m *Machine) disarmRank(r *room, k *rank) {
	k.marked = false
	if k.sess == nil32 {
		return
	}
	s := m.sessions.at(k.sess)
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		pt := m.parts.at(p)
		if pt.rank != k.rank {
			continue
		}
		m.scratch = m.getRuns(m.scratch[:0], pt.runs)
		s.armed[pt.ordinal].disarm(m.scratch, pt.prefix, pt.pages)
	}
}

// armedBy names a room of the session that has armed a page, for the refusal.
func (m *Machine) armedBy(s *session, ordinal, page int32) int64 {
	for _, i := range s.slots {
		if i == nil32 || !m.ranks.at(i).marked {
			continue
		}
		k := m.ranks.at(i)
		for p := m.rooms.at(k.room).dst; p != nil32; p = m.parts.at(p).next {
			pt := m.parts.at(p)
			if pt.rank != k.rank || int32(pt.ordinal) != ordinal {
				continue
			}
			for _, r := range m.getRuns(nil, pt.runs) {
				if d := page - r.Start; d >= 0 && d%r.Stride == 0 && d/r.Stride < r.Count {
					return m.rooms.at(k.room).id
				}
			}
		}
	}
	return -1
}
