package node

import (
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/peer"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/internal/telemetry"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

type regionState uint8

const (
	regionAbsent regionState = iota
	regionAsked
	regionReady
	regionBad
)

// backend is one transfer backend of the configuration.
type backend struct {
	name   string
	p      *pluginhost.Plugin
	spec   pluginhost.Spec // of the epoch that serves
	down   bool
	shake  *contract.HandshakeResponse // of the newest epoch that served
	lane   contract.Lane               // of the last Done
	epochs []*epoch                    // live, the oldest first; at most one does not retire and is no candidate
}

// epoch is one live process of a backend's plugin. The core knows it once it serves. While it is a
// candidate another one serves still; while it retires a newer one does.
type epoch struct {
	*backend
	epoch uint32
	shake *contract.HandshakeResponse

	live      bool   // false: it is lost, somebody holds on to this
	serving   bool   // it has every region: the core may use it
	candidate bool   // it is to take over, see handover
	retiring  bool   // it was taken over from: nothing new goes to it
	refused   string // why it does not take a region that another epoch has
	faulted   bool   // it broke the contract and is being ended
	checked   bool   // receiver_checked
	secret    []byte

	regions map[uint64]regionState
	given   map[uint64]bool // pools of our workers that it was told of
	peers   map[peerKey]*pluginPeer
	handles map[uint32]*pluginPeer
	plans   map[planKey]*plan
	ops     map[core.OpID]*opState
	nextID  uint64 // handles and plans
	seq     uint64 // of Submit

	out        []*contract.HostEvent // queued for the next flush
	statsAsked time.Time
}

// peerKey names a plugin epoch of a peer.
type peerKey struct {
	peer  core.PeerID
	inc   uint64
	epoch uint32
}

type pluginPeer struct {
	peerKey
	handle uint32
	pools  map[uint64]bool // remote pools made known
	ready  bool
	// wait holds what must follow PeerReady, in order.
	wait []*contract.HostEvent
}

type planKey struct {
	src  uint64
	peer core.PeerID
	// handle of the peer's epoch at the plugin
	handle uint32
	dst    uint64
	// rule and phase say what of a page goes where; the pools belong to one rank each.
	rule  layout.Map
	phase int32
}

type plan struct {
	id     uint64
	slices []layout.Slice
	shape  []layout.Tensor
	users  int // ops that are not quiet
}

// spec makes the host's spec of a configured backend.
func spec(name string, cfg *config.Config) (pluginhost.Spec, error) {
	s := pluginhost.Spec{Name: name}
	p, configured := cfg.Plugins[name]
	if configured {
		s.Exec, s.Script, s.Args, s.Env, s.SHA256, s.MTLS = p.Exec, p.Script, p.Args, p.Env, p.SHA256, p.MTLS
		if p.Wasm != "" {
			s.Wasm, s.WasmCache = p.Wasm, filepath.Join(cfg.StateDir, "wasm")
		}
		if len(p.Options) > 0 {
			b, err := jsonOptions(p.Options)
			if err != nil {
				return s, fmt.Errorf("plugins.%s.options: %w", name, err)
			}
			s.Options = b
		}
	}
	if s.Wasm != "" {
		return s, nil
	}
	if s.Exec == "" && name == config.BuiltinBackend {
		s.Args = []string{"plugin", name} // this binary, re-executed
	} else if s.Exec == "" {
		s.Exec = "engine-plugin-" + name
	}
	return s, nil
}

// current is the epoch that serves, or that will as soon as it can; nil when there is none.
func (b *backend) current() *epoch {
	for _, e := range b.epochs {
		if !e.candidate && !e.retiring {
			return e
		}
	}
	return nil
}

// of is the live epoch of a number; nil when there is none.
func (b *backend) of(epoch uint32) *epoch {
	for _, e := range b.epochs {
		if e.epoch == epoch {
			return e
		}
	}
	return nil
}

// serves reports whether rooms can be placed on the backend.
func (b *backend) serves() bool {
	e := b.current()
	return e != nil && e.serving
}

// epochs calls fn for every live epoch of every backend, in order of preference.
func (n *Node) epochs(fn func(*epoch)) {
	for _, b := range n.backends {
		for _, e := range b.epochs {
			fn(e)
		}
	}
}

func (n *Node) backendOf(name string) *backend {
	for _, b := range n.backends {
		if b.name == name {
			return b
		}
	}
	return nil
}

// queue collects events for a plugin's session; flush sends them, all of a step in one go.
func (n *Node) queue(b *epoch, e ...*contract.HostEvent) { b.out = append(b.out, e...) }

func (n *Node) flush() {
	n.epochs(func(b *epoch) {
		if len(b.out) == 0 {
			return
		}
		out := b.out
		b.out = nil
		seq := b.seq
		for _, e := range out {
			// Numbered in the order in which they go: an op that waited for its peer, or was aborted while
			// it waited, must leave no gap.
			if s := e.GetSubmit(); s != nil {
				seq++
				s.Seq = seq
				if o := b.ops[core.OpID(s.Op)]; o != nil {
					o.seq = seq
				}
			}
		}
		if err := b.p.Send(b.epoch, out...); err != nil {
			n.unsent(b, out, err)
		} else {
			b.seq = seq
		}
	})
}

// unsent ends locally what a plugin could not be told. A full queue of an epoch that matters for
// safety (grants, regions) means that the epoch cannot be followed any more: it is ended.
func (n *Node) unsent(b *epoch, events []*contract.HostEvent, err error) {
	for _, e := range events {
		switch {
		case e.GetSubmit() != nil:
			id := core.OpID(e.GetSubmit().Op)
			if o := b.ops[id]; o != nil {
				n.freeOp(b, id, o)
			}
			why := statemachine.TransferFailed
			if errors.Is(err, pluginhost.ErrEpoch) {
				why = statemachine.PluginLost
			}
			n.post(core.Event{Kind: core.OpEnd, Op: id, End: core.EndFailed, Reason: why, Quiet: true, Detail: err.Error()})
		case e.GetGrant() != nil:
			n.post(core.Event{Kind: core.GrantFailed, Grant: core.GrantID(e.GetGrant().Grant), Detail: err.Error()})
		case !errors.Is(err, pluginhost.ErrEpoch):
			n.fault(b, "frame", "Session", fmt.Sprintf("the plugin does not read: %v", err))
			return
		}
	}
}

func (n *Node) fault(b *epoch, rule, field, detail string) {
	n.log.Error("plugin broke the contract", "plugin", b.name, "epoch", b.epoch, "rule", rule, "field", field, "detail", detail)
	n.bad.add("plugin", rule)
	b.faulted = true
	if err := b.p.Fault(b.epoch, &contract.Fault{Rule: rule, Field: field, Detail: detail}); err != nil {
		n.log.Debug("fault not delivered", "plugin", b.name, "err", err)
	}
}

// pluginEvent is the sink of the plugin host, on the owner goroutine.
func (n *Node) pluginEvent(ev pluginhost.Event) {
	b := n.backendOf(ev.Plugin)
	if b == nil {
		return
	}
	switch ev.Kind {
	case pluginhost.Up:
		n.pluginUp(b, ev)
	case pluginhost.Frame:
		if p := b.of(ev.Epoch); p != nil {
			for _, e := range ev.Frame.Events {
				if p.faulted { // what it said after a breach is not believed
					break
				}
				n.pluginFrame(p, e)
			}
		}
	case pluginhost.Lost:
		if p := b.of(ev.Epoch); p != nil {
			n.pluginLost(p, ev)
		}
	case pluginhost.Reaped:
		n.reaped(leaseKey{b.name, ev.Epoch})
	case pluginhost.Down:
		b.down = true
		n.log.Error("backend is down", "plugin", b.name, "err", ev.Err)
		n.events = append(n.events, core.Event{Kind: core.PluginDown, Backend: b.name})
		for _, reg := range n.regions {
			n.offerRegion(reg)
			n.regionSettled(reg)
		}
		n.pairGroups()
	}
}

func (n *Node) pluginUp(of *backend, ev pluginhost.Event) {
	b := &epoch{
		backend: of, epoch: ev.Epoch, shake: ev.Handshake, live: true, candidate: ev.Beside,
		checked: slices.Contains(ev.Handshake.Features, sdk.FeatureReceiverChecked), secret: make([]byte, 32),
		regions: map[uint64]regionState{}, given: map[uint64]bool{}, plans: map[planKey]*plan{},
		peers: map[peerKey]*pluginPeer{}, handles: map[uint32]*pluginPeer{}, ops: map[core.OpID]*opState{}, statsAsked: time.Now(),
	}
	rand.Read(b.secret) // never fails
	of.epochs = append(of.epochs, b)
	if !b.candidate {
		of.down, of.shake, of.spec = false, b.shake, ev.Spec // the previous one, if the plugin went back to it
	}
	if l, err := newEpochLease(); err != nil {
		n.log.Error("this plugin epoch is fenced by the exit of its processes alone", "plugin", b.name, "epoch", b.epoch, "err", err)
	} else {
		n.leases[leaseKey{b.name, b.epoch}] = l
	}
	if err := n.cfg.CheckBackend(b.name, config.Duration(ev.Handshake.GetLimits().GetProgressTimeoutNs())); err != nil {
		n.log.Warn("backend and clocks do not fit", "plugin", b.name, "err", err)
	}
	if !servesTransfer(ev.Handshake) {
		n.fault(b, "R12", "HandshakeResponse.kinds", "transfer.backend names a plugin that is not a transfer backend")
		return
	}
	for _, reg := range n.regions {
		n.offerRegion(reg)
	}
	n.maybeServe(b)
}

func servesTransfer(h *contract.HandshakeResponse) bool {
	for _, k := range h.Kinds {
		if k == contract.Kind_KIND_TRANSFER {
			return true
		}
	}
	return false
}

// maybeServe lets the core use an epoch once it has every region that is ready at all.
func (n *Node) maybeServe(b *epoch) {
	if !b.live || b.serving {
		return
	}
	for _, reg := range n.regions {
		if reg.proven && (b.regions[reg.id] == regionAbsent || b.regions[reg.id] == regionAsked) {
			return
		}
	}
	if b.candidate {
		n.candidateReady(b)
		return
	}
	b.serving = true
	for _, p := range n.pools {
		n.givePool(b, p)
	}
	for id, r := range n.remotes {
		for key, e := range r.endpoints {
			if key.backend == b.name {
				n.accept(b, n.peerIDs[id], r, e)
			}
		}
	}
	self := peer.Endpoint{Backend: b.name, Epoch: b.epoch, Blob: b.shake.Endpoint, Secret: b.secret}
	self.Token = peer.PairToken(b.secret, n.cfg.Node, n.incarnation)
	n.remotes[n.cfg.Node].endpoints = replaceEndpoint(n.remotes[n.cfg.Node].endpoints, self)
	for _, e := range b.epochs { // this one too
		if e.serving {
			n.accept(e, selfPeer, n.remotes[n.cfg.Node], self)
			e.retiring = e != b
		}
	}
	b.backend.down, b.backend.shake = false, b.shake
	if err := n.links.AnnounceEndpoint(self); err != nil {
		n.log.Error("the plugin's endpoint cannot be announced", "plugin", b.name, "err", err)
	}
	n.setBackends()
	n.events = append(n.events, core.Event{
		Kind: core.PluginUp, Backend: b.name, Epoch: b.epoch, ReceiverChecked: b.checked,
		MaxOpBytes: int64(b.shake.GetLimits().GetMaxOpBytes()),
	})
	n.log.Info("backend serves", "plugin", b.name, "epoch", b.epoch, "version", b.shake.PluginVersion)
}

func (n *Node) setBackends() {
	var bs []peer.Backend
	for _, b := range n.backends {
		e := uint32(0)
		if b.serves() {
			e = b.current().epoch
		}
		bs = append(bs, peer.Backend{Name: b.name, Epoch: e})
	}
	n.links.SetBackends(bs)
	n.pairGroups()
}

func (n *Node) pluginLost(b *epoch, ev pluginhost.Event) {
	served := b.serving
	b.backend.epochs = slices.DeleteFunc(b.backend.epochs, func(e *epoch) bool { return e == b })
	n.leases[leaseKey{b.name, ev.Epoch}].end()
	for _, r := range n.remotes {
		for k := range r.accepted {
			if k.backend == b.name && k.own == ev.Epoch {
				delete(r.accepted, k)
			}
		}
	}
	b.live, b.serving, b.out = false, false, nil
	b.ops, b.plans = nil, nil
	if errors.Is(ev.Err, pluginhost.ErrStopped) {
		n.log.Info("plugin epoch ended", "plugin", b.name, "epoch", ev.Epoch)
	} else {
		n.log.Error("plugin lost", "plugin", b.name, "epoch", ev.Epoch, "err", ev.Err)
	}
	detail := ""
	if ev.Err != nil {
		detail = ev.Err.Error()
		if len(detail) > 512 {
			detail = detail[:512]
		}
	}
	n.handoverLost(b, detail)
	n.events = append(n.events, core.Event{Kind: core.PluginLost, Backend: b.name, Epoch: ev.Epoch, Detail: detail})
	for _, reg := range n.regions {
		if reg.done != nil && b.regions[reg.id] == regionAsked {
			n.regionOrphaned(reg, !errors.Is(ev.Err, pluginhost.ErrStopped))
		}
	}
	if served {
		n.links.AnnounceLost(b.name, ev.Epoch)
		delete(n.remotes[n.cfg.Node].endpoints, endpointKey{b.name, ev.Epoch})
	}
	n.setBackends()
}

// sendRegion hands one region to a live epoch.
func (n *Node) sendRegion(b *epoch, reg *region) {
	b.regions[reg.id] = regionAsked
	add := &contract.RegionAdd{Region: reg.id, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: uint64(reg.size), NoCanary: reg.proven}
	if !reg.proven {
		add.CanaryOffset, add.Canary = reg.canaryAt, reg.canary
	}
	n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: add}})
	lease := reg.lease
	if l := n.leases[leaseKey{b.name, b.epoch}]; l != nil {
		lease = l.far
	}
	if err := b.p.SendRegion(b.epoch, reg.id, reg.mem, lease); err != nil && !errors.Is(err, pluginhost.ErrEpoch) {
		n.fault(b, "frame", "control socketpair", "a region's descriptors cannot be sent: "+err.Error())
	}
}

func (n *Node) pluginFrame(b *epoch, e *contract.PluginEvent) {
	switch v := e.Event.(type) {
	case *contract.PluginEvent_RegionReady:
		if len(v.RegionReady.Export) > 0 {
			n.regionRefused(b, &contract.RegionFailed{
				Region: v.RegionReady.Region, Cause: contract.Cause_CAUSE_UNSUPPORTED,
				Detail: "RegionReady.export is in the contract and not served by this engine yet: peers cannot be told",
			})
			return
		}
		n.regionReady(b, v.RegionReady.Region)
	case *contract.PluginEvent_RegionFailed:
		n.regionRefused(b, v.RegionFailed)
	case *contract.PluginEvent_PeerReady:
		if p := b.handles[v.PeerReady.Peer]; p != nil && !p.ready {
			if v.PeerReady.Lane == contract.Lane_LANE_CMA {
				n.log.Error("plugin would reach a peer by a lane that is not served", "plugin", b.name, "peer", n.peerNames[p.peer], "lane", "cma")
				n.peerFailed(b, p, "plugin "+b.name+": "+cmaRefused)
				n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: p.handle}}})
				return
			}
			p.ready = true
			n.queue(b, p.wait...)
			p.wait = nil
		}
	case *contract.PluginEvent_PeerFailed:
		if p := b.handles[v.PeerFailed.Peer]; p != nil {
			n.log.Warn("plugin cannot reach a peer", "plugin", b.name, "peer", n.peerNames[p.peer], "cause", causeName(v.PeerFailed.Cause), "detail", v.PeerFailed.Detail)
			n.peerFailed(b, p, detailOf(b, v.PeerFailed.Cause, v.PeerFailed.Detail))
		}
	case *contract.PluginEvent_Accepted:
		if o := n.opEvent(b, v.Accepted.Op, "Accepted.op"); o != nil {
			if o.accepted {
				n.fault(b, "R8", "Accepted.op", fmt.Sprintf("op %d was accepted twice", v.Accepted.Op))
				return
			}
			o.accepted = true
		}
	case *contract.PluginEvent_Progress:
		o := n.opEvent(b, v.Progress.Op, "Progress.op")
		if o == nil {
			return
		}
		if !o.accepted || o.ended || v.Progress.Bytes < o.progress || v.Progress.Bytes > o.bytes {
			n.fault(b, "R8", "Progress.bytes", fmt.Sprintf("op %d: progress of %d bytes before accepted, after the end, backwards or beyond %d", v.Progress.Op, v.Progress.Bytes, o.bytes))
			return
		}
		o.progress = v.Progress.Bytes
		n.events = append(n.events, core.Event{Kind: core.OpProgress, Op: core.OpID(v.Progress.Op), Bytes: int64(v.Progress.Bytes)})
	case *contract.PluginEvent_Done:
		if v.Done.Lane == contract.Lane_LANE_CMA {
			n.fault(b, "R4", "Done.lane", fmt.Sprintf("op %d: %s", v.Done.Op, cmaRefused))
			return
		}
		b.lane = v.Done.Lane
		if o := b.ops[core.OpID(v.Done.Op)]; o != nil && v.Done.Bytes != o.bytes {
			n.fault(b, "R11", "Done.bytes", fmt.Sprintf("op %d: %d bytes done of %d", v.Done.Op, v.Done.Bytes, o.bytes))
			return
		}
		n.opEnded(b, v.Done.Op, core.Event{End: core.EndDone, Quiet: v.Done.Quiet, Bytes: int64(v.Done.Bytes)})
		n.moved[telemetry.Moved{Direction: "out", Backend: b.name, Lane: laneName(v.Done.Lane)}] += v.Done.Bytes
	case *contract.PluginEvent_Failed:
		n.opEnded(b, v.Failed.Op, core.Event{End: core.EndFailed, Quiet: v.Failed.Quiet, Reason: reasonOf(v.Failed.Cause), Detail: detailOf(b, v.Failed.Cause, v.Failed.Detail)})
	case *contract.PluginEvent_Skipped:
		n.opEnded(b, v.Skipped.Op, core.Event{End: core.EndSkipped, Quiet: v.Skipped.Quiet, Reason: statemachine.Skipped, Detail: detailOf(b, v.Skipped.Cause, v.Skipped.Detail)})
	case *contract.PluginEvent_Aborted:
		n.opEnded(b, v.Aborted.Op, core.Event{End: core.EndAborted, Quiet: v.Aborted.Quiet})
	case *contract.PluginEvent_Quiesced:
		o := n.opEvent(b, v.Quiesced.Op, "Quiesced.op")
		if o == nil {
			return
		}
		if !o.ended {
			n.fault(b, "R8", "Quiesced.op", fmt.Sprintf("op %d is quiesced before its end", v.Quiesced.Op))
			return
		}
		n.freeOp(b, core.OpID(v.Quiesced.Op), o)
		n.events = append(n.events, core.Event{Kind: core.OpQuiesced, Op: core.OpID(v.Quiesced.Op)})
	case *contract.PluginEvent_Granted:
		n.events = append(n.events, core.Event{Kind: core.Granted, Grant: core.GrantID(v.Granted.Grant)})
	case *contract.PluginEvent_GrantFailed:
		n.events = append(n.events, core.Event{Kind: core.GrantFailed, Grant: core.GrantID(v.GrantFailed.Grant), Detail: detailOf(b, v.GrantFailed.Cause, v.GrantFailed.Detail)})
	case *contract.PluginEvent_Revoked:
		n.events = append(n.events, core.Event{Kind: core.Revoked, Grant: core.GrantID(v.Revoked.Grant), Quiet: v.Revoked.Quiet})
	case *contract.PluginEvent_Fenced:
		n.events = append(n.events, core.Event{Kind: core.Fenced, Grant: core.GrantID(v.Fenced.Fence), Quiet: v.Fenced.Result == contract.FenceResult_FENCE_RESULT_QUIET})
	case *contract.PluginEvent_Stats:
		n.reconcile(b, v.Stats)
	}
}

func (n *Node) regionReady(b *epoch, id uint64) {
	reg := n.regions[id]
	if reg == nil || b.regions[id] != regionAsked {
		return
	}
	b.regions[id] = regionReady
	n.candidateAnswered(b)
	if !reg.proven {
		reg.proven = true
		n.offerRegion(reg)
	}
	n.regionSettled(reg)
	n.maybeServe(b)
}

func (n *Node) regionRefused(b *epoch, f *contract.RegionFailed) {
	reg := n.regions[f.Region]
	if reg == nil {
		return
	}
	b.regions[f.Region] = regionBad
	n.candidateAnswered(b)
	if b.refused == "" {
		b.refused = detailOf(b, f.Cause, f.Detail)
	}
	n.log.Warn("plugin refused a region", "plugin", b.name, "region", f.Region, "cause", f.Cause, "detail", f.Detail)
	if !reg.proven {
		n.regionFailed(reg, regionError(b, f))
	} else {
		n.regionSettled(reg)
	}
	n.maybeServe(b)
}

// cmaRefused is why a plugin may not write into the process of another: such a write goes on when that
// process, and with it the epoch that the destination's engine fences, is dead and gone.
const cmaRefused = "lane cma is not served, a write by it outlives the death of the plugin at the other end; configure the backend for shm or tcp"

// peerFailed forgets a peer that the plugin cannot serve and ends what waited for it; the next op tries
// anew.
func (n *Node) peerFailed(b *epoch, p *pluginPeer, detail string) {
	delete(b.peers, p.peerKey)
	delete(b.handles, p.handle)
	for _, e := range p.wait {
		if s := e.GetSubmit(); s != nil {
			id := core.OpID(s.Op)
			if o := b.ops[id]; o != nil {
				n.freeOp(b, id, o)
			}
			n.post(core.Event{Kind: core.OpEnd, Op: id, End: core.EndFailed, Reason: statemachine.TransferFailed, Quiet: true, Detail: detail})
		}
	}
	p.wait = nil
	for k := range b.plans { // the plugin drops its own with the peer
		if k.handle == p.handle {
			delete(b.plans, k)
		}
	}
}

// pluginPeer makes a peer's plugin epoch known to ours.
func (n *Node) pluginPeer(b *epoch, id core.PeerID, inc uint64, epoch uint32) (*pluginPeer, error) {
	key := peerKey{id, inc, epoch}
	if p := b.peers[key]; p != nil {
		return p, nil
	}
	node := n.peerNames[id]
	r := n.remotes[node]
	if r == nil || r.inc != inc {
		return nil, fmt.Errorf("engine %q is not the incarnation that registered the pages", node)
	}
	e, ok := r.endpoints[endpointKey{b.name, epoch}]
	if !ok {
		return nil, fmt.Errorf("engine %q has not announced epoch %d of plugin %s", node, epoch, b.name)
	}
	b.nextID++
	p := &pluginPeer{peerKey: key, handle: uint32(b.nextID), pools: map[uint64]bool{}}
	b.peers[key], b.handles[p.handle] = p, p
	n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
		Peer: p.handle, Node: node, Incarnation: inc, Epoch: epoch, Endpoint: e.Blob,
		SameHost: r.hostID == n.hostID, RequireLane: lane(n.cfg.Transfer.RequireLane), Token: e.Token,
	}}})
	return p, nil
}

// accept admits a peer's plugin epoch as a writer.
func (n *Node) accept(b *epoch, id core.PeerID, r *remote, e peer.Endpoint) {
	if !b.live {
		return
	}
	b.nextID++
	n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{
		Peer: uint32(b.nextID), Node: n.peerNames[id], Incarnation: r.inc, Epoch: e.Epoch,
		SameHost: r.hostID == n.hostID, Token: peer.PairToken(b.secret, n.peerNames[id], r.inc), Endpoint: e.Blob,
	}}})
	if r.accepted == nil {
		r.accepted = map[acceptKey]uint32{}
	}
	r.accepted[acceptKey{b.name, b.epoch, e.Epoch}] = uint32(b.nextID)
}

func (n *Node) planFor(b *epoch, p *pluginPeer, e *core.PluginEffect) (*plan, error) {
	src, dst := e.SrcPool, e.DstPool
	key := planKey{src, p.peer, p.handle, dst, e.Map, e.Phase}
	if pl := b.plans[key]; pl != nil {
		return pl, nil
	}
	sp, rp := n.pools[src], n.remotes[n.peerNames[p.peer]].pools[dst]
	if sp == nil || rp == nil {
		return nil, fmt.Errorf("pool %d or the peer's pool %d is gone", src, dst)
	}
	slices, err := e.Map.Plan(e.SrcRank, e.DstRank, e.Phase, sp.shape, rp.shape)
	if err != nil {
		return nil, err
	}
	if !p.pools[dst] {
		p.pools[dst] = true
		n.follow(b, p, &contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{
			Peer: p.handle, Pool: &contract.PoolAdd{Pool: dst, Pages: uint32(rp.pages), Tensors: rp.tensors},
		}}})
	}
	b.nextID++
	pl := &plan{id: b.nextID, slices: slices, shape: sp.shape}
	add := &contract.PlanAdd{Plan: pl.id, SrcPool: src, Peer: p.handle, DstPool: dst, SrcPages: 1, DstPages: 1}
	for _, s := range slices {
		add.Slices = append(add.Slices, &contract.Slice{
			SrcTensor: uint32(s.Src), DstTensor: uint32(s.Dst), SrcOff: uint64(s.SrcOff), DstOff: uint64(s.DstOff),
			Len: uint64(s.Len), SrcStride: uint64(s.SrcStride), DstStride: uint64(s.DstStride), Count: uint32(s.Count),
		})
	}
	b.plans[key] = pl
	n.follow(b, p, &contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: add}})
	return pl, nil
}

// dropPlans removes plans that no op uses; a plan in use is kept until its plugin epoch ends.
func (n *Node) dropPlans(b *epoch, match func(planKey) bool) {
	for k, pl := range b.plans {
		if match(k) && pl.users == 0 {
			delete(b.plans, k)
			n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_PlanRemove{PlanRemove: &contract.PlanRemove{Plan: pl.id}}})
		}
	}
}
