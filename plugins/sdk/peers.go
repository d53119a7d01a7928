package sdk

import (
	"context"
	"errors"
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

type peerState struct {
	Peer
	accept   bool // an admitted writer (PeerAccept), not a target
	ready    bool
	busy     bool // a job runs
	removing bool // written by the loop under mu
	imports  int  // calls for its remote regions that run
	live     int  // ops not yet ended; guarded by mu
}

// remoteKey names a pool or a region of a peer.
type remoteKey struct {
	peer uint32
	id   uint64
}

// poolEntry keeps a bad pool too: ops that name it are told why.
type poolEntry struct {
	pool *Pool
	err  error
}

type planEntry struct {
	plan    *Plan
	peer    uint32
	regions []*regionState
	err     error
}

type grantState struct {
	Grant
	busy   bool
	revoke *contract.Revoke // arrived while the grant was being opened
}

func (s *Session) peerFailed(handle uint32, err error) {
	detail := cut(err.Error(), MaxDetail)
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_PeerFailed{PeerFailed: &contract.PeerFailed{
		Peer: handle, Cause: causeOf(err, contract.Cause_CAUSE_PEER_UNREACHABLE), Detail: detail,
	}}}, len(detail))
}

func (s *Session) peerRemoved(handle uint32) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_PeerRemoved{PeerRemoved: &contract.PeerRemoved{Peer: handle}}}, 0)
}

func (s *Session) newPeer(handle uint32, token []byte) error {
	if len(s.peers) >= maxTable {
		return &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("%d peers are the limit", maxTable)}
	}
	if len(token) != 32 {
		return breached("the token of peer %d has %d bytes, not 32", handle, len(token))
	}
	return nil
}

func (s *Session) peerAdd(m *contract.PeerAdd) {
	if s.peers[m.Peer] != nil {
		s.breach("PeerAdd.peer %d is in use", m.Peer)
		return
	}
	err := s.newPeer(m.Peer, m.Token)
	if err == nil && !known(contract.Lane_name, int32(m.RequireLane)) {
		err = breached("PeerAdd.require_lane is %d", m.RequireLane)
	}
	if err == nil && len(m.Endpoint) > MaxEndpoint {
		err = breached("PeerAdd.endpoint has %d bytes, at most %d are allowed", len(m.Endpoint), MaxEndpoint)
	}
	if err != nil {
		s.peerFailed(m.Peer, err)
		return
	}
	p := &peerState{busy: true, Peer: Peer{
		Handle: m.Peer, Node: m.Node, Incarnation: m.Incarnation, Epoch: m.Epoch, Endpoint: m.Endpoint,
		SameHost: m.SameHost, RequireLane: m.RequireLane, Token: m.Token,
	}}
	s.peers[m.Peer] = p
	s.job(jobPeer, func() func() {
		done := s.declareBusy(contract.BusyKind_BUSY_KIND_CONNECT, uint64(m.Peer))
		lane, err := s.connect(&p.Peer)
		done()
		return func() {
			p.busy = false
			if err != nil {
				delete(s.peers, m.Peer)
				s.peerFailed(m.Peer, err)
				if p.removing {
					s.peerRemoved(m.Peer)
				}
				return
			}
			p.ready = true
			s.post(&contract.PluginEvent{Event: &contract.PluginEvent_PeerReady{PeerReady: &contract.PeerReady{Peer: m.Peer, Lane: lane}}}, 0)
			if p.removing {
				s.tryRemovePeer(p)
			}
		}
	})
}

// connect calls the backend and holds its answer against the demanded lane.
func (s *Session) connect(p *Peer) (lane contract.Lane, err error) {
	defer recovered(&err, "AddPeer")
	lane, err = s.backend.AddPeer(p)
	if err != nil {
		return 0, err
	}
	if !known(contract.Lane_name, int32(lane)) {
		err = &Error{Cause: contract.Cause_CAUSE_INTERNAL, Err: fmt.Errorf("AddPeer returned lane %d", lane)}
	} else if slower(lane, p.RequireLane) {
		err = &Error{Cause: contract.Cause_CAUSE_LANE, Err: fmt.Errorf("only lane %v exists, %v is demanded", lane, p.RequireLane)}
	}
	if err != nil {
		s.backend.RemovePeer(p)
	}
	return lane, err
}

// slower tells whether a known lane is worse than the demanded one.
func slower(lane, demanded contract.Lane) bool {
	return lane != contract.Lane_LANE_ANY && demanded != contract.Lane_LANE_ANY && lane > demanded
}

// peerAccept runs the backend's Accept on the loop: it only records, and every later Grant must find
// it done.
func (s *Session) peerAccept(m *contract.PeerAccept) {
	if s.peers[m.Peer] != nil {
		s.breach("PeerAccept.peer %d is in use", m.Peer)
		return
	}
	p := &peerState{accept: true, ready: true, Peer: Peer{
		Handle: m.Peer, Node: m.Node, Incarnation: m.Incarnation, Epoch: m.Epoch, Endpoint: m.Endpoint,
		SameHost: m.SameHost, RequireLane: contract.Lane_LANE_ANY, Token: m.Token,
	}}
	err := s.newPeer(m.Peer, m.Token)
	if accepter, ok := s.backend.(Accepter); ok && err == nil {
		err = accept(accepter, &p.Peer)
	}
	if err != nil {
		s.peerFailed(m.Peer, err)
		return
	}
	s.peers[m.Peer] = p
}

func accept(a Accepter, p *Peer) (err error) {
	defer recovered(&err, "Accept")
	return a.Accept(p)
}

func (s *Session) peerRemove(m *contract.PeerRemove) {
	p := s.peers[m.Peer]
	if p == nil {
		s.peerRemoved(m.Peer)
		return
	}
	if p.removing {
		return
	}
	for key := range s.remote {
		if key.peer == m.Peer {
			delete(s.remote, key)
		}
	}
	for id, e := range s.plans {
		if e.peer == m.Peer {
			delete(s.plans, id)
		}
	}
	for key := range s.remoteRegions {
		if key.peer == m.Peer {
			delete(s.remoteRegions, key)
		}
	}
	s.mu.Lock()
	p.removing = true
	var open []*opState
	for _, st := range s.ops {
		if st.peer == p && !st.ended {
			open = append(open, st)
		}
	}
	s.mu.Unlock()
	for _, st := range open {
		s.abortOp(st, ErrPeerRemoved)
	}
	s.tryRemovePeer(p)
}

// tryRemovePeer goes on with a removal when the ops of the peer have ended.
func (s *Session) tryRemovePeer(p *peerState) {
	s.mu.Lock()
	live := p.live
	s.mu.Unlock()
	if p.busy || p.imports > 0 || live > 0 {
		return
	}
	p.busy, p.ready = true, false
	s.job(jobRemove, func() func() {
		err := s.disconnect(p)
		return func() {
			if err != nil {
				s.logf(contract.Log_LEVEL_ERROR, "peer %d: %v", p.Handle, err)
			}
			delete(s.peers, p.Handle)
			s.peerRemoved(p.Handle)
		}
	})
}

func (s *Session) disconnect(p *peerState) (err error) {
	if p.accept {
		defer recovered(&err, "Unaccept")
		if accepter, ok := s.backend.(Accepter); ok {
			accepter.Unaccept(&p.Peer)
		}
		return nil
	}
	defer recovered(&err, "RemovePeer")
	s.backend.RemovePeer(&p.Peer)
	return nil
}

// removable is an entry that its host may remove again.
type removable interface{ good() bool }

func (e poolEntry) good() bool { return e.err == nil }
func (e planEntry) good() bool { return e.err == nil }

// removeKey drops an entry and reports whether the backend knows of it.
func removeKey[K comparable, E removable](table map[K]E, key K) bool {
	e, ok := table[key]
	delete(table, key)
	return ok && e.good()
}

// planned tells a backend that keeps the geometry itself, of what was good.
func (s *Session) planned(good bool, e *contract.HostEvent) {
	if planner, ok := s.backend.(Planner); ok && good {
		var err error
		func() {
			defer recovered(&err, "Geometry")
			planner.Geometry(e)
		}()
		if err != nil {
			s.logf(contract.Log_LEVEL_ERROR, "%v", err)
		}
	}
}

// poolAdd reports whether the pool is new and good.
func (s *Session) poolAdd(m *contract.PoolAdd) bool {
	if _, ok := s.pools[m.Pool]; ok || len(s.pools) >= maxTable {
		s.breach("PoolAdd.pool %d is in use, or %d pools are there", m.Pool, maxTable)
		return false
	}
	pool, err := newPool(m, func(t *Tensor) (uint64, error) {
		if t.Region = s.readyRegion(t.RegionID); t.Region == nil {
			return 0, errors.New("not ready")
		}
		return t.Region.Size, nil
	})
	s.pools[m.Pool] = poolEntry{pool, err}
	if err != nil {
		s.breach("pool %d: %v", m.Pool, err)
	}
	return err == nil
}

// remotePoolAdd reports whether the pool is new and good.
func (s *Session) remotePoolAdd(m *contract.RemotePoolAdd) bool {
	key := remoteKey{m.Peer, m.Pool.GetPool()}
	if _, ok := s.remote[key]; ok || len(s.remote) >= maxTable {
		s.breach("RemotePoolAdd.pool %d of peer %d is in use, or %d pools are there", key.id, key.peer, maxTable)
		return false
	}
	if p := s.peers[m.Peer]; p == nil || p.accept || p.removing {
		s.breach("RemotePoolAdd.peer %d is not a peer", m.Peer)
		return false
	}
	if m.Pool == nil {
		s.breach("RemotePoolAdd.pool is missing")
		return false
	}
	pool, err := newPool(m.Pool, func(t *Tensor) (uint64, error) {
		r := s.remoteRegions[remoteKey{m.Peer, t.RegionID}]
		if r == nil {
			return 1 << 63, nil
		}
		if !r.ready || r.removing {
			return 0, errors.New("not ready")
		}
		t.Remote = &r.RemoteRegion
		return r.Size, nil
	})
	s.remote[key] = poolEntry{pool, err}
	if err != nil {
		s.breach("remote pool %d of peer %d: %v", key.id, key.peer, err)
	}
	return err == nil
}

// planAdd reports whether the plan is new and good.
func (s *Session) planAdd(m *contract.PlanAdd) bool {
	if _, ok := s.plans[m.Plan]; ok || len(s.plans) >= maxTable {
		s.breach("PlanAdd.plan %d is in use, or %d plans are there", m.Plan, maxTable)
		return false
	}
	e := planEntry{peer: m.Peer}
	if p := s.peers[m.Peer]; p == nil || p.accept || p.removing {
		s.breach("PlanAdd.peer %d is not a peer", m.Peer)
		return false
	}
	e.plan, e.err = s.makePlan(m)
	if e.err != nil {
		s.breach("plan %d: %v", m.Plan, e.err)
	} else {
		seen := map[uint64]bool{}
		for i := range e.plan.Slices {
			if id := e.plan.Slices[i].Src.RegionID; !seen[id] {
				seen[id] = true
				e.regions = append(e.regions, s.regions[id])
			}
		}
	}
	s.plans[m.Plan] = e
	return e.err == nil
}

func (s *Session) makePlan(m *contract.PlanAdd) (*Plan, error) {
	src, ok := s.pools[m.SrcPool]
	if !ok {
		return nil, fmt.Errorf("PlanAdd.src_pool %d is unknown", m.SrcPool)
	}
	if src.err != nil {
		return nil, fmt.Errorf("PlanAdd.src_pool %d is bad: %w", m.SrcPool, src.err)
	}
	dst, ok := s.remote[remoteKey{m.Peer, m.DstPool}]
	if !ok {
		return nil, fmt.Errorf("PlanAdd.dst_pool %d of peer %d is unknown", m.DstPool, m.Peer)
	}
	if dst.err != nil {
		return nil, fmt.Errorf("PlanAdd.dst_pool %d is bad: %w", m.DstPool, dst.err)
	}
	for i := range src.pool.Tensors {
		t := &src.pool.Tensors[i]
		if s.readyRegion(t.RegionID) != t.Region {
			return nil, fmt.Errorf("PlanAdd.src_pool %d: region %d is gone", m.SrcPool, t.RegionID)
		}
	}
	return newPlan(m, src.pool, dst.pool, s.has(FeatureRepage))
}

func (s *Session) fencePeer(m *contract.FencePeer) {
	fencer, ok := s.backend.(Fencer)
	if !ok || !s.has(FeatureFencePeer) {
		s.fenced(m.Fence, contract.FenceResult_FENCE_RESULT_UNKNOWN)
		return
	}
	s.job(jobFence, func() func() {
		result := contract.FenceResult_FENCE_RESULT_UNKNOWN
		err := func() (err error) {
			defer recovered(&err, "FencePeer")
			ctx, cancel := context.WithTimeout(s.ctx, fenceBound)
			defer cancel()
			if fencer.FencePeer(ctx, m.Node, m.Incarnation, m.Epoch) == contract.FenceResult_FENCE_RESULT_QUIET {
				result = contract.FenceResult_FENCE_RESULT_QUIET
			}
			return nil
		}()
		return func() {
			if err != nil {
				s.logf(contract.Log_LEVEL_ERROR, "fence %d: %v", m.Fence, err)
			}
			s.fenced(m.Fence, result)
		}
	})
}

func (s *Session) fenced(fence uint64, result contract.FenceResult) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_Fenced{Fenced: &contract.Fenced{Fence: fence, Result: result}}}, 0)
}
