package sdktest

import (
	"crypto/rand"
	"fmt"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Peer is a connection of one host to another.
type Peer struct {
	From, To *Host
	Handle   uint32 // at From (PeerAdd)
	Writer   uint32 // at To (PeerAccept)
	Lane     contract.Lane
}

// Connect admits `from` at `to` (PeerAccept), makes `to` a peer of `from` and waits for PeerReady. They
// may be the same host.
func Connect(from, to *Host) *Peer {
	from.t.Helper()
	p, err := Dial(from, to, contract.Lane_LANE_ANY)
	if err != nil {
		from.t.Fatalf("%s: %v", from.node, err)
	}
	return p
}

// Dial is Connect with a demanded lane; PeerFailed comes back as an error.
func Dial(from, to *Host, lane contract.Lane) (*Peer, error) {
	from.t.Helper()
	token := make([]byte, 32)
	_, _ = rand.Read(token)
	p := &Peer{From: from, To: to, Handle: from.handle()}
	same := from.machine == to.machine
	p.Writer = to.handle()
	to.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{
		Peer: p.Writer, Node: from.node, Incarnation: from.incarnation, Epoch: from.epoch, SameHost: same,
		Token: token, Endpoint: from.Response.Endpoint,
	}}})
	to.Stats() // the accept is done when this is answered
	from.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
		Peer: p.Handle, Node: to.node, Incarnation: to.incarnation, Epoch: to.epoch, Endpoint: to.Response.Endpoint,
		SameHost: same, RequireLane: lane, Token: token,
	}}})
	e := from.Until("PeerReady", func(e *contract.PluginEvent) bool {
		return e.GetPeerReady().GetPeer() == p.Handle || e.GetPeerFailed().GetPeer() == p.Handle
	})
	if f := e.GetPeerFailed(); f != nil {
		return nil, fmt.Errorf("peer failed: %v: %s", f.Cause, f.Detail)
	}
	p.Lane = e.GetPeerReady().GetLane()
	return p, nil
}

// Remove drops the peer at both ends and waits for both answers.
func (p *Peer) Remove() {
	p.From.t.Helper()
	p.From.removePeer(p.Handle)
	p.To.removePeer(p.Writer)
}

func (h *Host) removePeer(handle uint32) {
	h.t.Helper()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: handle}}})
	h.Until("PeerRemoved", func(e *contract.PluginEvent) bool { return e.GetPeerRemoved().GetPeer() == handle })
}

func (h *Host) handle() uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.handles++
	return h.handles
}

// Plan makes a plan from srcPool of p.From to dstPool of p.To and returns its id.
func (p *Peer) Plan(srcPool, dstPool uint64, slices ...*contract.Slice) uint64 {
	p.From.t.Helper()
	return p.Repage(srcPool, dstPool, 1, 1, slices...)
}

// Repage is Plan for groups of srcPages and dstPages pages.
func (p *Peer) Repage(srcPool, dstPool uint64, srcPages, dstPages uint32, slices ...*contract.Slice) uint64 {
	p.From.t.Helper()
	h := p.From
	p.To.mu.Lock()
	dst := p.To.pools[dstPool]
	p.To.mu.Unlock()
	id := h.id()
	h.mu.Lock()
	src := h.pools[srcPool]
	key := remoteKey{p.Handle, dstPool}
	known := h.remote[key]
	h.remote[key] = true
	h.plans[id] = planInfo{src: src, srcPages: srcPages, slices: slices}
	h.mu.Unlock()
	if src == nil || dst == nil {
		h.t.Fatalf("plan: pool %d of %s or pool %d of %s is unknown", srcPool, h.node, dstPool, p.To.node)
	}
	var events []*contract.HostEvent
	if !known {
		p.announce(dst)
		events = append(events, &contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: p.Handle, Pool: dst}}})
	}
	h.Send(append(events, &contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
		Plan: id, SrcPool: srcPool, Peer: p.Handle, DstPool: dstPool, SrcPages: srcPages, DstPages: dstPages, Slices: slices,
	}}})...)
	return id
}

// announce tells the backend of the peer's regions that export something, as a host must.
func (p *Peer) announce(pool *contract.PoolAdd) {
	p.From.t.Helper()
	for _, t := range pool.GetTensors() {
		p.To.mu.Lock()
		r := p.To.regions[t.Region]
		p.To.mu.Unlock()
		key := remoteKey{p.Handle, t.Region}
		if r == nil || len(r.Export) == 0 || p.From.imported(key) {
			continue
		}
		p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionAdd{RemoteRegionAdd: &contract.RemoteRegionAdd{
			Peer: p.Handle, Region: r.ID, Size: uint64(len(r.Bytes)), Export: r.Export,
		}}})
		e := p.From.Until("RemoteRegionReady", func(e *contract.PluginEvent) bool {
			ready, failed := e.GetRemoteRegionReady(), e.GetRemoteRegionFailed()
			return ready.GetPeer() == p.Handle && ready.GetRegion() == r.ID || failed.GetPeer() == p.Handle && failed.GetRegion() == r.ID
		})
		if f := e.GetRemoteRegionFailed(); f != nil {
			p.From.t.Fatalf("%s: region %d of peer %d: %v: %s", p.From.node, r.ID, p.Handle, f.Cause, f.Detail)
		}
	}
}

// imported notes that a region of a peer is announced, and reports whether it was before.
func (h *Host) imported(key remoteKey) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.remoteRegions[key]
	h.remoteRegions[key] = true
	return before
}

// IdentityPlan copies whole pages, tensor by tensor; both pools have the same shape.
func (p *Peer) IdentityPlan(srcPool, dstPool uint64) uint64 {
	p.From.t.Helper()
	p.From.mu.Lock()
	src := p.From.pools[srcPool]
	p.From.mu.Unlock()
	var slices []*contract.Slice
	for i, t := range src.GetTensors() {
		slices = append(slices, &contract.Slice{SrcTensor: uint32(i), DstTensor: uint32(i), Len: t.PageBytes, Count: 1})
	}
	return p.Plan(srcPool, dstPool, slices...)
}

// Pages is one run of consecutive pages.
func Pages(start, count uint32) []sdk.Run { return []sdk.Run{{Start: start, Count: count, Stride: 1}} }

// Runs converts to the wire.
func Runs(runs []sdk.Run) *contract.Runs {
	m := &contract.Runs{}
	strided := false
	for _, r := range runs {
		m.Start = append(m.Start, r.Start)
		m.Count = append(m.Count, r.Count)
		m.Stride = append(m.Stride, r.Stride)
		strided = strided || r.Stride != 1
	}
	if !strided {
		m.Stride = nil
	}
	return m
}

// Op is what Submit sends. Zero values: openers 1.1 and 2.2, all layers, the size that the plan gives.
type Op struct {
	Plan        uint64
	Src, Dst    []sdk.Run
	Source      sdk.Opener
	Destination sdk.Opener
	LayerFrom   uint32
	LayerTo     uint32
	Priority    int32
	Deadline    time.Duration
}

// Default openers of Op.
var (
	Source      = sdk.Opener{Incarnation: 1, Sequence: 1}
	Destination = sdk.Opener{Incarnation: 2, Sequence: 2}
)

// Pending is a submitted op.
type Pending struct {
	ID uint64
	h  *Host
}

// Submit sends an op to the peer.
func (p *Peer) Submit(op Op) *Pending {
	p.From.t.Helper()
	h := p.From
	if op.Source == (sdk.Opener{}) {
		op.Source = Source
	}
	if op.Destination == (sdk.Opener{}) {
		op.Destination = Destination
	}
	if op.LayerTo == 0 {
		op.LayerTo = 1 << 31
	}
	h.mu.Lock()
	plan := h.plans[op.Plan]
	h.mu.Unlock()
	var bytes uint64
	for _, s := range plan.slices {
		if l := plan.src.Tensors[s.SrcTensor].Layer; l >= op.LayerFrom && l < op.LayerTo {
			bytes += s.Len * uint64(s.Count)
		}
	}
	pages := uint64(0)
	for _, r := range op.Src {
		pages += uint64(r.Count)
	}
	return h.SubmitRaw(&contract.Submit{
		Generation: &contract.Generation{
			Source:      &contract.Opener{Incarnation: op.Source.Incarnation, Sequence: op.Source.Sequence},
			Destination: &contract.Opener{Incarnation: op.Destination.Incarnation, Sequence: op.Destination.Sequence},
		},
		Direction: contract.Direction_DIRECTION_WRITE, Peer: p.Handle, Plan: op.Plan,
		Source: Runs(op.Src), Destination: Runs(op.Dst), LayerFrom: op.LayerFrom, LayerTo: op.LayerTo,
		Priority: op.Priority, DeadlineNs: uint64(op.Deadline), Bytes: bytes * (pages / uint64(max(plan.srcPages, 1))),
	})
}

// SubmitRaw sends m after setting its op (when 0) and seq.
func (h *Host) SubmitRaw(m *contract.Submit) *Pending {
	h.t.Helper()
	if m.Op == 0 {
		m.Op = h.id()
	}
	h.mu.Lock()
	h.seq++
	m.Seq = h.seq
	h.mu.Unlock()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}})
	return &Pending{ID: m.Op, h: h}
}

// Abort sends AbortOp on the Control stream.
func (p *Pending) Abort() {
	p.h.t.Helper()
	p.h.SendControl(&contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: p.ID}}})
}

// End is how an op ended.
type End struct {
	Kind   string // "done", "failed", "skipped", "aborted"
	Cause  contract.Cause
	Detail string
	Quiet  bool
	Bytes  uint64
	Lane   contract.Lane
}

// EndOf reads an end event of op; ok is false for every other event.
func EndOf(e *contract.PluginEvent, op uint64) (end End, ok bool) {
	switch e := e.GetEvent().(type) {
	case *contract.PluginEvent_Done:
		return End{Kind: "done", Quiet: e.Done.Quiet, Bytes: e.Done.Bytes, Lane: e.Done.Lane}, e.Done.Op == op
	case *contract.PluginEvent_Failed:
		return End{Kind: "failed", Cause: e.Failed.Cause, Detail: e.Failed.Detail, Quiet: e.Failed.Quiet}, e.Failed.Op == op
	case *contract.PluginEvent_Skipped:
		return End{Kind: "skipped", Cause: e.Skipped.Cause, Detail: e.Skipped.Detail, Quiet: e.Skipped.Quiet}, e.Skipped.Op == op
	case *contract.PluginEvent_Aborted:
		return End{Kind: "aborted", Quiet: e.Aborted.Quiet}, e.Aborted.Op == op
	}
	return End{}, false
}

// End waits for the end of the op.
func (p *Pending) End() End {
	p.h.t.Helper()
	var end End
	p.h.Until(fmt.Sprintf("end of op %d", p.ID), func(e *contract.PluginEvent) (ok bool) {
		end, ok = EndOf(e, p.ID)
		return ok
	})
	return end
}

// Quiet waits until the op has ended and is quiet, and returns its end.
func (p *Pending) Quiet() End {
	p.h.t.Helper()
	end := p.End()
	if !end.Quiet {
		p.h.Until(fmt.Sprintf("Quiesced of op %d", p.ID), func(e *contract.PluginEvent) bool { return e.GetQuiesced().GetOp() == p.ID && e.GetQuiesced() != nil })
	}
	return end
}

// Progress returns the highest Progress so far.
func (p *Pending) Progress() uint64 {
	var n uint64
	for _, e := range p.h.Events() {
		if m := e.GetProgress(); m != nil && m.Op == p.ID {
			n = max(n, m.Bytes)
		}
	}
	return n
}

// Grant opens pages of a pool to an opener and waits for Granted; it returns the grant's id.
func (h *Host) Grant(destination sdk.Opener, pool uint64, pages ...sdk.Run) uint64 {
	h.t.Helper()
	return h.GrantTo(nil, destination, pool, pages...)
}

// GrantTo is Grant for the writers of some nodes only.
func (h *Host) GrantTo(writers []string, destination sdk.Opener, pool uint64, pages ...sdk.Run) uint64 {
	h.t.Helper()
	id := h.id()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: &contract.Grant{
		Grant: id, Destination: &contract.Opener{Incarnation: destination.Incarnation, Sequence: destination.Sequence},
		Parts: []*contract.GrantPart{{Pool: pool, Pages: Runs(pages)}}, Writers: writers,
	}}})
	e := h.Until("Granted", func(e *contract.PluginEvent) bool {
		return e.GetGranted().GetGrant() == id || e.GetGrantFailed().GetGrant() == id
	})
	if f := e.GetGrantFailed(); f != nil {
		h.t.Fatalf("%s: grant: %v: %s", h.node, f.Cause, f.Detail)
	}
	return id
}

// Revoke closes a grant for good and reports whether it is quiet.
func (h *Host) Revoke(grant uint64, destination sdk.Opener) (quiet bool) {
	h.t.Helper()
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_Revoke{Revoke: &contract.Revoke{
		Grant: grant, Destination: &contract.Opener{Incarnation: destination.Incarnation, Sequence: destination.Sequence},
	}}})
	return h.Until("Revoked", func(e *contract.PluginEvent) bool {
		return e.GetRevoked() != nil && e.GetRevoked().Grant == grant
	}).GetRevoked().GetQuiet()
}

// CheckOrder fails the test when the events of any op break R1 or R8: Accepted first, growing
// Progress, one end, Quiesced iff it said quiet=false and at most once.
func (h *Host) CheckOrder() {
	h.t.Helper()
	if err := CheckOrder(h.Events()); err != nil {
		h.t.Errorf("%s: %v", h.node, err)
	}
}

// CheckOrder is Host.CheckOrder on a list of events.
func CheckOrder(events []*contract.PluginEvent) error {
	type state struct {
		ended, quiet bool
		progress     uint64
	}
	ops := map[uint64]*state{}
	for i, e := range events {
		var op uint64
		switch e := e.GetEvent().(type) {
		case *contract.PluginEvent_Accepted:
			if ops[e.Accepted.Op] != nil {
				return fmt.Errorf("event %d: op %d accepted twice (R8)", i, e.Accepted.Op)
			}
			ops[e.Accepted.Op] = &state{}
			continue
		case *contract.PluginEvent_Progress:
			st := ops[e.Progress.Op]
			if st == nil || st.ended || e.Progress.Bytes <= st.progress {
				return fmt.Errorf("event %d: progress %d of op %d out of order (R8): %+v", i, e.Progress.Bytes, e.Progress.Op, st)
			}
			st.progress = e.Progress.Bytes
			continue
		case *contract.PluginEvent_Quiesced:
			st := ops[e.Quiesced.Op]
			if st == nil || !st.ended || st.quiet {
				return fmt.Errorf("event %d: quiesced of op %d out of order (R4): %+v", i, e.Quiesced.Op, st)
			}
			st.quiet = true
			continue
		case *contract.PluginEvent_Done:
			op = e.Done.Op
		case *contract.PluginEvent_Failed:
			op = e.Failed.Op
		case *contract.PluginEvent_Skipped:
			op = e.Skipped.Op
		case *contract.PluginEvent_Aborted:
			op = e.Aborted.Op
		default:
			continue
		}
		st := ops[op]
		if st == nil || st.ended {
			return fmt.Errorf("event %d: end of op %d out of order (R1, R8): %+v", i, op, st)
		}
		end, _ := EndOf(e, op)
		st.ended, st.quiet = true, end.Quiet
	}
	return nil
}
