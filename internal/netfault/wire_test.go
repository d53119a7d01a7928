package netfault

import (
	"container/heap"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// The ends of the wire, and with them the directions: what goes from an end has its number.
const (
	endA = 0
	endB = 1
)

// lane is what a packet belongs to.
type lane int

const (
	control lane = iota // between the engines
	data                // between the plugins
	other               // always passed on
	lanes
)

// treatment is what the wire does to the packets of a lane in one direction.
type treatment struct {
	drop        bool
	reset       bool          // both ends are told that the connection is over, as a firewall does that has forgotten it
	resetSender bool          // only the sender is
	mute        bool          // packets with bytes for the other end are lost: connections come up and stand
	most        int           // longer packets are lost; 0: none
	delay       time.Duration // of each packet
	spread      time.Duration // more delay, by chance: packets overtake each other
	loss        float64       // of packets
	double      float64       // of packets: they come twice
	rate        float64       // bytes a second; 0: any
}

// slowQueue is how much a slow wire holds before it drops.
const slowQueue = 300 * time.Millisecond

// wire carries frames between two hosts.
type wire struct {
	hosts [2]*host
	wg    sync.WaitGroup

	mu    sync.Mutex
	treat [2][lanes]treatment
	rng   *rand.Rand
	free  [2]time.Time // when a slow wire is free for the next packet

	passed [lanes]atomic.Int64 // bytes, both directions
	hit    atomic.Int64        // packets that were not passed on as they came
}

// frame is one on its way.
type frame struct {
	due  time.Time
	turn uint64
	b    []byte
}

func newWire(hosts [2]*host, seed uint64) *wire {
	w := &wire{hosts: hosts, rng: rand.New(rand.NewPCG(seed, 0x77697265))}
	for end := range hosts {
		out := make(chan frame, 4096)
		w.wg.Go(func() { w.read(end, out) })
		w.wg.Go(func() { w.deliver(1-end, out) })
	}
	return w
}

// close ends the wire; hosts' cables are closed.
func (w *wire) close() {
	for _, h := range w.hosts {
		h.far.Close()
	}
	w.wg.Wait()
}

// set treats the packets of some lanes that come from the given ends.
func (w *wire) set(t treatment, ends []int, of ...lane) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range ends {
		for _, l := range of {
			w.treat[e][l] = t
		}
	}
}

// heal makes the wire as new.
func (w *wire) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.treat = [2][lanes]treatment{}
}

// read takes frames off one end.
func (w *wire) read(end int, out chan<- frame) {
	defer close(out)
	buf := make([]byte, 1<<17)
	var turn uint64
	for {
		n, err := w.hosts[end].far.Read(buf)
		if err != nil {
			if errors.Is(err, os.ErrClosed) {
				return
			}
			continue // the cable is down
		}
		p := parse(buf[:n])
		for _, f := range w.treatPacket(end, p) {
			turn++
			f.turn = turn
			select {
			case out <- f:
			default: // it is full: lost, as in a switch
			}
		}
		w.answerReset(end, p)
	}
}

// treatPacket returns the copies of a packet that go on.
func (w *wire) treatPacket(end int, p packet) []frame {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.treat[end][p.lane]
	now := time.Now()
	f := frame{due: now.Add(t.delay), b: append([]byte(nil), p.all...)}
	if t != (treatment{}) {
		w.hit.Add(1)
	}
	if t.drop || t.reset || t.resetSender || t.mute && p.n > 0 || t.most > 0 && len(p.all) > t.most+vnetLen+ethLen || t.loss > 0 && w.rng.Float64() < t.loss {
		return nil
	}
	if t.spread > 0 {
		f.due = f.due.Add(time.Duration(w.rng.Int64N(int64(t.spread))))
	}
	if t.rate > 0 {
		if w.free[end].Before(now) {
			w.free[end] = now
		}
		if w.free[end].Sub(now) > slowQueue {
			return nil
		}
		w.free[end] = w.free[end].Add(time.Duration(float64(len(p.all)) / t.rate * float64(time.Second)))
		if f.due.Before(w.free[end]) {
			f.due = w.free[end]
		}
	}
	w.passed[p.lane].Add(int64(len(p.all)))
	if t.double > 0 && w.rng.Float64() < t.double {
		return []frame{f, f}
	}
	return []frame{f}
}

// deliver hands frames to one end when they are due.
func (w *wire) deliver(end int, in <-chan frame) {
	var waiting frames
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		for len(waiting) > 0 {
			d := time.Until(waiting[0].due)
			if d > 0 {
				timer.Reset(d)
				break
			}
			_, _ = w.hosts[end].far.Write(heap.Pop(&waiting).(frame).b) // a cable that is down takes none
		}
		select {
		case f, ok := <-in:
			if !ok {
				return
			}
			heap.Push(&waiting, f)
		case <-timer.C:
		}
	}
}

// frames is a heap: the first due is on top, and of those due at once the one that came first.
type frames []frame

func (h frames) Len() int { return len(h) }
func (h frames) Less(i, j int) bool {
	if h[i].due.Equal(h[j].due) {
		return h[i].turn < h[j].turn
	}
	return h[i].due.Before(h[j].due)
}
func (h frames) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *frames) Push(x any)   { *h = append(*h, x.(frame)) }
func (h *frames) Pop() any {
	old := *h
	f := old[len(old)-1]
	old[len(old)-1] = frame{}
	*h = old[:len(old)-1]
	return f
}

// Lengths of the headers, and flags of TCP.
const (
	vnetLen = 10
	ethLen  = 14
	ipLen   = 20
	tcpLen  = 20

	flagFIN = 1
	flagSYN = 2
	flagRST = 4
	flagACK = 16
)

// packet is a frame taken apart.
type packet struct {
	all  []byte // with the virtio header
	ip   []byte
	tcp  []byte // header and what follows; nil: it is none
	lane lane
	n    int // bytes of the TCP segment
}

func parse(b []byte) packet {
	p := packet{all: b, lane: other}
	if len(b) < vnetLen+ethLen+ipLen || b[vnetLen+12] != 8 || b[vnetLen+13] != 0 { // IPv4
		return p
	}
	p.ip = b[vnetLen+ethLen:]
	at := int(p.ip[0]&15) * 4
	if p.ip[9] != 6 || len(p.ip) < at+tcpLen {
		return p
	}
	p.tcp = p.ip[at:]
	p.n = int(binary.BigEndian.Uint16(p.ip[2:])) - at - int(p.tcp[12]>>4)*4
	for _, port := range []uint16{binary.BigEndian.Uint16(p.tcp), binary.BigEndian.Uint16(p.tcp[2:])} {
		switch port {
		case controlPort:
			p.lane = control
		case dataPort:
			p.lane = data
		}
	}
	return p
}

// answerReset tells both ends of a packet's connection that it is over, if that is to be, or only its sender. Either takes it only if the sequence
// number is exactly what it expects next: that is what the packet says.
func (w *wire) answerReset(end int, p packet) {
	w.mu.Lock()
	t := w.treat[end][p.lane]
	w.mu.Unlock()
	if !t.reset && !t.resetSender || p.tcp == nil || p.tcp[13]&flagRST != 0 {
		return
	}
	seq, ack := binary.BigEndian.Uint32(p.tcp[4:]), binary.BigEndian.Uint32(p.tcp[8:])
	past := seq + uint32(p.n)
	if p.tcp[13]&(flagSYN|flagFIN) != 0 {
		past++
	}
	if p.tcp[13]&flagACK == 0 {
		ack = 0
	}
	_, _ = w.hosts[end].far.Write(resetFrame(p, true, ack, past))
	if t.reset && p.tcp[13]&flagSYN == 0 {
		_, _ = w.hosts[1-end].far.Write(resetFrame(p, false, seq, ack))
	}
}

// resetFrame makes a RST of p's connection, back to its sender or on to its receiver.
func resetFrame(p packet, back bool, seq, ack uint32) []byte {
	b := make([]byte, vnetLen+ethLen+ipLen+tcpLen)
	eth, from := b[vnetLen:], p.all[vnetLen:]
	ip, tcp := eth[ethLen:], eth[ethLen+ipLen:]
	copy(eth, from[:ethLen])
	ip[0], ip[3], ip[8], ip[9] = 0x45, ipLen+tcpLen, 64, 6
	copy(ip[12:20], p.ip[12:20])
	copy(tcp, p.tcp[:4])
	if back {
		copy(eth[0:6], from[6:12])
		copy(eth[6:12], from[0:6])
		copy(ip[12:16], p.ip[16:20])
		copy(ip[16:20], p.ip[12:16])
		copy(tcp[0:2], p.tcp[2:4])
		copy(tcp[2:4], p.tcp[0:2])
	}
	binary.BigEndian.PutUint32(tcp[4:], seq)
	binary.BigEndian.PutUint32(tcp[8:], ack)
	tcp[12], tcp[13] = tcpLen/4<<4, flagRST|flagACK
	binary.BigEndian.PutUint16(ip[10:], checksum(0, ip[:ipLen]))
	sum := uint32(6 + tcpLen)
	for i := 12; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(tcp[16:], checksum(sum, tcp))
	return b
}

func checksum(sum uint32, b []byte) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
