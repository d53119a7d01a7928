package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/admin"
)

// Groups implements admin.Engine.
func (n *Node) Groups(ctx context.Context) ([]admin.GroupInfo, error) {
	var out []admin.GroupInfo
	err := n.ask(ctx, func() {
		rooms, pairs := n.liveRooms()
		views, silent := n.views(), n.silence()
		for _, v := range views {
			for _, p := range slices.Concat(v.parts, v.gone) {
				out = append(out, n.groupInfo(views, v, p, rooms, pairs, silent))
			}
		}
	})
	slices.SortFunc(out, func(a, b admin.GroupInfo) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Node, b.Node))
	})
	return out, err
}

// groupPair is a group and its counterpart, each by its name.
type groupPair struct{ own, theirs string }

// liveRooms counts the rooms that have not ended, by group and by the pair of groups.
func (n *Node) liveRooms() (groups map[string]int, pairs map[groupPair]int) {
	groups, pairs = map[string]int{}, map[groupPair]int{}
	n.m.Rooms(func(v *core.View) bool {
		if v.State != statemachine.Ended {
			groups[v.Group]++
			groups[v.PeerGroup]++
			pairs[groupPair{v.Group, v.PeerGroup}]++
		}
		return true
	})
	return groups, pairs
}

func (n *Node) groupInfo(views map[string]*view, v *view, p part, rooms map[string]int, pairs map[groupPair]int, silent map[core.PeerID]string) admin.GroupInfo {
	i := admin.GroupInfo{
		Name: p.Name, Role: p.Role.String(), Node: p.node, Here: p.id == selfPeer, Size: int(p.Size), Ranks: p.Ranks,
		Missing: v.missing(), Complete: v.clash == nil && len(v.missing()) == 0, Rooms: rooms[p.Name],
	}
	for _, o := range v.parts {
		if o.node != p.node {
			i.Elsewhere = append(i.Elsewhere, o.Ranks...)
		}
	}
	slices.Sort(i.Elsewhere)
	if i.Here {
		for _, lp := range n.pools {
			if w := n.sessions[lp.session]; w != nil && w.Group == p.Name {
				i.Pools++
			}
		}
	}
	for _, key := range n.pairKeys(p.Name) {
		q := n.paired[key]
		g := admin.GroupPair{Node: n.peerNames[key.id], Group: key.theirs, Backends: q.ev.Backends, Rooms: pairs[groupPair{key.own, key.theirs}]}
		switch {
		case i.Here && key.own == p.Name:
		case !i.Here && key.theirs == p.Name && key.id == p.id:
			g.Node, g.Group = n.cfg.Node, key.own
		default:
			continue
		}
		g.Verdict = admin.PairUsable
		if q.ev.Reason != statemachine.None {
			g.Verdict, g.Reason, g.Field, g.Detail = admin.PairRefused, q.ev.Reason.String(), q.field, q.ev.Detail
		} else if what := waitsFor(views, key); what != "" {
			g.Verdict, g.Detail = admin.PairWaits, "for "+what
		} else if s := silent[key.id]; s != "" {
			g.Verdict, g.Detail = admin.PairWaits, s
		}
		i.Pairs = append(i.Pairs, g)
	}
	switch c := v.refusal(); {
	case slices.ContainsFunc(v.gone, func(g part) bool { return g.node == p.node }):
		i.Detail = "the engine is dead, and the group lives on elsewhere"
	case c != nil:
		i.Detail = c.detail
	case silent[p.id] != "":
		i.Detail = silent[p.id]
	default:
		for _, g := range i.Pairs {
			if g.Verdict == admin.PairRefused {
				i.Detail = fmt.Sprintf("with %s: %s: %s", g.Group, g.Reason, g.Detail)
				break
			}
		}
	}
	return i
}

// waitsFor names the ranks that a pair of groups lacks, on either side; empty: none.
func waitsFor(views map[string]*view, key pairKey) string {
	var lacks []string
	for _, name := range []string{key.own, key.theirs} {
		if v := views[name]; v != nil && len(v.missing()) > 0 {
			lacks = append(lacks, fmt.Sprintf("%s of %q", ranksText("rank", v.missing()), name))
		}
	}
	return strings.Join(lacks, " and ")
}

// pairKeys are the pairs of different groups that a group is in, on either side, in order.
func (n *Node) pairKeys(group string) []pairKey {
	var keys []pairKey
	for key := range n.paired {
		if key.own != key.theirs && (key.own == group || key.theirs == group) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b pairKey) int {
		return cmp.Or(strings.Compare(a.own, b.own), strings.Compare(a.theirs, b.theirs), strings.Compare(n.peerNames[a.id], n.peerNames[b.id]))
	})
	return keys
}

// GroupWhy implements admin.Engine.
func (n *Node) GroupWhy(ctx context.Context, name string) ([]string, error) {
	var out []string
	err := n.ask(ctx, func() {
		views := n.views()
		if v := views[name]; v != nil {
			out = n.groupWhy(views, v)
		}
	})
	if err == nil && len(out) == 0 {
		err = fmt.Errorf("group %q: %w: no rank of it is here or at an engine that is known", name, admin.ErrNotFound)
	}
	return out, err
}

// groupWhy is one sentence on the group, and one on each pair that it is in.
func (n *Node) groupWhy(views map[string]*view, v *view) []string {
	subject := fmt.Sprintf("group %q (%s, %s)", v.name, v.role(), countOf(int(v.size()), "rank"))
	if c := v.refusal(); c != nil {
		return []string{fmt.Sprintf("%s is refused: %s.", subject, c.detail)}
	}
	said := ""
	switch missing := v.missing(); {
	case len(missing) > 0:
		said = fmt.Sprintf("%s waits for %s to connect, with %s", subject, ranksText("rank", missing), v.where())
	default:
		said = fmt.Sprintf("%s is complete: %s", subject, v.where())
	}
	for _, g := range v.gone {
		said += fmt.Sprintf("; engine %q, which hosted %s, is dead", g.node, ranksText("rank", g.Ranks))
	}
	_, rooms := n.liveRooms()
	silent := n.silence()
	var pairs []string
	for _, key := range n.pairKeys(v.name) {
		if key.id == selfPeer && key.own != v.name {
			continue // the same pair, seen from its other group
		}
		pairs = append(pairs, n.pairWhy(views, v.name, key, rooms, silent))
	}
	if len(pairs) == 0 {
		said += "; " + n.unpaired(v)
	}
	return append([]string{said + "."}, pairs...)
}

// unpaired says why a group is in no pair.
func (n *Node) unpaired(v *view) string {
	role := statemachine.Source
	if v.role() == role {
		role = statemachine.Destination
	}
	for _, o := range n.views() {
		if o.role() == role && (o.at(selfPeer) != nil || v.at(selfPeer) != nil) {
			if missing := o.missing(); len(missing) > 0 && o.refusal() == nil {
				return fmt.Sprintf("its counterpart %q waits for %s", o.name, ranksText("rank", missing))
			}
		}
	}
	if v.at(selfPeer) == nil {
		return fmt.Sprintf("no %s group is here to work with it", role)
	}
	return fmt.Sprintf("no %s group is known to work with it", role)
}

func (n *Node) pairWhy(views map[string]*view, name string, key pairKey, rooms map[groupPair]int, silent map[core.PeerID]string) string {
	p := n.paired[key]
	at := "" // where the group of the other engine is
	if key.id != selfPeer {
		at = fmt.Sprintf(" at engine %q", n.peerNames[key.id])
	}
	pair := fmt.Sprintf("group %q with %q%s", key.own, key.theirs, at)
	if name != key.own {
		pair = fmt.Sprintf("group %q%s with %q", key.theirs, at, key.own)
	}
	live := rooms[groupPair{key.own, key.theirs}]
	if p.ev.Reason != statemachine.None {
		return fmt.Sprintf("%s is refused (%s): %s.", pair, p.ev.Reason, p.ev.Detail)
	}
	does, what, s := "works by "+strings.Join(p.ev.Backends, ", "), waitsFor(views, key), silent[key.id]
	switch {
	case what != "":
		does = "waits for " + what
	case s != "":
		does = "waits"
	}
	said := fmt.Sprintf("%s %s, %s", pair, does, countOf(live, "live room"))
	if s != "" {
		said += "; " + s
	}
	return said + "."
}

// silence says of each peer that takes no new rooms why.
func (n *Node) silence() map[core.PeerID]string {
	out := map[core.PeerID]string{}
	for _, p := range n.m.Peers() {
		since := p.Silent.Round(100 * time.Millisecond)
		switch {
		case p.Dead:
			out[p.ID] = fmt.Sprintf("engine %q is dead: silent for %s", p.Node, since)
		case p.Suspect:
			out[p.ID] = fmt.Sprintf("engine %q is silent since %s: no new rooms towards it until it is heard", p.Node, since)
		case p.Draining:
			out[p.ID] = fmt.Sprintf("engine %q is draining: no new rooms towards it", p.Node)
		}
	}
	return out
}

func countOf(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
