package demo

// blockKey names a block of shared prefix: the room that computed it and its place in the prompt.
type blockKey struct {
	owner int64
	block int
}

// cached is a block in the decode worker's prefix cache.
type cached struct {
	pages []int32
	refs  int    // rooms that use it now
	used  uint64 // when it was used last; the oldest is evicted first
}

// prefixCache keeps the pages of blocks that later rooms share. It holds pages of the allocator and
// gives them back when the allocator runs short.
type prefixCache struct {
	alloc  *allocator
	blocks map[blockKey]*cached
	clock  uint64
}

func newPrefixCache(a *allocator) *prefixCache {
	return &prefixCache{alloc: a, blocks: make(map[blockKey]*cached)}
}

// use returns the block's pages and holds them until drop; nil if the block is not cached.
func (c *prefixCache) use(k blockKey) []int32 {
	b := c.blocks[k]
	if b == nil {
		return nil
	}
	c.clock++
	b.refs++
	b.used = c.clock
	return b.pages
}

// put adds a block that one room holds; false if there is one already, then the pages stay the room's.
func (c *prefixCache) put(k blockKey, pages []int32) bool {
	if c.blocks[k] != nil {
		return false
	}
	c.clock++
	c.blocks[k] = &cached{pages: pages, refs: 1, used: c.clock}
	return true
}

// drop ends one use of the block.
func (c *prefixCache) drop(k blockKey) { c.blocks[k].refs-- }

// shrink gives back the pages of blocks that nobody uses, oldest first, until the allocator has want.
func (c *prefixCache) shrink(want int) error {
	for c.alloc.available() < want {
		var oldest blockKey
		var found *cached
		for k, b := range c.blocks {
			if b.refs == 0 && (found == nil || b.used < found.used) {
				oldest, found = k, b
			}
		}
		if found == nil {
			return nil
		}
		delete(c.blocks, oldest)
		if err := c.alloc.give(found.pages); err != nil {
			return err
		}
	}
	return nil
}

// flush gives back everything that nobody uses.
func (c *prefixCache) flush() error { return c.shrink(c.alloc.mem.pages + 1) }
