package conformance

import (
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "abort/unknown", Rule: "R7", Profile: TransferAbort,
			Title:    "an abort of an op that never existed changes nothing",
			Incident: "sglang#36108: a late message must not bring a room back",
			Script: `
> AbortOp of ids that were never used
> Submit of one page, StatsRequest
< Accepted, Done
= no event names those ids, Stats list nothing`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				for i := range uint64(16) {
					t.A().SendControl(abortOf(1<<40 + i))
					t.B().SendControl(abortOf(1<<40 + i))
				}
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
				for _, n := range []*Node{t.A(), t.B()} {
					st := n.Stats()
					t.Check(len(st.OpenOps) == 0, "R7", "Stats without open ops", "%v at %s", st.OpenOps, n.Name)
				}
			},
		},
		Case{
			ID: "abort/after-done", Rule: "R7", Profile: TransferAbort,
			Title:    "an abort of an op that is done changes nothing",
			Incident: "sglang#31965: an abort of a room that was cleaned up took the scheduler down",
			Script: `
> Submit
< Accepted, Done
> AbortOp of it, three times
> Submit of the same pages
< Accepted, Done
= no second end of the first op; the second is not touched`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				for range 8 {
					op := p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4)})
					op.Done()
					op.Abort().Abort().Abort()
					p.Submit(Submit{Src: Pages(4, 4), Dst: Pages(4, 4)}).Done()
				}
			},
		},
		Case{
			ID: "abort/before-submit", Rule: "R7", Profile: TransferAbort,
			Title: "an abort that overtakes its Submit ends the op as Aborted at once, and nothing of it moves",
			Script: `
> AbortOp of an id not used yet; behind it on the same stream AbortOp of an open op X
< X: Aborted, which proves that the first abort was read
> Submit with that id
< Accepted, then Aborted(quiet=true)
= no byte of it lands`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 256<<10)
				id := t.A().NewID()
				proved := abortOvertakes(t, l, id)
				abortedBefore(t, l.Path, id, proved, "an op whose abort came first")
			},
		},
		Case{
			ID: "abort/many-overtake", Rule: "R7", Profile: TransferAbort,
			Title: "the last 4096 aborts that overtake their Submits are remembered",
			Script: `
> 4091 AbortOps of ids not used yet; behind them AbortOp of an open op X
< X: Aborted
> Submits with the first, the last and some ids between
< for each: Accepted, then Aborted(quiet=true)
= no byte of them lands`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 256<<10)
				// A plugin may take the aborts that prove the order, of ops that may have ended, for early ones, too.
				ids := make([]uint64, 4096-proofs)
				for i := range ids {
					ids[i] = t.A().NewID()
				}
				proved := abortOvertakes(t, l, ids...)
				for _, i := range []int{0, 1, 1000, 2048, len(ids) - 2, len(ids) - 1} {
					abortedBefore(t, l.Path, ids[i], proved, fmt.Sprintf("an op whose abort came first (%d of %d)", i+1, len(ids)))
				}
			},
		},
		Case{
			ID: "abort/queued", Rule: "R7", Profile: TransferAbort,
			Title: "ops that wait behind others are aborted soon; those in front are done",
			Script: `
> one frame with 32 Submits of 256 KiB; AbortOp of the last 16
< the first 16: Done
< the last 16: Aborted, or Done
= nothing lands after an op is quiet`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 256<<10)
				ops := l.submitAll()
				half := len(ops) / 2
				for i := len(ops) - 1; i >= half; i-- {
					ops[i].Abort()
				}
				for _, op := range ops[half:] {
					orderOver(t, op.Quiet())
				}
				for _, op := range ops[:half] {
					op.Done()
				}
			},
		},
		Case{
			ID: "abort/mid-transfer", Rule: "R7", Profile: TransferAbort,
			Title: "an op that moves bytes is aborted soon",
			Script: `
> Submit of 8 MiB
< Accepted, Progress
> AbortOp
< Aborted, or Done if it was too late; Quiesced if that said quiet=false
= nothing lands after that; 6 rounds, at other moments`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 1, 8<<20)
				for round := range 6 {
					op := l.submit(0).Accepted()
					if round%2 == 1 {
						op.Moving()
					}
					orderOver(t, op.Abort().Quiet())
				}
				l.submit(0).Done()
			},
		},
		Case{
			ID: "abort/twice", Rule: "R7", Profile: TransferAbort,
			Title: "aborting again changes nothing",
			Script: `
> Submits of 512 KiB; AbortOp of each, three times in one frame and once more
< for each: one end, Aborted or Done`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 8, 512<<10)
				ops := l.submitAll()
				for _, op := range ops {
					l.From.SendControl(abortOf(op.ID), abortOf(op.ID), abortOf(op.ID))
				}
				for _, op := range ops {
					op.Abort()
				}
				for _, op := range ops {
					orderOver(t, op.Quiet())
					op.Abort()
				}
				l.submit(0).Done()
			},
		},
		Case{
			ID: "abort/storm", Rule: "R1", Profile: TransferAbort,
			Title: "every one of 200 aborted ops ends",
			Script: `
> 200 Submits, each followed by its AbortOp
< for each: Accepted, then Aborted or Done
= Stats list none`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 200, 16<<10)
				var ops []*Op
				for i := range l.count {
					ops = append(ops, l.submit(i).Abort())
				}
				for _, op := range ops {
					orderOver(t, op.Quiet())
				}
			},
		},
		Case{
			ID: "abort/neighbours-unharmed", Rule: "R12", Profile: TransferAbort,
			Title: "an abort harms no other op",
			Script: `
> one frame with 32 Submits; AbortOp of every other one
< those: Aborted, or Done
< the others: Done
= every page of the others is there`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 256<<10)
				ops := l.submitAll()
				for i := 1; i < len(ops); i += 2 {
					ops[i].Abort()
				}
				for i, op := range ops {
					if i%2 == 0 {
						op.Done()
					} else {
						orderOver(t, op.Quiet())
					}
				}
			},
		},
		Case{
			ID: "abort/at-the-receiver", Rule: "R12", Profile: TransferAbort,
			Title: "an abort at the receiving plugin does not touch the writer's op of the same id",
			Script: `
> A: Submits; B: AbortOp of the same ids
< A: Accepted, Done for each
= B says nothing of them`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 16, 256<<10)
				ops := l.submitAll()
				for _, op := range ops {
					l.To.passID(op.ID) // else that abort would be remembered for an op of B
					l.To.SendControl(abortOf(op.ID))
				}
				for _, op := range ops {
					op.Done()
				}
			},
		},
	)
}

// proofs is how often abortOvertakes tries.
const proofs = 5

// abortOvertakes sends aborts of ids and looks for the proof that the plugin has read them: an op ends as Aborted
// whose abort follows on the same stream. Each try puts more work in front of that op; false when it was always
// faster than its abort, or what is aborted here is finished all the same.
func abortOvertakes(t *T, l *load, ids ...uint64) (proved bool) {
	var events []*contract.HostEvent
	for _, id := range ids {
		events = append(events, abortOf(id))
	}
	l.From.SendControl(events...)
	for try := range proofs {
		var list []Submit
		for i := range stormWindow(t, l.count<<try, l.size()) {
			s := l.op(i % l.count)
			s.Loose = true // there are fewer pages than ops
			list = append(list, s)
		}
		ops := l.SubmitAll(list)
		last := ops[len(ops)-1]
		orderOver(t, last.Abort().Quiet())
		for _, op := range ops[:len(ops)-1] {
			end := op.Quiet()
			t.Check(end.Kind == "done", "R12", fmt.Sprintf("op %d, which nobody aborted, to be done", op.ID), "%s", end)
		}
		if last.End().Kind == "aborted" {
			return true
		}
	}
	return false
}

// abortedBefore submits an op by an id that was aborted: it must end as Aborted, and no byte of it may land. One
// that is done although nothing proves that its abort was read shows nothing, for or against the plugin.
func abortedBefore(t *T, p *Path, id uint64, proved bool, what string) {
	s := Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}
	if proved {
		s.Change = lands(nothing)
	}
	op, m := p.prepare(s)
	m.Op = id
	end := p.From.submit(op, m).Quiet()
	if !proved && end.Kind == "done" {
		t.Unsupported("no op was slow enough here to be aborted: whether an abort came before its Submit is not known")
	}
	t.Check(end.Kind == "aborted" && end.Quiet, "R7", "Aborted(quiet=true) of "+what, "%s", end)
}
