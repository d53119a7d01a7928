package node

import (
	"log/slog"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/flight"
)

// recorded is one line of history with its time (since the engine's start).
type recorded struct {
	at time.Duration
	core.Record
}

// recorder keeps the last events of all rooms in a ring, writes them to the flight recorder, which
// outlives the engine, and feeds the watchers.
type recorder struct {
	ring     [flight.DefaultRecords]recorded
	next     int
	file     *flight.File // nil where it cannot be written
	watchers map[*watcher]struct{}
}

// record takes the records of a step.
func (n *Node) record(recs []core.Record) {
	if f := n.recorder.file; f != nil {
		if err := f.Add(time.Now(), recs, n.nodeName); err != nil {
			n.log.Error("the flight recorder is off until the engine starts again", "err", err)
			f.Close()
			n.recorder.file = nil
		}
	}
	for i := range recs {
		if recs[i].Kind == core.RecRung {
			n.logRung(&recs[i])
		}
	}
	n.recorder.add(n.clock.last, recs, n)
}

// logRung tells of pages that no simple proof frees. Rung 1 is what every aborted room passes.
func (n *Node) logRung(r *core.Record) {
	level := slog.LevelInfo
	switch r.Rung {
	case statemachine.NoRung, statemachine.Drain:
		level = slog.LevelDebug
	case statemachine.Quarantine:
		level = slog.LevelWarn
	}
	n.log.Log(n.ctx, level, flight.What(r, n.nodeName(r.Peer)), "room", r.Room, "peer", n.nodeName(r.Peer), "reason", r.Reason)
}

// nodeName is the node of a peer, or "" for none.
func (n *Node) nodeName(id core.PeerID) string {
	if id < 0 || int(id) >= len(n.peerNames) {
		return ""
	}
	return n.peerNames[id]
}

// watcher is one reader of changes. A full channel drops changes and counts them.
type watcher struct {
	room   int64 // negative: all
	ch     chan admin.RoomChange
	missed int
}

// send never waits: the owner goroutine calls it.
func (w *watcher) send(c admin.RoomChange) {
	c.Missed = w.missed
	select {
	case w.ch <- c:
		w.missed = 0
	default:
		w.missed++
	}
}

func (r *recorder) add(at time.Duration, recs []core.Record, n *Node) {
	for i := range recs {
		r.ring[r.next%len(r.ring)] = recorded{at, recs[i]}
		r.next++
		for w := range r.watchers {
			if w.room >= 0 && w.room != recs[i].Room {
				continue
			}
			c := admin.RoomChange{What: flight.What(&recs[i], n.nodeName(recs[i].Peer))}
			for _, v := range n.m.Room(recs[i].Room) {
				if v.Own == recs[i].Own && v.Role == recs[i].Role {
					c.RoomInfo = n.roomInfo(&v)
				}
			}
			w.send(c)
		}
	}
}

// history is what the ring still has of one record, oldest first.
func (r *recorder) history(now time.Duration, v *core.View, n *Node) []admin.Change {
	var out []admin.Change
	for i := max(0, r.next-len(r.ring)); i < r.next; i++ {
		rec := &r.ring[i%len(r.ring)]
		if rec.Room == v.Room && rec.Role == v.Role && rec.Own == v.Own {
			out = append(out, admin.Change{AgeNS: int64(now - rec.at), What: flight.What(&rec.Record, n.nodeName(rec.Peer))})
		}
	}
	return out
}
