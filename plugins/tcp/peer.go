package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"golang.org/x/sys/unix"
)

const (
	firstBackoff = 10 * time.Millisecond
	lastBackoff  = time.Second
	slowBackoff  = 30 * time.Second
	moreEvery    = time.Second // between attempts at one more connection
	maxTries     = 3           // connections lost under an op that has not begun
	maxRetired   = 4           // connections that take no new op and still have old ones
	maxSettlers  = 256         // peers, removed ones that are still asked about lost ops included
)

// peer is a plugin epoch that local ops write to. Its connections are made when ops need them.
type peer struct {
	b      *Backend
	sdk    *sdk.Peer
	ep     endpoint
	target instance
	alive  *lockFile // nil: no proof of death
	ctx    context.Context
	cancel context.CancelFunc
	conns  sync.WaitGroup // connections
	dialer sync.WaitGroup // dialLoop
	hurry  chan struct{}  // 1: ends a pause of dialLoop

	mu       sync.Mutex
	closed   bool
	admitted bool        // the receiver has welcomed us once
	slots    []*outbound // live connections, nil where there is none
	retired  []*outbound
	pending  []*xfer // ops that wait for a connection
	ops      int     // not ended
	dialing  bool
	more     bool // one more connection would help
	moreAt   time.Time
	noShm    bool // the receiver could not map a region
	nextConn uint64
	lost     map[uint64][]*xfer // ended, not quiet: by lost connection
	lostAt   time.Time
}

// laneError says that the demanded lane cannot be had.
func laneError(format string, args ...any) error {
	return &sdk.Error{Cause: contract.Cause_CAUSE_LANE, Err: fmt.Errorf(format, args...)}
}

// slowest returns the slowest lane that the host allows.
func slowest(p *sdk.Peer) contract.Lane {
	if p.RequireLane == contract.Lane_LANE_UNSPECIFIED {
		return contract.Lane_LANE_ANY
	}
	return p.RequireLane
}

// AddPeer implements sdk.Backend. It connects nothing: the receiver may not admit us yet.
func (b *Backend) AddPeer(sp *sdk.Peer) (contract.Lane, error) {
	ep, target, err := decodeEndpoint(sp.Endpoint)
	if err != nil {
		return 0, fmt.Errorf("peer %s: %w", sp.Node, err)
	}
	if len(sp.Token) != tokenLen {
		return 0, fmt.Errorf("peer %s: token of %d bytes, %d are needed", sp.Node, len(sp.Token), tokenLen)
	}
	p := &peer{
		b: b, sdk: sp, ep: ep, target: target,
		slots: make([]*outbound, b.cfg.Connections),
		hurry: make(chan struct{}, 1),
		lost:  map[uint64][]*xfer{},
	}
	lane, err := p.lane()
	if err != nil {
		return 0, err
	}
	if sp.SameHost && ep.Host == b.start.HostID {
		p.alive = watchLock(ep)
	}
	p.ctx, p.cancel = context.WithCancel(b.ctx)
	sp.Data = p
	b.mu.Lock()
	b.peers[p] = struct{}{}
	b.mu.Unlock()
	return lane, nil
}

// lane returns the lane that ops will take, LANE_ANY when the first connection will tell.
func (p *peer) lane() (contract.Lane, error) {
	need := slowest(p.sdk)
	shm := p.shm()
	switch {
	case need < contract.Lane_LANE_SHM:
		return 0, laneError("lane %s is required; tcp offers %s and %s", need, contract.Lane_LANE_SHM, contract.Lane_LANE_TCP)
	case need < contract.Lane_LANE_TCP && !shm:
		return 0, laneError("lane %s is required and only %s exists: the peer is on another host, or shm is off at one end", need, contract.Lane_LANE_TCP)
	case need < contract.Lane_LANE_TCP:
		return contract.Lane_LANE_SHM, nil
	case !shm && len(p.ep.TCP) == 0:
		return 0, errors.New("its endpoint has no address")
	case !shm:
		return contract.Lane_LANE_TCP, nil
	}
	return contract.Lane_LANE_ANY, nil
}

// shm tells whether the shm lane may be tried.
func (p *peer) shm() bool {
	return p.b.cfg.Shm && !p.noShm && p.sdk.SameHost && p.ep.Unix != "" && p.ep.Host == p.b.start.HostID
}

// RemovePeer implements sdk.Backend.
func (b *Backend) RemovePeer(sp *sdk.Peer) {
	if p, ok := sp.Data.(*peer); ok {
		b.mu.Lock()
		settle := len(b.peers) < maxSettlers
		b.mu.Unlock()
		p.close(settle)
	}
}

// Transfer implements sdk.Backend. It queues the op and returns.
func (b *Backend) Transfer(op *sdk.Op) {
	p, ok := op.Peer().Data.(*peer)
	if !ok {
		op.Fail(contract.Cause_CAUSE_PROTOCOL, true, "peer %s is not added", op.Peer().Node)
		return
	}
	op.Async()
	x := &xfer{
		op:    op,
		total: op.Bytes(),
		until: time.Now().Add(milliseconds(b.cfg.ConnectTimeout)),
	}
	if x.total == 0 {
		lane := contract.Lane_LANE_TCP
		if p.shm() {
			lane = contract.Lane_LANE_SHM
		}
		op.Done(lane)
		return
	}
	p.submit(x)
}

func (p *peer) submit(x *xfer) {
	var buf [1]ending
	out := buf[:0]
	p.mu.Lock()
	p.ops++
	// The watch may fire at once: cancel waits for the lock.
	x.unhook = context.AfterFunc(x.op.Context(), func() { p.abort(x) })
	switch {
	case p.closed:
		out = p.finish(x, ending{kind: endFailed, cause: contract.Cause_CAUSE_PEER_UNREACHABLE, quiet: true, detail: "the peer was removed"}, out)
	case p.ops > maxOpsPerPeer:
		out = p.finish(x, ending{kind: endFailed, cause: contract.Cause_CAUSE_LIMIT, quiet: true, detail: fmt.Sprintf("more than %d ops to one peer", maxOpsPerPeer)}, out)
	default:
		p.place(x)
	}
	p.mu.Unlock()
	deliver(out)
}

// place gives x to the least loaded connection or lets it wait for one. p.mu is held.
func (p *peer) place(x *xfer) {
	var best *outbound
	free := false
	for _, c := range p.slots {
		switch {
		case c == nil:
			free = true
		case best == nil || c.load < best.load:
			best = c
		}
	}
	if best == nil {
		x.pending = true
		p.pending = append(p.pending, x)
		if len(p.pending) == 1 || !p.dialing {
			p.dial()
		}
		return
	}
	if free && best.load > 0 && !p.dialing && time.Now().After(p.moreAt) {
		p.more = true
		p.dial()
	}
	best.add(x)
}

// abort ends x because its context is done.
func (p *peer) abort(x *xfer) {
	var buf [1]ending
	out := buf[:0]
	p.mu.Lock()
	x.cancelled = true
	switch {
	case x.ended:
	case x.id == 0: // nothing was sent
		out = p.finish(x, ending{kind: endAborted, quiet: true}, out)
	default:
		p.ask(x)
	}
	p.mu.Unlock()
	deliver(out)
}

// ask sends a cancel for an op that has begun. The receiver answers after its last slice; when it does
// not in time, the op ends as not quiet. p.mu is held.
func (p *peer) ask(x *xfer) {
	if x.asked || x.late.kind != 0 {
		return
	}
	x.asked = true
	x.c.unqueue(x)
	x.c.cancels = append(x.c.cancels, x)
	x.c.wake.Signal()
	x.abortTimer = time.AfterFunc(milliseconds(p.b.cfg.AbortTimeout), func() { p.abandon(x) })
}

// abandon ends an op whose cancel was not answered. New ops get another connection.
func (p *peer) abandon(x *xfer) {
	p.mu.Lock()
	if x.ended || x.c == nil {
		p.mu.Unlock()
		return
	}
	x.ended = true
	p.ops--
	e := ending{kind: endAborted}
	if !x.writing && x.why.kind != 0 {
		e = x.why
	}
	e.x, e.quiet = x, false
	p.retire(x.c)
	p.mu.Unlock()
	e.deliver()
}

// finish ends x and appends what the SDK must be told. e.x need not be set. p.mu is held.
func (p *peer) finish(x *xfer, e ending, out []ending) []ending {
	e.x = x
	if x.writing { // the pump reads its pages: settle comes back
		x.late = e
		return out
	}
	if x.pending {
		x.pending = false
		p.pending = slices.DeleteFunc(p.pending, func(y *xfer) bool { return y == x })
	}
	c := x.c
	if c != nil {
		c.drop(x)
	}
	if x.abortTimer != nil {
		x.abortTimer.Stop()
	}
	if e.kind == endMove && !x.ended {
		x.rewind()
		if !x.cancelled && !p.closed {
			p.place(x)
			return out
		}
		e = ending{x: x, kind: endAborted, quiet: true}
	}
	if x.stop != nil {
		x.stop()
		x.stop, x.next = nil, nil
	}
	switch {
	case !x.ended:
		x.ended = true
		p.ops--
		out = append(out, e)
	case e.quiet:
		out = append(out, ending{x: x, kind: endQuiesced})
	}
	if !e.quiet && c != nil {
		p.lost[c.number] = append(p.lost[c.number], x)
	}
	return out
}

// retire takes a connection out of use for new ops. It closes when its last op ends. p.mu is held.
func (p *peer) retire(c *outbound) {
	i := slices.Index(p.slots, c)
	if i < 0 {
		return
	}
	p.slots[i] = nil
	p.retired = append(p.retired, c)
	if c.load == 0 {
		c.shut(nil)
	}
	if len(p.retired) > maxRetired {
		p.retired[0].shut(errors.New("too many connections whose receiver does not answer"))
	}
}

// lose ends what was on a connection that is over: reader and pump have ended.
func (p *peer) lose(c *outbound) {
	var out []ending
	p.mu.Lock()
	if i := slices.Index(p.slots, c); i >= 0 {
		p.slots[i] = nil
	}
	p.retired = slices.DeleteFunc(p.retired, func(o *outbound) bool { return o == c })
	err := c.err
	if err == nil {
		err = errors.New("the peer closed the connection")
	}
	cause := contract.Cause_CAUSE_TRANSPORT
	if errors.Is(err, unix.EFAULT) {
		cause = contract.Cause_CAUSE_INTERNAL
	}
	e := ending{kind: endFailed, cause: cause, detail: fmt.Sprintf("connection to %s lost: %v", p.sdk.Node, err)}
	for _, x := range c.ops {
		out = p.finish(x, e, out)
	}
	e.quiet = true // what follows was never sent
	for len(c.ready) > 0 {
		x := c.ready[0]
		if x.tries++; x.tries > maxTries || p.closed {
			out = p.finish(x, e, out)
			continue
		}
		c.drop(x)
		x.rewind()
		p.place(x)
	}
	if len(p.lost) > 0 {
		p.lostAt = time.Now()
		if !p.closed {
			p.dial()
		}
	}
	if !p.closed && c.err != nil {
		p.b.count.connectionsLost.Add(1)
	}
	p.mu.Unlock()
	deliver(out)
}

// forget takes a source region back from the receiver.
func (p *peer) forget(region uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range append(slices.Clone(p.slots), p.retired...) {
		if c != nil && c.lane == contract.Lane_LANE_SHM {
			c.forgets = append(c.forgets, region)
			c.wake.Signal()
		}
	}
}

// close ends the connections and all ops. With settle, ops that are not known to be quiet are asked about
// for the settle timeout; without it, nothing of the peer is left when close returns.
func (p *peer) close(settle bool) {
	var out []ending
	p.mu.Lock()
	p.closed = true
	for len(p.pending) > 0 {
		out = p.finish(p.pending[0], ending{kind: endFailed, cause: contract.Cause_CAUSE_PEER_UNREACHABLE, quiet: true, detail: "the peer was removed"}, out)
	}
	for _, c := range append(slices.Clone(p.slots), p.retired...) {
		if c != nil {
			c.shut(net.ErrClosed)
		}
	}
	p.mu.Unlock()
	deliver(out)
	p.conns.Wait()

	p.mu.Lock()
	settle = settle && p.unsettled()
	if settle {
		p.dial()
	}
	p.mu.Unlock()
	if !settle {
		p.cancel()
		p.dialer.Wait()
		p.settled()
	}
}

// settled ends a closed peer: what is not known to be quiet stays so, unless the receiver is dead.
func (p *peer) settled() {
	var out []ending
	p.mu.Lock()
	if p.alive.dead() {
		out = p.quiesce(nil, out)
	}
	if p.alive != nil {
		p.alive.Close()
		p.alive = nil
	}
	p.mu.Unlock()
	deliver(out)
	p.b.mu.Lock()
	delete(p.b.peers, p)
	p.b.mu.Unlock()
}

// quiesce reports the ops of lost connections as quiet; of all of them when numbers is nil. p.mu is held.
func (p *peer) quiesce(numbers []uint64, out []ending) []ending {
	for n, list := range p.lost {
		if numbers != nil && !slices.Contains(numbers, n) {
			continue
		}
		for _, x := range list {
			out = append(out, ending{x: x, kind: endQuiesced})
		}
		delete(p.lost, n)
	}
	return out
}
