package conformance

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// stormMutants have faults that take chance, or a crowd, to be seen: what the storms are there for.
var stormMutants = []mutant{
	{
		name: "abort-or-deadline", killer: "storm/ops",
		fault: "of an op that has a deadline and is aborted, each of the two leaves the end to the other",
		frames: func(m *mangler) {
			hit := map[uint64]bool{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil {
					hit[a.Op] = true
				}
				return []*contract.HostEvent{e}
			}
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if end.Kind == "aborted" && hit[op.Op] && op.DeadlineNs != 0 {
					return nil
				}
				return one(e)
			})
		},
	},
	{
		name: "revoked-are-forgotten", killer: "storm/generations",
		fault: "of the openers that were revoked the last 8 are remembered; older ones write whatever is granted",
		backend: func(h *hooks) {
			var revoked []sdk.Opener
			h.revoke = func(b *reference, g *sdk.Grant) bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				delete(b.grants, g.Destination)
				revoked = append(revoked, g.Destination)
				return true
			}
			h.covers = func(b *reference, o sdk.Opener, region, off, n uint64) error {
				grants := b.grants[o]
				if at := slices.Index(revoked, o); at >= 0 && at < len(revoked)-8 {
					for _, g := range b.grants {
						grants = append(grants, g...)
					}
				}
				var all sdk.Grant
				for _, g := range grants {
					all.Parts = append(all.Parts, g.Parts...)
				}
				if all.Covers(region, off, n) {
					return nil
				}
				b.late.Add(1)
				return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: errNotGranted}
			}
		},
	},
	{
		name: "aborted-and-removed", killer: "storm/peers",
		fault: "an op that is being aborted when its peer goes is ended by neither",
		frames: func(m *mangler) {
			removed := map[uint32]bool{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if r := e.GetPeerRemove(); r != nil {
					removed[r.Peer] = true
				}
				return []*contract.HostEvent{e}
			}
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if end.Kind == "aborted" && removed[op.Peer] {
					return nil
				}
				return one(e)
			})
		},
		backend: func(h *hooks) {
			h.transfer = func(b *reference, op *sdk.Op) {
				select {
				case <-op.Context().Done(): // ops take a while, and so does their end
					time.Sleep(50 * time.Millisecond)
					op.FailErr(true, context.Cause(op.Context()))
				case <-time.After(2 * time.Millisecond):
					b.move(op)
				}
			}
		},
	},
	{
		name: "removal-moves-the-others", killer: "storm/regions",
		fault: "when a region goes, the ones behind it move up in the table, and ops that are under way fail",
		frames: func(m *mangler) {
			open := map[uint64]bool{} // true: hit
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if s := e.GetSubmit(); s != nil {
					open[s.Op] = false
				}
				if e.GetRegionRemove() != nil {
					for id := range open {
						open[id] = true
					}
				}
				return []*contract.HostEvent{e}
			}
			m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				hit := open[op.Op]
				if delete(open, op.Op); hit {
					return one(failed(op.Op, contract.Cause_CAUSE_INTERNAL))
				}
				return one(e)
			})
		},
		backend: func(h *hooks) {
			h.transfer = func(b *reference, op *sdk.Op) {
				time.Sleep(5 * time.Millisecond)
				b.move(op)
			}
		},
	},
	{
		name: "one-refusal-in-64", killer: "storm/bad-submits",
		fault: "refusals are told from a ring of 64, whose last place is never read",
		frames: func(m *mangler) {
			refused := 0
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetFailed().GetCause() == contract.Cause_CAUSE_PROTOCOL {
					if refused++; refused%64 == 0 {
						return nil
					}
				}
				return one(e)
			}
		},
	},
	{
		name: "abort-ends-the-others-op", killer: "storm/two-way",
		fault: "an abort takes the op of the same id that the peer sends us out of the table, and its end is never told",
		frames: func() func(*mangler) {
			var aborted sync.Map // {endpoint, op}
			return func(m *mangler) {
				to := m.targets(func(e *contract.HostEvent) {
					if a := e.GetAbort(); a != nil && m.seen[a.Op] != nil {
						aborted.Store(opAt{m.endpoint(), a.Op}, true)
					}
				})
				m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
					if _, hit := aborted.Load(opAt{to[op.Peer], op.Op}); hit && end.Kind == "done" {
						return nil
					}
					return one(e)
				})
			}
		}(),
	},
	{
		name: "drops-ends-when-full", killer: "storm/slow-host",
		fault: "the queue to the host holds 300 events; an end that finds it full is dropped",
		frames: func(m *mangler) {
			var queue []*contract.PluginEvent
			passing := false
			m.out = func(control bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if control {
					return one(e)
				}
				if _, end, _ := opEvent(e); end != nil && len(queue) >= 300 {
					return nil
				}
				if queue = append(queue, e); !passing {
					passing = true
					m.later.Go(func() {
						for {
							m.mu.Lock()
							now := queue
							queue, passing = nil, len(now) > 0
							m.mu.Unlock()
							if len(now) == 0 {
								return
							}
							m.pass(false, now...)
						}
					})
				}
				return nil
			}
		},
	},
	{
		name: "odd-row-left-out", killer: "layout/random-geometry",
		fault: "rows go in pairs: where the tensors lie in several regions, the last of an odd number of rows is left out",
		backend: func(h *hooks) {
			h.pieces = func(op *sdk.Op) []sdk.Copy {
				pieces := slices.Collect(op.Pieces(pieceBytes))
				odd, several := false, false
				for _, s := range op.Plan().Slices {
					odd = odd || s.Count > 1 && s.Count%2 == 1
					several = several || s.Dst.RegionID != op.Plan().Slices[0].Dst.RegionID
				}
				if odd && several && len(pieces) > 0 {
					pieces = pieces[:len(pieces)-1]
				}
				return pieces
			}
		},
	},
}
