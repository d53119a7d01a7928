package core

import (
	"math"
	"math/bits"
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// class is a clock with one fixed length. Because the length is fixed, arming puts a timer at the tail
// of its class and the head is always the next one due: no heap, no wheel.
type class uint8

const (
	noClock class = iota
	clkQueue
	clkBootstrap
	clkPeerQueued
	clkRegister
	clkInput
	clkStall
	clkVerdict
	clkDrain
	clkTombstone
	clkQuarantine   // rung 4; not armed when it is 0
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

	// slotTomb links a tombstone into the list of its peer's. An ended room runs no transfer clock.
	slotTomb = slotTransfer
)

var clockNames = [clkTransfer]string{
	"none", "queue", "bootstrap", "peer_queued", "register", "input", "stall", "verdict", "drain", "tombstone", "quarantine",
	"bootstrap", "input", "stall",
}

func (c class) String() string {
	switch {
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

// timer is one clock of a room; prev and next are timer numbers (room*numTimers + slot).
type timer struct {
	due        int64
	prev, next int32
}

// fifo is a list of timers, the first to be due at its head.
type fifo struct{ head, tail int32 }

var emptyFIFO = fifo{nil32, nil32}

type clocks struct {
	length *[numClasses]int64 // never changed
	queue  [numClasses]fifo
	busy   [2]uint64 // classes whose queue is not empty
}

// first is the first class from c on of which a timer runs; numClasses when there is none.
func (k *clocks) first(c class) class {
	if w := k.busy[0] >> c; c < 64 && w != 0 {
		return c + class(bits.TrailingZeros64(w))
	}
	c = max(c, 64)
	if w := k.busy[1] >> (c - 64); w != 0 {
		return c + class(bits.TrailingZeros64(w))
	}
	return numClasses
}

func newClocks(c *Clocks, q *Quarantine) clocks {
	k := clocks{length: new([numClasses]int64)}
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
	k.length[clkQuarantine] = int64(q.Age)
	for i := class(0); i < logs; i++ {
		d := time.Duration(1<<i) * time.Second
		k.length[clkTransfer+i], k.length[clkTransferSrc+i] = int64(d), longer(d)
		k.length[clkDeadline+i], k.length[clkDeadlineSrc+i] = int64(d), longer(d)
	}
	for i := range k.queue {
		k.queue[i] = emptyFIFO
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

func (m *Machine) timer(t int32) *timer { return &m.rooms.at(t / numTimers).timers[t%numTimers] }

// link puts a timer at the tail of a list.
func (m *Machine) link(q *fifo, id int32, t *timer) {
	t.prev, t.next = q.tail, nil32
	if q.tail != nil32 {
		m.timer(q.tail).next = id
	} else {
		q.head = id
	}
	q.tail = id
}

func (m *Machine) unlink(q *fifo, t *timer) {
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
}

// arm starts the class for a slot of a room; an armed timer of that slot is stopped first. Arming the
// same class again renews it.
func (m *Machine) arm(idx int32, r *room, slot int32, c class) {
	m.disarm(r, slot)
	t, q := &r.timers[slot], &m.clocks.queue[c]
	r.class[slot], t.due = c, m.now+m.clocks.length[c]
	if q.tail == nil32 {
		m.clocks.busy[c/64] |= 1 << (c % 64)
	}
	m.link(q, idx*numTimers+slot, t)
}

// keep arms the class unless it already runs.
func (m *Machine) keep(idx int32, r *room, slot int32, c class) {
	if r.class[slot] != c {
		m.arm(idx, r, slot, c)
	}
}

func (m *Machine) disarm(r *room, slot int32) {
	c := r.class[slot]
	if c == noClock {
		return
	}
	q := &m.clocks.queue[c]
	m.unlink(q, &r.timers[slot])
	if q.head == nil32 {
		m.clocks.busy[c/64] &^= 1 << (c % 64)
	}
	r.class[slot] = noClock
}

// Next is the time at which something is due, or 0 when nothing is: a clock of a room, a peer's silence, an
// abort mark, a placeholder. The host calls Step then, or earlier.
func (m *Machine) Next() int64 {
	next := m.NextHeard()
	if m.judgeAt != math.MaxInt64 {
		next = sooner(next, m.judgeAt)
	}
	return next
}

// NextHeard is Next while no peer is silent: for simulators, which need not tell every beat of a peer when
// nothing else happens. The host tells that the peers were heard at the latest when one falls silent.
func (m *Machine) NextHeard() int64 {
	var next int64
	if len(m.markQueue) > 0 {
		next = sooner(next, m.marks[m.markQueue[0].key].due)
	}
	if len(m.holdQueue) > 0 {
		next = sooner(next, m.holdQueue[0].due)
	}
	for i := range m.retirees {
		if r := &m.retirees[i]; !r.killed {
			next = sooner(next, r.due)
		}
	}
	next = sooner(next, m.weighAt)
	for c := m.clocks.first(0); c < numClasses; c = m.clocks.first(c + 1) {
		next = sooner(next, m.timer(m.clocks.queue[c].head).due)
	}
	return next
}

// sooner is the earlier of two times, of which 0 is none.
func sooner(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// expire fires every clock that is due. A clock that fires never re-arms itself in the past, so the
// loop ends.
func (m *Machine) expire() {
	for c := m.clocks.first(0); c < numClasses; c = m.clocks.first(c + 1) {
		for h := m.clocks.queue[c].head; h != nil32 && m.timer(h).due <= m.now; h = m.clocks.queue[c].head {
			m.disarm(m.rooms.at(h/numTimers), h%numTimers)
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
	case clkQuarantine:
		m.rooms.at(idx).aged, m.weigh = true, true
	case clkStall, clkStallSrc:
		// Stalled is a peer towards which nothing moves. An op that waits in the plugin behind others that
		// do move is not; if it is lost, the plugin's Stats or the transfer clock tell.
		if m.moves(m.rooms.at(idx), m.clocks.length[c]) {
			m.arm(idx, m.rooms.at(idx), slotPhase, c)
			return
		}
		fallthrough
	default:
		m.step(idx, statemachine.Event{Kind: statemachine.OnClock, Reason: c.reason()})
	}
}

// moves reports whether bytes moved within a time towards, or from, every engine that a record has ops
// outstanding with.
func (m *Machine) moves(r *room, within int64) bool {
	moved := false
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		p := m.pairs.at(i)
		if !p.outstanding || p.peer == nilPeer {
			continue
		}
		if moved = m.now-m.peer(p.peer).moved < within; !moved {
			return false
		}
	}
	return moved
}

// setClocks makes the clock function total: it arms what the record's state demands. It is called
// after every change of a record; clocks that must restart are armed by the caller before.
func (m *Machine) setClocks(idx int32, r *room) {
	pick := func(judge, source class) class { // whoever is not the judge has clocks that run longer than its
		if r.sm.Role == statemachine.Source || m.voter(r) {
			return source
		}
		return judge
	}
	switch r.sm.State {
	case statemachine.Unbound, statemachine.Opened:
		switch {
		case !r.sm.Admitted:
			m.keep(idx, r, slotPhase, clkQueue)
		case r.sm.Role == statemachine.Destination:
			m.keep(idx, r, slotPhase, clkRegister)
		case r.peerQueued || r.class[slotPhase] == clkPeerQueued: // one total, whoever says it again
			m.keep(idx, r, slotPhase, clkPeerQueued)
		default:
			m.keep(idx, r, slotPhase, clkBootstrapSrc)
		}
	case statemachine.Offered, statemachine.Registered:
		m.keep(idx, r, slotPhase, pick(clkBootstrap, clkBootstrapSrc))
	case statemachine.Confirmed, statemachine.Bound:
		if r.outstanding {
			m.keep(idx, r, slotPhase, pick(clkStall, clkStallSrc))
		} else {
			m.keep(idx, r, slotPhase, pick(clkInput, clkInputSrc))
		}
		if r.sm.Started {
			m.keep(idx, r, slotTransfer, pick(clkTransfer, clkTransferSrc)+class(r.clockLog2))
		}
	case statemachine.Committed, statemachine.Voted:
		m.disarm(r, slotTransfer)
		c := clkVerdict
		if r.sm.State == statemachine.Committed && r.local < r.size {
			// The judge waits for the other engines of this group as long as its input or transfer clock lets it.
			c = clkTransferSrc + class(r.clockLog2)
			if m.clocks.length[clkInputSrc] > m.clocks.length[c] {
				c = clkInputSrc
			}
		}
		m.keep(idx, r, slotPhase, c)
	case statemachine.Ended:
		m.disarm(r, slotTransfer)
		m.disarm(r, slotDeadline)
		switch {
		case r.sm.Rung == statemachine.Drain || r.sm.Rung == statemachine.Fence:
			if r.rungArmed != r.sm.Rung {
				r.rungArmed = r.sm.Rung
				m.arm(idx, r, slotPhase, clkDrain)
			}
		case r.sm.Rung == statemachine.Quarantine && !r.aged && m.cfg.Quarantine.Age > 0:
			m.keep(idx, r, slotPhase, clkQuarantine)
		case m.forgettable(r):
			m.keep(idx, r, slotPhase, clkTombstone)
			m.bury(idx, r)
		default:
			m.disarm(r, slotPhase)
		}
	}
}

// graves are the tombstones of one peer, the oldest first.
type graves struct {
	fifo
	n int32
}

// gravesOf are those of a peer; rooms that never met one have their own.
func (m *Machine) gravesOf(p PeerID) *graves {
	if p == nilPeer {
		return &m.peerless
	}
	return &m.peer(p).tombs
}

func (m *Machine) enterGrave(idx int32, r *room) {
	g := m.gravesOf(r.peer)
	g.n++
	m.link(&g.fifo, idx*numTimers+slotTomb, &r.timers[slotTomb])
}

func (m *Machine) leaveGrave(r *room) {
	g := m.gravesOf(r.peer)
	g.n--
	m.unlink(&g.fifo, &r.timers[slotTomb])
}

// bury counts a new tombstone of a peer; beyond the cap the peer's oldest is evicted, which costs
// nothing but time if its counterpart still asks.
func (m *Machine) bury(idx int32, r *room) {
	if r.buried {
		return
	}
	r.buried = true
	m.freeParts(r) // a tombstone answers without pages
	m.enterGrave(idx, r)
	if g := m.gravesOf(r.peer); g.n > m.cfg.Limits.Tombstones {
		m.evict(g.head / numTimers)
	}
}

// setPeer notes the engine at the other end of a record. A tombstone moves to that peer's.
func (m *Machine) setPeer(idx int32, r *room, to PeerID) {
	if r.buried && r.peer != to {
		m.leaveGrave(r)
		r.peer = to
		m.enterGrave(idx, r)
	}
	r.peer = to
}
