package tcp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	minRoom    = 64 << 10 // of the window before the pump sends again
	batchBytes = 1 << 20  // bytes that the pump takes at once, of all ops together
	batchOps   = 64       // ops that it takes at once
	copyBelow  = 1 << 10  // smaller pieces are cheaper copied than gathered
	arenaBytes = 320 << 10
	// progressEvery is the shortest time between two reports of one op: each costs the host a message.
	progressEvery = 100 * time.Millisecond
)

// outbound is a connection to a receiver. The pump goroutine writes, the other one reads the answers.
// Ops take turns: each gets an equal share of every batch.
type outbound struct {
	p      *peer
	number uint64
	lane   contract.Lane
	conn   net.Conn

	// Guarded by peer.mu.
	wake     *sync.Cond
	over     bool
	err      error // why it is over, nil for an orderly end
	ready    []*xfer
	ops      map[uint64]*xfer // begun and not ended at the receiver
	load     int              // ops on this connection
	lastID   uint64
	inflight uint64 // bytes given to the pump and not acknowledged
	cancels  []*xfer
	forgets  []uint64
	batch    []*xfer // what the pump sends now

	// Of the pump.
	handed map[uint64]bool // source regions that the receiver has
	arena  []byte          // frames, never moved while iov points into it
	cut    int             // arena up to here is in iov
	iov    [][]byte
	bufs   net.Buffers
	pieces []sdk.Copy
}

func newOutbound(p *peer, number uint64, c net.Conn, lane contract.Lane) *outbound {
	return &outbound{
		p: p, number: number, lane: lane, conn: c,
		wake:   sync.NewCond(&p.mu),
		ops:    map[uint64]*xfer{},
		handed: map[uint64]bool{},
		arena:  make([]byte, 0, arenaBytes),
	}
}

// add queues an op. peer.mu is held.
func (c *outbound) add(x *xfer) {
	x.c = c
	c.load++
	c.queue(x)
}

func (c *outbound) queue(x *xfer) {
	x.queued = true
	c.ready = append(c.ready, x)
	c.wake.Signal()
}

func (c *outbound) unqueue(x *xfer) {
	if x.queued {
		x.queued = false
		c.ready = slices.DeleteFunc(c.ready, func(y *xfer) bool { return y == x })
	}
}

// drop takes an op off the connection. peer.mu is held.
func (c *outbound) drop(x *xfer) {
	c.unqueue(x)
	if x.asked {
		c.cancels = slices.DeleteFunc(c.cancels, func(y *xfer) bool { return y == x })
	}
	if x.id != 0 {
		delete(c.ops, x.id)
	}
	c.inflight -= x.sent - x.acked
	x.sent, x.acked = 0, 0
	c.load--
	c.wake.Signal()
	if c.load == 0 && slices.Contains(c.p.retired, c) {
		c.shut(nil)
	}
}

// shut ends the connection; peer.lose follows. peer.mu is held.
func (c *outbound) shut(err error) {
	if c.over {
		return
	}
	c.over, c.err = true, err
	c.conn.Close()
	c.wake.Broadcast()
}

// run serves the connection until it is over.
func (c *outbound) run() {
	var pump sync.WaitGroup
	pump.Go(c.pump)
	err := c.read()
	c.p.mu.Lock()
	c.shut(err)
	c.p.mu.Unlock()
	pump.Wait()
	c.p.lose(c)
}

func (c *outbound) pump() {
	debug.SetPanicOnFault(true) // of this goroutine
	p := c.p
	var out []ending
	for {
		p.mu.Lock()
		for !c.over && !c.busy() {
			c.wake.Wait()
		}
		if c.over {
			p.mu.Unlock()
			return
		}
		c.pick()
		p.mu.Unlock()

		err := c.send()

		p.mu.Lock()
		out = c.settle(out)
		if err != nil {
			c.shut(err)
		}
		p.mu.Unlock()
		out = deliver(out)
	}
}

// busy tells whether there is something to send. peer.mu is held.
func (c *outbound) busy() bool {
	return len(c.cancels) > 0 || len(c.forgets) > 0 || len(c.ready) > 0 && c.room() >= minRoom
}

func (c *outbound) room() uint64 {
	if w := uint64(c.p.b.cfg.Window); c.inflight < w {
		return w - c.inflight
	}
	return 0
}

// pick chooses what to send next and writes the control frames. peer.mu is held.
func (c *outbound) pick() {
	c.arena, c.iov, c.cut, c.batch = c.arena[:0], c.iov[:0], 0, c.batch[:0]
	n := min(len(c.cancels), batchOps)
	for _, x := range c.cancels[:n] {
		c.arena = putHeader(c.arena, header{kind: frameCancel, id: x.id})
	}
	c.cancels = slices.Delete(c.cancels, 0, n)
	n = min(len(c.forgets), batchOps)
	for _, id := range c.forgets[:n] {
		if c.handed[id] {
			delete(c.handed, id)
			c.arena = putHeader(c.arena, header{kind: frameForget, id: id})
		}
	}
	c.forgets = slices.Delete(c.forgets, 0, n)

	room := c.room()
	if room < minRoom {
		return
	}
	room = min(room, batchBytes)
	n = min(len(c.ready), batchOps)
	share := max(room/uint64(max(n, 1)), minRoom)
	for ; n > 0 && room > 0; n-- {
		x := c.ready[0]
		c.ready[0] = nil
		c.ready = c.ready[1:]
		x.queued, x.writing = false, true
		if x.id == 0 {
			c.lastID++
			x.id = c.lastID
			c.ops[x.id] = x
		}
		x.limit = min(share, room, x.total-x.sent)
		x.sent += x.limit
		c.inflight += x.limit
		room -= x.limit
		c.batch = append(c.batch, x)
	}
}

// settle takes the ops back from the pump. peer.mu is held.
func (c *outbound) settle(out []ending) []ending {
	for i, x := range c.batch {
		c.batch[i] = nil
		x.writing = false
		x.sent -= x.limit
		c.inflight -= x.limit
		short := x.dry && x.limit > 0
		x.limit = 0
		switch {
		case x.late.kind != 0:
			e := x.late
			x.late = ending{}
			out = c.p.finish(x, e, out)
		case x.asked:
		case x.why.kind != 0:
			c.p.ask(x)
		case short:
			x.why = ending{kind: endFailed, cause: contract.Cause_CAUSE_INTERNAL, quiet: true, detail: fmt.Sprintf("the copies end before %d bytes", x.total)}
			c.p.ask(x)
		case x.sent < x.total:
			c.queue(x)
		}
	}
	return out
}

// send writes the batch.
func (c *outbound) send() error {
	for _, x := range c.batch {
		if !x.begun {
			x.begun = true
			c.arena = putBegin(c.arena, x.id, x.op.Generation(), x.total, uint64(c.p.b.cfg.Window))
		}
	}
	for _, x := range c.batch {
		var err error
		if c.lane == contract.Lane_LANE_SHM {
			err = c.sendDescs(x)
		} else {
			c.sendData(x)
		}
		if err != nil {
			return err
		}
	}
	return c.flush()
}

// flush writes what has been put together.
func (c *outbound) flush() error {
	if c.cut < len(c.arena) {
		c.iov = append(c.iov, c.arena[c.cut:])
	}
	if len(c.iov) == 0 {
		return nil
	}
	c.bufs = c.iov
	_, err := c.bufs.WriteTo(c.conn)
	c.arena, c.iov, c.cut = c.arena[:0], c.iov[:0], 0
	return err
}

// fits tells whether n more bytes fit into the arena.
func (c *outbound) fits(n int) bool { return cap(c.arena)-len(c.arena) >= n }

// sendDescs puts together frames that name copies for the receiver to do.
func (c *outbound) sendDescs(x *xfer) error {
	for x.limit > 0 && x.peek() && c.fits(headerLen+maxDesc*descLen) {
		if r := x.cur.Src; !c.handed[r.ID] {
			if err := c.flush(); err != nil {
				return err
			}
			u, ok := c.conn.(*net.UnixConn)
			if !ok {
				return errors.New("the shm lane needs a unix socket")
			}
			frame := putNumber(nil, frameRegion, r.ID, r.Size)
			if err := sendRegion(u, frame, r.FD); err != nil {
				return err
			}
			c.handed[r.ID] = true
		}
		at := len(c.arena)
		c.arena = putHeader(c.arena, header{kind: frameDesc, id: x.id})
		n := 0
		for src := x.cur.Src; n < maxDesc && x.limit > 0 && x.peek() && (x.cur.Src == src || c.handed[x.cur.Src.ID]); n++ {
			d := x.take(x.limit)
			c.arena = putDesc(c.arena, desc{src: d.Src.ID, srcOff: d.SrcOff, dst: d.DstRegion, dstOff: d.DstOff, n: d.Len})
		}
		putHeader(c.arena[at:at], header{kind: frameDesc, id: x.id, count: n, size: n * descLen})
	}
	return nil
}

// sendData puts together frames of places and bytes. A fault in the source ends the op alone: the frame
// that met it is taken back.
func (c *outbound) sendData(x *xfer) {
	slice := c.p.b.cfg.Slice
	for x.limit > 0 && x.why.kind == 0 && x.peek() && c.fits(headerLen+maxDesc*pieceLen+sliceBytes) {
		c.pieces = c.pieces[:0]
		bytes := 0
		for len(c.pieces) < maxDesc && bytes < slice && x.limit > 0 && x.peek() {
			d := x.take(min(x.limit, uint64(slice-bytes)))
			c.pieces = append(c.pieces, d)
			bytes += int(d.Len)
		}
		c.putData(x, bytes)
	}
}

func (c *outbound) putData(x *xfer, bytes int) {
	at, cut, vecs := len(c.arena), c.cut, len(c.iov)
	defer func() {
		if r := recover(); r != nil {
			no := faultRefusal(r)
			c.arena, c.cut, c.iov = c.arena[:at], cut, c.iov[:vecs]
			x.limit += uint64(bytes)
			x.why = ending{kind: endFailed, cause: no.cause, quiet: true, detail: no.detail}
			c.p.b.count.faults.Add(1)
		}
	}()
	n := len(c.pieces)
	c.arena = putHeader(c.arena, header{kind: frameData, id: x.id, count: n, size: n*pieceLen + bytes})
	for i := range c.pieces {
		d := &c.pieces[i]
		c.arena = putPiece(c.arena, piece{region: d.DstRegion, off: d.DstOff, n: d.Len})
	}
	for i := range c.pieces {
		d := &c.pieces[i]
		src := d.Src.Bytes[d.SrcOff : d.SrcOff+d.Len]
		if len(src) < copyBelow {
			c.arena = append(c.arena, src...)
			continue
		}
		c.iov = append(c.iov, c.arena[c.cut:], src)
		c.cut = len(c.arena)
	}
}

// read carries out the receiver's answers until the connection ends.
func (c *outbound) read() error {
	r := bufio.NewReaderSize(c.conn, 16<<10)
	var out []ending
	for {
		b, err := r.Peek(headerLen)
		if err != nil {
			return err
		}
		h, err := readHeader(b, false)
		if err != nil {
			return err
		}
		if b, err = r.Peek(headerLen + h.size); err != nil {
			return err
		}
		c.p.mu.Lock()
		out, err = c.answer(h, b[headerLen:], out)
		c.p.mu.Unlock()
		out = deliver(out)
		if err != nil {
			return err
		}
		if _, err := r.Discard(headerLen + h.size); err != nil {
			return err
		}
	}
}

// answer carries out one frame of the receiver. peer.mu is held.
func (c *outbound) answer(h header, body []byte, out []ending) ([]ending, error) {
	x := c.ops[h.id]
	if x == nil || x.late.kind != 0 {
		return out, fmt.Errorf("the receiver spoke of op %d, which is not open", h.id)
	}
	switch h.kind {
	case frameAck:
		n := binary.LittleEndian.Uint64(body)
		if n < x.acked || n > x.sent {
			return out, fmt.Errorf("the receiver acknowledged %d bytes of op %d after %d, with %d sent", n, h.id, x.acked, x.sent)
		}
		c.inflight -= n - x.acked
		c.p.b.count.bytesOut.Add(n - x.acked)
		x.acked = n
		c.wake.Signal()
		if now := time.Now(); !x.ended && now.Sub(x.progress) >= progressEvery {
			x.progress = now
			out = append(out, ending{x: x, kind: endProgress, bytes: n})
		}
	case frameDone:
		if n := binary.LittleEndian.Uint64(body); n != x.total || x.sent != x.total {
			return out, fmt.Errorf("the receiver finished op %d with %d of %d bytes", h.id, n, x.total)
		}
		c.p.b.count.bytesOut.Add(x.total - x.acked)
		out = c.p.finish(x, ending{kind: endDone, quiet: true, lane: c.lane}, out)
	case frameFailed:
		cause := contract.Cause(h.count)
		if _, ok := contract.Cause_name[int32(cause)]; !ok || cause == 0 {
			cause = contract.Cause_CAUSE_INTERNAL
		}
		out = c.p.finish(x, ending{kind: endFailed, cause: cause, quiet: true, detail: string(body)}, out)
	case frameCancelled:
		e := x.why
		if e.kind == 0 {
			e = ending{kind: endAborted, quiet: true}
		}
		out = c.p.finish(x, e, out)
	case frameNoSource:
		c.p.noShm = true
		for _, o := range slices.Clone(c.p.slots) {
			if o != nil && o.lane == contract.Lane_LANE_SHM {
				c.p.retire(o)
			}
		}
		out = c.p.finish(x, ending{kind: endMove, quiet: true}, out)
	}
	return out, nil
}
