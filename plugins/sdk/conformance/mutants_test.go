package conformance

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

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
	// also are cases that it runs although they stand apart; those of which it is unsure, since whether they find it
	// hangs on the moment, it does not run.
	also, unsure []string
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

// memoryMutants run in memory: broken in how ops end, in when they are quiet, and in what the host asks of
// a plugin beside ops.
var memoryMutants = slices.Concat(endMutants, quietMutants, hostMutants, pairMutants, stormMutants)

var endMutants = []mutant{
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
		name: "ends-twice", unsure: []string{"quiesce/region-removed"}, killer: "abort/before-submit",
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
		name: "progress-after-end", unsure: []string{"quiesce/region-removed"}, also: []string{"layout/64-mib-op"}, killer: "progress/counts-bytes",
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
		name: "progress-goes-back", unsure: []string{"quiesce/region-removed"}, killer: "progress/counts-bytes",
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
		name: "progress-beyond-size", unsure: []string{"quiesce/region-removed"}, killer: "progress/counts-bytes",
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
		name: "accepted-late", killer: "order/accepted-first",
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
		name: "two-thresholds", killer: "layout/sizes-by-octave",
		fault: "ops below 20 MiB are copied and those from 60 MiB on are mapped; for what lies between nobody moves a byte",
		backend: func(h *hooks) {
			h.transfer = func(b *reference, op *sdk.Op) {
				if op.Bytes() >= 20<<20 && op.Bytes() < 60<<20 {
					op.Done(contract.Lane_LANE_SHM)
					return
				}
				b.move(op)
			}
		},
	},
	{
		name: "wrong-lane", unsure: []string{"quiesce/region-removed"}, also: []string{"layout/64-mib-op", "layout/pages-of-1-mib"}, killer: "transfer/lane-as-announced",
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
		name: "forgets-the-least-urgent", killer: "transfer/priorities",
		fault: "the queue goes by the negated priority: the lowest number there is has no negative, and such an op is never found",
		frames: func(m *mangler) {
			m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if op.Priority == -1<<31 {
					return nil
				}
				return one(e)
			})
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
		name: "frames-of-half-a-mib", killer: "proto/near-limit-frame",
		fault: "a message of more than 512 KiB ends the stream",
		frames: func(m *mangler) {
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if proto.Size(e) > 512<<10 {
					m.die("received message larger than max")
					return nil
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
		name: "answers-each-abort", killer: "abort/twice",
		fault: "the second abort of an op is answered at once, beside the end that the first one brings",
		frames: func(m *mangler) {
			asked := map[uint64]int{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && m.seen[a.Op] != nil {
					if asked[a.Op]++; asked[a.Op] == 2 {
						m.say(0, aborted(a.Op))
					}
				}
				return []*contract.HostEvent{e}
			}
		},
	},
	{
		name: "room-for-128-aborts", killer: "abort/storm",
		fault: "of the aborts of a life 128 find room in a table; an op whose abort finds none never ends",
		frames: func(m *mangler) {
			n := 0
			lost := map[uint64]bool{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if a := e.GetAbort(); a != nil && m.seen[a.Op] != nil {
					n++
					lost[a.Op] = n > 128
				}
				return []*contract.HostEvent{e}
			}
			m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if lost[op.Op] {
					return nil
				}
				return one(e)
			})
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
		name: "aborted-done-op", unsure: []string{"quiesce/region-removed"}, killer: "abort/after-done",
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
}
