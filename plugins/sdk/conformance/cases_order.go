package conformance

import (
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "order/accepted-first", Rule: "R8", Profile: TransferCore,
			Title: "Accepted comes before all other events of an op",
			Script: `
> 32 Submits in one frame, then 32 in a frame each
< for each: Accepted, then the rest`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 4096)
				for _, op := range l.submitAll() {
					op.Accepted().Done()
				}
				for i := range l.count {
					l.submit(i).Accepted().Done()
				}
			},
		},
		Case{
			ID: "order/refused-is-accepted-first", Rule: "R8", Profile: TransferCore,
			Title: "Accepted comes first also of an op that is refused",
			Script: `
> one frame: 8 Submits of which every other names an unknown plan
< for each: Accepted first; then Done, or Failed(CAUSE_PROTOCOL)`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				var list []Submit
				for i := range uint32(8) {
					s := Submit{Src: Pages(i, 1), Dst: Pages(i, 1)}
					if i%2 == 1 {
						s.Change = func(m *contract.Submit) { m.Plan = 1 << 50 }
					}
					list = append(list, s)
				}
				for i, op := range p.SubmitAll(list) {
					op.Accepted()
					if i%2 == 0 {
						op.Done()
					} else {
						protoRefused(t, op, "plan", contract.Cause_CAUSE_PROTOCOL)
					}
				}
			},
		},
		Case{
			ID: "order/stats-is-a-barrier", Rule: "R8", Profile: TransferCore,
			Title: "Stats come behind all events of the submits before them",
			Script: `
> one frame: 32 Submits and StatsRequest; then an abort and StatsRequest, until all is over
< Stats
= Accepted of every op was there before; each op is listed unless its end and its quiet were there before`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 64<<10)
				n := t.A()
				for round := range 4 {
					var events []*contract.HostEvent
					var ops []*Op
					for i := range l.count {
						op, m := l.prepare(l.op(i))
						n.enter(op, m)
						ops = append(ops, op)
						events = append(events, &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}})
					}
					ids := []uint64{n.NewID()}
					events = append(events, orderStats(ids[0]))
					n.Send(events...)
					ops[t.Rand().IntN(len(ops))].Abort()
					for range round {
						ids = append(ids, n.NewID())
						n.Send(orderStats(ids[len(ids)-1]))
					}
					orderAnswers(t, n, ids, func(int) uint64 { return ops[len(ops)-1].Seq })
					for _, op := range ops {
						orderOver(t, op.Quiet())
					}
				}
			},
		},
		Case{
			ID: "order/stats-lists-open", Rule: "R1", Profile: TransferCore,
			Title: "Stats list the ops that are not over, and no other",
			Script: `
> frames of Submit, StatsRequest, Submit, StatsRequest …
< Stats, one for each request
= what is listed is not over; what is not listed is; last_seq is at least the Submit before the request`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 24, 128<<10)
				n := t.A()
				var events []*contract.HostEvent
				var ops []*Op
				var ids []uint64
				for i := range l.count {
					op, m := l.prepare(l.op(i))
					n.enter(op, m)
					ops, ids = append(ops, op), append(ids, n.NewID())
					events = append(events, &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}}, orderStats(ids[i]))
					if len(events) >= 8 || i == l.count-1 {
						n.Send(events...)
						events = nil
					}
				}
				orderAnswers(t, n, ids, func(i int) uint64 { return ops[i].Seq })
				for _, op := range ops {
					op.Done()
				}
			},
		},
		Case{
			ID: "order/last-seq", Rule: "R1", Profile: TransferCore, Fresh: true,
			Title: "Stats name the last Submit that was seen: refused, aborted and done ones alike",
			Script: `
> StatsRequest, before any Submit
< Stats(last_seq=0)
> a Submit that is served, one that is refused, one that is aborted before it comes; StatsRequest after each
< Stats with the seq of that Submit`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				n := t.A()
				last := func(want uint64) {
					st := n.Stats()
					t.Check(st.LastSeq == want, "R1", fmt.Sprintf("Stats.last_seq to be %d", want), "%d", st.LastSeq)
				}
				last(0)
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)})
				last(1)
				p.Submit(Submit{Src: Pages(1, 1), Dst: Pages(1, 1), Change: func(m *contract.Submit) { m.Peer = 1 << 30 }})
				last(2)
				id := n.NewID()
				n.SendControl(abortOf(id))
				op, m := p.prepare(Submit{Src: Pages(2, 1), Dst: Pages(2, 1)})
				m.Op = id
				orderOver(t, n.submit(op, m).Quiet())
				last(3)
			},
		},
	)
}

func orderStats(id uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Stats{Stats: &contract.StatsRequest{Id: id}}}
}

// orderAnswers waits for the answers to several requests; the i-th must have seen Submit seen(i).
func orderAnswers(t *T, n *Node, ids []uint64, seen func(i int) uint64) {
	for i, id := range ids {
		st := n.Until("R8", fmt.Sprintf("Stats %d", id), func(e *contract.PluginEvent) bool {
			return e.GetStats() != nil && e.GetStats().Id == id
		}).GetStats()
		t.Check(st.LastSeq >= seen(i), "R8", fmt.Sprintf("Stats that have seen the Submit before them, seq %d", seen(i)), "last_seq=%d", st.LastSeq)
	}
}

// orderOver fails the case unless an op that may have been aborted was that, or done.
func orderOver(t *T, end End) {
	t.Check(endedAs(end, "done", "aborted"), "R7", "Aborted, or Done if the abort came too late", "%s", end)
}

func abortOf(op uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: op}}}
}
