package sim

import "github.com/terminus-kv/terminus/core/statemachine"

// memory is the pages of one worker process. It outlives the process as long as an engine holds it.
type memory struct {
	page  []page
	cell  []tag   // of all pages
	cells int32   // of a page
	free  []int32 // the one freed last is taken first: reuse comes at once
	wait  []int32 // lives that want pages
	freed bool    // nobody holds it any more
}

type page struct {
	owner int32 // life plus one; 0: free
}

// of is the cells of a page.
func (m *memory) of(page int32) []tag { return m.cell[page*m.cells:][:m.cells] }

func (w *world) newMemory(cells int32) int32 {
	at := int32(len(w.mems))
	if int(at) < cap(w.mems) {
		w.mems = w.mems[:at+1]
	} else {
		w.mems = append(w.mems, memory{})
	}
	m := &w.mems[at]
	n := int(w.plan.pages)
	if cap(m.page) < n {
		m.page = make([]page, n)
	}
	m.page, m.free, m.wait, m.freed = m.page[:n], m.free[:0], m.wait[:0], false
	clear(m.page)
	if m.cells = cells; cap(m.cell) < n*int(cells) {
		m.cell = make([]tag, n*int(cells))
	}
	m.cell = m.cell[:n*int(cells)]
	clear(m.cell)
	for i := n - 1; i >= 0; i-- {
		m.free = append(m.free, int32(i))
	}
	return at
}

// take gives a life n pages, or none.
func (w *world) take(at int32, n int) bool {
	l := &w.lives[at]
	m := &w.mems[l.mem]
	if len(m.free) < n {
		m.wait = append(m.wait, at)
		return false
	}
	for range n {
		p := m.free[len(m.free)-1]
		m.free = m.free[:len(m.free)-1]
		m.page[p].owner = at + 1
		l.pages = append(l.pages, p)
	}
	return true
}

// give takes the pages of a life back: from here on they may be somebody else's.
func (w *world) give(at int32) {
	l := &w.lives[at]
	if len(l.pages) == 0 {
		return
	}
	w.untouched(at, statemachine.Released)
	m := &w.mems[l.mem]
	for _, p := range l.pages {
		m.page[p].owner = 0
		m.free = append(m.free, p)
	}
	l.pages = l.pages[:0]
	for _, waits := range m.wait {
		w.wakeLife(waits, int64(1))
	}
	m.wait = m.wait[:0]
}

// untouched holds that no op can touch the pages of a life any more, now that they are said to be at rest.
func (w *world) untouched(at int32, said statemachine.Residency) {
	l := &w.lives[at]
	for i := range w.ops {
		o := &w.ops[i]
		if o.d == l.own && o.dstMem == l.mem && o.mayLand(w) {
			w.violate(Memory, "pages of %s are %s while op %d may still write to them", w.openerText(l.own), said, i)
		}
		if o.s == l.own && o.srcMem == l.mem && o.mayRead() {
			w.violate(Memory, "pages of %s are %s while op %d may still read them", w.openerText(l.own), said, i)
		}
	}
}

// land writes the next page of an op, if anything lets it.
func (w *world) land(o *op) {
	k := o.landed
	o.landed++
	switch {
	case o.cut || w.sealed[o.d]:
		if o.state != opRuns {
			w.total.refused++
		}
		return
	case o.state != opRuns:
		w.total.late++
	}
	src, dst := &w.mems[o.srcMem], &w.mems[o.dstMem]
	from, to := &src.page[o.from[k]], &dst.page[o.to[k]]
	cells := src.of(o.from[k])
	if o.read != nil {
		cells = o.read[k*src.cells:][:src.cells]
	} else if from.owner == 0 || w.lives[from.owner-1].own != o.s {
		w.violate(Memory, "an op of %s reads page %d, which it does not own any more", w.openerText(o.s), o.from[k])
	}
	if to.owner == 0 {
		w.violate(Memory, "a write for %s lands on page %d, which is free", w.openerText(o.d), o.to[k])
	} else if l := &w.lives[to.owner-1]; l.own != o.d {
		w.violate(Memory, "a write for %s lands on page %d, which is %s's", w.openerText(o.d), o.to[k], w.openerText(l.own))
	}
	w.copyPage(o, cells, dst.of(o.to[k]))
}
