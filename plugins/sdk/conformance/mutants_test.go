package conformance

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// mutant is a plugin with one fault.
type mutant struct {
	name   string
	fault  string // what is wrong with it
	killer string // the case that is there for this fault, or for its like; it must be in the list
	// One of these is set. backend changes the reference backend, frames what comes and goes; both run
	// once a launch. process is a fault of the program mutant.
	backend func(*hooks)
	frames  func(*mangler)
	process string
	program string // its path
	// also are cases that it runs although they stand apart.
	also []string
}

// largeOp is the size from which on a mutant can be caught in the middle of an op: it lingers there.
const largeOp = 128 << 10

// linger gives an abort of a large op the time to come while the op is half done. Later ones go through, or
// cases of many ops would take for ever.
func linger(b *reference, op *sdk.Op, i int, _ *sdk.Copy) bool {
	if op.Bytes() >= largeOp && i == 1 && b.lingered.Add(1) <= 32 {
		select {
		case <-op.Context().Done():
		case <-time.After(time.Second):
		}
	}
	return true
}

// keep holds ops that never end, so that the garbage collector does not end them.
type keep struct {
	mu  sync.Mutex
	ops []*sdk.Op
}

func (k *keep) forEver(op *sdk.Op) {
	op.Async()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ops = append(k.ops, op)
}

func one(e *contract.PluginEvent) []*contract.PluginEvent { return []*contract.PluginEvent{e} }

// memoryMutants run in this process.
var memoryMutants = []mutant{
	// How ops end: R1, R8.
	{
		name: "silent-skip", killer: "skip/empty-range",
		fault: "an op with nothing to move is accepted and forgotten",
		frames: func(m *mangler) {
			m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if op.Bytes == 0 {
					return nil
				}
				return one(e)
			})
		},
	},
	{
		name: "ends-twice", killer: "abort/before-submit",
		fault: "the abort ends an op, and so does the thread that was at it",
		frames: func(m *mangler) {
			m.ends(func(_ *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if end.Kind == "aborted" {
					return []*contract.PluginEvent{e, e}
				}
				return one(e)
			})
		},
	},
	{
		name: "done-after-failed", also: []string{"quiesce/peer-removed"}, killer: "peer/remove-ends-open-ops",
		fault: "the removal of a peer fails its ops, and the threads that were at them succeed",
		frames: func(m *mangler) {
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if end.Cause == contract.Cause_CAUSE_PEER_UNREACHABLE {
					return []*contract.PluginEvent{e, done(op.Op, op.Bytes)}
				}
				return one(e)
			})
		},
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "progress-after-end", also: []string{"layout/64-mib-op"}, killer: "progress/counts-bytes",
		fault: "progress is counted by a thread that does not know of the end",
		frames: func(m *mangler) {
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if op.Bytes >= largeOp && end.Kind == "done" {
					return []*contract.PluginEvent{e, progress(op.Op, op.Bytes)}
				}
				return one(e)
			})
		},
	},
	{
		name: "progress-goes-back", killer: "progress/counts-bytes",
		fault: "progress is told per stream of a large op, not for the op",
		frames: func(m *mangler) {
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if op.Bytes >= largeOp && end.Kind == "done" {
					return []*contract.PluginEvent{progress(op.Op, op.Bytes), progress(op.Op, op.Bytes/2), e}
				}
				return one(e)
			})
		},
	},
	{
		name: "progress-beyond-size", killer: "progress/counts-bytes",
		fault: "bytes that were sent twice count twice",
		frames: func(m *mangler) {
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if op.Bytes >= largeOp && end.Kind == "done" {
					return []*contract.PluginEvent{progress(op.Op, op.Bytes+1), e}
				}
				return one(e)
			})
		},
	},
	{
		name: "no-byte-progress", killer: "progress/counts-bytes",
		fault: "byte_progress is declared, and large ops only say that they are done",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetProgress() != nil {
					return nil
				}
				return one(e)
			}
		},
	},
	{
		name: "refused-is-not-accepted", killer: "order/refused-is-accepted-first",
		fault: "an op that is refused gets its end only",
		frames: func(m *mangler) {
			var held *contract.PluginEvent
			m.out = func(_ bool, e *contract.PluginEvent) (out []*contract.PluginEvent) {
				_, end, ok := opEvent(e)
				switch {
				case e.GetAccepted() != nil:
					if held != nil {
						out = one(held)
					}
					held = e
					return out
				case held != nil && ok && end != nil && end.Cause == contract.Cause_CAUSE_PROTOCOL:
					held = nil
				case held != nil:
					out = one(held)
					held = nil
				}
				return append(out, e)
			}
		},
	},
	{
		name: "accepted-late", killer: "transfer/many-in-one-frame",
		fault: "an op is accepted when the dispatcher, busy with the ops behind it, comes to say so; by then it has ended",
		frames: func(m *mangler) {
			held := map[uint64]*contract.PluginEvent{}
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				id, _, ok := opEvent(e)
				if e.GetAccepted() != nil && m.behind[id] > 0 {
					held[id] = e
					return nil
				}
				if h := held[id]; ok && h != nil {
					delete(held, id)
					return []*contract.PluginEvent{e, h}
				}
				return one(e)
			}
		},
	},
	{
		name: "wrong-bytes", killer: "layout/64-mib-op",
		fault: "the size of an op is kept in 26 bits",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if d := e.GetDone(); d != nil {
					d.Bytes &= 1<<26 - 1
				}
				return one(e)
			}
		},
	},
	{
		name: "wrong-lane", also: []string{"layout/64-mib-op"}, killer: "transfer/lane-as-announced",
		fault: "large ops fall back to a slower lane than the one that was announced",
		backend: func(h *hooks) {
			h.moved = func(_ *reference, op *sdk.Op, _ sdk.Copy) {
				if op.Bytes() >= largeOp {
					op.Done(contract.Lane_LANE_TCP)
					return
				}
				op.Done(contract.Lane_LANE_SHM)
			}
		},
	},
	{
		name: "one-in-ten-thousand", killer: "leak/ten-thousand-ops",
		fault: "the completion of every 10,000th op is lost",
		frames: func(m *mangler) {
			ended := 0
			m.ends(func(_ *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if ended++; ended%10000 == 0 {
					return nil
				}
				return one(e)
			})
		},
	},
	{
		name: "ring-wraps", also: []string{"window/*"}, killer: "window/full",
		fault: "the index of the completion ring has 13 bits, and 0 means none: every 8,192nd end is lost",
		frames: func(m *mangler) {
			ended := 0
			m.ends(func(_ *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if ended++; ended%8192 == 0 {
					return nil
				}
				return one(e)
			})
		},
	},
	{
		name: "zero-cause", killer: "proto/read-refused",
		fault: "CAUSE_UNSUPPORTED is sent as 0",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if f := e.GetFailed(); f.GetCause() == contract.Cause_CAUSE_UNSUPPORTED {
					f.Cause = 0
				}
				return one(e)
			}
		},
	},
	{
		name: "long-detail", killer: "proto/unknown-plan",
		fault: "the detail is a stack trace",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if f := e.GetFailed(); f.GetCause() == contract.Cause_CAUSE_PROTOCOL {
					f.Detail = string(make([]byte, 4096))
				}
				return one(e)
			}
		},
	},
	{
		name: "bad-submit-is-fatal", killer: "proto/unknown-plan",
		fault: "a mistake of the host in one op ends the session",
		frames: func(m *mangler) {
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if e.GetFailed().GetCause() == contract.Cause_CAUSE_PROTOCOL {
					m.die("panic: plan not found")
				}
				return one(e)
			}
		},
	},
	{
		name: "one-fails-all", killer: "proto/unknown-plan",
		fault: "an op that fails takes the next op of its peer along",
		frames: func(m *mangler) {
			bad := map[uint32]bool{}
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				switch {
				case end.Kind == "failed":
					bad[op.Peer] = true
				case bad[op.Peer]:
					delete(bad, op.Peer)
					return one(failed(op.Op, contract.Cause_CAUSE_TRANSPORT))
				}
				return one(e)
			})
		},
	},
	{
		name: "unknown-event-is-fatal", killer: "proto/unknown-event",
		fault: "an event of a newer host ends the session",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if e.Event == nil {
					m.die("unknown event")
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "read-becomes-write", killer: "proto/read-refused",
		fault: "the direction is not looked at",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if s := e.GetSubmit(); s != nil {
					s.Direction = contract.Direction_DIRECTION_WRITE
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "judges-deadlines", killer: "deadline/is-a-hint",
		fault: "an op past its deadline is failed by the plugin",
		backend: func(h *hooks) {
			h.transfer = func(b *reference, op *sdk.Op) {
				if d := op.Deadline(); !d.IsZero() && time.Until(d) < time.Millisecond {
					op.Fail(contract.Cause_CAUSE_TRANSPORT, true, "timed out")
					return
				}
				b.move(op)
			}
		},
	},

	// Aborts: R7.
	{
		name: "ignores-abort", killer: "abort/mid-transfer",
		fault: "an op that is aborted in the middle never ends",
		backend: func(h *hooks) {
			var k keep
			h.piece = linger
			h.cancelled = func(_ *reference, op *sdk.Op, _ []sdk.Copy) { k.forEver(op) }
		},
	},
	{
		name: "ignores-early-abort", also: []string{"abort/many-overtake"}, killer: "abort/before-submit",
		fault: "an abort that overtakes its Submit is dropped",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && m.seen[a.Op] == nil {
					return nil
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "forgets-early-aborts", killer: "abort/many-overtake",
		fault: "of the aborts that overtake their Submit the last 16 are remembered",
		frames: func(m *mangler) {
			var early []uint64
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				a := e.GetAbort()
				if a == nil || m.seen[a.Op] != nil {
					if s := e.GetSubmit(); s != nil && slices.Contains(early, s.Op) {
						abort := &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: s.Op}}}
						return []*contract.HostEvent{abort, e}
					}
					return []*contract.HostEvent{e}
				}
				early = append(early, a.Op)
				early = early[max(0, len(early)-16):]
				return nil
			}
		},
	},
	{
		name: "abort-makes-op", killer: "abort/unknown",
		fault: "an abort of an unknown op is answered by its end",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && m.seen[a.Op] == nil {
					m.say(0, aborted(a.Op))
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "abort-leaves-entry", killer: "abort/unknown",
		fault: "an abort of an unknown op leaves an op behind that nobody ends",
		frames: func(m *mangler) {
			var left []uint64
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && m.seen[a.Op] == nil {
					left = append(left, a.Op)
				}
				return []*contract.HostEvent{e}
			}
			m.stats(func(s *contract.Stats) { s.OpenOps = append(s.OpenOps, left...) })
		},
	},
	{
		name: "aborted-done-op", killer: "abort/after-done",
		fault: "an abort of an op that is done is answered by a second end",
		frames: func(m *mangler) {
			ended := map[uint64]bool{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && ended[a.Op] {
					m.say(0, aborted(a.Op))
				}
				return []*contract.HostEvent{e}
			}
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				ended[op.Op] = end.Kind == "done"
				return one(e)
			})
		},
	},
	{
		name: "abort-hits-neighbours", also: []string{"abort/queued"}, killer: "abort/neighbours-unharmed",
		fault: "an abort cancels whatever goes to the same peer",
		frames: func(m *mangler) {
			open := map[uint64]*contract.Submit{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				events := []*contract.HostEvent{e}
				if s := e.GetSubmit(); s != nil {
					open[s.Op] = s
				}
				if a := e.GetAbort(); a != nil && open[a.Op] != nil {
					for id, s := range open {
						if id != a.Op && s.Peer == open[a.Op].Peer {
							events = append(events, &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: id}}})
						}
					}
				}
				return events
			}
			m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				delete(open, op.Op)
				return one(e)
			})
		},
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "leaks-aborted-op", killer: "abort/mid-transfer",
		fault: "Stats goes on listing an op that was aborted in the middle",
		frames: func(m *mangler) {
			var left []uint64
			m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
				if a := e.GetAborted(); a != nil && m.seen[a.Op].GetBytes() >= largeOp {
					left = append(left, a.Op)
				}
				if s := e.GetStats(); s != nil {
					s.OpenOps = append(s.OpenOps, left...)
				}
				return one(e)
			}
		},
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "silent-inflight-pin", also: []string{"quiesce/aborted-pages-reused"}, killer: "abort/mid-transfer",
		fault: "the first incident: an abort inside the write of a chunk drops what is known of the transfer, " +
			"the write goes on and overwrites the end by progress, and the next chunk, finding nothing, is skipped without a word",
		backend: func(h *hooks) {
			var k keep
			var mu sync.Mutex
			dropped := map[sdk.Generation]bool{}
			h.piece = linger
			h.cancelled = func(b *reference, op *sdk.Op, left []sdk.Copy) {
				mu.Lock()
				dropped[op.Generation()] = true
				mu.Unlock()
				op.Aborted(true)
			}
			h.transfer = func(b *reference, op *sdk.Op) {
				mu.Lock()
				gone := dropped[op.Generation()]
				mu.Unlock()
				if gone {
					k.forEver(op)
					return
				}
				b.move(op)
			}
		},
	},

	// When ops are quiet: R4.
	{
		name: "quiet-before-last-write", killer: "quiesce/not-before-last-write",
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
		name: "quiesced-after-quiet", killer: "abort/before-submit",
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
							err = to.granted(op.Generation().Destination, c.DstRegion, c.DstOff, c.Len)
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
			h.piece = linger
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
		name: "forgets-generation", also: []string{"generation/room-reuse"}, killer: "generation/other-openers-pages",
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
		name: "ignores-layer-range", killer: "layout/layer-range",
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

	// Regions.
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
		name: "stats-overtakes", killer: "order/stats-is-a-barrier",
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
