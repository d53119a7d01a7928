package conformance

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

var quietMutants = []mutant{
	// When ops are quiet: R4.
	{
		name: "quiet-before-last-write", unsure: []string{"quiesce/region-removed"}, killer: "quiesce/not-before-last-write",
		fault: "an aborted op says that it is quiet, and one write is still under way",
		backend: func(h *hooks) {
			h.piece = linger
			h.cancelled = func(b *reference, op *sdk.Op, left []sdk.Copy) {
				write := b.poke(op.Peer(), left[0])
				op.Aborted(true)
				time.Sleep(5 * time.Millisecond)
				write()
			}
		},
	},
	{
		name: "writes-50-ms-after-quiet", unsure: []string{"quiesce/region-removed"}, killer: "quiesce/stays-quiet",
		fault:   "a library's thread writes 50 ms after the op was quiet",
		backend: writesAfter(50 * time.Millisecond),
	},
	{
		name: "writes-300-ms-after-quiet", unsure: []string{"quiesce/region-removed"}, killer: "quiesce/stays-quiet",
		fault:   "a library's thread writes 300 ms after the op was quiet",
		backend: writesAfter(300 * time.Millisecond),
	},
	{
		name: "writes-a-second-after-quiet", unsure: []string{"quiesce/region-removed"}, killer: "quiesce/stays-quiet",
		fault:   "a library's thread writes a second after the op was quiet",
		backend: writesAfter(time.Second),
	},
	{
		name: "never-quiesced", also: []string{"quiesce/not-before-last-write"}, killer: "abort/mid-transfer",
		fault: "an aborted op is not quiet, and Quiesced never comes",
		backend: func(h *hooks) {
			var k keep
			h.piece = linger
			h.cancelled = func(_ *reference, op *sdk.Op, _ []sdk.Copy) {
				op.Aborted(false)
				k.forEver(op)
			}
		},
	},
	{
		name: "quiesced-twice", killer: "abort/mid-transfer",
		fault: "both threads of an aborted op say that it is quiet",
		backend: func(h *hooks) {
			h.piece = linger
			h.cancelled = func(_ *reference, op *sdk.Op, _ []sdk.Copy) {
				op.Aborted(false)
				op.Quiesced()
			}
		},
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetQuiesced() != nil {
					return []*contract.PluginEvent{e, e}
				}
				return one(e)
			}
		},
	},
	{
		name: "quiesced-after-quiet", unsure: []string{"quiesce/region-removed"}, killer: "abort/before-submit",
		fault: "an aborted op that was quiet says so again",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if a := e.GetAborted(); a.GetQuiet() {
					return []*contract.PluginEvent{e, quiesced(a.Op)}
				}
				return one(e)
			}
		},
	},
	{
		name: "done-before-visible", killer: "transfer/visible-at-done",
		fault: "from the ninth on, small ops are done when they are posted, not when they have arrived",
		backend: func(h *hooks) {
			var ops atomic.Int64
			small := func(op *sdk.Op) bool { return op.Bytes() <= 4096 && ops.Load() > 8 }
			h.piece = func(_ *reference, op *sdk.Op, i int, c *sdk.Copy) bool {
				if i == 0 {
					ops.Add(1)
				}
				return i > 0 || !small(op) || c.Len != op.Bytes()
			}
			h.moved = func(b *reference, op *sdk.Op, last sdk.Copy) {
				if !small(op) || last.Len != op.Bytes() {
					op.Done(contract.Lane_LANE_SHM)
					return
				}
				write := b.poke(op.Peer(), last)
				op.Done(contract.Lane_LANE_SHM)
				time.Sleep(5 * time.Millisecond)
				write()
			}
		},
	},
	{
		name: "sentinel-equals-data", killer: "transfer/any-value-is-data",
		fault: "the second incident: a page has arrived when none of its words is -0.0 any more, so that a page that holds one never has",
		backend: func(h *hooks) {
			h.moved = func(b *reference, op *sdk.Op, _ sdk.Copy) {
				for b.holds(op, 0x80000000) {
					select {
					case <-op.Context().Done():
						op.FailErr(true, context.Cause(op.Context()))
						return
					case <-time.After(time.Millisecond):
					}
				}
				op.Done(contract.Lane_LANE_SHM)
			}
		},
	},
	{
		name: "revoked-too-early", also: []string{"generation/room-reuse"}, killer: "quiesce/revoked",
		fault: "an opener is checked when an op begins; Revoke does not wait for the op",
		backend: func(h *hooks) {
			h.covers = func(b *reference, o sdk.Opener, region, off, n uint64) error { return nil }
			h.transfer = func(b *reference, op *sdk.Op) {
				to, err := b.dial(op.Peer())
				if err == nil {
					to.mu.Lock()
					covers := to.covers
					to.covers = nil
					for c := range op.Copies() {
						if err == nil {
							err = to.granted(b.writer(), op.Generation().Destination, c.DstRegion, c.DstOff, c.Len)
						}
					}
					to.covers = covers
					to.mu.Unlock()
				}
				if err != nil {
					op.FailErr(true, err)
					return
				}
				b.move(op)
			}
			h.piece = func(b *reference, op *sdk.Op, i int, c *sdk.Copy) bool {
				if op.Bytes() < largeOp || i != 1 || b.lingered.Add(1) > 12 {
					return true
				}
				to, err := b.dial(op.Peer())
				for began := time.Now(); err == nil && time.Since(began) < time.Second; time.Sleep(time.Millisecond) {
					to.mu.RLock()
					revoked := to.revoked[op.Generation().Destination]
					to.mu.RUnlock()
					if revoked {
						time.Sleep(50 * time.Millisecond)
						break
					}
				}
				return true
			}
		},
	},
	{
		name: "removed-writer-writes", also: []string{"quiesce/writer-dropped"}, killer: "peer/not-accepted-cannot-write",
		fault:   "a writer that was removed stays admitted",
		backend: func(h *hooks) { h.unaccept = func(*reference, *sdk.Peer) {} },
	},
	{
		name: "fence-says-yes", also: []string{"fence/*"}, killer: "fence/live-writer",
		fault: "every fence is QUIET, and nobody is refused",
		backend: func(h *hooks) {
			h.fence = func(*reference, string, fence) contract.FenceResult {
				return contract.FenceResult_FENCE_RESULT_QUIET
			}
		},
	},
	{
		name: "fence-forgets", killer: "fence/outlives-the-answer",
		fault: "a fence ends the writers that are there, and does not refuse those that come",
		backend: func(h *hooks) {
			h.fence = func(b *reference, node string, f fence) contract.FenceResult {
				b.mu.Lock()
				defer b.mu.Unlock()
				for w := range b.writers {
					if w.node == node && f.covers(w) {
						delete(b.writers, w)
					}
				}
				return contract.FenceResult_FENCE_RESULT_QUIET
			}
		},
	},
	{
		name: "peer-removed-too-early", also: []string{"quiesce/peer-removed"}, killer: "peer/remove-ends-open-ops",
		fault: "PeerRemoved comes before the ends of the peer's ops",
		backend: func(h *hooks) {
			h.piece = linger
			h.cancelled = func(_ *reference, op *sdk.Op, _ []sdk.Copy) {
				time.Sleep(20 * time.Millisecond)
				op.Aborted(true)
			}
		},
		frames: func(m *mangler) {
			const answered, swallowed = 1, 2 // the first PeerRemove of a peer; its real answer
			state := map[uint32]int{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if r := e.GetPeerRemove(); r != nil && state[r.Peer] == 0 {
					state[r.Peer] = answered
					m.say(0, peerRemoved(r.Peer))
				}
				return []*contract.HostEvent{e}
			}
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if r := e.GetPeerRemoved(); r != nil && state[r.Peer] == answered {
					state[r.Peer] = swallowed
					return nil
				}
				return one(e)
			}
		},
	},
	{
		name: "region-removed-too-early", killer: "region/removed-is-unmapped",
		fault: "RegionRemoved comes before the memory is unmapped",
		frames: func(m *mangler) {
			early := map[uint64]bool{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				r := e.GetRegionRemove()
				if r == nil {
					return []*contract.HostEvent{e}
				}
				early[r.Region] = true
				m.say(0, regionRemoved(r.Region))
				m.later.Go(func() {
					time.Sleep(30 * time.Millisecond)
					_ = m.Plugin.Send(e)
				})
				return nil
			}
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if r := e.GetRegionRemoved(); r != nil && early[r.Region] {
					delete(early, r.Region)
					return nil
				}
				return one(e)
			}
		},
	},

	// Generations and grants: R3.
	{
		name: "checks-nothing", killer: "generation/ungranted",
		fault: "receiver_checked is declared, and nothing is checked",
		backend: func(h *hooks) {
			h.covers = func(*reference, sdk.Opener, uint64, uint64, uint64) error { return nil }
		},
	},
	{
		name: "forgets-generation", killer: "generation/other-openers-pages",
		fault: "pages may be written while they are granted, whoever writes",
		backend: func(h *hooks) {
			h.covers = func(b *reference, o sdk.Opener, region, off, n uint64) error {
				var all sdk.Grant
				for _, grants := range b.grants {
					for _, g := range grants {
						all.Parts = append(all.Parts, g.Parts...)
					}
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
		name: "checks-opener-only", killer: "generation/outside-grant",
		fault: "an opener that has a grant may write everywhere",
		backend: func(h *hooks) {
			h.covers = func(b *reference, o sdk.Opener, region, off, n uint64) error {
				if len(b.grants[o]) > 0 {
					return nil
				}
				b.late.Add(1)
				return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: errNotGranted}
			}
		},
	},
	{
		name: "ignores-writers", killer: "generation/other-writer",
		fault:   "whoever carries the opener may write, also a writer that the grant does not name",
		backend: func(h *hooks) { h.anyWriter = true },
	},
	{
		name: "revoke-forgets", also: []string{"quiesce/revoked"}, killer: "generation/after-revoke",
		fault: "Revoke answers, and the grant stays",
		backend: func(h *hooks) {
			h.revoke = func(*reference, *sdk.Grant) bool { return true }
		},
	},
	{
		name: "revoke-unanswered", killer: "generation/revoke-unknown",
		fault: "a Revoke of an unknown grant is not answered",
		frames: func(m *mangler) {
			known := map[uint64]bool{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if g := e.GetGrant(); g != nil {
					known[g.Grant] = true
				}
				if r := e.GetRevoke(); r != nil && !known[r.Grant] {
					return nil
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "late-writes-uncounted", killer: "generation/after-revoke",
		fault:  "late_refused stays 0",
		frames: func(m *mangler) { m.stats(func(s *contract.Stats) { s.LateRefused = 0 }) },
	},
	{
		name: "grants-anything", killer: "generation/grant-refused",
		fault: "a grant of pages that do not exist is granted",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if g := e.GetGrantFailed(); g != nil {
					return one(granted(g.Grant))
				}
				return one(e)
			}
		},
	},
}

// lateWrites are writes that mutants have under way.
var lateWrites sync.WaitGroup

// writesAfter is a backend whose aborted ops are quiet by their word, and one piece lands after d, from a
// thread that nobody waits for.
func writesAfter(d time.Duration) func(*hooks) {
	return func(h *hooks) {
		h.piece = linger
		h.cancelled = func(b *reference, op *sdk.Op, left []sdk.Copy) {
			write := b.poke(op.Peer(), left[0])
			lateWrites.Go(func() {
				time.Sleep(d)
				write()
			})
			op.Aborted(true)
		}
	}
}
