package workerapi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"golang.org/x/sys/unix"
)

// session is one worker's connection. Three goroutines serve it: serve reads requests, write sends
// answers, watch waits for the end of the worker's process.
type session struct {
	srv  *Server
	id   core.SessionID
	conn *net.UnixConn
	in   frames
	info Session
	exit *exitWatch

	seq      uint64        // last request; serve's own
	answered bool          // an answer of this step is not signalled yet; Apply's own
	inflight chan struct{} // a token for every request without a written answer
	gone     chan struct{} // closed by hangUp
	hungUp   sync.Once
	queued   chan struct{} // capacity 1: the queue has something, or finish was set
	writer   chan struct{} // closed when write returned

	mu      sync.Mutex
	page    *page // nil before hello and after the end
	eventfd int   // -1 without notify
	dirty   bool  // words were written since the last wake
	slots   []slot
	free    []int32
	pending map[uint64]pending
	regions map[int64]*region
	pools   []*pool
	queue   []outgoing
	finish  bool // write what is queued, then stop
}

// region and pool are what page ids and tensors are checked against.
type region struct {
	size  int64
	ready bool
}

type pool struct {
	pages int32
	ready bool
}

// slot is a place for one room.
type slot struct {
	state     slotState
	room      int64
	nextChunk int64
	status    statemachine.KVPoll
	residency statemachine.Residency
	reason    statemachine.Reason
	detail    string
	aux       []byte
}

type slotState uint8

const (
	slotFree      slotState = iota
	slotOpening             // open was posted, its answer is awaited
	slotOpen                // the worker may name it
	slotReleasing           // release was posted, its answer is awaited
)

// pending is a request that the core or the node will answer.
type pending struct {
	kind core.EventKind // 0: answered by the node
	slot int32
}

// outgoing is an answer; it is encoded by the writer.
type outgoing struct {
	header  any
	payload []byte
	fds     []int // stay the sender's
	counted bool  // gives back a token of inflight
}

func newSession(s *Server, conn *net.UnixConn, cred *unix.Ucred, pidfd int) *session {
	return &session{
		srv: s, id: core.SessionID(s.nextID.Add(1)), conn: conn,
		in:       frames{src: newSocket(conn)},
		info:     Session{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid},
		exit:     watchExit(pidfd),
		inflight: make(chan struct{}, s.cfg.MaxInflight),
		gone:     make(chan struct{}),
		queued:   make(chan struct{}, 1),
		writer:   make(chan struct{}),
		eventfd:  -1,
		pending:  make(map[uint64]pending),
		regions:  make(map[int64]*region),
	}
}

// serve runs the session until the worker is gone. It returns when nothing of the session is left but
// the memory, which is the node's.
func (ss *session) serve() {
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if ss.exit != nil && ss.exit.wait() {
			ss.hangUp()
		}
	}()
	go ss.write()
	said := ss.hello()
	if said {
		ss.requests()
	}
	ss.in.drop()
	ss.stopWriter()
	ss.hangUp()
	ss.exit.close()
	<-watched
	if !said {
		ss.drop()
		return
	}
	ss.srv.down(ss) // from here on neither Apply nor beat knows the session
	ss.drop()
	ss.srv.cfg.Post(core.Event{Kind: core.SessionDown, Session: ss.id})
	ss.srv.posted(ss)
	ss.srv.cfg.Node.SessionClosed(ss.id)
}

// hangUp ends the session from outside; serve does the rest.
func (ss *session) hangUp() {
	ss.hungUp.Do(func() {
		close(ss.gone)
		ss.conn.Close()
	})
}

// drop frees the page and the eventfd.
func (ss *session) drop() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.page != nil {
		ss.page.close()
		ss.page = nil
	}
	if ss.eventfd >= 0 {
		unix.Close(ss.eventfd)
		ss.eventfd = -1
	}
	ss.pending, ss.slots, ss.free = nil, nil, nil
}

// next reads a request, takes its token and parses it. ok is false when the session is over.
func (ss *session) next() (m message, h header, ok bool) {
	for {
		m, err := ss.in.next()
		var e *Error
		if errors.As(err, &e) {
			ss.fatal(e)
			return m, h, false
		}
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				ss.srv.n.helloTimeout.Add(1)
				ss.fatal(bad(BadState, "t", RuleOrder, "no hello within %v", ss.srv.cfg.HelloTimeout))
			} else if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				ss.srv.log.Debug("worker connection ended", "session", ss.id, "err", err)
			}
			return m, h, false
		}
		select {
		case ss.inflight <- struct{}{}:
		case <-ss.gone:
			closeAll(m.fds)
			return m, h, false
		}
		h, fatal, e := parseHeader(m.header)
		if e == nil || !fatal {
			if h.Seq <= ss.seq {
				e, fatal = bad(BadFrame, "seq", RuleOrder, "seq %d after %d: every request has a higher one", h.Seq, ss.seq), true
			}
		}
		if fatal {
			closeAll(m.fds)
			ss.fatal(e)
			return m, h, false
		}
		ss.seq = h.Seq
		if e == nil {
			e = checkFDs(h.T, &m)
		}
		if e != nil {
			closeAll(m.fds)
			ss.refuse(h.Seq, e)
			continue
		}
		ss.srv.n.frames.Add(1)
		return m, h, true
	}
}

// checkFDs compares the descriptors of a message with what its type takes.
func checkFDs(t string, m *message) *Error {
	want := 0
	if t == "region_add" {
		want = 2
	}
	if m.fdErr != nil {
		return m.fdErr
	}
	if len(m.fds) != want {
		return bad(BadFD, "descriptors", RuleFDs, "%s came with %d descriptors; it takes %d", t, len(m.fds), want)
	}
	return nil
}

// hello waits for a valid hello until the hello timeout; a refused worker may try again within it.
func (ss *session) hello() bool {
	ss.conn.SetReadDeadline(time.Now().Add(ss.srv.cfg.HelloTimeout))
	for {
		m, h, ok := ss.next()
		if !ok {
			return false
		}
		var e *Error
		if h.T != "hello" {
			e = bad(BadState, "t", RuleOrder, "%q before hello", h.T)
		} else if e = ss.admit(&h, &m); e == nil {
			ss.conn.SetReadDeadline(time.Time{})
			return true
		}
		closeAll(m.fds)
		ss.refuse(h.Seq, e)
	}
}

// admit checks a hello, asks the node, makes the page and answers.
func (ss *session) admit(h *header, m *message) *Error {
	if e := ss.checkHello(h, m); e != nil {
		return e
	}
	efd := -1
	if h.Notify {
		var err error
		if efd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			return bad(Limit, "notify", RuleLimits, "eventfd: %v", err)
		}
	}
	p, err := newPage(int(ss.info.Slots))
	if err != nil {
		closeFD(efd)
		return bad(Limit, "slots", RuleLimits, "%v", err)
	}
	rep, err := ss.srv.cfg.Node.Hello(ss.info)
	if err != nil {
		closeFD(efd)
		p.close()
		return asError(err)
	}
	p.store(offInc, rep.Incarnation)
	ss.mu.Lock()
	ss.page, ss.eventfd = p, efd
	ss.slots = make([]slot, p.slots)
	ss.free = make([]int32, 0, p.slots)
	for i := p.slots - 1; i >= 0; i-- {
		ss.free = append(ss.free, int32(i))
	}
	ss.mu.Unlock()
	ss.srv.up(ss)
	i := &ss.info
	ss.srv.cfg.Post(core.Event{
		Kind: core.SessionUp, Session: ss.id, Group: i.Group, Role: i.Role, Rank: i.Rank, Size: i.Size, Slots: i.Slots,
	})
	fds := []int{p.fd}
	if efd >= 0 {
		fds = append(fds, efd)
	}
	ss.send(outgoing{header: helloHeader{ok(h.Seq), rep.Node, rep.Incarnation, i.Slots, len(p.mem), ss.srv.limit}, fds: fds, counted: true})
	return nil
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

// refuse answers a request with an error.
func (ss *session) refuse(seq uint64, e *Error) {
	ss.srv.countError(e.Code)
	ss.send(outgoing{header: errorAnswer(seq, e), counted: true})
}

// fatal answers what cannot be parsed; the caller ends the session.
func (ss *session) fatal(e *Error) {
	ss.srv.countError(e.Code)
	ss.srv.warn("worker sent a bad frame; closing its session", "session", ss.id, "pid", ss.info.PID, "err", e)
	ss.send(outgoing{header: errorAnswer(0, e)})
}

// send queues an answer. It never waits: there are at most MaxInflight answers, because no more
// requests are read while so many are not answered.
func (ss *session) send(o outgoing) {
	ss.mu.Lock()
	ss.queue = append(ss.queue, o)
	ss.mu.Unlock()
	ss.signal()
}

func (ss *session) signal() {
	select {
	case ss.queued <- struct{}{}:
	default:
	}
}

// stopWriter lets the writer finish what is queued, for a second at most.
func (ss *session) stopWriter() {
	ss.conn.SetWriteDeadline(time.Now().Add(time.Second))
	ss.mu.Lock()
	ss.finish = true
	ss.mu.Unlock()
	ss.signal()
	<-ss.writer
}

// write sends answers, as many a system call as there are.
func (ss *session) write() {
	defer close(ss.writer)
	var batch []outgoing
	var buf []byte
	for {
		ss.mu.Lock()
		batch, ss.queue = ss.queue, batch[:0]
		finish := ss.finish
		ss.mu.Unlock()
		if len(batch) == 0 {
			if finish {
				return
			}
			<-ss.queued
			continue
		}
		if !finish { // else stopWriter's deadline holds
			ss.conn.SetWriteDeadline(time.Now().Add(ss.srv.cfg.WriteTimeout))
		}
		for i := range batch {
			buf = appendMessage(buf, batch[i].header, batch[i].payload)
			if len(buf) < 256<<10 && i+1 < len(batch) && len(batch[i].fds) == 0 && len(batch[i+1].fds) == 0 {
				continue
			}
			if err := ss.flush(buf, batch[i].fds); err != nil {
				if errors.Is(err, os.ErrDeadlineExceeded) && !finish {
					ss.srv.n.slow.Add(1)
					ss.srv.warn("worker does not read its answers; closing its session", "session", ss.id, "pid", ss.info.PID, "rule", RuleAnswers)
				}
				ss.hangUp()
				return
			}
			buf = buf[:0]
		}
		ss.srv.n.answers.Add(uint64(len(batch)))
		for i := range batch {
			if batch[i].counted {
				<-ss.inflight
			}
			batch[i] = outgoing{}
		}
		if cap(buf) > 1<<20 {
			buf = nil
		}
	}
}

func (ss *session) flush(b []byte, fds []int) error {
	if len(fds) > 0 {
		// So short a write is never partial.
		if _, _, err := ss.conn.WriteMsgUnix(b[:8], unix.UnixRights(fds...), nil); err != nil {
			return err
		}
		b = b[8:]
		ss.mu.Lock()
		if ss.page != nil && ss.page.fd >= 0 {
			unix.Close(ss.page.fd) // the worker has its own now
			ss.page.fd = -1
		}
		ss.mu.Unlock()
	}
	_, err := ss.conn.Write(b)
	return err
}

// setWord writes a slot's word; true the first time since the last wake. Apply's.
func (ss *session) setWord(w *core.WordEffect) bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.page == nil || w.Slot < 0 || int(w.Slot) >= len(ss.slots) || ss.slots[w.Slot].state == slotFree {
		return false
	}
	s := &ss.slots[w.Slot]
	s.status, s.residency, s.reason, s.detail = w.Status, w.Residency, w.Reason, w.Detail
	ss.page.set(w.Slot, word(uint8(w.Status), uint8(w.Residency), w.Opener.Seq))
	if ss.dirty {
		return false
	}
	ss.dirty = true
	return true
}

// one is what an eventfd takes to be incremented.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// wake writes the eventfd once for all words since the last wake. Apply's.
func (ss *session) wake() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.dirty = false
	if ss.eventfd < 0 {
		return
	}
	// EAGAIN: the counter is full of wakes that nobody took; the worker will wake all the same.
	if _, err := unix.Write(ss.eventfd, one); err == nil {
		ss.srv.n.wakeups.Add(1)
	}
}

// setAux keeps the aux record of a slot until its release. Apply's.
func (ss *session) setAux(slot int32, room int64, aux []byte) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if slot < 0 || int(slot) >= len(ss.slots) {
		return
	}
	if s := &ss.slots[slot]; s.state != slotFree && s.room == room {
		s.aux = aux
	}
}

func (ss *session) beat(now uint64) {
	ss.mu.Lock()
	if ss.page != nil {
		ss.page.store(offBeat, now)
	}
	ss.mu.Unlock()
}

// reply queues the answer to a request that the core was asked; the caller signals. Apply's.
func (ss *session) reply(r *core.Reply) bool {
	ss.mu.Lock()
	p, found := ss.pending[r.Seq]
	if found && p.kind != 0 {
		delete(ss.pending, r.Seq)
		h, code := ss.answerOf(p, r)
		ss.queue = append(ss.queue, outgoing{header: h, counted: true})
		ss.mu.Unlock()
		if code != "" {
			ss.srv.countError(code)
		}
		return true
	}
	ss.mu.Unlock()
	ss.srv.n.unmatched.Add(1)
	ss.srv.warn("the core answered a request that is not open", "session", ss.id, "seq", r.Seq)
	return false
}

// answerOf turns a core reply into an answer's header and keeps the slot's state. mu is held. code is
// set for an error.
func (ss *session) answerOf(p pending, r *core.Reply) (h any, code Code) {
	s := &ss.slots[p.slot]
	refused := func(code Code, rule string) (any, Code) {
		return errorAnswer(r.Seq, &Error{Code: code, Rule: rule, Message: r.Detail}), code
	}
	switch p.kind {
	case core.Open:
		if r.Code == core.OK {
			s.state = slotOpen
			return openHeader{ok(r.Seq), p.slot, tag(r.Opener.Seq)}, ""
		}
		ss.freeSlot(p.slot)
	case core.Release:
		if r.Code == core.Freed {
			ss.freeSlot(p.slot)
			return ok(r.Seq), ""
		}
		s.state = slotOpen
		if r.Code != core.Refused {
			r.Detail = fmt.Sprintf("the room was not released (reply code %d)", r.Code)
		}
		return refused(NotReusable, "R4")
	}
	switch r.Code {
	case core.Refused:
		return refused(Refused, "")
	case core.Ended:
		return endedHeader{ok(r.Seq), true, r.Reason.String()}, ""
	}
	return ok(r.Seq), ""
}

// freeSlot gives a slot back. mu is held.
func (ss *session) freeSlot(i int32) {
	ss.slots[i] = slot{}
	ss.free = append(ss.free, i)
}
