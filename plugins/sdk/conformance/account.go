package conformance

import (
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// account holds what a plugin says about its ops as a whole against what it said about each of them. Called
// with the lock held, for every event that is not an op's, in the order of the stream.
func (n *Node) account(e *contract.PluginEvent, mark func(string)) {
	switch ev := e.GetEvent().(type) {
	case *contract.PluginEvent_Stats:
		n.accountStats(ev.Stats, mark)
	case *contract.PluginEvent_PeerRemoved:
		for _, o := range n.ops {
			if o.path != nil && o.path.From == n && o.path.Handle == ev.PeerRemoved.Peer && o.state.end == nil {
				n.t.violate("R1", "PeerRemoved when all ops to the peer have ended", fmt.Sprintf("PeerRemoved while op %d has no end", o.ID), mark)
			}
		}
	case *contract.PluginEvent_Drained:
		var left uint32
		for _, o := range n.ops {
			if o.Seq <= n.drained && !o.over() {
				left++
			}
		}
		if got := ev.Drained.OpenOps; got != left {
			n.t.violate("R1", fmt.Sprintf("Drained(open_ops=%d): so many ops had not ended, or were not quiet, when it came", left), fmt.Sprintf("Drained(open_ops=%d)", got), mark)
		}
	}
}

// accountStats: Stats come behind all events of earlier submits and list exactly the ops that are not over.
func (n *Node) accountStats(st *contract.Stats, mark func(string)) {
	const behind = "Stats behind all events of the submits that it has seen"
	listed := make(map[uint64]bool, len(st.OpenOps))
	for _, id := range st.OpenOps {
		listed[id] = true
		switch o := n.ops[id]; {
		case o == nil:
			n.t.violate("R1", "Stats that list ops which were submitted", fmt.Sprintf("op %d is listed, which is none", id), mark)
		case o.over():
			n.t.violate("R1", "Stats that list only ops which are not over", fmt.Sprintf("op %d is listed after its end: %s", id, o.state.end), mark)
		}
	}
	for id, o := range n.ops {
		switch {
		case o.Seq > st.LastSeq || listed[id] && o.state.accepted:
		case !o.state.accepted:
			n.t.violate("R8", behind, fmt.Sprintf("Stats with last_seq %d before Accepted of op %d (seq %d)", st.LastSeq, id, o.Seq), mark)
		case o.state.end == nil:
			n.t.violate("R1", behind+", listing every op without an end", fmt.Sprintf("silence: op %d (seq %d) has no end and is not listed by Stats with last_seq %d", id, o.Seq, st.LastSeq), mark)
		case !o.over():
			n.t.violate("R4", behind+", listing every op that is not quiet", fmt.Sprintf("op %d ended with quiet=false, was never Quiesced and is not listed", id), mark)
		}
	}
	if st.LastSeq > n.seq {
		n.t.violate("R1", fmt.Sprintf("Stats.last_seq up to the last Submit, %d", n.seq), fmt.Sprint(st.LastSeq), mark)
	}
}

// over tells whether the op has ended and is quiet. Called with the node's lock held.
func (o *Op) over() bool { return o.state.end != nil && o.state.quiet }

// noteDrain remembers up to which op a Drain among the events asks for.
func (n *Node) noteDrain(events []*contract.HostEvent) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range events {
		switch ev := e.GetEvent().(type) {
		case *contract.HostEvent_Submit:
			n.sent = max(n.sent, ev.Submit.Seq)
		case *contract.HostEvent_Drain:
			n.drained = n.sent
		}
	}
}

// removePools takes back what AddPool told.
func (n *Node) removePools() {
	n.mu.Lock()
	pools := n.pools
	n.pools = nil
	lost := n.lost
	n.mu.Unlock()
	if lost != nil {
		return
	}
	for _, id := range pools {
		n.Send(&contract.HostEvent{Event: &contract.HostEvent_PoolRemove{PoolRemove: &contract.PoolRemove{Pool: id}}})
	}
}
