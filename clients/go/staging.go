package client

import (
	"context"
	"fmt"
	"sync"
)

// Staging is a pool of shared pages beside memory that cannot be shared: the worker copies pages in
// before Send, or out after Success. Its pool has the user's tensors in the same order, packed.
type Staging struct {
	region  *Region
	pool    int
	pages   int
	tensors []StagedTensor
	offsets []int64 // of each tensor in the region

	mu   sync.Mutex
	free []int32
	used []bool
}

// StagedTensor is one tensor in the user's own memory: page i occupies
// Mem[i*PageStride : i*PageStride+PageBytes].
type StagedTensor struct {
	Mem        []byte
	PageStride int64 // 0: PageBytes
	PageBytes  int64
	Layer      int
}

// NewStaging creates a region for pages pages of all tensors and a pool over it.
func (c *Client) NewStaging(ctx context.Context, pages int, tensors []StagedTensor) (*Staging, error) {
	if pages < 1 || len(tensors) == 0 {
		return nil, fmt.Errorf("staging of %d pages and %d tensors: at least one of each is needed", pages, len(tensors))
	}
	s := &Staging{pages: pages, tensors: append([]StagedTensor(nil), tensors...), used: make([]bool, pages)}
	size := int64(0)
	for i := range s.tensors {
		t := &s.tensors[i]
		if t.PageStride == 0 {
			t.PageStride = t.PageBytes
		}
		if t.PageBytes < 1 || t.PageStride < t.PageBytes {
			return nil, fmt.Errorf("staging: tensor %d: page of %d bytes at stride %d", i, t.PageBytes, t.PageStride)
		}
		s.offsets = append(s.offsets, size)
		size += (int64(pages)*t.PageBytes + 63) &^ 63
	}
	r, err := c.CreateRegion(ctx, size+64) // the canary stands behind the pages
	if err != nil {
		return nil, fmt.Errorf("staging: %w", err)
	}
	p := Pool{Pages: pages}
	for i, t := range s.tensors {
		p.Tensors = append(p.Tensors, Tensor{Region: r, Offset: s.offsets[i], PageStride: t.PageBytes, PageBytes: t.PageBytes, Layer: t.Layer})
	}
	s.pool, err = c.AddPool(ctx, p)
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("staging: %w", err)
	}
	s.region = r
	for i := pages - 1; i >= 0; i-- {
		s.free = append(s.free, int32(i))
	}
	return s, nil
}

// Pool returns the number by which parts name the staging pages.
func (s *Staging) Pool() int { return s.pool }

// Region returns the shared memory under the staging pages.
func (s *Staging) Region() *Region { return s.region }

// Free returns how many pages are free.
func (s *Staging) Free() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.free)
}

// Get takes n staging pages, all or none (ErrNoPages).
func (s *Staging) Get(n int) ([]int32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > len(s.free) {
		return nil, fmt.Errorf("%w: %d wanted, %d of %d free", ErrNoPages, n, len(s.free), s.pages)
	}
	at := len(s.free) - n
	ids := append([]int32(nil), s.free[at:]...)
	s.free = s.free[:at]
	for _, id := range ids {
		s.used[id] = true
	}
	return ids, nil
}

// Put gives staging pages back. Only pages of rooms that are reusable may come back.
func (s *Staging) Put(ids []int32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if id < 0 || int(id) >= s.pages || !s.used[id] {
			return fmt.Errorf("staging page %d was not taken", id)
		}
		s.used[id] = false
		s.free = append(s.free, id)
	}
	return nil
}

// CopyIn copies user pages into staging pages, pairwise, every tensor.
func (s *Staging) CopyIn(staging, user []int32) error {
	return s.each(staging, user, func(shared, own []byte) { copy(shared, own) })
}

// CopyOut copies staging pages into user pages, pairwise, every tensor.
func (s *Staging) CopyOut(user, staging []int32) error {
	return s.each(staging, user, func(shared, own []byte) { copy(own, shared) })
}

func (s *Staging) each(staging, user []int32, do func(shared, own []byte)) error {
	if len(staging) != len(user) {
		return fmt.Errorf("staging: %d pages for %d", len(staging), len(user))
	}
	for i, id := range staging {
		if id < 0 || int(id) >= s.pages {
			return fmt.Errorf("staging page %d is outside the pool of %d pages", id, s.pages)
		}
		for k, t := range s.tensors {
			if at := int64(user[i]) * t.PageStride; user[i] < 0 || at+t.PageBytes > int64(len(t.Mem)) {
				return fmt.Errorf("page %d is outside tensor %d of %d bytes", user[i], k, len(t.Mem))
			}
		}
	}
	mem := s.region.Bytes()
	for k, t := range s.tensors {
		for i, id := range staging {
			a := s.offsets[k] + int64(id)*t.PageBytes
			b := int64(user[i]) * t.PageStride
			do(mem[a:a+t.PageBytes], t.Mem[b:b+t.PageBytes])
		}
	}
	return nil
}
