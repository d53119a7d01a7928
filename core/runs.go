package core

import "github.com/terminus-kv/terminus/core/layout"

// runBlock is a piece of a stored page list.
type runBlock struct {
	n, next int32
	runs    [4]layout.Run
}

// putRuns stores a page list and returns its head.
func (m *Machine) putRuns(runs []layout.Run) int32 {
	head, tail := nil32, nil32
	for len(runs) > 0 {
		i := m.runs.alloc()
		b := m.runs.at(i)
		b.next, b.n = nil32, int32(copy(b.runs[:], runs))
		runs = runs[b.n:]
		if head == nil32 {
			head = i
		} else {
			m.runs.at(tail).next = i
		}
		tail = i
	}
	return head
}

func (m *Machine) freeRuns(head int32) {
	for head != nil32 {
		next := m.runs.at(head).next
		m.runs.del(head)
		head = next
	}
}

// getRuns appends a stored page list to dst.
func (m *Machine) getRuns(dst []layout.Run, head int32) []layout.Run {
	for ; head != nil32; head = m.runs.at(head).next {
		b := m.runs.at(head)
		dst = append(dst, b.runs[:b.n]...)
	}
	return dst
}

// cut appends to dst the pages from, from+step, … of a stored list, n of them, with at most maxRuns runs,
// and returns how many pages it took.
func (m *Machine) cut(dst []layout.Run, head int32, from, step, n, maxRuns int32) ([]layout.Run, int32) {
	var took int32
	for ; head != nil32 && n > 0 && maxRuns > 0; head = m.runs.at(head).next {
		b := m.runs.at(head)
		for _, r := range b.runs[:b.n] {
			if n == 0 || maxRuns == 0 {
				break
			}
			if from >= r.Count {
				from -= r.Count
				continue
			}
			take := min((r.Count-from-1)/step+1, n)
			run := layout.Run{Start: r.Start + from*r.Stride, Count: take, Stride: r.Stride}
			if step > 1 {
				if run.Stride = 1; take > 1 {
					run.Stride = r.Stride * step
				}
			}
			dst = append(dst, run)
			took += take
			n -= take
			maxRuns--
			from += take*step - r.Count
		}
	}
	return dst, took
}
