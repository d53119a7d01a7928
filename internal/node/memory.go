package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// regionBound is how long a worker waits at most for its region to be ready everywhere; a declared
// long registration has 120 s of its own.
const regionBound = 150 * time.Second

// maxGroupNames bounds the names that workers, and each peer, can make the engine remember.
const maxGroupNames = 4096

// worker is a session: what it added and which group rank it is. Kept until the core says that nothing
// touches its memory any more.
type worker struct {
	workerapi.Session
	closed  bool
	regions map[int64]uint64 // the worker's number → ours
	pools   []uint64
}

// region is memory of a worker. The node holds the descriptors so that later plugin epochs can map it,
// also after the worker's death.
type region struct {
	id       uint64
	session  core.SessionID
	size     int64
	mem      int
	lease    int
	canaryAt uint64
	canary   uint64
	proven   bool   // the canary was answered by some epoch
	asked    *epoch // that has to answer the canary; it may have ended, see askAnew
	deaths   int    // plugin processes that died while they took it
	done     func(error)
	bound    *time.Timer
}

// localPool is a pool of one of our workers.
type localPool struct {
	id      uint64
	session core.SessionID
	ordinal int32
	pages   int32
	layers  int32
	state   bool
	tensors []*contract.Tensor
	shape   []layout.Tensor
}

func (p *localPool) pageBytes() int64 {
	var n int64
	for _, t := range p.shape {
		n += t.PageBytes
	}
	return n
}

// group is a group of this engine: the ranks that are here.
type group struct {
	name   string
	role   statemachine.Role
	size   int32
	layout layout.Cache
	ranks  map[int32]core.SessionID
}

func (g *group) announce() peer.Group {
	a := peer.Group{Name: g.name, Role: g.role, Size: g.size, Layout: peer.Layout(g.layout)}
	for r := range g.ranks {
		a.Ranks = append(a.Ranks, r)
	}
	slices.Sort(a.Ranks)
	return a
}

// Hello implements workerapi.Node.
func (n *Node) Hello(s workerapi.Session) (reply workerapi.HelloReply, err error) {
	reply = workerapi.HelloReply{Node: n.cfg.Node, Incarnation: n.incarnation}
	asked := n.ask(n.ctx, func() { err = n.hello(s) })
	return reply, errors.Join(asked, err)
}

func (n *Node) hello(s workerapi.Session) error {
	if n.draining {
		return &workerapi.Error{Code: workerapi.Draining, Message: "the engine is draining and takes no new workers; use another engine"}
	}
	if s.Size < 1 || s.Rank < 0 || s.Rank >= s.Size {
		return &workerapi.Error{Code: workerapi.BadField, Field: "rank", Rule: workerapi.RuleFields, Message: fmt.Sprintf("rank %d is outside a group of %d", s.Rank, s.Size)}
	}
	g := n.groups[s.Group]
	switch {
	case g == nil && !n.groupNames[s.Group] && len(n.groupNames) >= maxGroupNames:
		return &workerapi.Error{Code: workerapi.Limit, Field: "group", Rule: workerapi.RuleLimits, Message: fmt.Sprintf("%d different group names were used since the engine started; a group keeps its name", maxGroupNames)}
	case g == nil:
		g = &group{name: s.Group, role: s.Role, size: s.Size, layout: s.Layout, ranks: map[int32]core.SessionID{}}
	case g.role != s.Role:
		return &workerapi.Error{Code: workerapi.Refused, Field: "role", Message: fmt.Sprintf("group %q is a %s here; a group has one role", s.Group, g.role)}
	case g.size != s.Size:
		return &workerapi.Error{Code: workerapi.Refused, Field: "size", Message: fmt.Sprintf("group %q has %d ranks here, not %d", s.Group, g.size, s.Size)}
	case g.layout != s.Layout:
		return &workerapi.Error{Code: workerapi.Refused, Field: "layout", Message: fmt.Sprintf("group %q has another layout: %v", s.Group, layout.Differ(g.layout, s.Layout))}
	}
	if _, taken := g.ranks[s.Rank]; taken {
		return &workerapi.Error{Code: workerapi.Refused, Field: "rank", Message: fmt.Sprintf("rank %d of group %q is connected already", s.Rank, s.Group)}
	}
	if err := n.fits(s); err != nil {
		return err
	}
	g.ranks[s.Rank] = s.ID
	n.groups[s.Group] = g
	n.groupNames[s.Group] = true
	n.sessions[s.ID] = &worker{Session: s, regions: map[int64]uint64{}}
	n.announceGroup(g)
	return nil
}

// fits refuses a worker that contradicts what other engines host of its group. Workers that connect to two
// engines at the same moment are not seen here: then the parts clash, and both engines refuse the group.
func (n *Node) fits(s workerapi.Session) error {
	v := n.views()[s.Group]
	if v == nil {
		return nil
	}
	mine := part{node: n.cfg.Node, Group: peer.Group{Name: s.Group, Role: s.Role, Size: s.Size, Ranks: []int32{s.Rank}, Layout: peer.Layout(s.Layout)}}
	for i := range v.parts {
		p := v.parts[i]
		if p.id == selfPeer || n.verdicts[p.node].word == "dead" {
			continue // hello has compared with it; or it is no more
		}
		if c := findClash(s.Group, []part{mine, p}); c != nil {
			return &workerapi.Error{Code: workerapi.Refused, Field: c.field, Message: c.detail}
		}
	}
	return nil
}

func (n *Node) announceGroup(g *group) {
	if len(g.ranks) == 0 {
		delete(n.groups, g.name)
		n.links.RemoveGroup(g.name, g.role)
	} else if err := n.links.AnnounceGroup(g.announce()); err != nil {
		n.log.Error("a group cannot be announced", "group", g.name, "err", err)
	}
	n.publishGroups()
	n.pairGroups()
}

// publishGroups tells routers, by the membership's store, what is here.
func (n *Node) publishGroups() {
	if n.publisher == nil {
		return
	}
	groups := make([]membership.Group, 0, len(n.groups))
	for _, g := range n.groups {
		groups = append(groups, membership.Group{Name: g.name, Role: g.role.String(), Size: g.size, Ranks: slices.Sorted(maps.Keys(g.ranks))})
	}
	n.publisher.SetGroups(groups)
}

// AddRegion implements workerapi.Node.
func (n *Node) AddRegion(s core.SessionID, r workerapi.Region, done func(error)) {
	if !n.do(func() { n.addRegion(s, r, done) }) {
		unix.Close(r.MemFD)
		unix.Close(r.LeaseFD)
		done(errStopped)
	}
}

func (n *Node) addRegion(s core.SessionID, r workerapi.Region, done func(error)) {
	w := n.sessions[s]
	n.nextID++
	reg := &region{
		id: n.nextID, session: s, size: r.Size, mem: r.MemFD, lease: r.LeaseFD,
		canaryAt: uint64(r.CanaryOffset), canary: r.Canary, done: done,
	}
	if w == nil || w.closed {
		n.closeRegion(reg)
		done(errors.New("the session is closed"))
		return
	}
	n.regions[reg.id] = reg
	w.regions[r.ID] = reg.id
	reg.bound = time.AfterFunc(regionBound, func() {
		n.do(func() { n.regionFailed(reg, fmt.Errorf("no plugin was ready with the region within %v", regionBound)) })
	})
	n.offerRegion(reg)
}

// offerRegion hands a region to the live epochs that do not have it. The canary is answered by the
// first; the others are asked after that.
func (n *Node) offerRegion(reg *region) {
	if !reg.proven {
		if reg.asked != nil {
			return
		}
		for _, b := range n.backends {
			if e := b.current(); e != nil && e.regions[reg.id] == regionAbsent {
				reg.asked = e
				n.sendRegion(e, reg)
				return
			}
		}
		n.regionSettled(reg) // none is up: an answer at once if none will be
		return
	}
	n.epochs(func(e *epoch) {
		if !e.retiring && e.regions[reg.id] == regionAbsent {
			n.sendRegion(e, reg)
		}
	})
	n.regionSettled(reg)
}

// maxRegionDeaths is how many plugin processes may die while they take a region before it is taken for the cause:
// one that kills each next process would use up the restart budget for everybody.
const maxRegionDeaths = 2

// regionOrphaned is called for a region that an epoch had not answered when it ended. The worker hears
// of it only if the plugin dies again and again by it.
func (n *Node) regionOrphaned(reg *region, died bool) {
	if died {
		reg.deaths++
	}
	if reg.deaths >= maxRegionDeaths {
		reg.asked = nil
		n.regionFailed(reg, &workerapiNoBackend)
	}
}

// askAnew offers what an epoch that is provably gone had been asked for to the one that serves. Before the proof
// the canary could still change.
func (n *Node) askAnew(gone leaseKey) {
	for _, reg := range n.regions {
		if reg.proven || reg.asked == nil || (leaseKey{reg.asked.name, reg.asked.epoch}) != gone {
			continue
		}
		reg.asked = nil
		word := make([]byte, 8)
		if _, err := unix.Pread(reg.mem, word, int64(reg.canaryAt)); err != nil {
			n.log.Warn("the canary of a region cannot be read", "region", reg.id, "err", err)
			n.regionFailed(reg, &workerapiNoBackend)
			continue
		}
		// It read the canary and wrote the complement through a shared mapping, only its answer is missing.
		reg.proven = binary.LittleEndian.Uint64(word) == ^reg.canary
		n.offerRegion(reg)
	}
}

// regionSettled answers the worker once every backend that is not down has the region.
func (n *Node) regionSettled(reg *region) {
	if reg.done == nil {
		return
	}
	ready := 0
	for _, b := range n.backends {
		switch e := b.current(); {
		case e != nil && e.regions[reg.id] == regionReady:
			ready++
		case e != nil && e.regions[reg.id] == regionBad, e == nil && b.down:
		default:
			return
		}
	}
	if ready == 0 {
		n.regionFailed(reg, &workerapi.Error{Code: workerapi.NoBackend, Field: "region", Message: "no transfer backend could take the region; see engine plugins list"})
		return
	}
	n.answerRegion(reg, nil)
}

func (n *Node) answerRegion(reg *region, err error) {
	if reg.done != nil {
		reg.bound.Stop()
		reg.done(err)
		reg.done = nil
	}
}

// regionFailed answers the worker and takes the region back from whoever has it.
func (n *Node) regionFailed(reg *region, err error) {
	if reg.done == nil {
		return
	}
	n.answerRegion(reg, err)
	if w := n.sessions[reg.session]; w != nil {
		for local, id := range w.regions {
			if id == reg.id {
				delete(w.regions, local)
			}
		}
	}
	n.dropRegion(reg)
}

// dropRegion takes a region of which nothing is unquiet away from the plugins.
func (n *Node) dropRegion(reg *region) {
	n.epochs(func(b *epoch) {
		if b.regions[reg.id] == regionReady || b.regions[reg.id] == regionAsked {
			n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: reg.id}}})
		}
		delete(b.regions, reg.id)
	})
	n.closeRegion(reg)
	delete(n.regions, reg.id)
}

func (n *Node) closeRegion(reg *region) {
	unix.Close(reg.mem)
	unix.Close(reg.lease)
}

// AddPool implements workerapi.Node.
func (n *Node) AddPool(s core.SessionID, p workerapi.Pool, done func(error)) {
	if !n.do(func() { done(n.addPool(s, p)) }) {
		done(errStopped)
	}
}

func (n *Node) addPool(s core.SessionID, p workerapi.Pool) error {
	w := n.sessions[s]
	if w == nil || w.closed {
		return errors.New("the session is closed")
	}
	n.nextID++
	lp := &localPool{id: n.nextID, session: s, ordinal: p.Ordinal, pages: p.Pages, state: p.State}
	for i, t := range p.Tensors {
		id, ok := w.regions[t.Region]
		if !ok || !n.regions[id].proven || n.regions[id].done != nil {
			return &workerapi.Error{Code: workerapi.BadField, Field: fmt.Sprintf("tensors[%d].region", i), Rule: workerapi.RulePools, Message: fmt.Sprintf("region %d is not ready; add it and wait for the answer", t.Region)}
		}
		lp.tensors = append(lp.tensors, &contract.Tensor{Region: id, Offset: uint64(t.Offset), PageStride: uint64(t.PageStride), PageBytes: uint64(t.PageBytes), Layer: uint32(t.Layer)})
		lp.shape = append(lp.shape, layout.Tensor{Layer: t.Layer, PageBytes: t.PageBytes})
		lp.layers = max(lp.layers, t.Layer+1)
	}
	n.pools[lp.id] = lp
	w.pools = append(w.pools, lp.id)
	n.epochs(func(b *epoch) {
		if b.serving && !b.retiring { // an epoch that does not serve yet gets all pools when it does
			n.givePool(b, lp)
		}
	})
	if err := n.links.AnnouncePool(n.announcePool(w, lp)); err != nil {
		return fmt.Errorf("the pool cannot be announced to peers: %w", err)
	}
	n.remotePool(selfPeer, &remotePool{id: lp.id, group: w.Group, ordinal: lp.ordinal, pages: lp.pages, layers: lp.layers, state: lp.state, tensors: lp.tensors, shape: lp.shape})
	n.events = append(n.events, core.Event{Kind: core.PoolUp, Session: s, Pool: lp.id, Ordinal: lp.ordinal, Pages: lp.pages, Layers: lp.layers, PageBytes: lp.pageBytes(), State: lp.state})
	if lp.state {
		n.pairGroups()
	}
	return nil
}

func (p *localPool) add() *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: &contract.PoolAdd{Pool: p.id, Pages: uint32(p.pages), Tensors: p.tensors}}}
}

// givePool tells an epoch of a pool, which every region of has been offered to it.
func (n *Node) givePool(b *epoch, p *localPool) {
	b.given[p.id] = true
	n.queue(b, p.add())
}

func (n *Node) announcePool(w *worker, p *localPool) peer.Pool {
	a := peer.Pool{ID: p.id, Group: w.Group, Role: w.Role, Rank: w.Rank, Ordinal: p.ordinal, Pages: p.pages, Layers: p.layers, State: p.state}
	for _, t := range p.tensors {
		a.Tensors = append(a.Tensors, peer.Tensor{Region: t.Region, Offset: t.Offset, PageStride: t.PageStride, PageBytes: t.PageBytes, Layer: t.Layer})
	}
	return a
}

// SessionClosed implements workerapi.Node: the worker is gone, its rooms are ended by the core; its
// memory stays until the core says that nothing can touch it.
func (n *Node) SessionClosed(s core.SessionID) { n.do(func() { n.sessionClosed(s) }) }

func (n *Node) sessionClosed(s core.SessionID) {
	w := n.sessions[s]
	if w == nil || w.closed {
		return
	}
	w.closed = true
	if g := n.groups[w.Group]; g != nil && g.ranks[w.Rank] == s {
		delete(g.ranks, w.Rank)
		n.announceGroup(g)
	}
	if w.gone() {
		n.forgetSession(s)
	}
}

// gone reports whether the worker never gave anything to the core to wait for.
func (w *worker) gone() bool { return len(w.regions) == 0 && len(w.pools) == 0 }

// forgetSession drops the memory of a session that is down and of which nothing is touched.
func (n *Node) forgetSession(s core.SessionID) {
	w := n.sessions[s]
	if w == nil {
		return
	}
	for _, id := range w.pools {
		n.epochs(func(b *epoch) {
			n.dropPlans(b, func(k planKey) bool { return k.src == id || (k.peer == selfPeer && k.dst == id) })
			if b.given[id] {
				delete(b.given, id)
				n.queue(b, &contract.HostEvent{Event: &contract.HostEvent_PoolRemove{PoolRemove: &contract.PoolRemove{Pool: id}}})
			}
		})
		n.links.RemovePool(id)
		n.remotePoolGone(selfPeer, id)
		delete(n.pools, id)
	}
	for _, id := range w.regions {
		if reg := n.regions[id]; reg != nil {
			n.answerRegion(reg, errors.New("the session is closed"))
			n.dropRegion(reg)
		}
	}
	if !w.closed {
		n.sessionClosed(s)
	}
	delete(n.sessions, s)
}
