package nixl

import (
	"errors"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// peer is a receiver, seen by its writer. Everything but the constants is of the driver's goroutine.
type peer struct {
	b    *Backend
	sdk  *sdk.Peer
	ep   endpoint
	lock *lockFile // nil: another host, or no proof of its death
	// session tells the receiver the links of this peer from those of the same one added again: each asks only for
	// the proof of its own, and must not end those of the other.
	session string

	link    *link   // that ops take; nil: none
	broken  []*link // that are over and not yet quiet
	pending []*xfer // that wait for a link
	dialing bool
	tries   int // failed dials since the last good one
	removed bool
}

const (
	redialFirst = 20 * time.Millisecond
	redialMost  = time.Second
)

// submit takes an op.
func (p *peer) submit(x *xfer) {
	switch {
	case x.ended:
	case p.removed:
		x.fail(contract.Cause_CAUSE_PEER_UNREACHABLE, "the peer was removed")
	case p.link != nil:
		p.link.add(x)
	default:
		if x.until.IsZero() { // else it has lost a link already
			x.until = time.Now().Add(connectBound)
		}
		p.pending = append(p.pending, x)
		p.want()
	}
}

// want dials when somebody waits for a link, or for the proof that an earlier one is quiet: a welcome is one.
func (p *peer) want() {
	if p.dialing || p.link != nil || len(p.pending) == 0 && !p.owes() {
		return
	}
	p.dialing = true
	delay := time.Duration(0)
	if p.tries > 0 {
		delay = min(redialFirst<<min(p.tries-1, 10), redialMost)
	}
	b := p.b
	go func() {
		select {
		case <-time.After(delay):
		case <-b.ctx.Done():
			return
		}
		if p.lock.dead() {
			b.driver.do(func() { p.dialed(nil, errDead) })
			return
		}
		l, err := p.open()
		b.driver.do(func() { p.dialed(l, err) })
	}()
}

var errDead = errors.New("the process of the peer is gone")

// open makes a link. It runs beside the driver.
func (p *peer) open() (*link, error) {
	b := p.b
	s, m, err := b.dial(b.ctx, p.ep, p.sdk.Token, p.session)
	if err != nil {
		return nil, err
	}
	name := ""
	if len(m.Agent) > maxName {
		err = errFrame
	} else if name, err = b.driver.agent.load(m.Metadata); err == nil && name != m.Agent {
		err = errFrame
	}
	if err != nil {
		s.conn.Close()
		return nil, err
	}
	return newLink(p, s, name), nil
}

func (p *peer) dialed(l *link, err error) {
	p.dialing = false
	if err == nil || errors.Is(err, errFarewell) || errors.Is(err, errDead) {
		p.tries = 0
		for _, old := range p.broken {
			old.proved = true
			p.b.driver.links[old] = struct{}{}
		}
	} else {
		p.tries++
	}
	switch {
	case err == nil && p.removed:
		l.close()
		p.b.driver.agent.forget(l.remote)
	case err == nil:
		p.use(l)
	default:
		now, rest := time.Now(), p.pending[:0]
		for _, x := range p.pending {
			if now.Before(x.until) && !errors.Is(err, errFarewell) && !errors.Is(err, errDead) {
				rest = append(rest, x)
				continue
			}
			cause := contract.Cause_CAUSE_PEER_UNREACHABLE
			var e *sdk.Error
			if errors.As(err, &e) {
				cause = e.Cause
			}
			x.fail(cause, err.Error())
		}
		p.pending = rest
		p.want()
	}
	p.tidy()
}

// use makes l the link that ops take.
func (p *peer) use(l *link) {
	p.link = l
	p.b.driver.links[l] = struct{}{}
	go l.listen()
	go l.speak(l.say)
	list := p.pending
	p.pending = nil
	for _, x := range list {
		if !x.ended {
			l.add(x)
		}
	}
}

// owes tells whether an op of a broken link waits for the proof that it is quiet.
func (p *peer) owes() bool {
	for _, l := range p.broken {
		if !l.proved && (len(l.owed) > 0 || len(l.flights) > 0) {
			return true
		}
	}
	return false
}

// remove lets go of the peer. Its ops have ended; those that are not quiet are followed to their quiet.
func (p *peer) remove() {
	p.removed = true
	for _, x := range p.pending {
		x.fail(contract.Cause_CAUSE_PEER_UNREACHABLE, "the peer was removed")
	}
	p.pending = nil
	if p.link != nil {
		p.link.fail(errors.New("the peer was removed"))
	}
	p.tidy()
}

// tidy closes what is of no more use when the peer was removed.
func (p *peer) tidy() {
	if p.removed && len(p.broken) == 0 && !p.dialing {
		p.lock.Close()
		p.lock = nil
	}
}
