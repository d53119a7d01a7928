package conformance

import (
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "transfer/one-page", Rule: "R1", Profile: TransferCore,
			Title: "one page arrives, whole and alone",
			Script: `
> regions, pools, peer, plan
> Submit of page 3 to page 5
< Accepted, Progress…, Done with the size of the page
= page 5 holds page 3 when Done arrives; nothing else has changed`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				p.Submit(Submit{Src: Pages(3, 1), Dst: Pages(5, 1)}).Done()
			},
		},
		Case{
			ID: "transfer/all-pages", Rule: "R1", Profile: TransferCore,
			Title: "a whole pool of several layers arrives in one op",
			Script: `
> Submit of 64 pages in 4 layers
< Accepted, Progress…, Done
= every page of every layer is there when Done arrives`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 64, PageBytes: 4096, Layers: 4, Gap: 128})
				p.Submit(Submit{Src: Pages(0, 64), Dst: Pages(0, 64)}).Done()
			},
		},
		Case{
			ID: "transfer/many-in-one-frame", Rule: "R1", Profile: TransferCore,
			Title: "every op of a frame with 64 ops is done",
			Script: `
> one frame with 64 Submits, each of one page to another place
< for each: Accepted, Progress…, Done
= every page is there`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 64, 4096)
				for _, op := range l.submitAll() {
					op.Done()
				}
			},
		},
		Case{
			ID: "transfer/both-directions", Rule: "R1", Profile: TransferCore,
			Title: "two plugins write to each other at the same time",
			Script: `
> A: 16 Submits to B; B: 16 Submits to A
< for each: Accepted, Progress…, Done
= every page is there, at both ends`,
			Run: func(t *T) {
				there, back := newLoad(t, t.A(), t.B(), 16, 128<<10), newLoad(t, t.B(), t.A(), 16, 128<<10)
				ops := append(there.submitAll(), back.submitAll()...)
				for _, op := range ops {
					op.Done()
				}
			},
		},
		Case{
			ID: "transfer/two-writers", Rule: "R12", Profile: TransferCore,
			Title: "two engines write to one at the same time, each into its own pages",
			Script: `
> A and C: 16 Submits each, to B
< for each: Accepted, Progress…, Done
= every page is there; no writer touched a page of the other`,
			Run: func(t *T) {
				c := transferThird(t)
				one, other := newLoad(t, t.A(), t.B(), 16, 128<<10), newLoad(t, c, t.B(), 16, 128<<10)
				ops := append(one.submitAll(), other.submitAll()...)
				for _, op := range ops {
					op.Done()
				}
			},
		},
		Case{
			ID: "transfer/fan-out", Rule: "R1", Profile: TransferCore,
			Title: "the same pages go to two engines at the same time",
			Script: `
> A: Submits of the same source pages to B and to C, in one frame
< for each: Accepted, Progress…, Done
= both have the pages; the source is untouched`,
			Run: func(t *T) {
				c := transferThird(t)
				pages := uint32(max(1, stormWindow(t, 32, 16<<10)/2))
				b := t.Path(Shape{Pages: pages, PageBytes: 16 << 10})
				other := t.Connect(t.A(), c, 0)
				other.SrcMem, other.Src = b.SrcMem, b.Src
				other.DstMem, other.Dst = c.pool(pages, 16<<10, 0, 1)
				other.Plan = other.AddPlan(other.Src, other.Dst, 1, 1, &contract.Slice{Len: 16 << 10, Count: 1})
				other.Grant(other.Generation.Destination, other.Dst, sdk.Run{Count: pages, Stride: 1})
				var ops []*Op
				for i := range pages {
					ops = append(ops, b.Submit(Submit{Src: Pages(i, 1), Dst: Pages(pages-1-i, 1)}), other.Submit(Submit{Src: Pages(i, 1), Dst: Pages(i, 1)}))
				}
				for _, op := range ops {
					op.Done()
				}
			},
		},
		Case{
			ID: "transfer/visible-at-done", Rule: "R4", Profile: TransferCore,
			Title: "at Done the bytes of this op are visible, not those of the one before",
			Script: `
> 24 rounds: the worker writes new bytes into 8 source pages; 8 Submits to the same 8 pages each time
< for each: Accepted, Progress…, Done
= the moment that Done is read, the page holds the bytes of this round`,
			Run: func(t *T) {
				const size = 4096
				pages := uint32(stormWindow(t, 8, size))
				p := t.Path(Shape{Pages: pages, PageBytes: size})
				fresh := make([]byte, size)
				last := make([]*Op, pages)
				for range 24 {
					for i := range pages {
						if last[i] != nil {
							last[i].Done()
						}
						fill(fresh, t.Rand())
						p.SrcMem.Rewrite(p.Src.Tensors[0].Offset+uint64(i)*size, fresh)
						last[i] = p.Submit(Submit{Src: Pages(i, 1), Dst: Pages(i, 1), Keep: true})
					}
				}
				for _, op := range last {
					op.Done()
				}
			},
		},
		Case{
			ID: "transfer/lane-as-announced", Rule: "R9", Profile: TransferCore,
			Title: "Done names the lane that the bytes took: a concrete one, and that of PeerReady if it named one",
			Script: `
> PeerAdd without a demand
< PeerReady with a lane
> Submits small and large
< Done with a lane
= the lane is concrete; if PeerReady named a concrete one, it is that one`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 64, PageBytes: 16 << 10})
				for _, n := range []uint32{1, 8, 64} {
					end := p.Submit(Submit{Src: Pages(0, n), Dst: Pages(0, n)}).Done()
					t.Check(end.Lane >= contract.Lane_LANE_RDMA && end.Lane <= contract.Lane_LANE_TCP, "R9", "Done with a concrete lane", "%v", end.Lane)
				}
			},
		},
		Case{
			ID: "transfer/trace-context", Rule: "R12", Profile: TransferCore,
			Title: "an op is served whatever its trace context is",
			Script: `
> Submits with a W3C traceparent, with 4 KiB of text, with characters of other scripts
< for each: Accepted, Done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				for i, trace := range []string{"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", strings.Repeat("x", 4096), "Ω\x00\n%s"} {
					p.Submit(Submit{Src: Pages(uint32(i), 1), Dst: Pages(uint32(i), 1), Trace: trace}).Done()
				}
			},
		},
		Case{
			ID: "transfer/priorities", Rule: "R1", Profile: TransferCore,
			Title: "priority orders ops, it starves none",
			Script: `
> one frame of 32 Submits with priorities from the lowest to the highest number there is
< for each: Accepted, Progress…, Done`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 64<<10)
				priorities := []int32{0, -1, 1, 1<<31 - 1, -1 << 31}
				for _, op := range l.submitAll(func(i int, s *Submit) { s.Priority = priorities[i%len(priorities)] }) {
					op.Done()
				}
			},
		},
		Case{
			ID: "deadline/is-a-hint", Rule: "R5", Profile: TransferCore,
			Title:    "an op is not failed because its deadline has passed: the host judges",
			Incident: "sglang#32267: completion and deadline fell into one poll, and the deadline won",
			Script: `
> Submits with deadline_ns of 1, of 1 ms and of 2^64-1
< for each: Accepted, Progress…, Done
= none is failed, skipped or aborted for being late`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 24, 128<<10)
				deadlines := []time.Duration{1, time.Millisecond, -1} // -1 is 2^64-1 on the wire
				for _, op := range l.submitAll(func(i int, s *Submit) { s.Deadline = deadlines[i%len(deadlines)] }) {
					op.Done()
				}
			},
		},
		Case{
			ID: "progress/counts-bytes", Rule: "R9", Profile: TransferCore, Needs: []string{sdk.FeatureByteProgress},
			Title: "a large op reports bytes between 0 and its size",
			Script: `
> up to 4 Submits of 16 MiB, one after the other
< Accepted, Progress…, Done
= one of them, at least, reported a count above 0 and below its size`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 1, 16<<20)
				if l.size() < 4<<20 {
					t.Unsupported("the plugin takes ops of at most %d bytes; too small to see progress", l.size())
				}
				for range 4 {
					op := l.submit(0)
					op.Done()
					if b := op.FirstProgress(); b > 0 && b < op.Size {
						return
					}
				}
				t.Fail("R9", "Progress between 0 and the size, byte_progress being declared", "none in 4 ops of %d bytes", l.size())
			},
		},
		Case{
			ID: "skip/empty-range", Rule: "R1", Profile: TransferCore, Needs: []string{sdk.FeatureLayerRange},
			Title:    "an op whose layers hold nothing ends, as Done with 0 bytes",
			Incident: "sglang#36707: a chunk that was skipped took the count of outstanding writes with it",
			Script: `
> Submit of layers in which the plan has no tensor: 0 bytes
< Accepted, then Done(bytes=0), or Skipped(CAUSE_EMPTY)`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096, Layers: 2})
				end := p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4), LayerFrom: 7, LayerTo: 9}).Quiet()
				t.Check(end.Kind == "done" || end.Kind == "skipped" && end.Cause == contract.Cause_CAUSE_EMPTY, "R1",
					"Done with 0 bytes, or Skipped(CAUSE_EMPTY)", "%s", end)
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
			},
		},
		Case{
			ID: "skip/no-pages", Rule: "R1", Profile: TransferCore,
			Title: "an op without any page ends",
			Script: `
> one frame: Submit of a page, Submit without runs (0 bytes), Submit of a page
< for the one without: Accepted, then Done(bytes=0), Skipped(CAUSE_EMPTY) or Failed(CAUSE_PROTOCOL)
= the others are done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				ops := p.SubmitAll([]Submit{{Src: Pages(0, 1), Dst: Pages(0, 1)}, {}, {Src: Pages(1, 1), Dst: Pages(1, 1)}})
				end := ops[1].Quiet()
				t.Check(end.Kind == "done" || end.Kind == "skipped" && end.Cause == contract.Cause_CAUSE_EMPTY ||
					end.Kind == "failed" && end.Cause == contract.Cause_CAUSE_PROTOCOL, "R1",
					"Done with 0 bytes, Skipped(CAUSE_EMPTY) or Failed(CAUSE_PROTOCOL)", "%s", end)
				ops[0].Done()
				ops[2].Done()
			},
		},
		Case{
			ID: "skip/draining", Rule: "R1", Profile: TransferCore, Fresh: true,
			Title: "a plugin that drains says so of every new op",
			Script: `
> Drain
< Drained(open_ops=0)
> 8 Submits
< for each: Accepted, then Skipped(CAUSE_SHUTDOWN, quiet=true)
= no byte moves`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
				left := t.A().Drain(time.Minute)
				t.Check(left == 0, "R1", "Drained(open_ops=0), nothing being open", "open_ops=%d", left)
				var list []Submit
				for i := range uint32(8) {
					list = append(list, Submit{Src: Pages(i, 1), Dst: Pages(i, 1), Change: lands(nothing)})
				}
				for _, op := range p.SubmitAll(list) {
					end := op.Quiet()
					t.Check(end.Kind == "skipped" && end.Cause == contract.Cause_CAUSE_SHUTDOWN && end.Quiet, "R1", "Skipped(CAUSE_SHUTDOWN, quiet=true) of an op that came after Drain", "%s", end)
				}
			},
		},
	)
}

// lands is Submit.Change of an op whose bytes must not land: whatever of it does is found as a byte that
// nobody may write. change, if any, makes the op what it must not be.
func lands(change func(*contract.Submit)) func(*contract.Submit) {
	if change == nil {
		return func(*contract.Submit) {}
	}
	return change
}

// nothing is the argument of lands for an op that is right in itself.
var nothing func(*contract.Submit)

// transferThird starts a third engine.
func transferThird(t *T) *Node { return t.Launch(t.run.newNode(), 1_000_000+t.A().NewID(), 1) }

// load is a path with room for several ops, each with pages of its own.
type load struct {
	*Path
	count int
	per   uint32 // pages of an op
}

// newLoad makes a load of up to count ops of up to size bytes (a multiple of 4096), within the limits that
// the plugin declares, with pages for two at least.
func newLoad(t *T, from, to *Node, count int, size uint64) *load {
	return newLoadOf(t, from, to, count, size, Shape{})
}

// newLoadOf is newLoad with what s says but the pages.
func newLoadOf(t *T, from, to *Node, count int, size uint64, s Shape) *load {
	limits := from.Hello().GetLimits()
	if n := limits.GetMaxOpBytes(); n != 0 && n < size {
		size = max(n&^4095, 4096)
	}
	for _, n := range []uint32{limits.GetMaxOps(), limits.GetMaxOpsPerPeer()} {
		if n != 0 {
			count = min(count, int(n))
		}
	}
	if n := limits.GetMaxBytesPerPeer(); n != 0 {
		count = max(1, min(count, int(n/size)))
	}
	page := uint64(64 << 10)
	for size%page != 0 {
		page /= 2
	}
	l := &load{count: count, per: uint32(size / page)}
	s.Pages, s.PageBytes = uint32(max(count, 2))*l.per, page
	l.Path = t.PathBetween(from, to, s)
	return l
}

// size is that of one op.
func (l *load) size() uint64 { return uint64(l.per) * l.Src.Tensors[0].PageBytes }

// op is the i-th: its source pages come first to last, its destination last to first.
func (l *load) op(i int) Submit {
	return Submit{Src: Pages(uint32(i)*l.per, l.per), Dst: Pages(uint32(l.count-1-i)*l.per, l.per)}
}

func (l *load) submit(i int) *Op { return l.Submit(l.op(i)) }

// submitAll sends all ops in one frame, changed by change.
func (l *load) submitAll(change ...func(i int, s *Submit)) []*Op {
	var list []Submit
	for i := range l.count {
		s := l.op(i)
		for _, c := range change {
			c(i, &s)
		}
		list = append(list, s)
	}
	return l.SubmitAll(list)
}

// endedAs tells whether an end is one of kinds, each "done", "aborted" or "failed CAUSE…".
func endedAs(end End, kinds ...string) bool {
	return slices.ContainsFunc(kinds, func(k string) bool {
		kind, cause, some := strings.Cut(k, " ")
		return end.Kind == kind && (!some || end.Cause.String() == cause)
	})
}
