package node

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// selfPeer is this engine as its own peer: a prefill and a decode worker on one engine hand over
// through the same protocol.
const selfPeer = core.PeerID(0)

// remote is what another engine has announced, in its present incarnation.
type remote struct {
	inc       uint64
	hostID    string
	conn      uint64
	up        bool
	backends  []string // in its order of preference
	features  []string
	groups    map[string]peer.Group
	pools     map[uint64]*remotePool
	endpoints map[endpointKey]peer.Endpoint
	accepted  map[acceptKey]uint32
	names     map[string]bool // of groups, ever, in whatever incarnation: the core never forgets a name
}

type endpointKey struct {
	backend string
	epoch   uint32
}

// acceptKey is a writer epoch of the peer that an epoch of ours admitted.
type acceptKey struct {
	backend string
	own     uint32
	epoch   uint32
}

type remotePool struct {
	id      uint64
	group   string
	ordinal int32
	pages   int32
	layers  int32
	state   bool
	tensors []*contract.Tensor
	shape   []layout.Tensor
}

// down is 1 when the peer has announced no live epoch of the backend.
func (r *remote) down(backend string) int {
	for k := range r.endpoints {
		if k.backend == backend {
			return 0
		}
	}
	return 1
}

func newRemote() *remote {
	return &remote{groups: map[string]peer.Group{}, pools: map[uint64]*remotePool{}, endpoints: map[endpointKey]peer.Endpoint{}, names: map[string]bool{}}
}

func replaceEndpoint(m map[endpointKey]peer.Endpoint, e peer.Endpoint) map[endpointKey]peer.Endpoint {
	m[endpointKey{e.Backend, e.Epoch}] = e
	return m
}

// peerID mints the id of a node name.
func (n *Node) peerID(node string) core.PeerID {
	if id, ok := n.peerIDs[node]; ok {
		return id
	}
	id := core.PeerID(len(n.peerNames))
	n.peerIDs[node] = id
	n.peerNames = append(n.peerNames, node)
	return id
}

// membershipUpdate: dial who is there; a proof of death ends rooms at once.
func (n *Node) membershipUpdate(u membership.Update) {
	why := ""
	if u.Err != nil {
		why = u.Err.Error()
	}
	switch {
	case why != "" && n.frozen == "":
		n.log.Warn("membership cannot be read, the last known peers stay", "err", u.Err)
	case why == "" && n.frozen != "":
		n.log.Info("membership can be read again")
	}
	n.frozen = why
	n.links.SetPeers(u.Peers)
	for _, g := range u.Gone {
		n.log.Warn("peer engine is gone", "peer", g.Node, "incarnation", g.Incarnation)
		if id, ok := n.peerIDs[g.Node]; ok { // else nothing is held of it, and its name is not worth a number
			n.events = append(n.events, core.Event{Kind: core.PeerGone, Peer: id, Inc: g.Incarnation})
		}
	}
}

// peerSink is the sink of the links: it hands over to the owner goroutine, and waits while that is behind.
func (n *Node) peerSink(ev peer.Event) {
	if ev.Kind == peer.Frame { // they come by the thousand: no function for each
		n.inbox.put(item{ev: core.Event{Kind: core.PeerFrame, Node: ev.Node, Frame: ev.Frame}}, true)
		return
	}
	n.inbox.put(item{fn: func() { n.peerEvent(ev) }}, true)
}

// peerEvent takes an event of the links, on the owner goroutine, in stream order.
func (n *Node) peerEvent(ev peer.Event) {
	if ev.Kind == peer.Refused { // of who may never have a stream: a name that only comes and goes gets no number
		n.bad.add("peer", ev.Refusal.Code.String())
		level := slog.LevelWarn
		if ev.Refusal.Code == peer.RefusedClosing { // an operator stops it
			level = slog.LevelInfo
		}
		n.log.Log(context.Background(), level, "peer refused", "peer", ev.Node, "code", ev.Refusal.Code, "detail", ev.Refusal.Detail, "by_peer", ev.Refusal.ByPeer)
		return
	}
	id := n.peerID(ev.Node)
	r := n.remotes[ev.Node]
	if r == nil {
		r = newRemote()
		n.remotes[ev.Node] = r
	}
	switch ev.Kind {
	case peer.Hello:
		if r.inc != ev.Incarnation {
			n.forgetRemote(id, r)
			names := r.names
			*r = *newRemote()
			r.names = names
		}
		r.inc, r.hostID, r.conn, r.up = ev.Incarnation, ev.HostID, ev.Conn, true
		r.backends = r.backends[:0]
		r.features = ev.Features
		for _, b := range ev.Backends {
			r.backends = append(r.backends, b.Name)
		}
		for key := range n.refused { // told anew on this stream
			if key.node == ev.Node {
				delete(n.refused, key)
			}
		}
		n.events = append(n.events, core.Event{Kind: core.PeerHello, Peer: id, Node: ev.Node, Inc: ev.Incarnation})
	case peer.Down:
		r.up = false
		n.events = append(n.events, core.Event{Kind: core.PeerDown, Peer: id})
		if n.looker != nil {
			n.looker.Look() // the broken stream proves nothing, but the lock of a dead engine does
		}
	case peer.Heard:
		n.events = append(n.events, core.Event{Kind: core.PeerHeard, Peer: id})
	case peer.GroupUp:
		if !r.names[ev.Group.Name] && len(r.names) >= maxGroupNames {
			n.bad.add("peer", "group_names")
			n.log.Error("a peer's group is not served: it has used too many names since this engine started", "peer", ev.Node, "group", ev.Group.Name, "names", len(r.names))
			return
		}
		r.names[ev.Group.Name] = true
		r.groups[ev.Group.Name] = ev.Group
		n.pairGroups()
	case peer.GroupGone:
		if r.groups[ev.Group.Name].Role == ev.Group.Role { // else announced anew with another role
			delete(r.groups, ev.Group.Name)
			n.pairGroups()
		}
	case peer.PoolUp:
		p := &remotePool{id: ev.Pool.ID, group: ev.Pool.Group, ordinal: ev.Pool.Ordinal, pages: ev.Pool.Pages, layers: ev.Pool.Layers, state: ev.Pool.State}
		for _, t := range ev.Pool.Tensors {
			p.tensors = append(p.tensors, &contract.Tensor{Region: t.Region, Offset: t.Offset, PageStride: t.PageStride, PageBytes: t.PageBytes, Layer: t.Layer})
			p.shape = append(p.shape, layout.Tensor{Layer: int32(t.Layer), PageBytes: int64(t.PageBytes)})
		}
		n.remotePool(id, p)
		if p.state {
			n.pairGroups()
		}
	case peer.PoolGone:
		n.remotePoolGone(id, ev.Pool.ID)
	case peer.EndpointUp:
		if old, ok := r.endpoints[endpointKey{ev.Endpoint.Backend, ev.Endpoint.Epoch}]; ok && string(old.Token) == string(ev.Endpoint.Token) {
			return // repeated after a Hello of the same incarnation
		}
		r.endpoints = replaceEndpoint(r.endpoints, ev.Endpoint)
		if b := n.backendOf(ev.Endpoint.Backend); b != nil {
			for _, e := range b.epochs { // one that does not serve yet admits all that there are when it does
				if e.serving {
					n.accept(e, id, r, ev.Endpoint)
				}
			}
		}
		n.pairGroups()
	case peer.Lost:
		n.endpointLost(id, r, ev.Endpoint)
	case peer.Draining:
		n.events = append(n.events, core.Event{Kind: core.PeerDraining, Peer: id})
	case peer.BadFrame:
		n.bad.add("peer", "frame")
		n.events = append(n.events, core.Event{Kind: core.PeerBadFrame, Peer: id, Frame: core.Frame{Kind: ev.Frame.Kind, Room: ev.Frame.Room, S: ev.Frame.S, D: ev.Frame.D}, Detail: ev.Detail})
		n.log.Warn("a frame of a peer broke the protocol and was dropped", "peer", ev.Node, "room", ev.Frame.Room, "detail", ev.Detail)
	}
}

func (n *Node) remotePool(id core.PeerID, p *remotePool) {
	r := n.remotes[n.peerNames[id]]
	r.pools[p.id] = p
	var bytes int64
	for _, t := range p.shape {
		bytes += t.PageBytes
	}
	n.events = append(n.events, core.Event{Kind: core.PeerPool, Peer: id, Pool: p.id, Pages: p.pages, Layers: p.layers, PageBytes: bytes, State: p.state})
}

func (n *Node) remotePoolGone(id core.PeerID, pool uint64) {
	delete(n.remotes[n.peerNames[id]].pools, pool)
	n.events = append(n.events, core.Event{Kind: core.PeerPool, Peer: id, Pool: pool})
	n.epochs(func(b *epoch) {
		n.dropPlans(b, func(k planKey) bool { return k.peer == id && k.dst == pool })
		for _, p := range b.peers {
			if p.peer == id && p.pools[pool] && !n.poolInUse(b, p.handle, pool) {
				delete(p.pools, pool)
				n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_RemotePoolRemove{RemotePoolRemove: &contract.RemotePoolRemove{Peer: p.handle, Pool: pool}}})
			}
		}
	})
}

func (n *Node) poolInUse(b *epoch, handle uint32, pool uint64) bool {
	for k := range b.plans {
		if k.handle == handle && k.dst == pool {
			return true
		}
	}
	return false
}

// endpointLost: a plugin epoch of the peer is gone; ours forgets it as a target and as a writer.
func (n *Node) endpointLost(id core.PeerID, r *remote, e peer.Endpoint) {
	delete(r.endpoints, endpointKey{e.Backend, e.Epoch})
	if b := n.backendOf(e.Backend); b != nil {
		for _, own := range b.epochs {
			n.forgetPeerEpoch(own, peerKey{id, r.inc, e.Epoch}, r)
		}
	}
	n.events = append(n.events, core.Event{Kind: core.PeerLost, Peer: id, Backend: e.Backend, Epoch: e.Epoch})
	n.pairGroups()
}

func (n *Node) forgetPeerEpoch(b *epoch, key peerKey, r *remote) {
	remove := func(handle uint32) {
		n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: handle}}})
	}
	if p := b.peers[key]; p != nil {
		n.peerFailed(b, p, "the peer's plugin is gone")
		remove(p.handle)
	}
	k := acceptKey{b.name, b.epoch, key.epoch}
	if h, ok := r.accepted[k]; ok {
		delete(r.accepted, k)
		remove(h)
	}
}

// forgetRemote drops what an older incarnation of a peer announced.
func (n *Node) forgetRemote(id core.PeerID, r *remote) {
	for key := range r.endpoints {
		if b := n.backendOf(key.backend); b != nil {
			for _, own := range b.epochs {
				n.forgetPeerEpoch(own, peerKey{id, r.inc, key.epoch}, r)
			}
		}
	}
	for key := range n.paired {
		if key.id == id {
			n.unpair(key)
		}
	}
}

// pair finds the backends by which a group here works with one elsewhere, or why it cannot. A room needs all
// engines of the other group, so what is found is the same for each part of it.
func (n *Node) pair(own *group, v *view, theirs *part, p *pairing) {
	ev := &p.ev
	mine := make([]string, len(n.backends))
	for i, b := range n.backends {
		mine[i] = b.name
	}
	their, lacking := mine, "" // the backends of every part; the part that has none of those left
	for i := range v.parts {
		if q := &v.parts[i]; q.id != selfPeer && len(their) > 0 {
			// The order is that of the first engine, which has rank 0.
			if i == 0 {
				their = common(q.r.backends, mine)
			} else {
				their = common(their, q.r.backends)
			}
			lacking = q.node
		}
	}
	down := func(backend string) (engines int) {
		for i := range v.parts {
			engines += v.parts[i].r.down(backend)
		}
		return engines
	}
	src, dst := layout.Side{Cache: layout.Cache(theirs.Layout), Ranks: theirs.Size}, layout.Side{Cache: own.layout, Ranks: own.size}
	order, other := mine, their // the destination's order decides
	if own.role == statemachine.Source {
		src, dst = dst, src
		order, other = other, order
	}
	ev.Backends = common(order, other)
	// A backend that is down at an engine of the peer group comes last: new rooms are placed on one that is up.
	slices.SortStableFunc(ev.Backends, func(a, b string) int { return down(a) - down(b) })
	var err error
	ev.Map, err = layout.New(src, dst)
	if err == nil && src.Ranks != dst.Ranks {
		err = n.stateTrouble(own.name, theirs.Name, src.Ranks, dst.Ranks)
	}
	if err != nil {
		ev.Backends, ev.Reason, ev.Detail = nil, statemachine.LayoutMismatch, err.Error()
		p.field = "layout"
		if m, ok := err.(*layout.Mismatch); ok {
			p.field = "layout." + m.Field
		}
		n.refuseGroup(own, theirs, err)
	} else if len(ev.Backends) == 0 {
		p.field, ev.Reason = "backends", statemachine.BackendDown
		ev.Detail = "the two engines have no transfer backend in common"
		if len(v.parts) > 1 {
			ev.Detail = fmt.Sprintf("%q has no transfer backend that this engine and the others of group %q have", lacking, v.name)
		}
	}
}

// stateTrouble refuses a pair of groups of unequal size one of which has a pool of state, at whatever engine: nothing
// says how its bytes would be shared out.
func (n *Node) stateTrouble(own, theirs string, src, dst int32) error {
	pool := int32(-1)
	for _, r := range n.remotes {
		for _, p := range r.pools {
			if p.state && (p.group == own || p.group == theirs) && (pool < 0 || p.ordinal < pool) {
				pool = p.ordinal
			}
		}
	}
	if pool < 0 {
		return nil
	}
	return &layout.Mismatch{Field: "ranks", Source: fmt.Sprint(src), Destination: fmt.Sprintf("%d, and pool %d is of kind state, which goes from rank r to rank r", dst, pool)}
}

// refusalKey is a pair of groups that a peer has been told cannot work together.
type refusalKey struct{ own, node, theirs string }

// noteRefusal logs a refusal, once; new says that this is the first time.
func (n *Node) noteRefusal(node, own, theirs, detail string) (first bool) {
	key := refusalKey{own, node, theirs}
	if n.refused[key] == detail {
		return false
	}
	n.refused[key] = detail
	n.log.Error("groups cannot work together", "group", own, "peer", node, "peer_group", theirs, "err", detail)
	return true
}

// refuseGroup tells a peer which of its groups cannot work with one of ours.
func (n *Node) refuseGroup(own *group, theirs *part, err error) {
	if !n.noteRefusal(theirs.node, own.name, theirs.Name, err.Error()) || theirs.id == selfPeer {
		return
	}
	r := peer.Refusal{Code: peer.RefusedFingerprint, Group: own.name, PeerGroup: theirs.Name, Detail: err.Error()}
	if mm, ok := err.(*layout.Mismatch); ok {
		r.Field = mm.Field
	}
	n.links.Refuse(theirs.node, r)
}

// common returns the names of order that are in other too.
func common(order, other []string) []string {
	var out []string
	for _, a := range order {
		for _, b := range other {
			if a == b {
				out = append(out, a)
				break
			}
		}
	}
	return out
}

// sendFrame hands a frame to the link, or to this very engine.
func (n *Node) sendFrame(f *core.FrameEffect) {
	if f.Peer == selfPeer {
		n.post(core.Event{Kind: core.PeerFrame, Peer: selfPeer, Frame: f.Frame.Clone()})
		return
	}
	node := n.peerNames[f.Peer]
	if r := n.remotes[node]; r != nil && r.up {
		n.links.Send(node, r.conn, f.Frame, f.Urgent)
	}
}

// dropDead ends the streams of peers that the core has given up. Such a peer may wake up on a stream
// that never broke, and only another Hello makes it one that rooms can use.
func (n *Node) dropDead() {
	for _, p := range n.m.Peers() {
		if r := n.remotes[p.Node]; p.Dead && r != nil && r.up {
			n.links.Drop(p.Node, r.conn, "the peer is dead: it was silent for longer than clocks.peer_dead, or provably gone")
		}
	}
}

// beat does what must happen regularly: the engine hears itself, changes of peers are noted, plugins are
// asked for their stats.
func (n *Node) beat(now int64) {
	if now-n.lastBeat < int64(tick) {
		return
	}
	n.lastBeat = now
	n.events = append(n.events, core.Event{Kind: core.PeerHeard, Peer: selfPeer})
	n.noteVerdicts()
	n.epochs(func(b *epoch) {
		if len(b.ops) > 0 && time.Since(b.statsAsked) > statsEvery {
			b.statsAsked = time.Now()
			n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_Stats{Stats: &contract.StatsRequest{Id: b.seq}}})
		}
	})
}

const statsEvery = 3 * time.Second
