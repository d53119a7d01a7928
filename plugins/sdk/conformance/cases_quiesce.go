package conformance

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "quiesce/not-before-last-write", Rule: "R4", Profile: TransferQuiesce,
			Title:    "an aborted op is not quiet before its last write",
			Incident: "sglang#36707: the abort was acknowledged as drained while a write could still land",
			Script: `
> 8 Submits of 1 MiB in one frame; AbortOp of each at a random moment; 4 rounds
< for each: Aborted or Done; Quiesced if that said quiet=false
= a canary is put over the pages the moment that the op is quiet; further ops run; the canary is whole`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 8, 1<<20)
				for range 4 {
					ops := l.submitAll()
					for _, i := range t.Rand().Perm(len(ops)) {
						if t.Rand().IntN(2) == 0 {
							ops[i].Accepted()
						}
						ops[i].Abort()
					}
					for _, op := range ops {
						orderOver(t, op.Quiet())
					}
					l.DstMem.intact(t, "R4", "nothing to be written after an op was quiet")
				}
				l.submit(0).Done()
			},
		},
		Case{
			ID: "quiesce/stays-quiet", Rule: "R4", Profile: TransferQuiesce,
			Title:    "nothing of an aborted op lands seconds after it was quiet",
			Incident: "sglang#36707: the abort was acknowledged as drained while a write could still land",
			Script: `
> 24 Submits of 8 MiB, one after another, each aborted as soon as it moves
< for each: Aborted or Done; Quiesced if that said quiet=false
> for two seconds: small ops the other way; the memory of the aborted ones stays registered
= a canary over the pages of the aborted ops is whole at the end`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 4, 8<<20)
				// No other op uses these pages once all are quiet, so a late write has nowhere to hide.
				for i := range 24 {
					op := l.submit(i % l.count)
					op.Moving()
					orderOver(t, op.Abort().Quiet())
				}
				const watch, pause = 2 * time.Second, 20 * time.Millisecond
				back := t.PathBetween(t.B(), t.A(), Shape{Pages: 8, PageBytes: 4096})
				for began := time.Now(); time.Since(began) < watch; t.Sleep(pause) {
					back.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
					l.DstMem.intact(t, "R4", "nothing to be written after an op was quiet")
				}
			},
		},
		Case{
			ID: "quiesce/aborted-pages-reused", Rule: "R4", Profile: TransferQuiesce,
			Title:    "pages of an aborted op can be written by the next as soon as it is quiet",
			Incident: "sglang#32564: pages of an aborted room went to the next one, and a late write landed in them",
			Script: `
> Submit of 4 MiB; AbortOp
< Aborted or Done, quiet
> at once: Submits of other source pages to the same destination pages
< Accepted, Done
= the pages hold the bytes of the second op, to the end; 3 rounds`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 2, 4<<20)
				for range 3 {
					first, second := l.op(0), l.op(1)
					second.Dst, second.Keep = first.Dst, true
					op := l.Submit(first)
					op.Accepted()
					orderOver(t, op.Abort().Quiet())
					l.Submit(second).Done()
					l.submit(0).Done()
					l.DstMem.intact(t, "R4", "the pages to hold the bytes of the second op")
				}
			},
		},
		Case{
			ID: "quiesce/peer-removed", Rule: "R4", Profile: TransferQuiesce,
			Title: "ops that PeerRemove ends become quiet, and then nothing of them lands",
			Script: `
> 16 Submits of 512 KiB; PeerRemove while they run
< for each: Done, or Failed(CAUSE_PEER_UNREACHABLE); Quiesced if that said quiet=false
< PeerRemoved, after the ends
= a canary over the pages of each op that is quiet is whole; a new peer works`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 16, 512<<10)
				ops := l.submitAll()
				ops[0].Accepted()
				l.From.removePeer(l.Handle)
				for _, op := range ops {
					end := op.Quiet()
					t.Check(endedAs(end, "done", "failed CAUSE_PEER_UNREACHABLE"), "R4", fmt.Sprintf("op %d to be done, or Failed(CAUSE_PEER_UNREACHABLE)", op.ID), "%s", end)
				}
				l.DstMem.intact(t, "R4", "nothing to be written after an op was quiet")
				l.teardown()
				t.Path(Shape{Pages: 8, PageBytes: 4096}).Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
		Case{
			ID: "quiesce/region-removed", Rule: "R4", Profile: TransferQuiesce,
			Title:    "memory can be taken back as soon as its ops are quiet",
			Incident: "nixl#2044: a transfer was released while it ran, and its memory was unregistered under it",
			Script: `
> Submit of 4 MiB; AbortOp
< Aborted or Done, quiet
> at once: Revoke, RegionRemove of the destination, RegionRemove of the source
< RegionRemoved of each
= nobody holds the leases in the end; nothing has been written since the op was quiet`,
			Run: func(t *T) {
				for range 2 {
					l := newLoad(t, t.A(), t.B(), 1, 4<<20)
					op := l.submit(0).Accepted()
					orderOver(t, op.Abort().Quiet())
					for _, g := range l.Grants() {
						l.Revoke(g)
					}
					l.To.RemoveRegion(l.DstMem)
					l.From.RemoveRegion(l.SrcMem)
					l.DstMem.intact(t, "R4", "nothing to be written after the op was quiet")
					l.teardown()
				}
			},
		},
		Case{
			ID: "quiesce/writer-dropped", Rule: "R4", Profile: TransferQuiesce,
			Title: "ops whose receiver drops the writer end, and say honestly whether they are quiet",
			Script: `
> A: 16 Submits of 512 KiB to B
> B: PeerRemove of the writer A
< B: PeerRemoved
> A: AbortOp of each
< A, for each: Done, Failed or Aborted; Quiesced if that said quiet=false
= a canary over the pages of each op that is quiet is whole`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 16, 512<<10)
				l.submit(0).Done()
				ops := l.submitAll()
				ops[0].Accepted()
				l.To.removePeer(l.Writer)
				for _, op := range ops {
					op.Abort()
				}
				for _, op := range ops {
					end := op.Quiet()
					t.Check(endedAs(end, "done", "failed", "aborted"), "R4", fmt.Sprintf("op %d to be done, failed or aborted", op.ID), "%s", end)
				}
				l.DstMem.intact(t, "R4", "nothing to be written after an op was quiet")
			},
		},
		Case{
			ID: "quiesce/revoked", Rule: "R4", Profile: TransferQuiesce, Needs: []string{sdk.FeatureReceiverChecked},
			Title: "after Revoked(quiet=true) no byte of the opener lands, however hard the writer pushes",
			Script: `
> Grant; 12 Submits of 512 KiB
> Revoke, while they run
< Revoked(quiet=true)
= from here on the pages do not change
> 12 more Submits of that opener, of other bytes
< for each: Done if it was before the Revoke, or Failed(CAUSE_REFUSED or CAUSE_BOUNDS); 3 rounds`,
			Run: func(t *T) {
				l := generationLoad(t)
				for round := range 3 {
					grant := l.Grant(l.Generation.Destination, l.Dst, Pages(0, l.Dst.Pages)...)
					ops := l.submitAll()
					if round%2 == 1 {
						ops[0].Moving()
					} else {
						ops[0].Accepted()
					}
					if !l.Revoke(grant) {
						t.Notef("Revoked(quiet=false): the plugin cannot know")
						for _, op := range ops {
							op.Quiet()
						}
					}
					l.disown(ops)
					l.makeWay(t, ops)
					l.renew(t)
					late := l.submitAll(func(_ int, s *Submit) { s.Change = lands(nothing) })
					for _, op := range ops {
						generationStale(t, op)
					}
					for _, op := range late {
						generationRefused(t, op)
					}
					l.DstMem.intact(t, "R4", "nothing to be written after Revoked(quiet=true)")
					l.Generation = l.NewGeneration()
				}
			},
		},
		Case{
			ID: "drain/empty", Rule: "R1", Profile: TransferQuiesce, Fresh: true,
			Title: "a plugin without ops drains at once",
			Script: `
> A and B: Drain with a deadline of a minute
< Drained(open_ops=0), each`,
			Run: func(t *T) {
				t.Path(Shape{Pages: 8, PageBytes: 4096}).Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
				for _, n := range []*Node{t.A(), t.B()} {
					left := n.Drain(time.Minute)
					t.Check(left == 0, "R1", "Drained(open_ops=0)", "open_ops=%d from %s", left, n.Name)
				}
			},
		},
		Case{
			ID: "drain/waits-for-open-ops", Rule: "R4", Profile: TransferQuiesce, Fresh: true,
			Title: "Drained comes when all open ops have ended and are quiet",
			Script: `
> one frame: 16 Submits of 512 KiB, Drain with a deadline of a minute, a Submit
< for the 16: Accepted, Progress…, Done
< for the last: Accepted, Skipped(CAUSE_SHUTDOWN, quiet=true)
< Drained(open_ops=0), behind the ends of the 16`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 16, 512<<10)
				ops, late := drainBehind(l, time.Minute)
				left := drainAnswer(l.From)
				t.Check(left == 0, "R4", "Drained(open_ops=0), there being time enough", "open_ops=%d", left)
				for _, op := range ops {
					op.Done()
				}
				drainSkipped(t, late)
			},
		},
		Case{
			ID: "drain/deadline", Rule: "R5", Profile: TransferQuiesce, Fresh: true,
			Title: "Drained comes at the deadline with what is left, and what is left still ends",
			Script: `
> one frame: 16 Submits of 512 KiB, Drain with a deadline of 1 ns, a Submit
< Drained with the number of ops that are not over
< for the 16: Done; for the last: Skipped(CAUSE_SHUTDOWN, quiet=true)
= nothing was ended because of the deadline; Drained came once`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 16, 512<<10)
				ops, late := drainBehind(l, 1)
				t.Notef("%d ops were left", drainAnswer(l.From))
				for _, op := range ops {
					op.Done()
				}
				drainSkipped(t, late)
				l.From.Stats()
				n := l.From.Count(func(e *contract.PluginEvent) bool { return e.GetDrained() != nil })
				t.Check(n == 1, "R5", "one Drained", "%d", n)
			},
		},
		Case{
			ID: "drain/abort-what-is-left", Rule: "R7", Profile: TransferQuiesce, Fresh: true,
			Title: "a draining plugin still aborts",
			Script: `
> one frame: 16 Submits of 512 KiB, Drain with a deadline of a minute
> AbortOp of each
< for each: Aborted or Done
< Drained(open_ops=0), behind them`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 16, 512<<10)
				ops, late := drainBehind(l, time.Minute)
				for _, op := range ops {
					orderOver(t, op.Abort().Quiet())
				}
				left := drainAnswer(l.From)
				t.Check(left == 0, "R4", "Drained(open_ops=0)", "open_ops=%d", left)
				drainSkipped(t, late)
			},
		},
		Case{
			ID: "fence/unknown-node", Rule: "R4", Profile: TransferQuiesce,
			Title: "a fence of a node that was never heard of is answered, and touches no other",
			Script: `
> FencePeer of an unknown node; of the writer's node, an older incarnation
< Fenced(QUIET or UNKNOWN) for each; never QUIET without fence_peer
> Submit
< Accepted, Done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				fenceResult(t, t.B(), "nobody", 77, 0)
				fenceResult(t, t.B(), "nobody", 77, 3)
				fenceResult(t, t.B(), t.A().ID.Node, t.A().ID.Incarnation-1, 0)
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
				fenceResult(t, t.A(), "nobody", 77, 0)
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
		Case{
			ID: "fence/live-writer", Rule: "R4", Profile: TransferQuiesce, Fresh: true,
			Title: "Fenced(QUIET) of a writer that lives means that no byte of it lands any more",
			Script: `
> A: 16 Submits of 512 KiB to B
> B: FencePeer of A's epoch, while they run
< B: Fenced(QUIET) or Fenced(UNKNOWN); never QUIET without fence_peer
> A: 16 more Submits, of other bytes; B: as many Submits to A, until those of A have ended, or for a second
< B, for each: Done
> B: PeerRemove of A; A: AbortOp of all
< A, for each: an end
= after QUIET the pages do not change any more, and no later op is done`,
			Run: func(t *T) {
				l, back := newLoad(t, t.A(), t.B(), 16, 512<<10), newLoad(t, t.B(), t.A(), 16, 512<<10)
				l.submit(0).Done()
				ops := l.submitAll()
				ops[0].Accepted()
				a := t.A().ID
				quiet := fenceResult(t, t.B(), a.Node, a.Incarnation, a.Epoch)
				if quiet {
					l.disown(ops)
					l.renew(t)
				}
				late := l.submitAll(func(_ int, s *Submit) {
					s.Loose = !quiet
					if quiet {
						s.Change = lands(nothing)
					}
				})
				// As long as the late ones take; but a plugin may go on trying.
				const most = time.Second
				over := func() bool { return !slices.ContainsFunc(late, func(op *Op) bool { return !op.Ended() }) }
				for began := time.Now(); ; {
					for _, op := range back.submitAll() {
						op.Done()
					}
					if over() || time.Since(began) > most {
						break
					}
				}
				l.DstMem.intact(t, "R4", "nothing to be written after Fenced(QUIET)")
				l.To.removePeer(l.Writer)
				for _, op := range append(ops, late...) {
					op.Abort()
				}
				for i, op := range append(ops, late...) {
					end := op.Quiet()
					t.Check(!quiet || i < len(ops) || end.Kind != "done", "R4", fmt.Sprintf("op %d, submitted after Fenced(QUIET), not to be done", op.ID), "%s", end)
				}
				l.DstMem.intact(t, "R4", "nothing to be written after Fenced(QUIET)")
			},
		},
		Case{
			ID: "fence/outlives-the-answer", Rule: "R4", Profile: TransferQuiesce, Fresh: true, Needs: []string{sdk.FeatureFencePeer},
			Title: "an epoch that was fenced cannot write later, admitted or not",
			Script: `
> B: FencePeer of A's epoch, which is no writer yet; after Fenced(UNKNOWN) once more, when it was one
< B: Fenced(QUIET)
> B: PeerAccept of A; A: PeerAdd of B, Submits, AbortOps
< B: PeerFailed, or A: PeerFailed, or A: ends that are not Done
= no byte lands`,
			Run: func(t *T) {
				a := t.A().ID
				quiet := fenceResult(t, t.B(), a.Node, a.Incarnation, a.Epoch)
				if !quiet { // it may know only those that it has seen
					p := t.Path(Shape{Pages: 8, PageBytes: 4096})
					p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
					p.Remove()
					quiet = fenceResult(t, t.B(), a.Node, a.Incarnation, a.Epoch)
				}
				if !quiet {
					t.Unsupported("the plugin answers Fenced(UNKNOWN) of a writer that is not there, and of one that was removed")
				}
				p, failed := t.Dial(t.A(), t.B(), 0, nil)
				if failed != nil {
					return
				}
				peerMustNotWrite(t, p)
			},
		},
	)
}

// renew puts other bytes into the source pages: whatever lands of them from now on is not there already.
func (l *load) renew(t *T) {
	fresh := make([]byte, uint64(l.Src.Pages)*l.Src.Tensors[0].PageBytes)
	fill(fresh, t.Rand())
	l.SrcMem.Rewrite(l.Src.Tensors[0].Offset, fresh)
}

// makeWay waits for the ends of ops if the plugin's limits do not leave room for as many more.
func (l *load) makeWay(t *T, ops []*Op) {
	if stormWindow(t, 2*l.count, l.size()) < 2*l.count {
		for _, op := range ops {
			op.Quiet()
		}
	}
}

// drainBehind sends all ops of a load, Drain and one more op in one frame.
func drainBehind(l *load, deadline time.Duration) (ops []*Op, late *Op) {
	var events []*contract.HostEvent
	add := func(s Submit) *Op {
		op, m := l.prepare(s)
		l.From.enter(op, m)
		events = append(events, &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}})
		return op
	}
	for i := range l.count {
		ops = append(ops, add(l.op(i)))
	}
	events = append(events, &contract.HostEvent{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{DeadlineNs: uint64(deadline)}}})
	late = add(Submit{Src: Pages(0, 1), Dst: Pages(0, 1), Change: lands(nothing)})
	l.From.Send(events...)
	return ops, late
}

func drainAnswer(n *Node) uint32 {
	return n.Until("R5", "Drained", func(e *contract.PluginEvent) bool { return e.GetDrained() != nil }).GetDrained().OpenOps
}

func drainSkipped(t *T, op *Op) {
	end := op.Quiet()
	t.Check(end.Kind == "skipped" && end.Cause == contract.Cause_CAUSE_SHUTDOWN && end.Quiet, "R1", "Skipped(CAUSE_SHUTDOWN, quiet=true) of the op that came after Drain", "%s", end)
}

// fenceResult asks and tells whether the answer is QUIET, which only a plugin with fence_peer may give.
func fenceResult(t *T, n *Node, node string, incarnation uint64, epoch uint32) (quiet bool) {
	result := n.Fence(node, incarnation, epoch)
	quiet = result == contract.FenceResult_FENCE_RESULT_QUIET
	t.Check(quiet || result == contract.FenceResult_FENCE_RESULT_UNKNOWN, "R4", "Fenced(QUIET) or Fenced(UNKNOWN)", "%v", result)
	t.Check(!quiet || t.Has(sdk.FeatureFencePeer), "R4", "Fenced(UNKNOWN) of a plugin that does not declare fence_peer", "%v", result)
	return quiet
}
