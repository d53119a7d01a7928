package conformance

import (
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	checked := []string{sdk.FeatureReceiverChecked}
	register(
		Case{
			ID: "generation/ungranted", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title: "an op of an opener that was never granted writes nothing",
			Script: `
> Grant of all pages to opener X
> Submits of opener Y
< for each: Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
= no byte lands; ops of X are done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				for i := range uint32(4) {
					op := p.Submit(Submit{Src: Pages(i, 1), Dst: Pages(i, 1), Generation: p.NewGeneration(), Change: lands(nothing)})
					p.Submit(Submit{Src: Pages(i, 1), Dst: Pages(i, 1)}).Done()
					generationRefused(t, op)
				}
			},
		},
		Case{
			ID: "generation/other-openers-pages", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title: "an opener cannot write the pages of another",
			Script: `
> Grant of pages 0-3 to opener X, of pages 4-7 to opener Y
> Submits of X into Y's pages, of Y into X's
< for each: Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
> Submits of each into its own
< Accepted, Done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096, NoGrant: true})
				x, y := p.NewGeneration(), p.NewGeneration()
				p.Grant(x.Destination, p.Dst, Pages(0, 4)...)
				p.Grant(y.Destination, p.Dst, Pages(4, 4)...)
				bad := p.SubmitAll([]Submit{
					{Src: Pages(0, 1), Dst: Pages(5, 1), Generation: x, Change: lands(nothing)},
					{Src: Pages(0, 1), Dst: Pages(2, 1), Generation: y, Change: lands(nothing)},
					{Src: Pages(0, 4), Dst: Pages(4, 4), Generation: x, Change: lands(nothing)},
				})
				for _, op := range bad {
					generationRefused(t, op)
				}
				p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4), Generation: x}).Done()
				p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4), Generation: y}).Done()
			},
		},
		Case{
			ID: "generation/other-writer", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title: "a writer that a grant does not name cannot use its opener",
			Script: `
> Grant of all pages to opener X, for another node
> Submit of X
< Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
= no byte lands; late_refused of the receiver has grown
> Grants to opener Y of pages 0-3, for the writer and for another node, of pages 4-7, for another node
> Submits of Y into pages 4-7, into 2-5
< for each: Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
> Submit of Y into pages 0-3
< Accepted, Done
> Grant to opener Z that names no writer; Submit of Z
< Accepted, Done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096, NoGrant: true})
				x, y, z := p.NewGeneration(), p.NewGeneration(), p.NewGeneration()
				elsewhere := []string{p.From.ID.Node + "-elsewhere"}
				p.GrantTo(elsewhere, x.Destination, p.Dst, Pages(0, 8)...)
				before := p.To.Stats().LateRefused
				generationRefused(t, p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8), Generation: x, Change: lands(nothing)}))
				after := p.To.Stats().LateRefused
				t.Check(after > before, "R3", "Stats.late_refused of the receiver to count what was refused", "%d before, %d after a refused op", before, after)
				p.GrantTo(append(elsewhere, p.From.ID.Node), y.Destination, p.Dst, Pages(0, 4)...)
				p.GrantTo(elsewhere, y.Destination, p.Dst, Pages(4, 4)...)
				generationRefused(t, p.Submit(Submit{Src: Pages(4, 4), Dst: Pages(4, 4), Generation: y, Change: lands(nothing)}))
				tensor := p.Dst.Tensors[0]
				op, m := p.prepare(Submit{Src: Pages(2, 4), Dst: Pages(2, 4), Generation: y, Loose: true})
				p.only(op, func(s span) bool { return s.dstOff+s.n <= tensor.Offset+4*tensor.PageStride })
				generationRefused(t, p.From.submit(op, m))
				p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4), Generation: y}).Done()
				p.GrantTo(nil, z.Destination, p.Dst, Pages(0, 8)...)
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8), Generation: z}).Done()
			},
		},
		Case{
			ID: "generation/outside-grant", Rule: "R4", Profile: TransferQuiesce, Needs: checked,
			Title: "an op that reaches beyond its grant fails, and writes nothing outside of it",
			Script: `
> Grant of pages 2-5
> Submits of pages 4-7, of 1-2, of 5-6, of 7
< for each: Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
= pages 0, 1, 6 and 7 are untouched`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096, Gap: 64, NoGrant: true})
				p.Grant(p.Generation.Destination, p.Dst, Pages(2, 4)...)
				tensor := p.Dst.Tensors[0]
				from, to := tensor.Offset+2*tensor.PageStride, tensor.Offset+6*tensor.PageStride
				for _, pages := range [][]sdk.Run{Pages(4, 4), Pages(1, 2), Pages(5, 2), Pages(7, 1)} {
					op, m := p.prepare(Submit{Src: pages, Dst: pages, Loose: true})
					p.only(op, func(s span) bool { return s.dstOff >= from && s.dstOff+s.n <= to })
					generationRefused(t, p.From.submit(op, m))
				}
				p.Submit(Submit{Src: Pages(2, 4), Dst: Pages(2, 4)}).Done()
			},
		},
		Case{
			ID: "generation/second-grant", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title: "two grants of one opener add up, and revoking one refuses the opener",
			Script: `
> Grant of pages 0-3, then Grant of pages 4-7, to the same opener
> Submit of pages 2-5
< Accepted, Done
> Revoke of the first grant
< Revoked
> Submit of pages 0-1, of 6-7
< for each: Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096, NoGrant: true})
				g := p.Generation
				first := p.Grant(g.Destination, p.Dst, Pages(0, 4)...)
				p.Grant(g.Destination, p.Dst, Pages(4, 4)...)
				p.Submit(Submit{Src: Pages(2, 4), Dst: Pages(2, 4)}).Done()
				p.Revoke(first)
				for _, op := range p.SubmitAll([]Submit{
					{Src: Pages(0, 2), Dst: Pages(0, 2), Change: lands(nothing)}, {Src: Pages(6, 2), Dst: Pages(6, 2), Change: lands(nothing)},
				}) {
					generationRefused(t, op)
				}
			},
		},
		Case{
			ID: "generation/after-revoke", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title:    "a revoked opener never writes again, and its writes are counted",
			Incident: "sglang#40125: a room id that had just ended was used again, and both schedulers crashed",
			Script: `
> Grant, Submit
< Accepted, Done
> Revoke
< Revoked
> 4 Submits of the same generation
< for each: Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
= no byte lands; late_refused of the receiver has grown`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096, NoGrant: true})
				grant := p.Grant(p.Generation.Destination, p.Dst, Pages(0, 8)...)
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
				before := p.To.Stats().LateRefused
				p.Revoke(grant)
				for i := range uint32(4) {
					generationRefused(t, p.Submit(Submit{Src: Pages(i, 1), Dst: Pages(i, 1), Change: lands(nothing)}))
				}
				after := p.To.Stats().LateRefused
				t.Check(after > before, "R3", "Stats.late_refused of the receiver to count what was refused", "%d before, %d after 4 refused ops", before, after)
			},
		},
		Case{
			ID: "generation/revoke-unknown", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title: "a Revoke of an unknown grant is answered, and its opener is refused",
			Script: `
> Revoke of a grant that was never made
< Revoked
> Submit of that opener
< Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)
= other openers are not touched`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				stale := p.NewGeneration()
				id := p.To.NewID()
				p.To.Send(generationRevoke(id, stale.Destination))
				generationRevoked(p.To, id)
				generationRefused(t, p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1), Generation: stale, Change: lands(nothing)}))
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
			},
		},
		Case{
			ID: "generation/revoke-twice", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title: "revoking again changes nothing",
			Script: `
> Grant
< Granted
> Revoke, Revoke in one frame
< Revoked
> Submit of that opener
< Accepted, then Failed(CAUSE_REFUSED or CAUSE_BOUNDS)`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				stale := p.NewGeneration()
				grant := p.Grant(stale.Destination, p.Dst, Pages(0, 4)...)
				delete(p.grants, grant)
				p.To.Send(generationRevoke(grant, stale.Destination), generationRevoke(grant, stale.Destination))
				generationRevoked(p.To, grant)
				generationRefused(t, p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1), Generation: stale, Change: lands(nothing)}))
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
			},
		},
		Case{
			ID: "generation/room-reuse", Rule: "R3", Profile: TransferQuiesce, Needs: checked,
			Title:    "pages that a new opener gets are written by nobody of the old one",
			Incident: "sglang#32564: pages of an aborted room went to the next one, and a late write landed in them",
			Script: `
> Grant of all pages to opener X; 12 Submits of 512 KiB
> Revoke, while they run
< Revoked(quiet=true)
> Grant of the same pages to opener Y; Submits of Y, of other bytes
< Accepted, Done
= the pages hold the bytes of Y, to the end`,
			Run: func(t *T) {
				l := generationLoad(t)
				for range 3 {
					grant := l.Grant(l.Generation.Destination, l.Dst, Pages(0, l.Dst.Pages)...)
					stale := l.submitAll()
					stale[0].Accepted()
					if !l.Revoke(grant) {
						t.Notef("Revoked(quiet=false): the pages cannot be given away at once")
						for _, op := range stale {
							op.Quiet()
						}
					}
					l.disown(stale)
					l.makeWay(t, stale)
					l.Generation = l.NewGeneration()
					grant = l.Grant(l.Generation.Destination, l.Dst, Pages(0, l.Dst.Pages)...)
					// Each page gets other bytes than the old opener had for it.
					for _, op := range l.submitAll(func(i int, s *Submit) { s.Src, s.Keep = l.op((i+1)%max(l.count, 2)).Src, true }) {
						op.Done()
					}
					for _, op := range stale {
						generationStale(t, op)
					}
					l.DstMem.intact(t, "R3", "the pages to hold what the new opener wrote")
					l.Revoke(grant)
					l.Generation = l.NewGeneration()
				}
			},
		},
		Case{
			ID: "generation/grant-refused", Rule: "R12", Profile: TransferQuiesce, Needs: checked,
			Title: "a grant of pages that are not there is answered by GrantFailed",
			Script: `
> Grants of a page beyond its pool, of a run that wraps, of an unknown pool, of a run of 0 pages, to an opener of 0
< GrantFailed for each
= good grants are not touched`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				pages := func(pool uint64, runs ...sdk.Run) []*contract.GrantPart {
					return []*contract.GrantPart{{Pool: pool, Pages: Runs(runs...)}}
				}
				opener := func() *contract.Opener { return p.NewGeneration().Destination }
				for _, bad := range []struct {
					what string
					g    *contract.Grant
				}{
					{"a page beyond the pool", &contract.Grant{Destination: opener(), Parts: pages(p.Dst.ID, sdk.Run{Start: 7, Count: 2, Stride: 1})}},
					{"a run that wraps", &contract.Grant{Destination: opener(), Parts: pages(p.Dst.ID, sdk.Run{Start: 1, Count: 2, Stride: 1<<32 - 1})}},
					{"an unknown pool", &contract.Grant{Destination: opener(), Parts: pages(1<<60, sdk.Run{Count: 1, Stride: 1})}},
					{"a run of 0 pages", &contract.Grant{Destination: opener(), Parts: pages(p.Dst.ID, sdk.Run{Start: 1, Stride: 1})}},
					{"an opener of 0", &contract.Grant{Destination: &contract.Opener{}, Parts: pages(p.Dst.ID, sdk.Run{Count: 1, Stride: 1})}},
				} {
					g, what := bad.g, bad.what
					g.Grant = p.To.NewID()
					p.To.Send(&contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: g}})
					e := p.To.Until("R12", fmt.Sprintf("an answer to grant %d", g.Grant), func(e *contract.PluginEvent) bool {
						return e.GetGranted() != nil && e.GetGranted().Grant == g.Grant || e.GetGrantFailed() != nil && e.GetGrantFailed().Grant == g.Grant
					})
					t.Check(e.GetGrantFailed() != nil, "R12", "GrantFailed of "+what, "%s", Describe(e))
				}
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
	)
}

// generationLoad is a load whose case grants by itself.
func generationLoad(t *T) *load {
	l := newLoad(t, t.A(), t.B(), 12, 512<<10)
	for _, g := range l.Grants() {
		l.Revoke(g)
	}
	l.Generation = l.NewGeneration()
	return l
}

// generationRefused fails the case unless the receiver refused the op.
func generationRefused(t *T, op *Op) {
	end := op.Quiet()
	t.Check(endedAs(end, "failed CAUSE_REFUSED", "failed CAUSE_BOUNDS"), t.Case.Rule, fmt.Sprintf("op %d to be Failed(CAUSE_REFUSED or CAUSE_BOUNDS)", op.ID), "%s", end)
}

// generationStale fails the case unless the op was done before its opener was revoked, or refused.
func generationStale(t *T, op *Op) {
	end := op.Quiet()
	t.Check(endedAs(end, "done", "failed CAUSE_REFUSED", "failed CAUSE_BOUNDS"), "R3", fmt.Sprintf("op %d, whose opener was revoked, to be done before, or Failed(CAUSE_REFUSED or CAUSE_BOUNDS)", op.ID), "%s", end)
}

func generationRevoke(grant uint64, destination *contract.Opener) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Revoke{Revoke: &contract.Revoke{Grant: grant, Destination: destination}}}
}

func generationRevoked(n *Node, grant uint64) bool {
	return n.Until("R4", fmt.Sprintf("Revoked of grant %d", grant), func(e *contract.PluginEvent) bool {
		return e.GetRevoked() != nil && e.GetRevoked().Grant == grant
	}).GetRevoked().Quiet
}

// only leaves an op those of its bytes that may land; op is not sent yet.
func (p *Path) only(op *Op, may func(span) bool) {
	var left []span
	for _, s := range op.spans {
		if may(s) {
			left = append(left, s)
		}
	}
	for _, r := range op.destinations() {
		r.mu.Lock()
		delete(r.open, op)
		r.mu.Unlock()
	}
	op.spans = left
	p.begin(op)
}

// disown takes the pages away from ops that can write them no more, by the plugin's own word: what is there
// now is what must stay.
func (p *Path) disown(ops []*Op) {
	p.From.mu.Lock()
	defer p.From.mu.Unlock()
	for _, o := range ops {
		for _, s := range o.spans {
			s.dst.mu.Lock()
			delete(s.dst.open, o)
			copy(s.dst.shadow[s.dstOff:][:s.n], s.dst.Bytes[s.dstOff:][:s.n])
			s.dst.mu.Unlock()
		}
		o.spans = nil
	}
}

// intact fails the case when memory is not as the ops left it.
func (r *Region) intact(t *T, rule, expected string) {
	bad := r.check()
	t.Check(bad == "", rule, expected, "%s", bad)
}
