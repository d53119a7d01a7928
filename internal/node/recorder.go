package node

import (
	"fmt"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/admin"
)

// recorded is one line of history with its time (since the engine's start).
type recorded struct {
	at time.Duration
	core.Record
}

// recorder keeps the last events of all rooms in a ring, and feeds the watchers.
type recorder struct {
	ring     [1 << 15]recorded
	next     int
	watchers map[*watcher]struct{}
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
			c := admin.RoomChange{What: what(&recs[i], n)}
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
			out = append(out, admin.Change{AgeNS: int64(now - rec.at), What: what(&rec.Record, n)})
		}
	}
	return out
}

func what(r *core.Record, n *Node) string {
	peer := ""
	if r.Peer >= 0 && int(r.Peer) < len(n.peerNames) {
		peer = n.peerNames[r.Peer]
	}
	switch r.Kind {
	case core.RecOpen:
		return "opened by the worker"
	case core.RecState:
		return "state " + r.State.String()
	case core.RecEnd:
		if r.Detail != "" {
			return fmt.Sprintf("ended: %s (%s)", r.Reason, r.Detail)
		}
		return "ended: " + r.Reason.String()
	case core.RecResidency:
		return "pages " + r.Residency.String()
	case core.RecFrameIn:
		return fmt.Sprintf("%s from %s", r.Frame, peer)
	case core.RecFrameOut:
		return fmt.Sprintf("%s to %s", r.Frame, peer)
	case core.RecOp:
		return fmt.Sprintf("operation of %d bytes submitted", r.Bytes)
	case core.RecOpEnd:
		how := endNames[r.End]
		if r.Detail != "" {
			how += " (" + r.Detail + ")"
		}
		return "operation " + how
	case core.RecReleased:
		return "pages released to the worker"
	}
	return "a late message changed nothing"
}
