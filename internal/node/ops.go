package node

import (
	"errors"
	"fmt"
	"slices"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/flight"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/internal/telemetry"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// opState is what the host knows of an op at a plugin, so that a breach of R1 or R8 is noticed.
type opState struct {
	seq      uint64 // 0: not sent yet
	accepted bool
	ended    bool
	bytes    uint64
	progress uint64
	plan     *plan
}

// pluginEffect carries out one request of the core.
func (n *Node) pluginEffect(e *core.PluginEffect) {
	of := n.backendOf(e.Backend)
	if of == nil {
		return
	}
	b := of.of(e.Epoch)
	if b == nil {
		return // PluginLost is on its way
	}
	switch e.Kind {
	case core.PluginSubmit:
		if err := n.submit(b, e); err != nil {
			why := statemachine.TransferFailed
			var mm *layout.Mismatch
			if errors.As(err, &mm) {
				why = statemachine.LayoutMismatch
			}
			n.post(core.Event{Kind: core.OpEnd, Op: e.Op, End: core.EndFailed, Reason: why, Quiet: true, Detail: err.Error()})
		}
	case core.PluginAbort:
		o := b.ops[e.Op]
		if o == nil || o.ended || n.abortWaiting(b, e.Op, o) {
			return
		}
		// Behind its Submit, which may still be queued here.
		n.flush()
		ev := &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: uint64(e.Op)}}}
		if err := b.p.SendControl(b.epoch, ev); err != nil && !errors.Is(err, pluginhost.ErrEpoch) {
			n.fault(b, "frame", "Control", "an abort cannot be sent: "+err.Error())
		}
	case core.PluginGrant:
		g := &contract.Grant{Grant: uint64(e.Grant), Destination: opener(e.D)}
		for _, id := range e.Writers {
			g.Writers = append(g.Writers, n.peerNames[id])
		}
		for i := range e.Parts {
			g.Parts = append(g.Parts, &contract.GrantPart{Pool: e.Parts[i].Pool, Pages: wireRuns(e.Parts[i].Runs)})
		}
		n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: g}})
	case core.PluginRevoke:
		n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_Revoke{Revoke: &contract.Revoke{Grant: uint64(e.Grant), Destination: opener(e.D)}}})
	case core.PluginReplace:
		n.log.Warn("too many pages rest in quarantine, the plugin is replaced by its next epoch", "plugin", b.name, "epoch", b.epoch)
		n.replace(b)
	case core.PluginEnd:
		n.log.Info("plugin epoch is ended", "plugin", b.name, "epoch", b.epoch)
		if err := b.p.End(b.epoch); err != nil {
			n.log.Error("a plugin epoch that was taken over from cannot be ended", "plugin", b.name, "epoch", b.epoch, "err", err)
		}
	case core.PluginFencePeer:
		n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_FencePeer{FencePeer: &contract.FencePeer{Fence: uint64(e.Grant), Node: n.peerNames[e.Peer], Incarnation: e.PeerInc}}})
	}
}

// submit queues an op, preceded by whatever the plugin must know first: the peer's epoch, the remote
// pool, the plan.
func (n *Node) submit(b *epoch, e *core.PluginEffect) error {
	p, err := n.pluginPeer(b, e.Peer, e.PeerInc, e.PeerEpoch)
	if err != nil {
		return err
	}
	pl, err := n.planFor(b, p, e)
	if err != nil {
		return err
	}
	bytes := uint64(layout.Bytes(pl.slices, pl.shape, e.LayerFrom, e.LayerTo)) * uint64(layout.Pages(e.Source))
	b.ops[e.Op] = &opState{bytes: bytes, plan: pl}
	pl.users++
	n.follow(b, p, &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
		Op: uint64(e.Op), Generation: &contract.Generation{Source: opener(e.S), Destination: opener(e.D)},
		Direction: contract.Direction_DIRECTION_WRITE, Peer: p.handle, Plan: pl.id,
		Source: wireRuns(e.Source), Destination: wireRuns(e.Destination),
		LayerFrom: uint32(e.LayerFrom), LayerTo: uint32(e.LayerTo), Priority: e.Priority, DeadlineNs: uint64(max(e.DeadlineIn, 0)), Bytes: bytes,
	}}})
	return nil
}

// follow queues events that need the peer to be ready.
func (n *Node) follow(b *epoch, p *pluginPeer, e *contract.HostEvent) {
	if p.ready {
		n.queue(b, e)
	} else {
		p.wait = append(p.wait, e)
	}
}

// abortWaiting ends an op that was not given to the plugin yet.
func (n *Node) abortWaiting(b *epoch, id core.OpID, o *opState) bool {
	for _, p := range b.peers {
		for i, e := range p.wait {
			if s := e.GetSubmit(); s != nil && core.OpID(s.Op) == id {
				p.wait = slices.Delete(p.wait, i, i+1)
				n.freeOp(b, id, o)
				n.post(core.Event{Kind: core.OpEnd, Op: id, End: core.EndAborted, Quiet: true})
				return true
			}
		}
	}
	return false
}

// opEvent finds the op that an event names; an op that the plugin was never given, or that is quiet
// already, is a breach.
func (n *Node) opEvent(b *epoch, op uint64, field string) *opState {
	o := b.ops[core.OpID(op)]
	if o == nil && b.live {
		n.fault(b, "R1", field, fmt.Sprintf("op %d is not open at this plugin", op))
	}
	return o
}

func (n *Node) opEnded(b *epoch, op uint64, ev core.Event) {
	o := n.opEvent(b, op, "end of an op")
	if o == nil {
		return
	}
	switch {
	case o.ended:
		n.fault(b, "R1", "end of an op", fmt.Sprintf("op %d ended twice", op))
		return
	case !o.accepted:
		n.fault(b, "R8", "end of an op", fmt.Sprintf("op %d ended before it was accepted", op))
		return
	}
	o.ended = true
	if ev.Quiet {
		n.freeOp(b, core.OpID(op), o)
	}
	n.opEnds[telemetry.OpEnd{Backend: b.name, End: flight.EndNames[ev.End]}]++
	ev.Kind, ev.Op = core.OpEnd, core.OpID(op)
	n.events = append(n.events, ev)
}

func (n *Node) freeOp(b *epoch, id core.OpID, o *opState) {
	delete(b.ops, id)
	if o.plan != nil {
		o.plan.users--
	}
}

// reconcile compares the plugin's open ops with the host's: one that it does not know is lost.
func (n *Node) reconcile(b *epoch, s *contract.Stats) {
	open := make(map[uint64]bool, len(s.OpenOps))
	for _, op := range s.OpenOps {
		open[op] = true
	}
	for id, o := range b.ops {
		if !o.ended && o.seq != 0 && o.seq <= s.LastSeq && !open[uint64(id)] {
			o.ended, o.accepted = true, true
			n.log.Error("plugin lost an op", "plugin", b.name, "op", uint64(id))
			n.events = append(n.events, core.Event{Kind: core.OpEnd, Op: id, End: core.EndFailed, Reason: statemachine.LostByPlugin, Detail: "plugin " + b.name + " does not list the operation"})
		}
	}
}
