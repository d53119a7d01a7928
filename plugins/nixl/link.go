package nixl

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// link is a control connection and the receiver's agent behind it, seen by the writer. Of the driver's goroutine.
type link struct {
	p      *peer
	s      *stream
	remote string // the receiver's agent
	say    chan message

	regions map[uint64]*remote
	queue   []*xfer   // that have bytes to post, oldest first
	flights []*flight // posted and not ended
	bytes   uint64    // in flight
	ending  []*xfer   // aborted, with requests in flight
	owed    []*xfer   // ended, not quiet
	why     error     // it is over; nil: it is not
	proved  bool      // the receiver's agent is destroyed: nothing lands any more
	gone    bool      // forgotten
}

// remote is a region of the receiver.
type remote struct {
	id        uint64
	mapped    bool
	withdrawn bool
	base      uintptr
	size      uint64
	flights   int
}

// flight is a request that the library works on.
type flight struct {
	x       *xfer
	req     *request
	bytes   uint64
	regions []*remote
}

// xfer is one op.
type xfer struct {
	op     *sdk.Op
	unhook func() bool // takes back the watch on the op's context
	until  time.Time   // it waits for a link no longer than this, and as an aborted one for its requests

	link      *link
	next      func() (sdk.Copy, bool)
	stop      func()
	cur       sdk.Copy
	dry       bool   // the copies ended
	flying    int    // requests
	bytes     uint64 // in flight
	moved     uint64 // known to be visible
	uncertain bool   // a request ended in an error: its bytes may still be under way
	cancelled bool
	ended     bool
}

func newLink(p *peer, s *stream, name string) *link {
	return &link{p: p, s: s, remote: name, say: make(chan message, 4096), regions: map[uint64]*remote{}}
}

// listen reads what the receiver says.
func (l *link) listen() {
	d := l.p.b.driver
	for {
		var m message
		if err := l.s.read(&m); err != nil {
			d.do(func() { l.fail(fmt.Errorf("control connection: %w", err)) })
			return
		}
		d.do(func() { l.hear(m) })
	}
}

// speak writes what the driver says, so that a receiver that reads nothing holds up nobody else.
func (l *link) speak(say <-chan message) {
	for m := range say {
		if err := l.s.write(m); err != nil {
			l.s.conn.Close() // listen finds it
			for range say {
			}
			return
		}
	}
}

func (l *link) tell(m message) {
	select {
	case l.say <- m:
	default:
		l.fail(errors.New("the receiver reads nothing"))
	}
}

func (l *link) hear(m message) {
	if l.why != nil {
		return
	}
	r := l.regions[m.Region]
	switch m.Kind {
	case kindMapped:
		if r == nil || r.mapped || m.Size == 0 || m.Address == 0 || m.Address+m.Size < m.Address {
			l.fail(errFrame)
			return
		}
		name, err := l.p.b.driver.agent.load(m.Metadata)
		if err == nil && name != l.remote {
			err = errFrame
		}
		if err != nil {
			l.fail(fmt.Errorf("region %d: %w", m.Region, err))
			return
		}
		r.mapped, r.base, r.size = true, uintptr(m.Address), m.Size
	case kindUnknown:
		if r == nil || r.mapped {
			l.fail(errFrame)
			return
		}
		delete(l.regions, m.Region)
		for _, x := range slices.Clone(l.queue) {
			if x.cur.Len > 0 && x.cur.DstRegion == m.Region {
				x.fail(contract.Cause_CAUSE_BOUNDS, fmt.Sprintf("the receiver has no region %d", m.Region))
			}
		}
	case kindWithdraw:
		if r == nil || !r.mapped {
			l.tell(message{Kind: kindUnmapped, Region: m.Region})
			return
		}
		delete(l.regions, m.Region)
		r.withdrawn = true
		l.returnRegion(r)
	default:
		l.fail(errFrame)
	}
}

// returnRegion gives a withdrawn region back when no request is on its way to it.
func (l *link) returnRegion(r *remote) {
	if r.withdrawn && r.flights == 0 && l.why == nil {
		l.tell(message{Kind: kindUnmapped, Region: r.id})
	}
}

// open tells whether the driver must look at the link again without being asked.
func (l *link) open() bool { return len(l.flights) > 0 || len(l.ending) > 0 }

func (l *link) add(x *xfer) {
	x.link = l
	l.queue = append(l.queue, x)
	l.p.b.driver.links[l] = struct{}{}
}

// step does what can be done now, and reports whether anything was.
func (l *link) step() (moved bool) {
	moved = l.poll()
	if l.why == nil && l.pump() {
		moved = true
	}
	if len(l.ending) > 0 {
		now := time.Now()
		for _, x := range slices.Clone(l.ending) {
			if now.After(x.until) {
				x.end(func(quiet bool) { x.op.Aborted(quiet) })
			}
		}
	}
	if l.why != nil {
		l.settle()
	} else if len(l.flights) == 0 && len(l.queue) == 0 {
		delete(l.p.b.driver.links, l)
	}
	if len(l.owed) > 0 {
		l.owed = slices.DeleteFunc(l.owed, func(x *xfer) bool {
			if x.quiet() {
				x.op.Quiesced()
				return true
			}
			return false
		})
	}
	return moved
}

// settle follows a broken link to its end.
func (l *link) settle() {
	if len(l.flights) > 0 {
		return
	}
	if !l.gone {
		l.gone = true
		l.p.b.driver.agent.forget(l.remote)
	}
	for _, x := range l.owed {
		if !x.quiet() {
			delete(l.p.b.driver.links, l) // a proof brings it back
			l.p.want()
			return
		}
	}
	delete(l.p.b.driver.links, l)
	l.p.broken = slices.DeleteFunc(l.p.broken, func(o *link) bool { return o == l })
	l.p.tidy()
}

// poll asks after every request.
func (l *link) poll() (moved bool) {
	a := l.p.b.driver.agent
	for _, f := range l.flights {
		if st := a.status(f.req); st != statusInProgress {
			moved = true
			l.landed(f, st)
		}
	}
	if moved {
		l.flights = slices.DeleteFunc(l.flights, func(f *flight) bool { return f.req.released() })
	}
	return moved
}

// landed takes the end of a request.
func (l *link) landed(f *flight, st status) {
	l.p.b.driver.agent.release(f.req)
	x := f.x
	x.flying--
	x.bytes -= f.bytes
	l.bytes -= f.bytes
	for _, r := range f.regions {
		r.flights--
		l.returnRegion(r)
	}
	if st < 0 {
		x.uncertain = true
		l.p.b.count.failed.Add(1)
		x.fail(contract.Cause_CAUSE_TRANSPORT, st.err("transfer").Error())
		l.fail(st.err("transfer"))
		return
	}
	x.moved += f.bytes
	l.p.b.count.bytesOut.Add(f.bytes)
	switch {
	case x.ended:
	case x.cancelled:
		if x.flying == 0 {
			x.end(func(quiet bool) { x.op.Aborted(quiet) })
		}
	case x.flying == 0 && x.dry && x.cur.Len == 0:
		x.end(func(bool) { x.op.Done(lane) })
	default:
		x.op.Progress(x.moved)
	}
}

// pump posts what the windows allow.
func (l *link) pump() (moved bool) {
	for i := 0; i < len(l.queue) && l.bytes < peerBytes && l.why == nil; {
		x := l.queue[i]
		for l.why == nil && !x.ended && x.bytes < opBytes && l.bytes < peerBytes && l.post(x) {
			moved = true
		}
		if l.why != nil {
			return true
		}
		if i < len(l.queue) && l.queue[i] == x {
			if x.dry && x.cur.Len == 0 {
				l.unqueue(x)
				continue
			}
			i++
		}
	}
	return moved
}

func (l *link) unqueue(x *xfer) {
	if i := slices.Index(l.queue, x); i >= 0 {
		l.queue = slices.Delete(l.queue, i, i+1)
	}
}

// post makes one request of an op and posts it; false when it has nothing to post now.
func (l *link) post(x *xfer) bool {
	d := l.p.b.driver
	pieces, n := d.pieces[:0], uint64(0)
	var regions []*remote
	for n < requestBytes && len(pieces) < requestPieces && x.peek() {
		r := l.regions[x.cur.DstRegion]
		if r == nil {
			r = &remote{id: x.cur.DstRegion}
			l.regions[r.id] = r
			l.tell(message{Kind: kindMap, Region: r.id})
			if l.why != nil {
				return false
			}
		}
		if !r.mapped {
			break
		}
		if x.cur.DstOff > r.size || x.cur.Len > r.size-x.cur.DstOff {
			x.fail(contract.Cause_CAUSE_BOUNDS, fmt.Sprintf("region %d has no bytes [%d,+%d)", r.id, x.cur.DstOff, x.cur.Len))
			return false
		}
		if !slices.Contains(regions, r) {
			regions = append(regions, r)
		}
		c := x.take(requestBytes - n)
		pieces = append(pieces, piece{address(c.Src.Bytes) + uintptr(c.SrcOff), r.base + uintptr(c.DstOff), c.Len})
		n += c.Len
	}
	d.pieces = pieces
	if n == 0 {
		if x.dry && x.cur.Len == 0 && x.flying == 0 && !x.ended { // an op of no bytes
			x.end(func(bool) { x.op.Done(lane) })
			return true
		}
		return false
	}
	req, err := d.agent.write(l.remote, pieces)
	if err != nil {
		x.fail(contract.Cause_CAUSE_TRANSPORT, err.Error())
		l.fail(err)
		return true
	}
	f := &flight{x: x, req: req, bytes: n, regions: regions}
	x.flying++
	x.bytes += n
	l.bytes += n
	for _, r := range regions {
		r.flights++
	}
	if st := d.agent.post(req); st != statusInProgress {
		l.landed(f, st)
		return true
	}
	l.flights = append(l.flights, f)
	return true
}

// fail ends the link. Its ops end too, those that have not begun move on to the next one.
func (l *link) fail(err error) {
	if l.why != nil {
		return
	}
	l.why = err
	l.close()
	p := l.p
	if p.link == l {
		p.link = nil
	}
	p.broken = append(p.broken, l)
	p.b.driver.links[l] = struct{}{}
	seen := map[*xfer]bool{}
	list := slices.Clone(l.queue)
	for _, f := range l.flights {
		list = append(list, f.x)
	}
	l.queue = nil
	for _, x := range list {
		if seen[x] || x.ended {
			continue
		}
		seen[x] = true
		if x.flying == 0 && x.moved == 0 && !x.uncertain && !p.removed {
			x.rewind()
			p.submit(x)
			continue
		}
		x.fail(contract.Cause_CAUSE_TRANSPORT, err.Error())
	}
}

// close ends the control connection, by which the receiver destroys its agent.
func (l *link) close() {
	l.s.conn.Close()
	close(l.say)
	l.say = nil
}

// peek makes cur the next bytes to write; false when there are none.
func (x *xfer) peek() bool {
	if x.cur.Len > 0 {
		return true
	}
	if x.dry {
		return false
	}
	if x.next == nil {
		x.next, x.stop = iter.Pull(x.op.Copies())
	}
	var ok bool
	if x.cur, ok = x.next(); !ok {
		x.dry, x.cur = true, sdk.Copy{}
	}
	return ok
}

// take cuts at most n bytes off cur.
func (x *xfer) take(n uint64) sdk.Copy {
	c := x.cur
	c.Len = min(c.Len, n)
	x.cur.SrcOff += c.Len
	x.cur.DstOff += c.Len
	x.cur.Len -= c.Len
	return c
}

// rewind makes x as it was before it was taken.
func (x *xfer) rewind() {
	if x.stop != nil {
		x.stop()
	}
	x.next, x.stop, x.cur, x.dry, x.link = nil, nil, sdk.Copy{}, false, nil
}

// quiet tells whether no byte of the op can land any more, and none of its source is read: every request has ended,
// and well, or else the receiver's agent is destroyed.
func (x *xfer) quiet() bool {
	return x.flying == 0 && (!x.uncertain || x.link.proved)
}

func (x *xfer) fail(cause contract.Cause, detail string) {
	if !x.ended {
		x.end(func(quiet bool) { x.op.Fail(cause, quiet, "%s", detail) })
	}
}

// cancel is what the op's context asks for.
func (x *xfer) cancel(p *peer) {
	if x.ended || x.cancelled {
		return
	}
	x.cancelled = true
	if x.flying == 0 {
		p.pending = slices.DeleteFunc(p.pending, func(o *xfer) bool { return o == x })
		x.end(func(quiet bool) { x.op.Aborted(quiet) })
		return
	}
	x.until = time.Now().Add(abortBound)
	x.link.unqueue(x)
	x.link.ending = append(x.link.ending, x)
}

// end tells the SDK, once.
func (x *xfer) end(tell func(quiet bool)) {
	x.ended = true
	x.unhook()
	if x.stop != nil {
		x.stop()
		x.stop = nil
	}
	x.dry, x.cur = true, sdk.Copy{}
	quiet := x.quiet()
	if l := x.link; l != nil {
		l.unqueue(x)
		l.ending = slices.DeleteFunc(l.ending, func(o *xfer) bool { return o == x })
		if !quiet {
			l.owed = append(l.owed, x)
		}
	}
	tell(quiet)
}
