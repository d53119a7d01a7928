package sim

import "github.com/terminus-kv/terminus/core"

// wire is the one network link of an engine, in virtual time. The peers that have ops in flight share its
// rate equally; the ops of one peer go one after the other. That is about what happens to TCP streams or RDMA
// queue pairs, of which a backend has one or a few a peer: those that meet at a bottleneck get equal parts of it
// (congestion control, or the NIC's arbitration in turns), and each keeps its order. The link never idles while
// there is something to send, whoever sends it, so that policies differ in order only.
//
// Time is whole nanoseconds and so is service: an op takes size / rate of the link if it has it alone.
type wire struct {
	rate int64 // bytes a second
	now  int64
	// served is the service that a peer got which had ops in flight all the time: it grows by a busy-th of
	// the time; rest is what division left.
	served, rest int64
	busy         int64
	peers        [][]flight // in flight, by peer, in order
}

type flight struct {
	op    core.OpID
	bytes int64
	end   int64 // of the first of a peer: when served has grown to it, the op is done
}

func newWire(rate int64, peers int) *wire { return &wire{rate: rate, peers: make([][]flight, peers)} }

// send puts an op behind those of its peer.
func (w *wire) send(peer core.PeerID, op core.OpID, bytes int64) {
	q := append(w.peers[peer], flight{op: op, bytes: bytes})
	w.peers[peer] = q
	if len(q) == 1 {
		w.busy++
		w.start(peer)
	}
}

// start lets the first op of a peer be served.
func (w *wire) start(peer core.PeerID) {
	f := &w.peers[peer][0]
	f.end = w.served + max(1, (f.bytes*1e9+w.rate-1)/w.rate)
}

// next is when the next op is done.
func (w *wire) next() (at int64, ok bool) {
	for _, q := range w.peers {
		if len(q) > 0 {
			if t := w.now + (q[0].end-w.served)*w.busy - w.rest; !ok || t < at {
				at, ok = t, true
			}
		}
	}
	return max(at, w.now), ok
}

// advance goes on to a time that is not after next, and tells which ops are done then.
func (w *wire) advance(to int64, done func(f flight)) {
	if w.busy == 0 {
		w.now, w.rest = to, 0
		return
	}
	w.rest += to - w.now
	w.now = to
	w.served += w.rest / w.busy
	w.rest %= w.busy
	for p := range w.peers {
		if q := w.peers[p]; len(q) > 0 && q[0].end <= w.served {
			w.peers[p] = q[1:]
			done(q[0])
			if len(q) > 1 {
				w.start(core.PeerID(p))
			} else {
				w.busy--
			}
		}
	}
}
