package sdk

import (
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// handleControl takes a frame of the Control stream: aborts and beats only.
func (s *Session) handleControl(frame *contract.HostFrame) {
	for _, e := range frame.GetEvents() {
		switch e.GetEvent().(type) {
		case *contract.HostEvent_Abort, *contract.HostEvent_Beat:
			s.handle(e)
		default:
			s.breach("%T on the Control stream", e.GetEvent())
		}
	}
}

// handle takes one event of the host. It never blocks on the backend.
func (s *Session) handle(ev *contract.HostEvent) {
	switch e := ev.GetEvent().(type) {
	case *contract.HostEvent_RegionAdd:
		s.regionAdd(e.RegionAdd)
	case *contract.HostEvent_RegionRemove:
		s.regionRemove(e.RegionRemove)
	case *contract.HostEvent_PoolAdd:
		s.planned(s.poolAdd(e.PoolAdd), ev)
	case *contract.HostEvent_PoolRemove:
		s.planned(removeKey(s.pools, e.PoolRemove.GetPool()), ev)
	case *contract.HostEvent_PeerAdd:
		s.peerAdd(e.PeerAdd)
	case *contract.HostEvent_PeerAccept:
		s.peerAccept(e.PeerAccept)
	case *contract.HostEvent_PeerRemove:
		s.peerRemove(e.PeerRemove)
	case *contract.HostEvent_RemotePoolAdd:
		s.planned(s.remotePoolAdd(e.RemotePoolAdd), ev)
	case *contract.HostEvent_RemotePoolRemove:
		s.planned(removeKey(s.remote, remoteKey{e.RemotePoolRemove.GetPeer(), e.RemotePoolRemove.GetPool()}), ev)
	case *contract.HostEvent_RemoteRegionAdd:
		s.remoteRegionAdd(e.RemoteRegionAdd)
	case *contract.HostEvent_RemoteRegionRemove:
		s.remoteRegionRemove(e.RemoteRegionRemove)
	case *contract.HostEvent_PlanAdd:
		s.planned(s.planAdd(e.PlanAdd), ev)
	case *contract.HostEvent_PlanRemove:
		s.planned(removeKey(s.plans, e.PlanRemove.GetPlan()), ev)
	case *contract.HostEvent_Submit:
		s.submit(e.Submit)
	case *contract.HostEvent_Abort:
		s.abort(e.Abort.GetOp())
	case *contract.HostEvent_Grant:
		s.grant(e.Grant)
	case *contract.HostEvent_Revoke:
		s.revoke(e.Revoke)
	case *contract.HostEvent_FencePeer:
		s.fencePeer(e.FencePeer)
	case *contract.HostEvent_Drain:
		s.drain(e.Drain)
	case *contract.HostEvent_Stats:
		s.stats(e.Stats.GetId())
	case *contract.HostEvent_Beat:
		// The host is alive. Its death is seen by the end of the control socketpair.
	case *contract.HostEvent_Fault:
		s.End(fmt.Errorf("the engine ends this epoch: %s %s: %s", e.Fault.GetRule(), e.Fault.GetField(), e.Fault.GetDetail()))
	case *contract.HostEvent_CommCreate:
		s.commFailed(e.CommCreate.GetComm(), e.CommCreate.GetRound())
	case *contract.HostEvent_Rebuild:
		s.commFailed(e.Rebuild.GetComm(), e.Rebuild.GetRound())
	case *contract.HostEvent_CommRun:
		s.refuse(e.CommRun.GetOp(), e.CommRun.GetSeq(), unsupported("CommRun: backend %s is a transfer backend", s.info.Name))
	case *contract.HostEvent_CommClose:
		s.post(&contract.PluginEvent{Event: &contract.PluginEvent_CommClosed{CommClosed: &contract.CommClosed{Comm: e.CommClose.GetComm()}}}, 0)
	default: // Poison, of which a transfer backend has nothing to poison, and events of a newer engine
		s.count("events_ignored", 1)
	}
}

func (s *Session) commFailed(comm uint64, round uint32) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_CommFailed{CommFailed: &contract.CommFailed{
		Comm: comm, Round: round, Cause: contract.Cause_CAUSE_UNSUPPORTED,
		Detail: fmt.Sprintf("backend %s is a transfer backend; collectives are not served", s.info.Name),
	}}}, MaxDetail)
}

// admitLocked notes op and seq; !ok means that nothing may be answered, because the op already has its
// end or will get it. s.mu is held.
func (s *Session) admitLocked(op, seq uint64) (ok bool, err error) {
	last := s.lastSeq
	s.lastSeq = max(last, seq)
	if _, live := s.ops[op]; live || s.done.has(op) {
		return false, nil
	}
	if seq != last+1 {
		return true, breached("Submit.seq is %d after %d", seq, last)
	}
	return true, nil
}

// refuse answers an op that is not taken: Accepted, then Failed. It ends quiet: nothing was touched.
func (s *Session) refuse(op, seq uint64, why error) {
	s.mu.Lock()
	ok, err := s.admitLocked(op, seq)
	if err != nil {
		why = err
	}
	if ok {
		s.answerLocked(op, failedEvent(op, why))
	}
	s.mu.Unlock()
	if !ok {
		s.usedTwice(op)
	}
}

func (s *Session) usedTwice(op uint64) { s.breach("Submit.op %d is used a second time", op) }

func failedEvent(op uint64, why error) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{
		Op: op, Cause: causeOf(why, contract.Cause_CAUSE_PROTOCOL), Detail: cut(why.Error(), MaxDetail), Quiet: true,
	}}}
}

// answerLocked accepts and ends an op that never became one of s.ops. s.mu is held.
func (s *Session) answerLocked(op uint64, end *contract.PluginEvent) {
	s.acceptLocked(op, &acceptedMemory{})
	s.emit(end, MaxDetail)
	s.done.add(op)
}

func (s *Session) acceptLocked(op uint64, m *acceptedMemory) {
	m.accepted.Op = op
	s.emit(m.link(), 0)
}

func (s *Session) submit(m *contract.Submit) {
	st, err := s.newOp(m)
	if err != nil {
		s.refuse(m.Op, m.Seq, err)
		return
	}
	s.mu.Lock()
	ok, err := s.admitLocked(m.Op, m.Seq)
	switch {
	case !ok:
	case err != nil:
		s.answerLocked(m.Op, failedEvent(m.Op, err))
	case s.early.has(m.Op):
		s.answerLocked(m.Op, &contract.PluginEvent{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: m.Op, Quiet: true}}})
	case s.draining:
		s.answerLocked(m.Op, &contract.PluginEvent{Event: &contract.PluginEvent_Skipped{Skipped: &contract.Skipped{
			Op: m.Op, Cause: contract.Cause_CAUSE_SHUTDOWN, Detail: "the plugin is draining", Quiet: true,
		}}})
	case len(s.ops) >= s.maxOps:
		s.answerLocked(m.Op, failedEvent(m.Op, &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("Limits.max_ops is %d", s.maxOps)}))
	default:
		s.beginLocked(st)
	}
	s.mu.Unlock()
	if !ok {
		s.usedTwice(m.Op)
	}
}

// beginLocked accepts an op and queues it for a worker. s.mu is held.
func (s *Session) beginLocked(st *opState) {
	s.ops[st.id] = st
	st.peer.live++
	for _, r := range st.regions {
		r.unquiet++
	}
	s.acceptLocked(st.id, &st.accepted)
	s.queue = append(s.queue, st)
	s.callLocked()
}

// callLocked starts a worker when ops wait. At most one is on its way; when it has taken its op it calls the
// next: so ops that end at once need few workers, and every op that takes its time still gets one, up to the
// concurrency. s.mu is held.
func (s *Session) callLocked() {
	if len(s.queue) > 0 && !s.called && s.running < s.concurrency && s.ctx.Err() == nil && s.spawnLocked(s.worker) {
		s.called = true
		s.running++
	}
}

// worker runs ops until none waits.
func (s *Session) worker() {
	// A fault in mapped memory becomes a panic of the op, not the death of the process.
	debug.SetPanicOnFault(true)
	defer func() { // also when the backend ends the goroutine (runtime.Goexit)
		s.mu.Lock()
		s.running--
		s.callLocked()
		s.mu.Unlock()
	}()
	for first := true; ; first = false {
		s.mu.Lock()
		s.called = s.called && !first
		st := s.nextLocked()
		s.callLocked()
		s.mu.Unlock()
		if st == nil {
			return
		}
		s.transfer(st)
	}
}

// nextLocked takes the op that waits longest, nil when there is none. s.mu is held.
func (s *Session) nextLocked() *opState {
	if len(s.queue) == 0 || s.ctx.Err() != nil {
		return nil
	}
	st := s.queue[0]
	s.queue[0] = nil
	s.queue = s.queue[1:]
	return st
}

// newOp holds a Submit against the tables. The error carries the cause and names the field.
func (s *Session) newOp(m *contract.Submit) (*opState, error) {
	switch m.Direction {
	case contract.Direction_DIRECTION_WRITE:
	case contract.Direction_DIRECTION_READ:
		return nil, unsupported("Submit.direction READ is not served by contract version %d", ContractVersion)
	default:
		return nil, breached("Submit.direction is %d", m.Direction)
	}
	source, err := opener("Submit.generation.source", m.Generation.GetSource())
	if err != nil {
		return nil, err
	}
	destination, err := opener("Submit.generation.destination", m.Generation.GetDestination())
	if err != nil {
		return nil, err
	}
	peer := s.peers[m.Peer]
	if peer == nil || !peer.ready || peer.removing || peer.accept {
		return nil, breached("Submit.peer %d is no ready peer", m.Peer)
	}
	e, ok := s.plans[m.Plan]
	if !ok {
		return nil, breached("Submit.plan %d is unknown", m.Plan)
	}
	if e.err != nil {
		if cause := causeOf(e.err, 0); cause != 0 {
			return nil, &Error{Cause: cause, Err: fmt.Errorf("Submit.plan %d is bad: %w", m.Plan, e.err)}
		}
		return nil, breached("Submit.plan %d is bad: %w", m.Plan, e.err)
	}
	if e.peer != m.Peer {
		return nil, breached("Submit.plan %d belongs to peer %d, not %d", m.Plan, e.peer, m.Peer)
	}
	for _, r := range e.regions {
		if s.readyRegion(r.ID) != &r.Region {
			return nil, breached("Submit.plan %d: region %d is gone", m.Plan, r.ID)
		}
	}
	if m.LayerTo <= m.LayerFrom {
		return nil, breached("Submit.layer_to %d is not above layer_from %d", m.LayerTo, m.LayerFrom)
	}
	if err := s.checkShape(m, e.plan); err != nil {
		return nil, err
	}
	st := &opState{
		s: s, id: m.Op, gen: Generation{source, destination}, peer: peer, plan: e.plan, regions: e.regions,
		source: m.Source, dest: m.Destination, layerFrom: m.LayerFrom, layerTo: m.LayerTo,
		bytes: m.Bytes, priority: m.Priority, trace: m.Trace,
	}
	if m.DeadlineNs != 0 && m.DeadlineNs <= math.MaxInt64 {
		st.deadline = time.Now().Add(time.Duration(m.DeadlineNs))
	}
	return st, nil
}

// checkShape checks pages, features, limits and the size of an op.
func (s *Session) checkShape(m *contract.Submit, plan *Plan) error {
	pages, strided, err := checkRuns("Submit.source", m.Source, plan.Src.Pages)
	if err != nil {
		return breached("%w", err)
	}
	dstPages, dstStrided, err := checkRuns("Submit.destination", m.Destination, plan.Dst.Pages)
	if err != nil {
		return breached("%w", err)
	}
	groups := pages / uint64(plan.SrcPages)
	if pages%uint64(plan.SrcPages) != 0 || dstPages%uint64(plan.DstPages) != 0 || groups != dstPages/uint64(plan.DstPages) {
		return breached("Submit.source names %d pages, Submit.destination %d; plan %d pairs groups of %d and %d", pages, dstPages, m.Plan, plan.SrcPages, plan.DstPages)
	}
	if (strided || dstStrided) && !s.has(FeatureStrided) {
		return unsupported("Submit: runs with a stride need feature %s", FeatureStrided)
	}
	if !s.has(FeatureLayerRange) && plan.bytesPerGroup(m.LayerFrom, m.LayerTo) != plan.bytesPerGroup(0, math.MaxUint32) {
		return unsupported("Submit: layers [%d,%d) of plan %d need feature %s", m.LayerFrom, m.LayerTo, m.Plan, FeatureLayerRange)
	}
	per := plan.bytesPerGroup(m.LayerFrom, m.LayerTo)
	if groups != 0 && (per > math.MaxUint64/groups || per*groups != m.Bytes) || groups == 0 && m.Bytes != 0 {
		return breached("Submit.bytes is %d; %d groups of %d bytes are named", m.Bytes, groups, per)
	}
	l := s.info.Limits
	if n := l.GetMaxOpBytes(); n != 0 && m.Bytes > n {
		return &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("Submit.bytes is %d, Limits.max_op_bytes %d", m.Bytes, n)}
	}
	if n := int(l.GetMaxRuns()); n != 0 && max(len(m.Source.GetStart()), len(m.Destination.GetStart())) > n {
		return &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("Submit has more runs than Limits.max_runs %d", n)}
	}
	return nil
}

// abort is idempotent. An abort that overtook its Submit is remembered for it; one of an ended op is
// forgotten.
func (s *Session) abort(op uint64) {
	s.mu.Lock()
	st := s.ops[op]
	if st == nil && !s.done.has(op) {
		s.early.add(op)
	}
	s.mu.Unlock()
	if st != nil {
		s.abortOp(st, ErrAborted)
	}
}

func (s *Session) drain(m *contract.Drain) {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	bound := time.Hour
	if m.GetDeadlineNs() < uint64(bound) {
		bound = time.Duration(m.GetDeadlineNs())
	}
	s.drainDone = time.After(bound)
	if s.openOps() == 0 {
		s.finishDrain()
	}
}

func (s *Session) finishDrain() {
	s.drainDone = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	s.emit(&contract.PluginEvent{Event: &contract.PluginEvent_Drained{Drained: &contract.Drained{OpenOps: uint32(len(s.ops))}}}, 0)
}

// stats answers beside the loop, because the backend's counters may take their time. One request of
// the backend runs at once; meanwhile the answers come without its counters.
func (s *Session) stats(id uint64) {
	reporter, ok := s.backend.(StatsReporter)
	if !ok || s.statsBusy {
		s.report(id, nil)
		return
	}
	s.statsBusy = true
	s.job(jobStats, func() func() {
		var counters map[string]uint64
		err := func() (err error) {
			defer recovered(&err, "Counters")
			counters = reporter.Counters()
			return nil
		}()
		return func() {
			s.statsBusy = false
			if err != nil {
				s.logf(contract.Log_LEVEL_ERROR, "%v", err)
			}
			s.report(id, counters)
		}
	})
}

// report queues the answer behind every event that led to it, in one step with the list of open ops.
func (s *Session) report(id uint64, counters map[string]uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := &contract.Stats{
		Id: id, LastSeq: s.lastSeq, BytesDone: s.bytesDone,
		LateRefused: counters[CounterLateRefused], Counters: make(map[string]uint64, len(counters)+len(s.counts)),
	}
	size := 256
	for op := range s.ops {
		stats.OpenOps = append(stats.OpenOps, op)
		size += 10
	}
	slices.Sort(stats.OpenOps)
	for name, n := range counters {
		if len(stats.Counters) == 256 {
			break
		}
		name = cut(name, 64)
		stats.Counters[name] = n
		size += len(name) + 16
	}
	for name, n := range s.counts {
		stats.Counters["sdk."+name] = n
		size += len(name) + 20
	}
	s.emit(&contract.PluginEvent{Event: &contract.PluginEvent_Stats{Stats: stats}}, size)
}
