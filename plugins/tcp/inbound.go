package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	inboundBuffer = 256 << 10              // at least one frame; over TCP the private buffer of the slices
	ackBytes      = 2 << 20                // landed bytes that are told, less when the writer's window is small
	ackEvery      = 100 * time.Millisecond // as long as anything lands, also fewer bytes are told
	maxInboundOps = 4096                   // ops open on one connection
)

// inbound is a connection that writes into local pages. One goroutine reads, checks, copies, answers.
type inbound struct {
	b      *Backend
	w      *writer
	number uint64
	conn   net.Conn
	fds    *fdReader // nil over TCP
	r      *intake
	done   chan struct{} // closed when nothing of it can land any more

	// gate is held shared while a slice is checked and copied; see receiver.barrier.
	gate sync.RWMutex

	// All below belong to the serving goroutine.
	ops     map[uint64]*inboundOp
	last    uint64 // highest op begun
	sources map[uint64]*source
	out     []byte       // frames to send
	ended   bool         // out holds the end of an op
	landed  uint64       // bytes not told yet
	ackAt   uint64       // when they are told: the writer's window is never full of them
	told    time.Time    // when some were told
	unacked []*inboundOp // ops with such bytes
	target  *region      // where the last slice went
	from    *source      // where the last copy came from
	fromID  uint64
	hint    int
}

// inboundOp is an op that has begun and not ended.
type inboundOp struct {
	id                   uint64
	opener               *opener
	total, copied, acked uint64
	ended                bool
}

// refusal ends one op and nothing else.
type refusal struct {
	cause    contract.Cause
	noSource bool
	detail   string
}

func newInbound(b *Backend, w *writer, number uint64, c net.Conn) *inbound {
	in := &inbound{
		b: b, w: w, number: number, conn: c,
		done:    make(chan struct{}),
		ops:     map[uint64]*inboundOp{},
		sources: map[uint64]*source{},
		ackAt:   ackBytes,
	}
	var r io.Reader = c
	if u, ok := c.(*net.UnixConn); ok {
		in.fds = &fdReader{c: u}
		r = in.fds
	}
	in.r = newIntake(r, inboundBuffer)
	return in
}

// serve runs until the connection ends.
func (in *inbound) serve() {
	defer in.discard()
	debug.SetPanicOnFault(true) // of this goroutine, which ends with serve
	for {
		if err := in.step(); err != nil {
			if _, bad := err.(badFrame); bad {
				in.b.count.badFrames.Add(1)
				in.b.start.Logf(contract.Log_LEVEL_WARN, "connection of writer %s incarnation %d epoch %d closed: %v",
					in.w.key.node, in.w.key.incarnation, in.w.key.epoch, err)
			}
			return
		}
	}
}

// discard lets go of everything but the place among the connections, which receiver.leave gives back.
func (in *inbound) discard() {
	in.conn.Close()
	if in.fds != nil {
		in.fds.close()
	}
	for id, s := range in.sources {
		in.b.recv.closeSource(in.w, id, s)
	}
	in.sources, in.ops = nil, nil
}

// badFrame ends the connection: the other end does not keep the protocol.
type badFrame string

func (e badFrame) Error() string { return string(e) }

func badf(format string, args ...any) error { return badFrame(fmt.Sprintf(format, args...)) }

// step carries out one frame.
func (in *inbound) step() error {
	if err := in.await(headerLen); err != nil {
		return err
	}
	b, err := in.r.peek(headerLen)
	if err != nil {
		return err
	}
	h, err := readHeader(b, true)
	if err != nil {
		return badFrame(err.Error())
	}
	if err := in.await(headerLen + h.size); err != nil {
		return err
	}
	if b, err = in.r.peek(headerLen + h.size); err != nil {
		return err
	}
	if err := in.handle(h, b[headerLen:]); err != nil {
		return err
	}
	in.r.skip(len(b))
	return nil
}

// await tells the writer what it waits for when the next n bytes are not here yet: the ends of ops, and now
// and then how far the others are.
func (in *inbound) await(n int) error {
	have := in.r.buffered()
	if have >= n {
		return nil
	}
	switch {
	case in.ended:
	case have > 0 || in.landed == 0 || time.Since(in.told) < ackEvery:
		return nil
	}
	if have == 0 {
		in.ack()
	}
	return in.flush()
}

func (in *inbound) ack() {
	for _, o := range in.unacked {
		if !o.ended && o.copied > o.acked {
			o.acked = o.copied
			in.out = putNumber(in.out, frameAck, o.id, o.copied)
		}
	}
	in.unacked, in.landed, in.told = in.unacked[:0], 0, time.Now()
}

func (in *inbound) flush() error {
	if len(in.out) == 0 {
		return nil
	}
	_, err := in.conn.Write(in.out)
	in.out, in.ended = in.out[:0], false
	return err
}

func (in *inbound) handle(h header, body []byte) error {
	switch h.kind {
	case frameBegin:
		return in.begin(h.id, readBegin(body))
	case frameRegion:
		return in.addSource(h.id, binary.LittleEndian.Uint64(body))
	case frameForget:
		if s := in.sources[h.id]; s != nil {
			delete(in.sources, h.id)
			in.from = nil
			in.b.recv.closeSource(in.w, h.id, s)
		}
		return nil
	}
	if h.id == 0 || h.id > in.last {
		return badf("frame kind %d of op %d, which has not begun", h.kind, h.id)
	}
	o := in.ops[h.id]
	switch h.kind {
	case frameData:
		n := h.count * pieceLen
		if !checkPieces(body[:n], len(body)-n) {
			return badf("pieces of op %d do not add up to %d bytes", h.id, len(body)-n)
		}
		if o == nil { // sent before the writer heard of the end
			in.b.count.lateFrames.Add(1)
			return nil
		}
		in.account(o, uint64(len(body)-n), in.landData(o, body[:n], body[n:]))
	case frameDesc:
		if o == nil {
			in.b.count.lateFrames.Add(1)
			return nil
		}
		in.copyDescs(o, body)
	case frameCancel:
		if o != nil {
			in.end(o)
			in.out = putHeader(in.out, header{kind: frameCancelled, id: o.id})
		}
	}
	if in.landed >= in.ackAt {
		in.ack()
		return in.flush()
	}
	return nil
}

func (in *inbound) begin(id uint64, op begin) error {
	if id != in.last+1 {
		return badf("op %d begins after op %d", id, in.last)
	}
	in.last = id
	in.ackAt = 0
	if op.window >= 2*minRoom { // else the writer waits for less than a quarter
		in.ackAt = min(ackBytes, op.window/4)
	}
	o := &inboundOp{id: id, total: op.bytes, opener: in.b.table.find(op.Destination)}
	switch {
	case o.opener == nil:
		in.refuse(o, &refusal{cause: contract.Cause_CAUSE_REFUSED, detail: fmt.Sprintf("opener %d/%d is not granted", op.Destination.Incarnation, op.Destination.Sequence)})
	case !o.opener.admits(in.w.key.node): // another peer's: an opener is no secret
		in.refuse(o, &refusal{cause: contract.Cause_CAUSE_REFUSED, detail: fmt.Sprintf("opener %d/%d is not granted to node %s", op.Destination.Incarnation, op.Destination.Sequence, in.w.key.node)})
	case len(in.ops) >= maxInboundOps:
		in.refuse(o, &refusal{cause: contract.Cause_CAUSE_LIMIT, detail: fmt.Sprintf("more than %d ops on one connection", maxInboundOps)})
	case op.bytes == 0 || op.bytes > maxOpBytes:
		in.refuse(o, &refusal{cause: contract.Cause_CAUSE_LIMIT, detail: fmt.Sprintf("op of %d bytes, 1 to %d are served", op.bytes, maxOpBytes)})
	default:
		in.ops[id] = o
	}
	return nil
}

func (in *inbound) addSource(id, size uint64) error {
	if in.fds == nil {
		return badf("region %d handed over on a connection that carries no descriptors", id)
	}
	fd, ok := in.fds.take()
	if !ok {
		return badf("region %d came without its descriptor", id)
	}
	if in.sources[id] != nil {
		unix.Close(fd)
		return badf("region %d handed over twice", id)
	}
	s, err := in.b.recv.openSource(in.w, id, size, fd)
	if err != nil { // the ops that need it are told
		in.b.start.Logf(contract.Log_LEVEL_WARN, "shared memory of writer %s: %v", in.w.key.node, err)
		return nil
	}
	in.sources[id] = s
	return nil
}

// account notes n more bytes of o, or its refusal.
func (in *inbound) account(o *inboundOp, n uint64, no *refusal) {
	if no != nil {
		in.refuse(o, no)
		return
	}
	if o.copied == o.acked {
		in.unacked = append(in.unacked, o)
	}
	o.copied += n
	in.landed += n
	in.b.count.bytesIn.Add(n)
	if o.copied == o.total {
		in.end(o)
		in.out = putNumber(in.out, frameDone, o.id, o.copied)
	}
}

// end forgets an op; the caller appends the frame that says how.
func (in *inbound) end(o *inboundOp) {
	o.ended, in.ended = true, true
	delete(in.ops, o.id)
}

func (in *inbound) refuse(o *inboundOp, no *refusal) {
	switch no.cause {
	case contract.Cause_CAUSE_REFUSED:
		in.b.count.lateRefused.Add(1)
	case contract.Cause_CAUSE_BOUNDS:
		in.b.count.outOfBounds.Add(1)
	case contract.Cause_CAUSE_INTERNAL:
		in.b.count.faults.Add(1)
	}
	in.end(o)
	if no.noSource {
		in.out = putHeader(in.out, header{kind: frameNoSource, id: o.id})
		return
	}
	in.out = putFailed(in.out, o.id, no.cause, no.detail)
}

// errRevoked is the answer to what comes for an opener or from a writer that was taken away.
var errRevoked = &refusal{cause: contract.Cause_CAUSE_REFUSED, detail: "the opener or the writer was revoked"}

// enter begins a slice: from here to leave the permission that it found cannot be taken away.
func (in *inbound) enter(o *inboundOp) *refusal {
	in.gate.RLock()
	if o.opener.revoked.Load() || in.w.refused.Load() {
		return errRevoked
	}
	return nil
}

// leave ends a slice. A fault in mapped memory becomes the refusal of this op.
func (in *inbound) leave(no **refusal) {
	in.gate.RUnlock()
	if r := recover(); r != nil {
		*no = faultRefusal(r)
	}
}

// faultRefusal turns the panic of a memory fault into a refusal. Any other panic goes on.
func faultRefusal(r any) *refusal {
	err, ok := r.(error)
	var fault interface{ Addr() uintptr }
	if !ok || !errors.As(err, &fault) {
		panic(r)
	}
	return &refusal{cause: contract.Cause_CAUSE_INTERNAL, detail: fmt.Sprintf("memory fault at %#x during a copy", fault.Addr())}
}

// place returns the granted local bytes [off, off+n) of a region. The gate is held.
func (in *inbound) place(o *inboundOp, id, off, n uint64) ([]byte, *refusal) {
	t := in.target
	if t == nil || t.id != id || t.removed.Load() {
		if t = in.b.region(id); t == nil || t.removed.Load() {
			return nil, &refusal{cause: contract.Cause_CAUSE_BOUNDS, detail: fmt.Sprintf("region %d is not here", id)}
		}
		in.target = t
	}
	if !within(off, n, len(t.bytes)) || !o.opener.covers(in.w.key.node, id, off, n, &in.hint) {
		return nil, &refusal{cause: contract.Cause_CAUSE_BOUNDS, detail: fmt.Sprintf("bytes [%d, +%d) of region %d are not granted", off, n, id)}
	}
	return t.bytes[off : off+n], nil
}

// landData copies one slice that is complete in the private buffer.
func (in *inbound) landData(o *inboundOp, pieces, data []byte) (no *refusal) {
	if uint64(len(data)) > o.total-o.copied {
		return &refusal{cause: contract.Cause_CAUSE_PROTOCOL, detail: "more bytes than the op announced"}
	}
	defer in.leave(&no)
	if no = in.enter(o); no != nil {
		return no
	}
	for ; len(pieces) >= pieceLen; pieces = pieces[pieceLen:] {
		p := readPiece(pieces)
		dst, no := in.place(o, p.region, p.off, p.n)
		if no != nil {
			return no
		}
		copyPage(dst, data)
		data = data[p.n:]
	}
	return nil
}

// descWalk is where a frameDesc stands.
type descWalk struct {
	rest []byte // descriptors not begun
	d    desc   // what is left of the present one
}

// copyDescs carries out the copies of a frameDesc, one slice at a time.
func (in *inbound) copyDescs(o *inboundOp, body []byte) {
	w := descWalk{rest: body}
	for !o.ended && (w.d.n > 0 || len(w.rest) > 0) {
		n, no := in.landDescs(o, &w)
		in.account(o, n, no)
		if in.landed >= in.ackAt && !o.ended {
			in.ack()
			if in.flush() != nil {
				return // the next read says so, too
			}
		}
	}
}

// landDescs copies one slice: up to sliceBytes of one or more descriptors.
func (in *inbound) landDescs(o *inboundOp, w *descWalk) (done uint64, no *refusal) {
	defer in.leave(&no)
	if no = in.enter(o); no != nil {
		return 0, no
	}
	for done < sliceBytes {
		if w.d.n == 0 {
			if len(w.rest) == 0 {
				break
			}
			w.d, w.rest = readDesc(w.rest), w.rest[descLen:]
			if w.d.n == 0 || w.d.n > o.total-o.copied-done {
				return done, &refusal{cause: contract.Cause_CAUSE_PROTOCOL, detail: "descriptors and the announced bytes differ"}
			}
		}
		d := &w.d
		n := min(d.n, sliceBytes-done)
		dst, no := in.place(o, d.dst, d.dstOff, n)
		if no != nil {
			return done, no
		}
		s := in.from
		if s == nil || in.fromID != d.src {
			if s = in.sources[d.src]; s == nil {
				return done, &refusal{noSource: true}
			}
			in.from, in.fromID = s, d.src
		}
		if !within(d.srcOff, n, len(s.bytes)) {
			return done, &refusal{cause: contract.Cause_CAUSE_BOUNDS, detail: fmt.Sprintf("bytes [%d, +%d) leave source region %d", d.srcOff, n, d.src)}
		}
		copyPage(dst, s.bytes[d.srcOff:d.srcOff+n])
		d.srcOff, d.dstOff, d.n = d.srcOff+n, d.dstOff+n, d.n-n
		done += n
	}
	return done, nil
}
