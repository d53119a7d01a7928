package core

// nil32 is the index of nothing.
const nil32 = int32(-1)

// slab is a pool of records addressed by index: the collector does not scan those without pointers, and
// a copy of it is a copy of the state. The records lie in pages, so that growing copies nothing and
// leaves no slack; only the first page grows by and by, for machines that hold little.
type slab[T any] struct {
	pages [][]T
	free  []int32
}

const (
	slabShift = 12
	slabPage  = 1 << slabShift
)

// alloc returns the index of a zero record. Pointers into the slab are invalid afterwards.
func (s *slab[T]) alloc() int32 {
	if n := len(s.free); n > 0 {
		i := s.free[n-1]
		s.free = s.free[:n-1]
		return i
	}
	last := len(s.pages) - 1
	switch {
	case last < 0:
		s.pages = append(s.pages, nil)
		last = 0
	case len(s.pages[last]) == slabPage:
		s.pages = append(s.pages, make([]T, 0, slabPage))
		last++
	}
	var zero T
	s.pages[last] = append(s.pages[last], zero)
	return int32(last<<slabShift + len(s.pages[last]) - 1)
}

// add stores v and returns its index. Pointers into the slab are invalid afterwards.
func (s *slab[T]) add(v T) int32 {
	i := s.alloc()
	*s.at(i) = v
	return i
}

func (s *slab[T]) at(i int32) *T { return &s.pages[i>>slabShift][i&(slabPage-1)] }

// del returns the index to the pool.
func (s *slab[T]) del(i int32) {
	var zero T
	*s.at(i) = zero
	s.free = append(s.free, i)
}

// len is one more than the highest index ever used.
func (s *slab[T]) len() int {
	n := len(s.pages)
	if n == 0 {
		return 0
	}
	return (n-1)<<slabShift + len(s.pages[n-1])
}

// used is the number of records in use.
func (s *slab[T]) used() int { return s.len() - len(s.free) }

// emptied is a slab without records that takes over the memory of this one's first page.
func (s *slab[T]) emptied() slab[T] {
	if len(s.pages) == 0 {
		return slab[T]{}
	}
	clear(s.pages[0]) // what records point to is let go
	s.pages[0] = s.pages[0][:0]
	return slab[T]{pages: s.pages[:1:1], free: s.free[:0]}
}

func (s *slab[T]) clone() slab[T] {
	c := slab[T]{free: append([]int32(nil), s.free...)}
	if len(s.pages) > 0 {
		c.pages = make([][]T, len(s.pages))
	}
	for i, p := range s.pages {
		c.pages[i] = append(make([]T, 0, len(p)), p...)
	}
	return c
}
