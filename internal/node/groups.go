package node

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/peer"
)

// part is what one engine hosts of a group.
type part struct {
	node string
	id   core.PeerID
	r    *remote
	peer.Group
}

// view is a group as this engine sees it: the parts at all engines, this one among them, sorted by their
// lowest ranks.
type view struct {
	name     string
	parts    []part
	gone     []part // at engines that are dead, where a living one hosts ranks of the group, too
	clash    *clash // the parts cannot be one group
	unserved string // why a group like this is not served; "" where it is
}

// clash says in which field the parts of a group contradict each other.
type clash struct{ field, detail string }

// role is that of all parts, where they do not clash.
func (v *view) role() statemachine.Role { return v.parts[0].Role }
func (v *view) size() int32             { return v.parts[0].Size }

// present are the ranks that some engine hosts, in order.
func (v *view) present() []int32 {
	var out []int32
	for i := range v.parts {
		out = append(out, v.parts[i].Ranks...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// missing are the ranks that no engine hosts.
func (v *view) missing() []int32 {
	present := v.present()
	var out []int32
	for r := range v.size() {
		if _, ok := slices.BinarySearch(present, r); !ok {
			out = append(out, r)
		}
	}
	return out
}

// at is the part at an engine, nil if it hosts none.
func (v *view) at(id core.PeerID) *part {
	for i := range v.parts {
		if v.parts[i].id == id {
			return &v.parts[i]
		}
	}
	return nil
}

// featureGroups is in the Hello of engines that serve groups whose ranks sit on several engines.
const featureGroups = "spanning_groups"

// views collects what all engines host, by the name of the group.
func (n *Node) views() map[string]*view {
	out := map[string]*view{}
	for node, r := range n.remotes {
		for name, g := range r.groups {
			v := out[name]
			if v == nil {
				v = &view{name: name}
				out[name] = v
			}
			v.parts = append(v.parts, part{node, n.peerIDs[node], r, g})
		}
	}
	for _, v := range out {
		v.settle(func(node string) bool { return n.verdicts[node].word == "dead" })
		if len(v.parts) > 1 {
			v.unserved = n.unserved(v)
		}
	}
	return out
}

// settle sorts the parts, sets those aside that a dead engine left behind, and looks for contradictions.
func (v *view) settle(dead func(node string) bool) {
	slices.SortFunc(v.parts, func(a, b part) int {
		return cmp.Or(slices.Compare(a.Ranks[:min(len(a.Ranks), 1)], b.Ranks[:min(len(b.Ranks), 1)]), cmp.Compare(a.node, b.node))
	})
	if len(v.parts) == 1 {
		return
	}
	// A dead engine cannot say that its ranks are gone, and its workers may have gone on elsewhere. Where no
	// other engine hosts the group its part stands: its rooms end by its death, not by this.
	living := slices.DeleteFunc(slices.Clone(v.parts), func(p part) bool { return dead(p.node) })
	if len(living) > 0 {
		v.gone = slices.DeleteFunc(v.parts, func(p part) bool { return !dead(p.node) })
		v.parts = living
	}
	v.clash = findClash(v.name, v.parts)
}

// findClash compares the parts by the names of their engines, so that each of them finds the same words.
func findClash(name string, parts []part) *clash {
	byNode := slices.SortedFunc(slices.Values(parts), func(a, b part) int { return cmp.Compare(a.node, b.node) })
	first := byNode[0]
	hosts := map[int32]string{}
	for _, p := range byNode {
		differ := func(field string, a, b any) *clash {
			return &clash{field, fmt.Sprintf("group %q has %s %v at engine %q and %v at engine %q: its workers must agree", name, field, a, first.node, b, p.node)}
		}
		switch {
		case p.Role != first.Role:
			return differ("role", first.Role, p.Role)
		case p.Size != first.Size:
			return differ("size", first.Size, p.Size)
		case p.Layout != first.Layout:
			field, a, b := "layout", fmt.Sprintf("%+v", first.Layout), fmt.Sprintf("%+v", p.Layout)
			if m := layout.Differ(layout.Cache(first.Layout), layout.Cache(p.Layout)); m != nil {
				field, a, b = "layout."+m.Field, m.Source, m.Destination
			}
			return differ(field, a, b)
		}
		for _, r := range p.Ranks {
			if other, twice := hosts[r]; twice {
				return &clash{"rank", fmt.Sprintf("rank %d of group %q is at engine %q and at engine %q: stop one of the two workers", r, name, other, p.node)}
			}
			hosts[r] = p.node
		}
	}
	return nil
}

// unserved says which engine's release does not serve groups whose ranks sit on several engines.
func (n *Node) unserved(v *view) string {
	for i := range v.parts {
		p := &v.parts[i]
		if p.id != selfPeer && !slices.Contains(p.r.features, featureGroups) {
			return fmt.Sprintf("group %q spans engines, %s, and the release of %q does not serve such groups: upgrade it", v.name, v.where(), p.node)
		}
	}
	return ""
}

// where lists the ranks with their engines.
func (v *view) where() string {
	var out []string
	for i := range v.parts {
		out = append(out, fmt.Sprintf("%s at %q", ranksText("rank", v.parts[i].Ranks), v.parts[i].node))
	}
	return strings.Join(out, ", ")
}

// refusal says why no room can use the group at all, with the field; nil when that is not so.
func (v *view) refusal() *clash {
	switch {
	case v.clash != nil:
		return v.clash
	case v.unserved != "":
		return &clash{"group", v.unserved}
	}
	return nil
}

// pairKey names what the core was told of one engine's part of a group.
type pairKey struct {
	id     core.PeerID
	theirs string
	own    string // equal to theirs: another engine's part of the own group
}

// pairing is what the core was told, for the comparison and for those who look.
type pairing struct {
	ev    core.Event
	field string // of a refusal
}

func (p *pairing) same(q *pairing) bool {
	a, b := &p.ev, &q.ev
	return a.Role == b.Role && a.Size == b.Size && a.Reason == b.Reason && a.Detail == b.Detail && a.Map == b.Map && slices.Equal(a.Backends, b.Backends) && slices.Equal(a.Ranks, b.Ranks)
}

// pairGroups tells the core which group here may work with which group at a peer, or why not, and where the
// other ranks of the own groups are.
func (n *Node) pairGroups() {
	self := n.remotes[n.cfg.Node]
	clear(self.groups)
	for _, g := range n.groups {
		self.groups[g.name] = g.announce()
	}
	views := n.views()
	want := map[pairKey]*pairing{}
	for _, own := range n.groups {
		mine := views[own.name]
		for name, theirs := range views {
			for i := range theirs.parts {
				p := &theirs.parts[i]
				if r := n.pairing(own, mine, theirs, p); r != nil {
					want[pairKey{p.id, name, own.name}] = r
				}
			}
		}
	}
	n.tell(want)
}

// pairing is what the core should know of a part of a group, for one group of this engine: nil for nothing.
func (n *Node) pairing(own *group, mine, theirs *view, p *part) *pairing {
	if theirs == mine && p.id == selfPeer {
		return nil // its sessions say it
	}
	if theirs != mine && p.Role == own.role {
		return nil
	}
	r := &pairing{ev: core.Event{Kind: core.PeerGroup, Peer: p.id, Group: theirs.name, PeerGroup: own.name, Role: p.Role, Size: p.Size, Ranks: p.Ranks}}
	for _, v := range []*view{mine, theirs} {
		if c := v.refusal(); c != nil {
			r.field = c.field
			r.ev.Reason, r.ev.Detail = statemachine.LayoutMismatch, c.detail
			n.noteRefusal(p.node, own.name, theirs.name, c.detail)
			return r
		}
	}
	if theirs != mine {
		n.pair(own, theirs, p, r)
	}
	if r.ev.Reason == statemachine.None { // the next refusal is news again
		delete(n.refused, refusalKey{own.name, p.node, theirs.name})
	}
	return r
}

// tell hands the changes to the core: first what is gone.
func (n *Node) tell(want map[pairKey]*pairing) {
	for key := range n.paired {
		if want[key] != nil {
			continue
		}
		n.unpair(key)
	}
	keys := make([]pairKey, 0, len(want))
	for key, p := range want {
		if old := n.paired[key]; old == nil || !old.same(p) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b pairKey) int {
		return cmp.Or(cmp.Compare(a.own, b.own), cmp.Compare(a.theirs, b.theirs), cmp.Compare(a.id, b.id))
	})
	for _, key := range keys {
		n.paired[key] = want[key]
		n.events = append(n.events, want[key].ev)
	}
}

// unpair tells the core that a part of a group is no longer there.
func (n *Node) unpair(key pairKey) {
	delete(n.paired, key)
	n.events = append(n.events, core.Event{Kind: core.PeerGroup, Peer: key.id, Group: key.theirs, PeerGroup: key.own})
}

// ranksText lists ranks in short: "rank 3", "ranks 0-3 and 6".
func ranksText(word string, ranks []int32) string {
	if len(ranks) == 0 {
		return "no " + word
	}
	var runs []string
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		switch {
		case i == j:
			runs = append(runs, fmt.Sprint(ranks[i]))
		case j == i+1:
			runs = append(runs, fmt.Sprint(ranks[i]), fmt.Sprint(ranks[j]))
		default:
			runs = append(runs, fmt.Sprintf("%d-%d", ranks[i], ranks[j]))
		}
		i = j + 1
	}
	if len(ranks) > 1 {
		word += "s"
	}
	if last := len(runs) - 1; last > 0 {
		return word + " " + strings.Join(runs[:last], ", ") + " and " + runs[last]
	}
	return word + " " + runs[0]
}
