package core

// nil32 is the index of nothing.
const nil32 = int32(-1)

// slab is a pool of pointer-free records addressed by index: the collector never scans it and a copy
// of it is a copy of the state.
type slab[T any] struct {
	items []T
	free  []int32
}

// add stores v and returns its index. Pointers into the slab are invalid afterwards.
func (s *slab[T]) add(v T) int32 {
	if n := len(s.free); n > 0 {
		i := s.free[n-1]
		s.free = s.free[:n-1]
		s.items[i] = v
		return i
	}
	s.items = append(s.items, v)
	return int32(len(s.items) - 1)
}

func (s *slab[T]) at(i int32) *T { return &s.items[i] }

// del returns the index to the pool.
func (s *slab[T]) del(i int32) {
	var zero T
	s.items[i] = zero
	s.free = append(s.free, i)
}

// used is the number of records in use.
func (s *slab[T]) used() int { return len(s.items) - len(s.free) }

func (s *slab[T]) clone() slab[T] {
	return slab[T]{items: append([]T(nil), s.items...), free: append([]int32(nil), s.free...)}
}
