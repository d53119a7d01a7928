package sim

// what is the kind of an event of the world.
type what uint8

const (
	wake          what = iota // a: engine; its core has a clock that is due
	deliver                   // a: link, b: side; the head of one of its lanes arrives
	broken                    // a: link, b: side, n: stream; that side sees the stream end
	dial                      // a: link, n: stream
	opStep                    // a: op
	opAbort                   // a: op
	answer                    // a: answer
	open                      // a: life
	act                       // a: life; its worker goes on
	fault                     // a: fault of the plan
	healed                    // a: fault of the plan
	noticed                   // a: epoch; its end is seen by the host
	fenced                    // a: epoch; its lease is at EOF
	pluginUp                  // a: engine, n: incarnation
	workerUp                  // a: worker, n: generation
	engineUp                  // a: engine
	limbo                     // a: worker, n: engine incarnation; the leases of all its epochs are at EOF
	drainEnd                  // a: engine, n: incarnation
	retry                     // a: request
	abortLife                 // a: life; its worker gives it up
	replaceEngine             // a: engine, n: incarnation
	local                     // a: engine, b: frame, n: incarnation
	retire                    // a: engine, n: incarnation; what is quarantined has rested long enough
	stale                     // a: op; its end comes after its plugin's
	orphanEnds                // a: epoch
	upgrade                   // a: epoch; the one that replaces it is ready
	kept                      // a: epoch; it could not be replaced
	gone                      // a: engine, b: that peer, n: incarnation of the peer that is proven dead
)

// due is an event of the world at its time.
type due struct {
	at   int64
	seq  uint32 // events of the same time keep their order
	what what
	a, b int32
	n    uint64
}

// queue is a heap of events.
type queue struct {
	heap []due
	seq  uint32
}

func (d *due) before(o *due) bool { return d.at < o.at || d.at == o.at && d.seq < o.seq }

func (q *queue) push(d due) {
	q.seq++
	d.seq = q.seq
	q.heap = append(q.heap, d)
	i := len(q.heap) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !d.before(&q.heap[up]) {
			break
		}
		q.heap[i] = q.heap[up]
		i = up
	}
	q.heap[i] = d
}

func (q *queue) pop() due {
	top, n := q.heap[0], len(q.heap)-1
	last := q.heap[n]
	h := q.heap[:n]
	q.heap = h
	if n == 0 {
		return top
	}
	i := 0
	for c := 1; c < n; c = 2*i + 1 {
		if c+1 < n && h[c+1].before(&h[c]) {
			c++
		}
		if !h[c].before(&last) {
			break
		}
		h[i] = h[c]
		i = c
	}
	h[i] = last
	return top
}
