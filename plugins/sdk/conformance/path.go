package conformance

import (
	"bytes"
	"cmp"
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Shape is the memory at both ends of a Path: pages of equal size in tensors that lie behind each other.
type Shape struct {
	Pages     uint32 // of each pool, at least 1
	PageBytes uint64
	Layers    uint32 // 0 means 1; one tensor each
	Gap       uint64 // bytes between pages
	Lane      contract.Lane
	// DstPageBytes and DstPages, if not 0, are the destination's: the caller gives its own plan.
	DstPageBytes uint64
	DstPages     uint32
	// SrcKind and DstKind are the kinds of the memory; 0 means host memory.
	SrcKind, DstKind contract.MemoryKind
	NoPlan           bool
	NoGrant          bool // receiver_checked plugins: the case grants by itself
}

// Path is everything that ops from one node to another need: memory, pools, the peer, a plan, a grant.
type Path struct {
	From, To       *Node
	Handle         uint32 // of To at From (PeerAdd)
	Writer         uint32 // of From at To (PeerAccept)
	Token          []byte
	Lane           contract.Lane // that PeerReady named
	SrcMem, DstMem *Region
	Src, Dst       *Pool
	Plan           *Plan // the identity, unless Shape.NoPlan
	Generation     *contract.Generation
	grants         map[uint64]*contract.Opener
	remotePools    map[uint64]bool
	remoteRegions  map[uint64]*Region
	plans          map[uint64]bool
	closed         bool
}

// Pool is tensors of one node that share page ids.
type Pool struct {
	ID      uint64
	Pages   uint32
	Tensors []Tensor
	node    *Node
}

// Tensor is one layer's pages in a region.
type Tensor struct {
	Region     *Region
	Offset     uint64
	PageStride uint64
	PageBytes  uint64
	Layer      uint32
}

func (p *Pool) message() *contract.PoolAdd {
	m := &contract.PoolAdd{Pool: p.ID, Pages: p.Pages}
	for _, t := range p.Tensors {
		m.Tensors = append(m.Tensors, &contract.Tensor{
			Region: t.Region.ID, Offset: t.Offset, PageStride: t.PageStride, PageBytes: t.PageBytes, Layer: t.Layer,
		})
	}
	return m
}

// AddPool makes a pool known. It is not answered.
func (n *Node) AddPool(pages uint32, tensors ...Tensor) *Pool {
	p := &Pool{ID: n.NewID(), Pages: pages, Tensors: tensors, node: n}
	n.mu.Lock()
	n.pools = append(n.pools, p.ID)
	n.mu.Unlock()
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: p.message()}})
	return p
}

// Plan is how source pages become destination pages.
type Plan struct {
	ID                 uint64
	Src, Dst           *Pool
	SrcPages, DstPages uint32
	Slices             []*contract.Slice
}

// Path makes memory of the shape at both nodes of the pair and connects them.
func (t *T) Path(s Shape) *Path { return t.PathBetween(t.A(), t.B(), s) }

// PathBetween is Path between any two nodes.
func (t *T) PathBetween(from, to *Node, s Shape) *Path {
	p := t.Connect(from, to, s.Lane)
	p.furnish(s)
	return p
}

// furnish makes the memory, the pools, the plan and the grant of a path that is dialled.
func (p *Path) furnish(s Shape) {
	from, to := p.From, p.To
	if s.DstPageBytes == 0 {
		s.DstPageBytes, s.DstPages = s.PageBytes, s.Pages
	}
	s.Layers = max(s.Layers, 1)
	p.SrcMem, p.Src = from.poolOf(s.SrcKind, s.Pages, s.PageBytes, s.Gap, s.Layers)
	p.DstMem, p.Dst = to.poolOf(s.DstKind, s.DstPages, s.DstPageBytes, s.Gap, s.Layers)
	if !s.NoPlan {
		var slices []*contract.Slice
		for i := range s.Layers {
			slices = append(slices, &contract.Slice{SrcTensor: i, DstTensor: i, Len: s.PageBytes, Count: 1})
		}
		p.Plan = p.AddPlan(p.Src, p.Dst, 1, 1, slices...)
	}
	if !s.NoGrant {
		p.Grant(p.Generation.Destination, p.Dst, sdk.Run{Count: p.Dst.Pages, Stride: 1})
	}
}

// pool makes memory for a pool, with a few bytes before, between and behind, and the pool.
func (n *Node) pool(pages uint32, pageBytes, gap uint64, layers uint32) (*Region, *Pool) {
	return n.poolOf(contract.MemoryKind_MEMORY_KIND_HOST_SHM, pages, pageBytes, gap, layers)
}

func (n *Node) poolOf(kind contract.MemoryKind, pages uint32, pageBytes, gap uint64, layers uint32) (*Region, *Pool) {
	const margin = 64
	stride := pageBytes + gap
	tensor := uint64(pages)*stride + margin
	r := n.addRegion(cmp.Or(kind, contract.MemoryKind_MEMORY_KIND_HOST_SHM), margin+uint64(layers)*tensor+margin)
	var tensors []Tensor
	for l := range layers {
		tensors = append(tensors, Tensor{Region: r, Offset: margin + uint64(l)*tensor, PageStride: stride, PageBytes: pageBytes, Layer: l})
	}
	return r, n.AddPool(pages, tensors...)
}

// Connect admits `from` at `to`, makes `to` a peer of `from` and waits for PeerReady. No lane means no
// demand.
func (t *T) Connect(from, to *Node, lane contract.Lane) *Path {
	p, failed := t.Dial(from, to, lane, nil)
	if failed != nil {
		t.Fail("R12", "PeerReady", "%s", Describe(failed))
	}
	t.Check(to.Count(func(e *contract.PluginEvent) bool {
		return e.GetPeerFailed() != nil && e.GetPeerFailed().Peer == p.Writer
	}) == 0,
		"R12", fmt.Sprintf("the writer %d to be admitted by %s", p.Writer, to.Name), "PeerFailed")
	return p
}

// Dial is Connect that returns what PeerFailed says. change, if any, changes PeerAdd.
func (t *T) Dial(from, to *Node, lane contract.Lane, change func(*contract.PeerAdd)) (*Path, *contract.PeerFailed) {
	p := t.Accept(from, to)
	if lane == 0 {
		lane = contract.Lane_LANE_ANY
	}
	e := p.add(lane, change)
	if f := e.GetPeerFailed(); f != nil {
		return p, f
	}
	p.Lane = e.GetPeerReady().Lane
	t.Check(lane == contract.Lane_LANE_ANY || p.Lane == contract.Lane_LANE_ANY || p.Lane <= lane, "R9",
		fmt.Sprintf("a lane no slower than the demanded %v", lane), "PeerReady(%v)", p.Lane)
	return p, nil
}

// add sends PeerAdd, changed by change, and returns PeerReady or PeerFailed.
func (p *Path) add(lane contract.Lane, change func(*contract.PeerAdd)) *contract.PluginEvent {
	from, to := p.From, p.To
	m := &contract.PeerAdd{
		Peer: p.Handle, Node: to.ID.Node, Incarnation: to.ID.Incarnation, Epoch: to.ID.Epoch, Endpoint: to.Hello().Endpoint,
		SameHost: from.ID.HostID == to.ID.HostID, RequireLane: lane, Token: p.Token,
	}
	if change != nil {
		change(m)
	}
	from.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: m}})
	return from.Until("R12", fmt.Sprintf("PeerReady or PeerFailed of peer %d", p.Handle), func(e *contract.PluginEvent) bool {
		return e.GetPeerReady() != nil && e.GetPeerReady().Peer == p.Handle || e.GetPeerFailed() != nil && e.GetPeerFailed().Peer == p.Handle
	})
}

// Accept admits `from` at `to` and returns a path that is not dialled yet.
func (t *T) Accept(from, to *Node) *Path {
	token := make([]byte, 32)
	for i := range token {
		token[i] = byte(t.Rand().Uint32())
	}
	p := &Path{
		From: from, To: to, Handle: from.newHandle(), Writer: to.newHandle(), Token: token, Lane: contract.Lane_LANE_ANY,
		grants: map[uint64]*contract.Opener{}, remotePools: map[uint64]bool{}, remoteRegions: map[uint64]*Region{}, plans: map[uint64]bool{},
	}
	p.Generation = p.NewGeneration()
	t.paths = append(t.paths, p)
	to.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{
		Peer: p.Writer, Node: from.ID.Node, Incarnation: from.ID.Incarnation, Epoch: from.ID.Epoch,
		SameHost: from.ID.HostID == to.ID.HostID, Token: token, Endpoint: from.Hello().Endpoint,
	}}})
	to.Stats() // what follows finds the writer admitted
	return p
}

// NewGeneration returns openers that were never used.
func (p *Path) NewGeneration() *contract.Generation {
	return &contract.Generation{
		Source:      &contract.Opener{Incarnation: p.From.ID.Incarnation, Sequence: p.From.NewID()},
		Destination: &contract.Opener{Incarnation: p.To.ID.Incarnation, Sequence: p.To.NewID()},
	}
}

// AddPlan sends PlanAdd, after what it needs of the peer's geometry.
func (p *Path) AddPlan(src, dst *Pool, srcPages, dstPages uint32, slices ...*contract.Slice) *Plan {
	plan := &Plan{ID: p.From.NewID(), Src: src, Dst: dst, SrcPages: srcPages, DstPages: dstPages, Slices: slices}
	p.Announce(dst)
	p.plans[plan.ID] = true
	p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
		Plan: plan.ID, SrcPool: src.ID, Peer: p.Handle, DstPool: dst.ID, SrcPages: srcPages, DstPages: dstPages, Slices: slices,
	}}})
	return plan
}

// Announce tells From of a pool of To, once: first the regions that export something.
func (p *Path) Announce(pool *Pool) {
	if p.remotePools[pool.ID] {
		return
	}
	p.remotePools[pool.ID] = true
	if f := p.announceRegions(pool); f != nil {
		p.From.case_().Fail("R12", "RemoteRegionReady", "%s", Describe(f))
	}
	p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: p.Handle, Pool: pool.message()}}})
}

// announceRegions tells From of the regions of a pool that export something, once each, and returns what
// the plugin says of the first that it refuses.
func (p *Path) announceRegions(pool *Pool) *contract.RemoteRegionFailed {
	for _, tensor := range pool.Tensors {
		r := tensor.Region
		if len(r.export) == 0 || p.remoteRegions[r.ID] != nil {
			continue
		}
		p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionAdd{RemoteRegionAdd: &contract.RemoteRegionAdd{
			Peer: p.Handle, Region: r.ID, Size: r.Size, Export: r.export,
		}}})
		e := p.From.Until("R12", fmt.Sprintf("RemoteRegionReady or RemoteRegionFailed of region %d", r.ID), func(e *contract.PluginEvent) bool {
			ready, failed := e.GetRemoteRegionReady(), e.GetRemoteRegionFailed()
			return ready != nil && ready.Peer == p.Handle && ready.Region == r.ID || failed != nil && failed.Peer == p.Handle && failed.Region == r.ID
		})
		if f := e.GetRemoteRegionFailed(); f != nil {
			return f
		}
		p.remoteRegions[r.ID] = r
	}
	return nil
}

// Grant opens pages to an opener of From at the receiver and waits for Granted; 0 when the plugin does not check.
func (p *Path) Grant(destination *contract.Opener, pool *Pool, pages ...sdk.Run) uint64 {
	return p.GrantTo([]string{p.From.ID.Node}, destination, pool, pages...)
}

// GrantTo is Grant for the writers of other nodes.
func (p *Path) GrantTo(writers []string, destination *contract.Opener, pool *Pool, pages ...sdk.Run) uint64 {
	t := p.To.case_()
	if !t.Has(sdk.FeatureReceiverChecked) {
		return 0
	}
	id := p.To.NewID()
	p.To.Send(&contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: &contract.Grant{
		Grant: id, Destination: destination, Parts: []*contract.GrantPart{{Pool: pool.ID, Pages: Runs(pages...)}}, Writers: writers,
	}}})
	e := p.To.Until("R4", fmt.Sprintf("Granted of grant %d", id), func(e *contract.PluginEvent) bool {
		return e.GetGranted() != nil && e.GetGranted().Grant == id || e.GetGrantFailed() != nil && e.GetGrantFailed().Grant == id
	})
	if f := e.GetGrantFailed(); f != nil {
		t.Fail("R4", "Granted", "%s", Describe(f))
	}
	p.grants[id] = destination
	return id
}

// Revoke closes a grant for good and returns what Revoked says.
func (p *Path) Revoke(grant uint64) (quiet bool) {
	destination := p.grants[grant]
	delete(p.grants, grant)
	p.To.Send(&contract.HostEvent{Event: &contract.HostEvent_Revoke{Revoke: &contract.Revoke{Grant: grant, Destination: destination}}})
	return p.To.Until("R4", fmt.Sprintf("Revoked of grant %d", grant), func(e *contract.PluginEvent) bool {
		return e.GetRevoked() != nil && e.GetRevoked().Grant == grant
	}).GetRevoked().Quiet
}

// Grants returns the ids of the open grants.
func (p *Path) Grants() (ids []uint64) {
	for id := range p.grants {
		ids = append(ids, id)
	}
	return ids
}

// Remove drops the peer at both ends and waits for both answers.
func (p *Path) Remove() {
	if p.closed {
		return
	}
	p.closed = true
	p.From.removePeer(p.Handle)
	p.To.removePeer(p.Writer)
}

func (n *Node) removePeer(handle uint32) {
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: handle}}})
	n.Until("R12", fmt.Sprintf("PeerRemoved of peer %d", handle), func(e *contract.PluginEvent) bool {
		return e.GetPeerRemoved() != nil && e.GetPeerRemoved().Peer == handle
	})
}

// teardown undoes the path, in the order that the contract gives. Everything of it is quiet, or a node is
// gone.
func (p *Path) teardown() {
	from, to := p.From.Lost() == nil, p.To.Lost() == nil
	t := p.From.case_()
	if to {
		for _, g := range p.Grants() {
			t.Check(p.Revoke(g), "R4", "Revoked with quiet=true, all ops being quiet", "quiet=false")
		}
	}
	if from && !p.closed {
		for plan := range p.plans {
			p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_PlanRemove{PlanRemove: &contract.PlanRemove{Plan: plan}}})
		}
		for pool := range p.remotePools {
			p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemotePoolRemove{RemotePoolRemove: &contract.RemotePoolRemove{Peer: p.Handle, Pool: pool}}})
		}
		for id := range p.remoteRegions {
			p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionRemove{RemoteRegionRemove: &contract.RemoteRegionRemove{Peer: p.Handle, Region: id}}})
			p.From.Until("R12", fmt.Sprintf("RemoteRegionRemoved of region %d", id), func(e *contract.PluginEvent) bool {
				r := e.GetRemoteRegionRemoved()
				return r != nil && r.Peer == p.Handle && r.Region == id
			})
		}
	}
	if p.closed {
		return
	}
	p.closed = true
	if from {
		p.From.removePeer(p.Handle)
	}
	if to {
		p.To.removePeer(p.Writer)
	}
}

// span is n bytes from one region to another.
type span struct {
	src, dst       *Region
	srcOff, dstOff uint64
	n              uint64
}

// expand is our own arithmetic of what an op copies: page by page, slice by slice, without any cleverness.
func (p *Plan) expand(src, dst []uint32, from, to uint32) (spans []span) {
	for g := 0; g*int(p.SrcPages) < len(src); g++ {
		for _, s := range p.Slices {
			a, b := p.Src.Tensors[s.SrcTensor], p.Dst.Tensors[s.DstTensor]
			if a.Layer < from || a.Layer >= to {
				continue
			}
			sp := src[g*int(p.SrcPages)+int(s.SrcPage)]
			dp := dst[g*int(p.DstPages)+int(s.DstPage)]
			for i := range uint64(s.Count) {
				spans = append(spans, span{
					src: a.Region, dst: b.Region, n: s.Len,
					srcOff: a.Offset + uint64(sp)*a.PageStride + s.SrcOff + i*s.SrcStride,
					dstOff: b.Offset + uint64(dp)*b.PageStride + s.DstOff + i*s.DstStride,
				})
			}
		}
	}
	return spans
}

// message makes the Submit of s and what it copies.
func (p *Path) message(s Submit) (*contract.Submit, []span) {
	if s.Plan == nil {
		s.Plan = p.Plan
	}
	if s.Generation == nil {
		s.Generation = p.Generation
	}
	if s.LayerTo == 0 {
		s.LayerTo = 1 << 31
	}
	spans := s.Plan.expand(pages(s.Src), pages(s.Dst), s.LayerFrom, s.LayerTo)
	var size uint64
	for _, sp := range spans {
		size += sp.n
	}
	return &contract.Submit{
		Generation: s.Generation, Direction: contract.Direction_DIRECTION_WRITE, Peer: p.Handle, Plan: s.Plan.ID,
		Source: Runs(s.Src...), Destination: Runs(s.Dst...), LayerFrom: s.LayerFrom, LayerTo: s.LayerTo,
		Priority: s.Priority, DeadlineNs: uint64(s.Deadline), Bytes: size, Trace: s.Trace,
	}, spans
}

// Pages is one run of consecutive pages.
func Pages(start, count uint32) []sdk.Run { return []sdk.Run{{Start: start, Count: count, Stride: 1}} }

// Runs converts runs to the wire.
func Runs(runs ...sdk.Run) *contract.Runs {
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

// pages lists the pages of runs.
func pages(runs []sdk.Run) (ids []uint32) {
	for _, r := range runs {
		for i := range r.Count {
			ids = append(ids, r.Start+i*r.Stride)
		}
	}
	return ids
}

// begin notes that the op may write its destination from now on.
func (p *Path) begin(o *Op) {
	for _, r := range o.destinations() {
		r.mu.Lock()
		r.open[o] = true
		r.used = true
		r.mu.Unlock()
	}
}

func (o *Op) destinations() (regions []*Region) {
	var last *Region
	for _, s := range o.spans {
		if s.dst != last {
			last = s.dst
			regions = append(regions, last)
		}
	}
	return regions
}

// arrived checks that every byte of a done op is there, and takes it as what memory must be. Called with the
// lock of the op's node, before anybody can know of the end.
func (p *Path) arrived(o *Op) (bad string) {
	for _, s := range o.spans {
		s.dst.mu.Lock()
		s.dst.pull(s.dstOff, s.n)
		got, want := s.dst.Bytes[s.dstOff:][:s.n], s.src.shadow[s.srcOff:][:s.n]
		if bad == "" && !bytes.Equal(got, want) {
			for i := range got {
				if got[i] != want[i] {
					bad = fmt.Sprintf("byte %d of region %d of %s is %#02x, not %#02x, when Done of op %d arrives", s.dstOff+uint64(i), s.dst.ID, s.dst.node.Name, got[i], want[i], o.ID)
					break
				}
			}
		}
		copy(s.dst.shadow[s.dstOff:], want)
		s.dst.mu.Unlock()
	}
	return bad
}

// quiet puts a canary over the pages of an op that is quiet: whoever writes there from now on is found by
// the check of the region. Called with the lock of the op's node.
func (p *Path) quiet(o *Op) {
	for _, s := range o.spans {
		s.dst.mu.Lock()
		delete(s.dst.open, o)
		dst, shadow := s.dst.Bytes[s.dstOff:][:s.n], s.dst.shadow[s.dstOff:][:s.n]
		switch {
		case o.loose:
			s.dst.pull(s.dstOff, s.n)
			copy(shadow, dst)
		case !o.keep:
			if len(shadow) > 0 {
				shadow[0] = byte(o.ID*151) ^ 0x5A
			}
			for n := 1; n < len(shadow); n *= 2 {
				copy(shadow[n:], shadow[:n])
			}
			copy(dst, shadow)
			s.dst.push(s.dstOff, s.n)
		case o.state.end.Kind != "done":
			s.dst.pull(s.dstOff, s.n)
			copy(shadow, dst)
		}
		s.dst.mu.Unlock()
	}
}
