package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// dial starts the goroutine that makes connections, or ends its pause. p.mu is held.
func (p *peer) dial() {
	if p.dialing {
		select {
		case p.hurry <- struct{}{}:
		default:
		}
		return
	}
	p.dialing = true
	p.dialer.Go(p.dialLoop)
}

// dialLoop connects as long as ops wait for a connection, or a lost connection has ops that are not
// known to be quiet. Ops wait no longer than the connect timeout. Lost ones are asked about until the peer
// is removed, seldom after the settle timeout: a host that comes back after hours still tells that nothing
// of them can land. The ops of a removed peer are given up after the settle timeout.
func (p *peer) dialLoop() {
	backoff := firstBackoff
	for {
		p.mu.Lock()
		slot := slices.Index(p.slots, nil)
		useful := slot >= 0 && (len(p.pending) > 0 || p.more && !p.closed)
		if !useful && !p.unsettled() || p.ctx.Err() != nil {
			p.dialing = false
			closed := p.closed && p.ctx.Err() == nil
			p.mu.Unlock()
			if closed {
				p.settled()
			}
			return
		}
		p.nextConn++
		number := p.nextConn
		var givenUp []uint64
		for n := range p.lost {
			if givenUp = append(givenUp, n); len(givenUp) == maxGivenUp {
				break
			}
		}
		p.mu.Unlock()

		c, lane, err := p.connect(number, givenUp)

		var out []ending
		p.mu.Lock()
		p.more = false
		if err == nil {
			out = p.attach(slot, newOutbound(p, number, c, lane), givenUp, out)
			backoff = firstBackoff
		} else {
			out = p.failed(err, out)
		}
		again := err != nil && (len(p.pending) > 0 || p.unsettled())
		most := lastBackoff
		if len(p.pending) == 0 && time.Since(p.lostAt) > milliseconds(p.b.cfg.SettleTimeout) {
			most = slowBackoff
		}
		p.mu.Unlock()
		deliver(out)
		if !again {
			continue
		}
		t := time.NewTimer(backoff)
		backoff = min(2*backoff, most)
		select {
		case <-t.C:
		case <-p.hurry:
			backoff = firstBackoff
		case <-p.ctx.Done():
		}
		t.Stop()
	}
}

// unsettled tells whether lost connections are still asked about. p.mu is held.
func (p *peer) unsettled() bool {
	return len(p.lost) > 0 && (!p.closed || time.Since(p.lostAt) < milliseconds(p.b.cfg.SettleTimeout))
}

// attach puts a new connection to work, in no slot if there is none. Its handshake has proved that the
// connections given up are over. p.mu is held.
func (p *peer) attach(slot int, c *outbound, givenUp []uint64, out []ending) []ending {
	p.admitted = true
	if givenUp != nil {
		out = p.quiesce(givenUp, out)
	}
	if p.closed || slot < 0 { // it was made for the handshake alone
		c.conn.Close()
		return out
	}
	p.slots[slot] = c
	p.conns.Go(c.run)
	for len(p.pending) > 0 {
		x := p.pending[0]
		p.pending = p.pending[1:]
		x.pending = false
		c.add(x)
	}
	return out
}

// failed ends what cannot wait any longer for a connection. p.mu is held.
func (p *peer) failed(err error, out []ending) []ending {
	p.moreAt = time.Now().Add(moreEvery)
	dead := p.alive.dead()
	if dead {
		err = fmt.Errorf("its plugin process has ended: %w", err)
	}
	if dead || p.admitted && errors.Is(err, statusUnknown) {
		// Unknown, once admitted: the receiver has dropped us, and nothing of us can land there.
		out = p.quiesce(nil, out)
	}
	cause := contract.Cause_CAUSE_PEER_UNREACHABLE
	var lane *sdk.Error
	if errors.As(err, &lane) {
		cause = lane.Cause
	}
	now := time.Now()
	for _, x := range slices.Clone(p.pending) {
		if dead || cause == contract.Cause_CAUSE_LANE || now.After(x.until) {
			out = p.finish(x, ending{kind: endFailed, cause: cause, quiet: true, detail: fmt.Sprintf("peer %s: %v", p.sdk.Node, err)}, out)
		}
	}
	return out
}

// connect makes one connection: by the unix socket for the shm lane, else by TCP.
func (p *peer) connect(number uint64, givenUp []uint64) (net.Conn, contract.Lane, error) {
	timeout := milliseconds(p.b.cfg.HandshakeTimeout)
	h := hello{
		target: p.target, conn: number,
		node: p.b.start.Node, incarnation: p.b.start.Incarnation, epoch: p.b.start.Epoch,
	}
	try := func(network, addr string) (c net.Conn, reached bool, err error) {
		ctx, cancel := context.WithTimeout(p.ctx, timeout)
		defer cancel()
		var d net.Dialer
		if c, err = d.DialContext(ctx, network, addr); err != nil {
			return nil, false, err
		}
		conn := c // c is nil when this function returns an error; the watch may still be about to run
		quit := context.AfterFunc(p.ctx, func() { conn.Close() })
		if err = tune(c, milliseconds(p.b.cfg.SilenceTimeout)); err == nil {
			err = introduce(c, h, p.sdk.Token, givenUp, timeout)
		}
		if !quit() && err == nil {
			err = p.ctx.Err()
		}
		if err != nil {
			c.Close()
			return nil, true, fmt.Errorf("%s %s: %w", network, addr, err)
		}
		return c, true, nil
	}
	p.mu.Lock()
	shm := p.shm()
	p.mu.Unlock()
	var errs []error
	if shm {
		c, reached, err := try("unix", p.ep.Unix)
		if err == nil {
			return c, contract.Lane_LANE_SHM, nil
		}
		if reached {
			return nil, 0, err
		}
		errs = append(errs, err)
	}
	if need := slowest(p.sdk); need < contract.Lane_LANE_TCP {
		if shm && p.alive != nil {
			return nil, 0, errors.Join(errs...) // it can come back
		}
		return nil, 0, laneError("lane %s is required and only %s is left: %v", need, contract.Lane_LANE_TCP, errors.Join(errs...))
	}
	for _, a := range p.ep.TCP {
		c, _, err := try("tcp", a)
		if err == nil {
			return c, contract.Lane_LANE_TCP, nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		errs = append(errs, errors.New("no address"))
	}
	return nil, 0, errors.Join(errs...)
}
