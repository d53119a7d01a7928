package conformance

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// pairMutants are broken in what goes on between several plugins: they know of each other what the suite cannot see.
var pairMutants = []mutant{
	{
		name: "abort-hits-receiver", killer: "abort/at-the-receiver",
		fault: "aborts of sent and of received ops are kept in one table, by id: the receiver ends what a writer sends it under that id",
		frames: func() func(*mangler) {
			var aborted sync.Map // {endpoint of a receiver, op}
			return func(m *mangler) {
				to := m.targets(func(e *contract.HostEvent) {
					if a := e.GetAbort(); a != nil && m.seen[a.Op] == nil {
						aborted.Store(opAt{m.endpoint(), a.Op}, true)
					}
				})
				m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
					if _, hit := aborted.Load(opAt{to[op.Peer], op.Op}); hit {
						return one(failed(op.Op, contract.Cause_CAUSE_TRANSPORT))
					}
					return one(e)
				})
			}
		}(),
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "half-duplex", killer: "transfer/both-directions",
		fault:   "an op fails whose receiver is sending to us at the time",
		frames:  collides(func(open map[link]int, l link) bool { return open[link{l.to, l.from}] > 0 }),
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "one-writer-at-a-time", killer: "transfer/two-writers",
		fault: "an op fails whose receiver is being written by another",
		frames: collides(func(open map[link]int, l link) bool {
			for o, n := range open {
				if n > 0 && o.to == l.to && o.from != l.from {
					return true
				}
			}
			return false
		}),
		backend: func(h *hooks) { h.piece = linger },
	},
	{
		name: "dropped-writer-waits", killer: "quiesce/writer-dropped",
		fault: "an op that is aborted asks its receiver what has arrived; one that has dropped the writer never answers",
		backend: func(h *hooks) {
			var k keep
			var lingered atomic.Int32
			h.piece = func(_ *reference, op *sdk.Op, i int, _ *sdk.Copy) bool { // as linger, but also after many cases
				if op.Bytes() >= largeOp && i == 1 && lingered.Add(1) <= 512 {
					select {
					case <-op.Context().Done():
					case <-time.After(200 * time.Millisecond):
					}
				}
				return op.Context().Err() == nil
			}
			h.cancelled = func(b *reference, op *sdk.Op, _ []sdk.Copy) {
				to, err := b.dial(op.Peer())
				if err == nil {
					to.mu.RLock()
					err = to.admit(b.writer(), op.Peer().Token)
					to.mu.RUnlock()
				}
				if err != nil {
					k.forEver(op)
					return
				}
				op.Aborted(true)
			}
		},
	},
	{
		name: "quarantines-a-peer", killer: "peer/added-again", also: []string{"quiesce/peer-removed"},
		fault: "a node of which one op failed is bad until a restart",
		frames: func(m *mangler) {
			bad := map[string]bool{}
			nodes := map[uint32]string{}
			m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
				if p := e.GetPeerAdd(); p != nil {
					if nodes[p.Peer] = p.Node; bad[p.Node] {
						m.say(0, peerFailed(p.Peer, contract.Cause_CAUSE_PEER_UNREACHABLE))
						return nil
					}
				}
				return []*contract.HostEvent{e}
			}
			m.ends(func(op *contract.Submit, end *End, e *contract.PluginEvent) []*contract.PluginEvent {
				if end.Cause == contract.Cause_CAUSE_PEER_UNREACHABLE {
					bad[nodes[op.Peer]] = true
				}
				return one(e)
			})
		},
		backend: func(h *hooks) { h.piece = linger },
	},
}

// endpoint is that of the plugin. For hooks.
func (m *mangler) endpoint() string { return string(m.Plugin.Hello().Endpoint) }

// targets passes everything on, shows it to see, and returns the endpoints of the peers, by handle.
func (m *mangler) targets(see func(*contract.HostEvent)) map[uint32]string {
	to := map[uint32]string{}
	m.in = func(_ bool, e *contract.HostEvent) []*contract.HostEvent {
		if p := e.GetPeerAdd(); p != nil {
			to[p.Peer] = string(p.Endpoint)
		}
		see(e)
		return []*contract.HostEvent{e}
	}
	return to
}

// opAt is an op at an endpoint.
type opAt struct {
	endpoint string
	op       uint64
}

// link is from one endpoint to another.
type link struct{ from, to string }

// collides fails each op of which hit says so when it is submitted: open is how many ops are on each link then.
func collides(hit func(open map[link]int, l link) bool) func(*mangler) {
	var mu sync.Mutex
	open := map[link]int{}
	return func(m *mangler) {
		bad := map[uint64]bool{}
		var to map[uint32]string
		to = m.targets(func(e *contract.HostEvent) {
			if s := e.GetSubmit(); s != nil {
				mu.Lock()
				defer mu.Unlock()
				l := link{m.endpoint(), to[s.Peer]}
				bad[s.Op] = hit(open, l)
				open[l]++
			}
		})
		m.ends(func(op *contract.Submit, _ *End, e *contract.PluginEvent) []*contract.PluginEvent {
			mu.Lock()
			defer mu.Unlock()
			open[link{m.endpoint(), to[op.Peer]}]--
			if bad[op.Op] {
				return one(failed(op.Op, contract.Cause_CAUSE_TRANSPORT))
			}
			return one(e)
		})
	}
}
