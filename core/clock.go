package core

import (
	"math/bits"
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// class is a clock with one fixed length. Because the length is fixed, arming puts a timer at the tail
// of its class and the head is always the next one due: no heap, no wheel.
type class int16

const (
	noClock class = iota - 1
	clkQueue
	clkBootstrap
	clkPeerQueued
	clkRegister
	clkInput
	clkStall
	clkVerdict
	clkDrain
	clkTombstone
	clkBootstrapSrc // the source's run 10 % longer than the judge's
	clkInputSrc
	clkStallSrc
	clkTransfer    // + log2 of the length in seconds
	clkTransferSrc = clkTransfer + logs
	clkDeadline    = clkTransferSrc + logs
	clkDeadlineSrc = clkDeadline + logs
	numClasses     = clkDeadlineSrc + logs

	logs = 24 // 2^23 s is 97 days
)

// slots of a room's timers
const (
	slotPhase = iota
	slotTransfer
	slotDeadline
	numTimers
)

var clockNames = [clkTransfer]string{
	"queue", "bootstrap", "peer_queued", "register", "input", "stall", "verdict", "drain", "tombstone",
	"bootstrap", "input", "stall",
}

func (c class) String() string {
	switch {
	case c == noClock:
		return "none"
	case c < clkTransfer:
		return clockNames[c]
	case c < clkDeadline:
		return "transfer"
	}
	return "deadline"
}

// reason is the verdict of a live room whose clock of this class expires.
func (c class) reason() statemachine.Reason {
	switch c {
	case clkQueue:
		return statemachine.QueueTimeout
	case clkBootstrap, clkBootstrapSrc:
		return statemachine.BootstrapTimeout
	case clkPeerQueued:
		return statemachine.PeerQueueTimeout
	case clkRegister:
		return statemachine.RegisterTimeout
	case clkInput, clkInputSrc:
		return statemachine.InputTimeout
	case clkStall, clkStallSrc:
		return statemachine.Stalled
	case clkVerdict:
		return statemachine.OutcomeUnknown
	}
	if c >= clkTransfer && c < clkDeadline {
		return statemachine.TransferTimeout
	}
	return statemachine.Deadline
}

// timer is one armed clock of a room; prev and next are timer numbers (room*numTimers + slot).
type timer struct {
	due        int64
	prev, next int32
	class      class
}

// fifo is the queue of one class.
type fifo struct{ head, tail int32 }

type clocks struct {
	length [numClasses]int64
	queue  [numClasses]fifo
}

func newClocks(c *Clocks) clocks {
	var k clocks
	longer := func(d time.Duration) int64 { return int64(d) + int64(d)/10 }
	k.length[clkQueue] = int64(c.Queue)
	k.length[clkBootstrap] = int64(c.Bootstrap)
	k.length[clkBootstrapSrc] = longer(c.Bootstrap)
	k.length[clkPeerQueued] = longer(c.PeerQueued)
	k.length[clkRegister] = int64(c.Register)
	k.length[clkInput] = int64(c.Input)
	k.length[clkInputSrc] = longer(c.Input)
	k.length[clkStall] = int64(c.Stall)
	k.length[clkStallSrc] = longer(c.Stall)
	k.length[clkVerdict] = int64(c.Verdict)
	k.length[clkDrain] = int64(c.Drain)
	k.length[clkTombstone] = int64(c.Tombstone)
	for i := class(0); i < logs; i++ {
		d := time.Duration(1<<i) * time.Second
		k.length[clkTransfer+i], k.length[clkTransferSrc+i] = int64(d), longer(d)
		k.length[clkDeadline+i], k.length[clkDeadlineSrc+i] = int64(d), longer(d)
	}
	for i := range k.queue {
		k.queue[i] = fifo{nil32, nil32}
	}
	return k
}

// log2Seconds rounds d up to a power of two seconds and returns the exponent.
func log2Seconds(d int64) uint8 {
	s := (d + int64(time.Second) - 1) / int64(time.Second)
	if s <= 1 {
		return 0
	}
	return uint8(min(bits.Len64(uint64(s-1)), logs-1))
}

func (m *Machine) timer(t int32) *timer {
	return &m.rooms.items[t/numTimers].timers[t%numTimers]
}

// arm starts the class for a slot of a room; an armed timer of that slot is stopped first. Arming the
// same class again renews it.
func (m *Machine) arm(room int32, slot int, c class) {
	m.disarm(room, slot)
	id := room*numTimers + int32(slot)
	t := m.timer(id)
	q := &m.clocks.queue[c]
	*t = timer{due: m.now + m.clocks.length[c], class: c, prev: q.tail, next: nil32}
	if q.tail != nil32 {
		m.timer(q.tail).next = id
	} else {
		q.head = id
	}
	q.tail = id
}

// keep arms the class unless it already runs.
func (m *Machine) keep(room int32, slot int, c class) {
	if m.rooms.at(room).timers[slot].class != c {
		m.arm(room, slot, c)
	}
}

func (m *Machine) disarm(room int32, slot int) {
	t := &m.rooms.at(room).timers[slot]
	if t.class == noClock {
		return
	}
	q := &m.clocks.queue[t.class]
	if t.prev != nil32 {
		m.timer(t.prev).next = t.next
	} else {
		q.head = t.next
	}
	if t.next != nil32 {
		m.timer(t.next).prev = t.prev
	} else {
		q.tail = t.prev
	}
	*t = timer{class: noClock}
}

// Next is the time at which the first clock is due, or 0 when none runs. The host calls Step then, or
// earlier.
func (m *Machine) Next() int64 {
	var next int64
	for i := range m.clocks.queue {
		if h := m.clocks.queue[i].head; h != nil32 {
			if d := m.timer(h).due; next == 0 || d < next {
				next = d
			}
		}
	}
	return next
}

// expire fires every clock that is due. A clock that fires never re-arms itself in the past, so the
// loop ends.
func (m *Machine) expire() {
	for c := class(0); c < numClasses; c++ {
		for {
			h := m.clocks.queue[c].head
			if h == nil32 || m.timer(h).due > m.now {
				break
			}
			m.disarm(h/numTimers, int(h%numTimers))
			m.fired(h/numTimers, c)
		}
	}
}

func (m *Machine) fired(idx int32, c class) {
	switch c {
	case clkTombstone:
		m.evict(idx)
	case clkDrain:
		m.step(idx, statemachine.Event{Kind: statemachine.OnDrainClock})
	case clkStall, clkStallSrc:
		// Stalled is a peer towards which nothing moves. An op that waits in the plugin behind others that
		// do move is not; if it is lost, the plugin's Stats or the transfer clock tell.
		if id := m.rooms.at(idx).peer; id != nilPeer && m.now-m.peer(id).moved < m.clocks.length[c] {
			m.arm(idx, slotPhase, c)
			return
		}
		fallthrough
	default:
		m.step(idx, statemachine.Event{Kind: statemachine.OnClock, Reason: c.reason()})
	}
}

// setClocks makes the clock function total: it arms what the record's state demands. It is called
// after every change of a record; clocks that must restart are armed by the caller before.
func (m *Machine) setClocks(idx int32) {
	r := m.rooms.at(idx)
	src := r.sm.Role == statemachine.Source
	pick := func(judge, source class) class {
		if src {
			return source
		}
		return judge
	}
	if !r.sm.State.Live() {
		m.disarm(idx, slotTransfer)
		m.disarm(idx, slotDeadline)
	}
	switch r.sm.State {
	case statemachine.Unbound, statemachine.Opened:
		switch {
		case !r.sm.Admitted:
			m.keep(idx, slotPhase, clkQueue)
		case !src:
			m.keep(idx, slotPhase, clkRegister)
		case r.peerQueued:
			m.keep(idx, slotPhase, clkPeerQueued)
		default:
			m.keep(idx, slotPhase, clkBootstrapSrc)
		}
	case statemachine.Offered, statemachine.Registered:
		m.keep(idx, slotPhase, pick(clkBootstrap, clkBootstrapSrc))
	case statemachine.Confirmed, statemachine.Bound:
		if r.outstanding {
			m.keep(idx, slotPhase, pick(clkStall, clkStallSrc))
		} else {
			m.keep(idx, slotPhase, pick(clkInput, clkInputSrc))
		}
		if r.sm.Started {
			m.keep(idx, slotTransfer, pick(clkTransfer, clkTransferSrc)+class(r.clockLog2))
		}
	case statemachine.Committed:
		m.disarm(idx, slotTransfer)
		m.keep(idx, slotPhase, clkVerdict)
	case statemachine.Ended:
		switch {
		case r.sm.Rung == statemachine.Drain || r.sm.Rung == statemachine.Fence:
			if r.rungArmed != r.sm.Rung {
				r.rungArmed = r.sm.Rung
				m.arm(idx, slotPhase, clkDrain)
			}
		case m.forgettable(idx):
			m.keep(idx, slotPhase, clkTombstone)
			m.bury(idx)
		default:
			m.disarm(idx, slotPhase)
		}
	}
}

// bury counts a new tombstone of a peer; beyond the cap the peer's oldest is evicted, which costs
// nothing but time if its counterpart still asks.
func (m *Machine) bury(idx int32) {
	r := m.rooms.at(idx)
	if r.buried {
		return
	}
	r.buried = true
	m.freeParts(idx) // a tombstone answers without pages
	n := m.tombs(r.peer)
	if *n++; *n <= m.cfg.Limits.Tombstones {
		return
	}
	for t := m.clocks.queue[clkTombstone].head; t != nil32; t = m.timer(t).next {
		if old := t / numTimers; m.rooms.at(old).buried && m.rooms.at(old).peer == r.peer {
			m.evict(old)
			return
		}
	}
}

// tombs is the count of tombstones of a peer; rooms that never met one have a count of their own.
func (m *Machine) tombs(p PeerID) *int32 {
	if p == nilPeer {
		return &m.peerless
	}
	return &m.peer(p).tombs
}

// setPeer notes the engine at the other end of a record. A tombstone moves to that peer's count.
func (m *Machine) setPeer(idx int32, to PeerID) {
	r := m.rooms.at(idx)
	if r.buried {
		*m.tombs(r.peer)--
		*m.tombs(to)++
	}
	r.peer = to
}
