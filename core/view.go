package core

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// View is what an operator sees of one record. Ages are of core time.
type View struct {
	Room             int64
	Role             statemachine.Role
	State            statemachine.State
	Status           statemachine.KVPoll
	Residency        statemachine.Residency
	Rung             statemachine.Rung
	Reason           statemachine.Reason
	ByPeer           bool
	Detail           string
	Admitted         bool
	Own, Pair        statemachine.Opener
	Pairs            []PairView // when there is more than one
	Attempt          uint64
	Peer             PeerID // -1: not known yet
	PeerNode         string
	PeerReady        bool
	PeerSilent       time.Duration // since the peer was last heard
	Group, PeerGroup string
	Backend          string
	Epoch            uint32
	Ranks            []int32 // that joined here
	Size             int     // ranks of the group
	Local            int     // of those, ranks that are this engine's
	Paged            int     // ranks that registered, or sent their last
	Age, Since       time.Duration
	Total, Moved     int64
	Held             int64
	Ops              statemachine.Counts
	GrantPending     bool
	PeerQueued       bool   // the destination's worker is known to wait for memory
	Clock            string // of the clock that ends the state first; empty: none
	Remaining        time.Duration
	Incomplete       bool // not every rank of the other group is known to be hosted
	Released         bool
	OverBudget       bool // it waits for admission because of limits.quarantine
	Ladder           Ladder
}

// PairView is a record and one other engine, of a group that spans engines.
type PairView struct {
	Peer    PeerID
	Node    string
	Ranks   []int32 // of the group there that it hosts; nil: all
	Sibling bool    // it hosts others of the own group
	Judge   bool
	Other   statemachine.Opener // of a sibling: the opener that voted
	State   statemachine.State  // of the pair
	Ended   bool                // RankEnd has come from there
	Quiet   bool                // nothing of it can land in the pages
	Ops     statemachine.Counts
}

// Ladder is what the pages of an ended destination wait for beyond rung 4.
type Ladder struct {
	Asked  bool          // the host was asked to replace the plugin epoch that they are registered with
	Epoch  EpochState    // of that epoch; 0: it is provably gone, or was never up
	Users  int           // EpochRetires: live rooms and ops that it still has
	EndsIn time.Duration // EpochRetires: when it is ended whoever uses it
	Lost   time.Duration // EpochLost: for how long
}

// Rooms calls fn for every record, ended ones that are remembered included, until it returns false.
// The View is overwritten by the next; a copy of it may be kept. Only the owner goroutine may call it.
func (m *Machine) Rooms(fn func(*View) bool) {
	var v View
	var ranks []int32 // of all views: each has its part
	for i := range int32(m.rooms.len()) {
		if m.rooms.at(i).sm.State == statemachine.Absent {
			continue
		}
		ranks = m.view(i, &v, ranks)
		if !fn(&v) {
			return
		}
	}
}

// Room returns the records of a room, sources first, the newest open first.
func (m *Machine) Room(id int64) []View {
	var out []View
	for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
		for i := m.head(keyOf(id, role)); i != nil32; i = m.rooms.at(i).next {
			m.view(i, next(&out), nil)
		}
	}
	return out
}

// view fills v; the ranks in it are appended to ranks, which is returned.
func (m *Machine) view(idx int32, v *View, ranks []int32) []int32 {
	r := m.rooms.at(idx)
	*v = View{
		Room: r.id, Role: r.sm.Role, State: r.sm.State, Status: r.sm.Status(), Rung: r.sm.Rung, Reason: r.sm.Reason,
		ByPeer: r.sm.ByPeer, Detail: m.detail(r), Admitted: r.sm.Admitted, Own: r.sm.Own, Pair: m.firstPair(r).sm.Other, Attempt: r.sm.Att,
		Peer: r.peer, Group: m.name(r.group), PeerGroup: m.name(r.peerGroup), Backend: m.name(r.backend), Epoch: r.epoch,
		Size: int(r.size), Local: int(r.local), Paged: int(r.paged), Age: time.Duration(m.now - r.opened), Since: time.Duration(m.now - r.since),
		Total: r.total, Moved: r.moved + r.flight, Held: r.held, Ops: m.opsOf(r), GrantPending: r.grant == grantAsked, PeerQueued: r.peerQueued,
	}
	if r.peer != nilPeer {
		p := m.peer(r.peer)
		v.PeerNode, v.PeerReady = p.node, p.ready
		if p.known {
			v.PeerSilent = time.Duration(m.now - p.heard)
		}
	}
	if r.sm.Role == statemachine.Source {
		v.Residency = statemachine.SourceResidency(r.sm.State, r.sm.Armed, v.Ops)
	} else if v.Residency = r.sm.Pages; v.Residency == statemachine.NoPages && r.sm.Armed {
		v.Residency = statemachine.Armed
	}
	for i := r.pairs; i != nil32 && m.firstPair(r).next != nil32; i = m.pairs.at(i).next {
		p := m.pairs.at(i)
		q := PairView{
			Peer: p.peer, Sibling: p.sm.Sibling, Judge: p.sm.Judge, Other: p.sm.Other, State: r.sm.Column(&p.sm),
			Ended: p.sm.RankEnded, Quiet: p.sm.Quiet, Ops: p.sm.Ops,
		}
		if p.peer != nilPeer {
			q.Node = m.peer(p.peer).node
		}
		if p.set != fullyHosted {
			q.Ranks = m.sets[p.set]
		}
		v.Pairs = append(v.Pairs, q)
	}
	v.Released = true
	first := len(ranks)
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		ranks = append(ranks, m.ranks.at(i).rank)
		v.Released = v.Released && m.ranks.at(i).done
	}
	v.Ranks = tail(ranks, first)
	if r.sm.Rung != statemachine.NoRung {
		v.Ladder = m.ladder(r.backend, r.epoch)
	}
	if r.sm.Role == statemachine.Destination && r.sm.State.Live() && !r.sm.Admitted {
		m.eachSession(r, func(s *session, _ *rank) { v.OverBudget = v.OverBudget || m.over(s) })
	}
	v.Incomplete = !r.whole
	if v.Released && r.sm.State == statemachine.Ended && v.Residency.Reusable() {
		v.Residency = statemachine.Released
	}
	for s, c := range r.class {
		if c == noClock || c == clkTombstone {
			continue
		}
		if left := time.Duration(r.timers[s].due - m.now); v.Clock == "" || left < v.Remaining {
			v.Clock, v.Remaining = c.String(), left
		}
	}
	return ranks
}

// Why explains a record in one sentence: state, since when, waiting on whom, what happens when.
func (v *View) Why() string {
	var b strings.Builder
	fmt.Fprintf(&b, "room %d (%s) ", v.Room, v.Role)
	peer := v.waitsFor()
	if v.State == statemachine.Ended {
		fmt.Fprintf(&b, "ended %s ago: %s", round(v.Since), v.Status)
		if v.Reason != statemachine.Success {
			fmt.Fprintf(&b, " (%s)", v.Reason)
		}
		if v.Reason != statemachine.Success {
			fmt.Fprintf(&b, ": %s", strings.TrimSuffix(v.Reason.Doc(), "."))
		}
		if from, said := strings.CutPrefix(v.Detail, "said by "); v.ByPeer && said {
			fmt.Fprintf(&b, "; the cause came from %s", from)
		} else if v.ByPeer && v.PeerNode != "" {
			fmt.Fprintf(&b, "; the cause came from %s", v.PeerNode)
		}
		if v.Detail != "" && !strings.HasPrefix(v.Detail, "said by ") {
			fmt.Fprintf(&b, "; detail: %s", v.Detail)
		}
		switch {
		case v.Residency == statemachine.Released:
			b.WriteString("; its pages were released")
		case v.Residency.Reusable():
			fmt.Fprintf(&b, "; its pages are %s, the worker may release them", v.Residency)
		case v.Ladder.Epoch == EpochLost:
			fmt.Fprintf(&b, "; its pages are %s: epoch %d of plugin %s ended %s ago, waiting for the proof that every process of it is gone (rung 5)",
				v.Residency, v.Epoch, v.Backend, round(v.Ladder.Lost))
		case v.Residency == statemachine.Quarantined:
			b.WriteString("; its pages are quarantined: no proof yet that nothing can write to them (rung 4)")
			v.retires(&b)
			v.clock(&b, "the plugin is replaced to have one")
		default:
			fmt.Fprintf(&b, "; its pages are %s", v.Residency)
			switch {
			case v.Role == statemachine.Source:
				fmt.Fprintf(&b, ": %d operations are not quiet yet", v.Ops.Open+v.Ops.Linger+v.Ops.Dead)
			case v.Rung == statemachine.Drain:
				fmt.Fprintf(&b, ": waiting for %s to say drained (rung 1)", peer)
			case v.Rung == statemachine.Fence:
				fmt.Fprintf(&b, ": waiting for the plugin to fence %s (rung 3)", peer)
			}
			v.clock(&b, "the next rung is tried")
		}
		return b.String() + "."
	}
	fmt.Fprintf(&b, "is %s for %s", v.Status, round(v.Since))
	switch {
	case !v.Admitted && v.OverBudget:
		b.WriteString(", waiting for admission at this engine: more of its worker's pages rest in quarantine than limits.quarantine allows")
	case !v.Admitted:
		b.WriteString(", waiting for admission at this engine")
	case v.State == statemachine.Unbound && v.Incomplete && v.PeerGroup != "" && v.PeerNode != "":
		fmt.Fprintf(&b, ", waiting for the other ranks of group %q to appear", v.PeerGroup)
	case v.State == statemachine.Unbound && (v.PeerQueued || len(v.Pairs) > 0):
		fmt.Fprintf(&b, ", waiting for the destination worker at %s to find memory and register pages", peer)
	case v.State == statemachine.Unbound:
		b.WriteString(", waiting for a destination to register pages")
	case v.State == statemachine.Offered:
		fmt.Fprintf(&b, ", waiting for %s to confirm the pair", peer)
	case v.State == statemachine.Opened && v.Paged > 0 && v.Local > v.Paged:
		fmt.Fprintf(&b, ", waiting for the pages of %d of its %d ranks here", v.Local-v.Paged, v.Local)
	case v.State == statemachine.Opened:
		b.WriteString(", waiting for its own worker to register pages")
	case v.State == statemachine.Registered && v.Backend == "" && v.PeerNode == "":
		fmt.Fprintf(&b, ", waiting for group %q to appear", v.PeerGroup)
	case v.State == statemachine.Registered && v.Backend == "" && v.Incomplete:
		fmt.Fprintf(&b, ", waiting for the other ranks of group %q to appear", v.PeerGroup)
	case v.State == statemachine.Registered && v.Backend == "":
		b.WriteString(", waiting for a transfer backend")
	case v.State == statemachine.Registered:
		fmt.Fprintf(&b, ", registered, waiting for the source worker at %s to open the room", peer)
	case v.State == statemachine.Bound && v.votes() != "":
		fmt.Fprintf(&b, ", every byte is here, waiting for the same of %s", v.votes())
	case v.State == statemachine.Bound && v.GrantPending:
		fmt.Fprintf(&b, ", waiting for plugin %s to open the pages for writing", v.Backend)
	case v.State == statemachine.Bound && v.Clock == "input":
		fmt.Fprintf(&b, ", bound to %s, waiting for the source to send (%s of %s arrived)", peer, size(v.Moved), size(v.Total))
	case v.State == statemachine.Bound:
		fmt.Fprintf(&b, ", receiving from %s by %s (%s of %s)", peer, v.Backend, size(v.Moved), size(v.Total))
	case v.State == statemachine.Confirmed && v.Ops.Open > 0:
		fmt.Fprintf(&b, ", %d operations outstanding in plugin %s towards %s (%s of %s done)", v.Ops.Open, v.Backend, peer, size(v.Moved), size(v.Total))
	case v.State == statemachine.Confirmed && v.Held > 0:
		fmt.Fprintf(&b, ", %s held by the window towards %s or by a restarting plugin", size(v.Held), peer)
	case v.State == statemachine.Confirmed:
		fmt.Fprintf(&b, ", bound to %s, waiting for its own worker to send", peer)
	case v.State == statemachine.Committed:
		fmt.Fprintf(&b, ", everything sent, waiting for the verdict of %s", peer)
	case v.State == statemachine.Voted:
		fmt.Fprintf(&b, ", every byte is here, waiting for the verdict of %s, the engine of rank 0", peer)
	}
	if v.PeerNode != "" && !v.PeerReady {
		fmt.Fprintf(&b, " (the link to %s is down, silent for %s)", v.PeerNode, round(v.PeerSilent))
	}
	v.clock(&b, "it fails")
	return b.String() + "."
}

// waitsFor names the engines that the record waits for: of a group that spans engines, those that are behind.
func (v *View) waitsFor() string {
	var nodes []string
	for i := range v.Pairs {
		p := &v.Pairs[i]
		if v.State == statemachine.Committed || v.State == statemachine.Voted {
			if p.Judge {
				return p.Node
			}
			continue
		}
		if behind := v.State == statemachine.Ended && !p.Quiet || v.State != statemachine.Ended && p.State == v.State; behind && !p.Sibling && !p.Ended && p.Node != "" {
			nodes = append(nodes, p.Node)
		}
	}
	switch {
	case len(nodes) > 0:
		return strings.Join(nodes, ", ")
	case v.PeerNode != "":
		return v.PeerNode
	}
	return "its peer"
}

// votes names the engines of the own group that have not said yet that they have every byte, where this one, the
// judge, has; "" where it waits for something else.
func (v *View) votes() string {
	var nodes []string
	for i := range v.Pairs {
		switch p := &v.Pairs[i]; {
		case !p.Sibling && !p.Ended:
			return ""
		case p.Sibling && p.Other.IsZero():
			nodes = append(nodes, p.Node)
		}
	}
	return strings.Join(nodes, ", ")
}

// retires says how far the replacement of the plugin is that would fence the pages.
func (v *View) retires(b *strings.Builder) {
	switch l := &v.Ladder; {
	case l.Epoch == EpochRetires:
		fmt.Fprintf(b, "; epoch %d of plugin %s retires: %d rooms and operations are left in it, it is ended in %s at the latest (rung 5 follows)",
			v.Epoch, v.Backend, l.Users, round(l.EndsIn))
	case l.Epoch == EpochEnds:
		fmt.Fprintf(b, "; epoch %d of plugin %s is being ended (rung 5 follows)", v.Epoch, v.Backend)
	case l.Asked:
		fmt.Fprintf(b, "; the next epoch of plugin %s is being started beside epoch %d to retire it", v.Backend, v.Epoch)
	}
}

func (v *View) clock(b *strings.Builder, what string) {
	if v.Clock != "" {
		fmt.Fprintf(b, "; %s in %s by the %s clock", what, round(v.Remaining), v.Clock)
	}
}

func round(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Millisecond).String()
}

func size(n int64) string {
	for _, u := range []struct {
		n    int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.n {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(u.n), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

// PeerView is what the core knows of a peer.
type PeerView struct {
	ID                             PeerID
	Node                           string
	Incarnation                    uint64
	Ready, Suspect, Dead, Draining bool
	Silent                         time.Duration
	Ops                            int32
	Bytes                          int64
}

// Peers lists the peers that have said Hello at least once, by id.
func (m *Machine) Peers() []PeerView {
	var out []PeerView
	for i := range m.peers {
		if p := &m.peers[i]; p.known {
			out = append(out, PeerView{PeerID(i), p.node, p.inc, p.ready, p.suspect, p.dead, p.draining, time.Duration(m.now - p.heard), p.ops, p.bytes})
		}
	}
	return out
}

// GroupView is a pair of groups: one here, and what a peer hosts of the one that it may work with, or of the
// same group.
type GroupView struct {
	Own      string
	Name     string
	Peer     PeerID
	Role     statemachine.Role
	Size     int32
	Ranks    []int32 // that the peer hosts; nil: all
	Backends []string
	Reason   statemachine.Reason
	Detail   string
}

// Groups lists the peers' groups by name, one entry a peer.
func (m *Machine) Groups() []GroupView {
	var out []GroupView
	for pair, g := range m.groups {
		for _, h := range g.hosts {
			v := GroupView{Own: m.name(pair.own), Name: m.name(pair.peer), Peer: h.peer, Role: g.role, Size: g.size, Reason: g.reason, Detail: g.detail}
			if h.set != fullyHosted {
				v.Ranks = m.sets[h.set]
			}
			for _, b := range g.backends {
				v.Backends = append(v.Backends, m.name(b))
			}
			out = append(out, v)
		}
	}
	slices.SortFunc(out, func(a, b GroupView) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Own, b.Own), cmp.Compare(a.Peer, b.Peer))
	})
	return out
}
