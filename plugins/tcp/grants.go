package tcp

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/terminus-kv/terminus/plugins/sdk"
)

// openers says which destination openers may be written. An opener that is not in it is refused, so
// forgetting one is a refusal for good; past keeps the last ones only to catch a host that would grant
// one again.
type openers struct {
	mu   sync.Mutex
	live map[sdk.Opener]*opener
	past map[sdk.Opener]struct{}
	ring []sdk.Opener
	next int
}

// opener is one destination opener and its pages.
type opener struct {
	revoked atomic.Bool
	grants  atomic.Pointer[[]*sdk.Grant] // replaced, never changed
}

func (t *openers) grant(g *sdk.Grant) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := g.Destination
	if _, ok := t.past[d]; ok {
		return fmt.Errorf("opener %d/%d was revoked; a new attempt needs a new opener", d.Incarnation, d.Sequence)
	}
	o := t.live[d]
	if o == nil {
		if t.live == nil {
			t.live = map[sdk.Opener]*opener{}
		}
		o = &opener{}
		t.live[d] = o
	}
	var all []*sdk.Grant
	if old := o.grants.Load(); old != nil {
		all = append(all, *old...)
	}
	all = append(all, g)
	o.grants.Store(&all)
	return nil
}

// revoke forgets d for good. A slice that has already been checked may still land; the caller passes
// the barrier.
func (t *openers) revoke(d sdk.Opener) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if o := t.live[d]; o != nil {
		o.revoked.Store(true)
		delete(t.live, d)
	}
	if _, ok := t.past[d]; ok {
		return
	}
	if t.past == nil {
		t.past = map[sdk.Opener]struct{}{}
	}
	if len(t.ring) < maxPastOpener {
		t.ring = append(t.ring, d)
	} else {
		delete(t.past, t.ring[t.next])
		t.ring[t.next] = d
		t.next = (t.next + 1) % maxPastOpener
	}
	t.past[d] = struct{}{}
}

// find returns the opener, nil when it is not granted.
func (t *openers) find(d sdk.Opener) *opener {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.live[d]
}

// admits tells whether writers of the node may write any page of the opener.
func (o *opener) admits(node string) bool {
	return slices.ContainsFunc(*o.grants.Load(), func(g *sdk.Grant) bool { return g.Admits(node) })
}

// covers tells whether every byte of [off, off+n) of the region belongs to a page that is granted to the
// node. hint holds the number of the tensor that fitted last time; neighbouring copies mostly stay in one.
func (o *opener) covers(node string, region, off, n uint64, hint *int) bool {
	grants := o.grants.Load()
	for n > 0 {
		took := uint64(0)
		for _, g := range *grants {
			if !g.Admits(node) {
				continue
			}
			for i := range g.Parts {
				if took = covered(&g.Parts[i], region, off, n, hint); took > 0 {
					break
				}
			}
			if took > 0 {
				break
			}
		}
		if took == 0 {
			return false
		}
		off, n = off+took, n-took
	}
	return true
}

// covered returns how many of the n bytes from off lie in granted pages of one tensor of the part.
func covered(part *sdk.GrantPart, region, off, n uint64, hint *int) uint64 {
	tensors := part.Pool.Tensors
	for i := range tensors {
		j := *hint + i
		if j >= len(tensors) {
			if j -= len(tensors); j >= len(tensors) { // the hint is another pool's
				j, *hint = 0, 0
			}
		}
		t := &tensors[j]
		if t.RegionID != region || off < t.Offset || t.PageStride == 0 {
			continue
		}
		page, in := (off-t.Offset)/t.PageStride, (off-t.Offset)%t.PageStride
		var took uint64
		for in < t.PageBytes && page < uint64(part.Pool.Pages) && part.Pages.Contains(uint32(page)) {
			took += min(t.PageBytes-in, n-took)
			if took == n || t.PageStride != t.PageBytes {
				break
			}
			page, in = page+1, 0
		}
		if took > 0 {
			*hint = j
			return took
		}
	}
	return 0
}
