package conformance

import (
	"fmt"
	"slices"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "peer/wrong-token-cannot-write", Rule: "R12", Profile: TransferCore,
			Title: "a writer that does not know the token of the receiver cannot write",
			Script: `
> B: PeerAccept of A with a token; A: PeerAdd of B with another one
< A: PeerReady or PeerFailed
> A: Submits into pages that its opener may write; AbortOp of those that have not ended
< A, for each: Failed, or Aborted; never Done
= no byte lands; B writes to A as before`,
			Run: func(t *T) {
				p, failed := t.Dial(t.A(), t.B(), 0, func(m *contract.PeerAdd) {
					m.Token = slices.Clone(m.Token)
					m.Token[31] ^= 1
				})
				if failed == nil {
					peerMustNotWrite(t, p)
				}
			},
		},
		Case{
			ID: "peer/not-accepted-cannot-write", Rule: "R12", Profile: TransferCore,
			Title: "a writer that was never accepted by the receiver cannot write",
			Script: `
> A: PeerAdd of B, without PeerAccept at B
< A: PeerReady or PeerFailed
> A: Submits; AbortOp of those that have not ended
< A, for each: Failed, or Aborted; never Done
= no byte lands; B writes to A as before`,
			Run: func(t *T) {
				p := t.Accept(t.A(), t.B())
				t.B().removePeer(p.Writer)
				if e := p.add(contract.Lane_LANE_ANY, nil); e.GetPeerFailed() == nil {
					peerMustNotWrite(t, p)
				}
			},
		},
		Case{
			ID: "peer/bad-endpoint", Rule: "R12", Profile: TransferCore,
			Title: "a peer whose endpoint makes no sense fails alone",
			Script: `
> A: PeerAdds with an empty endpoint, with noise, with 64 KiB of it
< for each: PeerFailed, or PeerReady and then no op to it is done
= B writes to A as before`,
			Run: func(t *T) {
				noise := make([]byte, 64<<10)
				fill(noise, t.Rand())
				for _, endpoint := range [][]byte{nil, noise[:100], noise} {
					p, failed := t.Dial(t.A(), t.B(), 0, func(m *contract.PeerAdd) { m.Endpoint = endpoint })
					if failed == nil {
						peerMustNotWrite(t, p)
					}
					p.teardown()
				}
				t.PathBetween(t.B(), t.A(), Shape{Pages: 8, PageBytes: 4096}).Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
		Case{
			ID: "peer/unknown-lane-refused", Rule: "R12", Profile: TransferCore,
			Title: "a demand for lane 0, or for one that this version does not know, is refused",
			Script: `
> A: PeerAdds with require_lane 0 and 99
< PeerFailed(CAUSE_PROTOCOL) of each
= a good peer works`,
			Run: func(t *T) {
				for _, lane := range []contract.Lane{0, 99} {
					p, failed := t.Dial(t.A(), t.B(), 0, func(m *contract.PeerAdd) { m.RequireLane = lane })
					t.Check(failed.GetCause() == contract.Cause_CAUSE_PROTOCOL, "R12", fmt.Sprintf("PeerFailed(CAUSE_PROTOCOL) of a demand for lane %d", lane), "%s", peerAnswer(failed))
					p.teardown()
				}
				t.Path(Shape{Pages: 8, PageBytes: 4096}).Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
		Case{
			ID: "peer/lane-demand", Rule: "R9", Profile: TransferCore,
			Title: "bytes never take a slower lane than the host allows",
			Script: `
> PeerAdds that demand rdma, nvlink, shm, tcp
< for each: PeerFailed(CAUSE_LANE), or PeerReady
> after PeerReady: Submit
< Done on that lane or a faster one, or Failed(CAUSE_LANE)`,
			Run: func(t *T) {
				for _, lane := range []contract.Lane{contract.Lane_LANE_RDMA, contract.Lane_LANE_NVLINK, contract.Lane_LANE_SHM, contract.Lane_LANE_TCP} {
					p, failed := t.Dial(t.A(), t.B(), lane, nil)
					if failed != nil {
						t.Check(failed.Cause == contract.Cause_CAUSE_LANE, "R9", fmt.Sprintf("PeerFailed(CAUSE_LANE), or PeerReady, %v being demanded", lane), "%s", Describe(failed))
						p.teardown()
						continue
					}
					p.furnish(Shape{Pages: 8, PageBytes: 4096})
					end := p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Quiet()
					t.Check(end.Kind == "done" && end.Lane <= lane || endedAs(end, "failed CAUSE_LANE"), "R9",
						fmt.Sprintf("Done on %v or a faster lane, or Failed(CAUSE_LANE)", lane), "%s on %v", end, end.Lane)
					p.teardown()
				}
			},
		},
		Case{
			ID: "peer/remove-unknown-answered", Rule: "R12", Profile: TransferCore,
			Title: "PeerRemove of an unknown handle is answered",
			Script: `
> A and B: PeerRemove of a handle that was never used
< PeerRemoved
= ops of the other peers are done`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				ops := p.SubmitAll([]Submit{{Src: Pages(0, 4), Dst: Pages(0, 4)}, {Src: Pages(4, 4), Dst: Pages(4, 4)}})
				t.A().removePeer(1 << 31)
				t.B().removePeer(1 << 31)
				for _, op := range ops {
					op.Done()
				}
			},
		},
		Case{
			ID: "peer/remove-twice", Rule: "R12", Profile: TransferCore,
			Title: "PeerRemove of a peer that is gone is answered",
			Script: `
> PeerRemove
< PeerRemoved
> PeerRemove of the same handle
< PeerRemoved, a second one`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
				p.teardown()
				for i, n := range []*Node{p.From, p.To} {
					handle := []uint32{p.Handle, p.Writer}[i]
					n.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: handle}}})
					removed := func(e *contract.PluginEvent) bool {
						return e.GetPeerRemoved() != nil && e.GetPeerRemoved().Peer == handle
					}
					n.until("R12", fmt.Sprintf("a second PeerRemoved of peer %d", handle), func() bool {
						k := 0
						for _, e := range n.events {
							if removed(e) {
								k++
							}
						}
						return k == 2
					})
				}
			},
		},
		Case{
			ID: "peer/added-again", Rule: "R12", Profile: TransferCore,
			Title:    "a peer that was removed can be added again, any number of times",
			Incident: "sglang#25287: one failed transfer left a healthy peer refused until a restart",
			Script: `
> 6 times: PeerAccept, PeerAdd with a new handle and a new token; Submits; every other time PeerRemove while they run
< PeerReady; Done, or Failed(CAUSE_PEER_UNREACHABLE) of ops that PeerRemove met
= the last ones are done`,
			Run: func(t *T) {
				for round := range 6 {
					l := newLoad(t, t.A(), t.B(), 8, 256<<10)
					ops := l.submitAll()
					if round%2 == 1 {
						peerRemoveBusy(t, l, ops)
					} else {
						for _, op := range ops {
							op.Done()
						}
					}
					l.teardown()
				}
				t.Path(Shape{Pages: 8, PageBytes: 4096}).Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
			},
		},
		Case{
			ID: "peer/remove-ends-open-ops", Rule: "R1", Profile: TransferCore,
			Title: "PeerRemove ends the open ops of that peer, and no other",
			Script: `
> A: 32 Submits to B; B: 8 Submits to A; A: PeerRemove of B while they run
< A, for each: Done, or Failed(CAUSE_PEER_UNREACHABLE); then PeerRemoved
< B, for each: Done`,
			Run: func(t *T) {
				l := newLoad(t, t.A(), t.B(), 32, 128<<10)
				back := newLoad(t, t.B(), t.A(), 8, 128<<10)
				ops, others := l.submitAll(), back.submitAll()
				peerRemoveBusy(t, l, ops)
				for _, op := range others {
					op.Done()
				}
			},
		},
		Case{
			ID: "peer/removed-is-unknown", Rule: "R12", Profile: TransferCore,
			Title: "an op to a peer that was removed is refused",
			Script: `
> PeerRemove
< PeerRemoved
> Submit to that peer
< Accepted, then Failed(CAUSE_PROTOCOL, quiet=true)`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
				p.From.removePeer(p.Handle)
				protoRefused(t, p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1), Change: lands(nothing)}), "peer|plan", contract.Cause_CAUSE_PROTOCOL)
			},
		},
	)
}

// peerRemoveBusy removes the target of open ops, each of which must end.
func peerRemoveBusy(t *T, l *load, ops []*Op) {
	ops[0].Accepted()
	l.From.removePeer(l.Handle)
	for _, op := range ops {
		end := op.Quiet()
		t.Check(endedAs(end, "done", "failed CAUSE_PEER_UNREACHABLE"), "R1", fmt.Sprintf("op %d to be done, or Failed(CAUSE_PEER_UNREACHABLE)", op.ID), "%s", end)
	}
}

func peerAnswer(failed *contract.PeerFailed) string {
	if failed == nil {
		return "PeerReady"
	}
	return Describe(failed)
}

// peerMustNotWrite submits ops of a writer that the receiver does not admit, gives them as much time as
// honest ops in the other direction take, and aborts what is left: a plugin may go on trying.
func peerMustNotWrite(t *T, p *Path) {
	const pages = 8
	p.SrcMem, p.Src = p.From.pool(pages, 4096, 0, 1)
	p.DstMem, p.Dst = p.To.pool(pages, 4096, 0, 1)
	p.Grant(p.Generation.Destination, p.Dst, Pages(0, pages)...)
	if p.announceRegions(p.Dst) != nil {
		return // there is nothing to write to
	}
	p.Plan = p.AddPlan(p.Src, p.Dst, 1, 1, &contract.Slice{Len: 4096, Count: 1})
	var ops []*Op
	for i := range uint32(pages) {
		ops = append(ops, p.Submit(Submit{Src: Pages(i, 1), Dst: Pages(i, 1), Change: lands(nothing)}))
	}
	back := t.PathBetween(p.To, p.From, Shape{Pages: pages, PageBytes: 4096})
	for range 8 {
		back.Submit(Submit{Src: Pages(0, pages), Dst: Pages(0, pages)}).Done()
	}
	p.DstMem.intact(t, "R12", "no byte to land of a writer that is not admitted")
	for _, op := range ops {
		op.Abort()
	}
	for _, op := range ops {
		end := op.Quiet()
		t.Check(endedAs(end, "failed", "aborted"), "R12", fmt.Sprintf("op %d of a writer that is not admitted to be Failed, or Aborted", op.ID), "%s", end)
	}
	p.DstMem.intact(t, "R12", "no byte to land of a writer that is not admitted")
	back.teardown()
}
