package guest

import (
	"errors"
	"iter"
	"strconv"
)

const (
	methodDescribe = 1
	methodStart    = 2
	methodFrame    = 3
)

const (
	// maxActive is how many ops take turns; the others wait. Each has a stack of its own.
	maxActive = 32
	// turnBytes is how much an op copies before its turn ends, whatever the clock says.
	turnBytes = 4 << 20
	// flushAt is when events go to the host; they also go at the end of every call.
	flushAt = 32 << 10
)

// host is what a session needs of its engine; tests have their own.
type host interface {
	log(level Level, text string)
	emit(frame []byte) int32
	now() int64
	copy(peer uint32, dst, dstOff, src, srcOff, n uint64) int32
}

// session answers the calls of the host.
type session struct {
	backend Backend
	host    host
	out     encoder // events not yet emitted

	pools  map[uint64]*Pool
	remote map[remoteKey]*Pool
	plans  map[uint64]*Plan
	ops    map[uint64]*Op // open
	queue  []*Op          // not begun
	active []*worker      // take turns, the first is next
	idle   []*worker

	deadline int64 // of the running pump
}

type remoteKey struct {
	peer uint32
	pool uint64
}

// worker runs Transfer of one op after another, on a stack of its own.
type worker struct {
	op   *Op
	next func() (over bool, _ bool) // goes on with the op until it gives way or is over
}

func newSession(b Backend, h host) *session {
	return &session{backend: b, host: h, pools: map[uint64]*Pool{}, remote: map[remoteKey]*Pool{}, plans: map[uint64]*Plan{}, ops: map[uint64]*Op{}}
}

// call carries out engine_v1_call and returns a CallResult.
func (s *session) call(method uint32, payload []byte) []byte {
	var result []byte
	var err error
	switch method {
	case methodDescribe:
		result = describe(s.backend.Info())
	case methodStart:
		var start Start
		if start, err = decodeStart(payload); err == nil {
			err = s.backend.Start(start)
		}
	case methodFrame:
		err = s.frame(payload)
	default:
		err = errors.New("engine_v1_call: method " + strconv.Itoa(int(method)) + " is unknown")
	}
	s.flush()
	return callResult(result, err)
}

// report queues an event.
func (s *session) report(put func(*encoder)) {
	put(&s.out)
	if len(s.out.b) >= flushAt {
		s.flush()
	}
}

func (s *session) flush() {
	if len(s.out.b) == 0 {
		return
	}
	if code := s.host.emit(s.out.b); code != 0 {
		panic("the host refuses a frame of this guest (code " + strconv.Itoa(int(code)) + ")")
	}
	s.out.b = s.out.b[:0]
}

// pump runs ops for about budget nanoseconds and reports whether any is left.
func (s *session) pump(budget int64) bool {
	s.deadline = s.host.now() + budget
	for {
		for len(s.active) < maxActive && len(s.queue) > 0 {
			s.begin(s.queue[0])
			s.queue = s.queue[1:]
		}
		if len(s.active) == 0 {
			break
		}
		r := s.active[0]
		s.active = append(s.active[:0], s.active[1:]...)
		over, _ := r.next()
		s.progress(r.op)
		if over {
			s.over(r.op)
			r.op = nil
			s.idle = append(s.idle, r)
		} else {
			s.active = append(s.active, r)
		}
		if s.host.now() >= s.deadline {
			break
		}
	}
	s.flush()
	return len(s.active)+len(s.queue) > 0
}

// begin gives an op to a worker. Of those there are at most maxActive.
func (s *session) begin(o *Op) {
	var w *worker
	if n := len(s.idle); n > 0 {
		w, s.idle = s.idle[n-1], s.idle[:n-1]
	} else {
		w = &worker{}
		w.next, _ = iter.Pull(func(yield func(over bool) bool) {
			for {
				w.op.yield = yield
				s.backend.Transfer(w.op)
				yield(true)
			}
		})
	}
	w.op = o
	s.active = append(s.active, w)
}

// over is after Transfer has returned.
func (s *session) over(o *Op) {
	if !o.ended {
		o.Fail(CauseNoTerminal, "Transfer returned without an end")
	}
	delete(s.ops, o.ID)
}

// progress reports what the author said since the last turn.
func (s *session) progress(o *Op) {
	if !o.ended && o.progress > o.sent {
		o.sent = o.progress
		s.report(func(e *encoder) { e.progress(o.ID, o.sent) })
	}
}

// frame carries out the events of a HostFrame.
func (s *session) frame(b []byte) error {
	return decodeFrame(b, s)
}

func (s *session) regionAdd(id uint64)    { s.report(func(e *encoder) { e.regionReady(id) }) }
func (s *session) regionRemove(id uint64) { s.report(func(e *encoder) { e.regionRemoved(id) }) }

func (s *session) peerAdd(p Peer) {
	if b, ok := s.backend.(Peerer); ok {
		if err := b.AddPeer(p); err != nil {
			s.report(func(e *encoder) { e.peerFailed(p.Handle, CauseRefused, err.Error()) })
			return
		}
	}
	s.report(func(e *encoder) { e.peerReady(p.Handle) })
}

func (s *session) peerRemove(handle uint32) {
	for key := range s.remote {
		if key.peer == handle {
			delete(s.remote, key)
		}
	}
	for id, plan := range s.plans {
		if plan.Peer == handle {
			delete(s.plans, id)
		}
	}
	if b, ok := s.backend.(Peerer); ok {
		b.RemovePeer(handle)
	}
	s.report(func(e *encoder) { e.peerRemoved(handle) })
}

// planAdd resolves the pools; a plan that names unknown ones is the host's fault, which the op will tell.
func (s *session) planAdd(p *Plan, src, dst uint64) {
	p.Src, p.Dst = s.pools[src], s.remote[remoteKey{p.Peer, dst}]
	if p.Src != nil && p.Dst != nil && p.fits() {
		s.plans[p.ID] = p
	}
}

// fits tells whether the slices name tensors and pages that are there. The host has checked the rest.
func (p *Plan) fits() bool {
	for i := range p.Slices {
		s := &p.Slices[i]
		if uint64(s.SrcTensor) >= uint64(len(p.Src.Tensors)) || uint64(s.DstTensor) >= uint64(len(p.Dst.Tensors)) ||
			s.SrcPage >= p.SrcPages || s.DstPage >= p.DstPages {
			return false
		}
	}
	return p.SrcPages > 0 && p.DstPages > 0
}

func (s *session) submit(o *Op, plan uint64) {
	o.s = s
	s.report(func(e *encoder) { e.accepted(o.ID) })
	if o.Plan = s.plans[plan]; o.Plan == nil {
		o.Fail(CauseProtocol, "plan "+strconv.FormatUint(plan, 10)+" is unknown")
		return
	}
	s.ops[o.ID] = o
	s.queue = append(s.queue, o)
}

func (s *session) abort(id uint64) {
	o := s.ops[id]
	if o == nil || o.ended {
		return
	}
	o.aborted = true
	for i, waiting := range s.queue {
		if waiting == o {
			s.queue = append(s.queue[:i], s.queue[i+1:]...)
			o.Aborted()
			delete(s.ops, id)
			return
		}
	}
}
