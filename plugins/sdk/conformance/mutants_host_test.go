package conformance

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

var hostMutants = []mutant{
	// What is copied where.
	{
		name: "writes-past-the-run", killer: "layout/pages-of-7-bytes",
		fault: "copies are rounded up to 8 bytes",
		backend: func(h *hooks) {
			h.piece = func(b *reference, op *sdk.Op, _ int, c *sdk.Copy) bool {
				if tail := c.Len % 8; tail != 0 && c.SrcOff+c.Len+8-tail <= c.Src.Size {
					more := *c
					more.SrcOff, more.DstOff, more.Len = c.SrcOff+c.Len, c.DstOff+c.Len, 8-tail
					b.poke(op.Peer(), more)()
				}
				return true
			}
		},
	},
	{
		name: "writes-before-the-run", killer: "layout/odd-offsets",
		fault: "a copy to an odd address begins one byte early",
		backend: func(h *hooks) {
			h.piece = func(b *reference, op *sdk.Op, _ int, c *sdk.Copy) bool {
				if c.DstOff%2 == 1 && c.SrcOff > 0 {
					before := *c
					before.SrcOff, before.DstOff, before.Len = c.SrcOff-1, c.DstOff-1, 1
					b.poke(op.Peer(), before)()
				}
				return true
			}
		},
	},
	{
		name: "sorts-pages", killer: "layout/thousands-of-runs",
		fault: "source pages are sorted so that neighbours can be joined, destination pages are not",
		backend: func(h *hooks) {
			h.pieces = func(op *sdk.Op) []sdk.Copy {
				pieces := slices.Collect(op.Pieces(pieceBytes))
				src := slices.Clone(pieces)
				slices.SortStableFunc(src, func(a, b sdk.Copy) int { return int(int64(a.SrcOff) - int64(b.SrcOff)) })
				for i := range pieces {
					if pieces[i].Len == src[i].Len {
						pieces[i].Src, pieces[i].SrcOff = src[i].Src, src[i].SrcOff
					}
				}
				return pieces
			}
		},
	},
	{
		name: "swaps-two-pages", killer: "layout/thousands-of-runs",
		fault: "with more than 256 pieces the last two change places",
		backend: func(h *hooks) {
			h.pieces = func(op *sdk.Op) []sdk.Copy {
				p := slices.Collect(op.Pieces(pieceBytes))
				if n := len(p); n > 256 && p[n-1].Len == p[n-2].Len {
					p[n-1].DstOff, p[n-2].DstOff = p[n-2].DstOff, p[n-1].DstOff
				}
				return p
			}
		},
	},
	{
		name: "skips-last-page", killer: "layout/thousands-of-runs",
		fault: "a descriptor list holds 1,024 pieces; what does not fit is left out",
		backend: func(h *hooks) {
			h.piece = func(_ *reference, _ *sdk.Op, i int, _ *sdk.Copy) bool { return i < 1024 }
		},
	},
	{
		name: "ignores-layer-range", unsure: []string{"layout/layer-by-layer"}, killer: "layout/layer-range",
		fault: "layer_range is declared, and all layers are moved",
		backend: func(h *hooks) {
			h.pieces = func(op *sdk.Op) (all []sdk.Copy) {
				for _, s := range op.Plan().Slices {
					for a, b := range op.Runs() {
						for i := range a.Count {
							for k := range s.Count {
								all = append(all, sdk.Copy{
									Src: s.Src.Region, DstRegion: s.Dst.RegionID, Len: s.Len,
									SrcOff: s.Src.Offset + uint64(a.Start+i*a.Stride)*s.Src.PageStride + s.SrcOff + k*s.SrcStride,
									DstOff: s.Dst.Offset + uint64(b.Start+i*b.Stride)*s.Dst.PageStride + s.DstOff + k*s.DstStride,
								})
							}
						}
					}
				}
				if from, to := op.Layers(); from == 0 && to >= 1<<31 || op.Plan().SrcPages != 1 || op.Plan().DstPages != 1 {
					return slices.Collect(op.Pieces(pieceBytes))
				}
				return all
			}
		},
	},
	{
		name: "declares-strided", killer: "layout/strided-runs",
		fault: "strided is declared, and runs with a stride are refused",
		backend: func(h *hooks) {
			h.transfer = func(b *reference, op *sdk.Op) {
				for _, r := range slices.Concat(op.Source(), op.Destination()) {
					if r.Stride != 1 {
						op.Fail(contract.Cause_CAUSE_UNSUPPORTED, true, "stride %d", r.Stride)
						return
					}
				}
				b.move(op)
			}
		},
	},
	{
		name: "declares-repage", killer: "layout/repage-up",
		fault: "repage is declared, and page groups are refused",
		backend: func(h *hooks) {
			h.transfer = func(b *reference, op *sdk.Op) {
				if p := op.Plan(); p.SrcPages != 1 || p.DstPages != 1 {
					op.Fail(contract.Cause_CAUSE_UNSUPPORTED, true, "%d pages to %d", p.SrcPages, p.DstPages)
					return
				}
				b.move(op)
			}
		},
	},

	{
		name: "layers-are-repeats", killer: "layout/layer-by-layer",
		fault: "what has arrived is noted by opener and pages: the second layer of the same pages is taken for a repetition",
		backend: func(h *hooks) {
			var mu sync.Mutex
			seen := map[string]bool{}
			h.transfer = func(b *reference, op *sdk.Op) {
				from, to := op.Layers()
				key := fmt.Sprint(op.Generation().Destination, op.Plan().ID, op.Destination())
				mu.Lock()
				again := to-from == 1 && seen[key]
				seen[key] = true
				mu.Unlock()
				if again {
					op.Done(contract.Lane_LANE_SHM)
					return
				}
				b.move(op)
			}
		},
	},
	{
		name: "plans-of-512-slices", killer: "layout/many-slices",
		fault: "a plan keeps its first 512 slices",
		backend: func(h *hooks) {
			h.pieces = func(op *sdk.Op) []sdk.Copy {
				pieces, n := slices.Collect(op.Pieces(pieceBytes)), len(op.Plan().Slices)
				return pieces[:len(pieces)*min(n, 512)/max(n, 1)]
			}
		},
	},

	// Regions.
	{
		name: "registers-where-it-beats", killer: "beat/during-big-registration",
		fault: "memory is registered by the thread that beats, and 128 MiB take it for ever",
		frames: func(m *mangler) {
			stuck := false
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if e.GetRegionAdd().GetSize() >= 128<<20 {
					stuck = true
					return nil
				}
				return []*contract.HostEvent{e}
			}
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if stuck && e.GetBeat() != nil {
					return nil
				}
				return one(e)
			}
		},
	},
	{
		name: "canary-unanswered", killer: "region/canary-both-ways",
		fault: "the complement of the canary is not written",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetRegionAdd(); a != nil {
					a.NoCanary, a.Canary, a.CanaryOffset = true, 0, 0
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "canary-in-use", killer: "region/no-canary-untouched",
		fault: "the canary is written although the region is in use",
		backend: func(h *hooks) {
			h.addRegion = func(_ *reference, r *sdk.Region) error {
				if word := r.Bytes[r.Size-8:]; !isCanary(word) {
					putCanary(word)
				}
				return nil
			}
		},
	},
	{
		name: "wrong-canary-accepted", killer: "region/wrong-canary-refused",
		fault:  "the canary is not read",
		frames: func(m *mangler) { acceptMemory(m, contract.Cause_CAUSE_PROTOCOL) },
	},
	{
		name: "takes-any-memory", killer: "region/cuda-refused",
		fault:  "memory of a kind that is not served is taken",
		frames: func(m *mangler) { acceptMemory(m, contract.Cause_CAUSE_UNSUPPORTED) },
	},
	{
		name: "leaks-leases", also: []string{"leak/hundred-peers"}, killer: "leak/thousand-regions",
		fault: "the 100th region and later ones are never let go",
		backend: func(h *hooks) {
			var mu sync.Mutex
			var held []int
			n := 0
			h.addRegion = func(_ *reference, r *sdk.Region) error {
				mu.Lock()
				defer mu.Unlock()
				if n++; n < 100 {
					return nil
				}
				fd, err := unix.FcntlInt(uintptr(r.Lease), unix.F_DUPFD_CLOEXEC, 0)
				if err == nil {
					held = append(held, fd)
				}
				return err
			}
			h.closing = func(*reference) {
				mu.Lock()
				defer mu.Unlock()
				for _, fd := range held {
					unix.Close(fd)
				}
			}
		},
	},

	// Peers.
	{
		name: "any-token", killer: "peer/wrong-token-cannot-write",
		fault: "a writer is known by its name",
		backend: func(h *hooks) {
			h.admits = func(b *reference, w writer, _ []byte) bool { return b.writers[w] != nil }
		},
	},
	{
		name: "lane-demand-ignored", killer: "peer/lane-demand",
		fault: "a demanded lane is taken as a wish",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if p := e.GetPeerAdd(); p != nil {
					p.RequireLane = contract.Lane_LANE_ANY
				}
				return []*contract.HostEvent{e}
			}
		},
	},

	// Drain, Stats, beats.
	{
		name: "drained-at-once", killer: "drain/waits-for-open-ops",
		fault: "Drained says 0 while ops are open",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if e.GetDrain() != nil {
					m.say(0, drained(0))
				}
				return []*contract.HostEvent{e}
			}
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetDrained() != nil {
					return nil
				}
				return one(e)
			}
		},
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "never-drained", also: []string{"drain/*"}, killer: "drain/deadline",
		fault: "Drained waits for the ends of all ops, and those wait for Drained",
		frames: func(m *mangler) {
			draining := false
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				draining = draining || e.GetDrain() != nil && len(m.seen) > 0
				return []*contract.HostEvent{e}
			}
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				_, end, _ := opEvent(e)
				if draining && (end != nil && end.Kind == "done" || e.GetDrained() != nil) {
					return nil
				}
				return one(e)
			}
		},
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "drains-and-serves", killer: "skip/draining",
		fault: "new ops are done while the plugin drains",
		frames: func(m *mangler) {
			open := map[uint64]bool{}
			drain := false
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if s := e.GetSubmit(); s != nil {
					open[s.Op] = true
				}
				if e.GetDrain() == nil {
					return []*contract.HostEvent{e}
				}
				if drain = len(open) > 0; !drain {
					m.say(0, drained(0))
				}
				return nil
			}
			m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if delete(open, op.Op); drain && len(open) == 0 {
					drain = false
					return []*contract.PluginEvent{e, drained(0)}
				}
				return one(e)
			})
		},
	},
	{
		name: "stats-overtakes", unsure: []string{"drain/deadline", "drain/waits-for-open-ops"}, killer: "order/stats-is-a-barrier",
		fault: "Stats is answered beside the queue in which the events of bursts wait",
		frames: func(m *mangler) {
			var held []*contract.PluginEvent
			flushing := false
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if id, _, isOp := opEvent(e); !isOp || m.behind[id] == 0 {
					return one(e)
				}
				if held = append(held, e); !flushing {
					flushing = true
					m.later.Go(func() {
						for {
							time.Sleep(5 * time.Millisecond)
							m.mu.Lock()
							now := held
							held, flushing = nil, len(now) > 0
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
		name: "last-seq-of-good-ops", killer: "order/last-seq",
		fault: "ops that are refused do not count in last_seq",
		frames: func(m *mangler) {
			refused := uint64(0)
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetFailed().GetCause() == contract.Cause_CAUSE_PROTOCOL {
					refused++
				}
				if s := e.GetStats(); s != nil {
					s.LastSeq -= refused
				}
				return one(e)
			}
		},
	},
	{
		name: "stats-hides-open-ops", killer: "order/stats-lists-open",
		unsure: []string{
			"abort/at-the-receiver", "beat/goes-with-dispatch", "deadline/is-a-hint", "drain/deadline", "drain/waits-for-open-ops",
			"transfer/both-directions", "transfer/two-writers",
		},
		fault: "Stats lists at most 7 ops",
		frames: func(m *mangler) {
			m.stats(func(s *contract.Stats) { s.OpenOps = s.OpenOps[:min(7, len(s.OpenOps))] })
		},
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "beats-prove-nothing", killer: "beat/goes-with-dispatch",
		fault: "the thread that dispatches is stuck, and another one sends the beats",
		frames: func(m *mangler) {
			stuck := false
			m.in = func(control bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && m.seen[a.Op] == nil {
					stuck = true
				}
				if stuck && !control {
					return nil
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "feature-twice", killer: "handshake/says-what-it-is",
		fault: "the features of two layers are listed one behind the other",
		backend: func(h *hooks) {
			h.info = func(i *sdk.Info) { i.Features = append(i.Features, i.Features[0]) }
		},
	},
	{
		name: "first-version-only", killer: "handshake/newer-host",
		fault: "of the host's versions the first is looked at",
		frames: func(m *mangler) {
			m.asked = func(r *contract.HandshakeRequest) { r.Versions = r.Versions[:1] }
		},
	},
	{
		name: "any-version", killer: "handshake/no-common-version",
		fault: "the host's versions are not looked at",
		frames: func(m *mangler) {
			m.asked = func(r *contract.HandshakeRequest) { r.Versions = []uint32{sdk.ContractVersion} }
		},
	},
	{
		name: "refuses-new-features", killer: "handshake/unknown-host-feature",
		fault: "a feature of the host that is not known is an error",
		frames: func(m *mangler) {
			known := true
			m.asked = func(r *contract.HandshakeRequest) { known = !slices.Contains(r.Features, "from-the-future") }
			m.answered = func(r *contract.HandshakeResponse) {
				if !known {
					r.Version, r.Error = 0, "feature from-the-future is unknown"
				}
			}
		},
	},
	{
		name: "any-option", killer: "handshake/unknown-option",
		fault: "options are not looked at",
		backend: func(h *hooks) {
			h.info = func(i *sdk.Info) { i.Schema = []byte(`{"type": "object"}`) }
		},
	},
	{
		name: "no-beats", also: []string{"beat/*"}, killer: "beat/every-second",
		fault: "no beats",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetBeat() != nil {
					return nil
				}
				return one(e)
			}
		},
	},
}
