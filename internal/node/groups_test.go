package node

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/peer"
)

// groupNode is a node of which only what concerns groups is there.
type groupNode struct {
	*Node
	t *testing.T
}

func newGroupNode(t *testing.T, name string) groupNode {
	cfg := config.Default()
	cfg.Node = name
	m, err := core.New(coreConfig(&cfg, 1))
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{
		cfg: &cfg, log: slog.New(slog.DiscardHandler), m: m, groups: map[string]*group{}, remotes: map[string]*remote{}, peerIDs: map[string]core.PeerID{},
		refused: map[refusalKey]string{}, paired: map[pairKey]*pairing{}, verdicts: map[string]verdict{}, backends: []*backend{{name: "tcp"}},
	}
	n.peerID(name)
	n.remotes[name] = newRemote()
	return groupNode{n, t}
}

var testLayout = layout.Cache{DType: "bf16", Layers: 2, KVHeads: 8, HeadDim: 64, PageTokens: 16, Kind: "mha", Order: "nhd"}

// host makes ranks of a group those of this engine.
func (n groupNode) host(name string, role statemachine.Role, size int32, ranks ...int32) {
	g := &group{name: name, role: role, size: size, layout: testLayout, ranks: map[int32]core.SessionID{}}
	for _, r := range ranks {
		g.ranks[r] = core.SessionID(r + 1)
	}
	n.groups[name] = g
	n.pairGroups()
}

// hello is what the link says of a peer that comes up.
func (n groupNode) hello(node string, inc uint64, features ...string) {
	n.peerEvent(peer.Event{Kind: peer.Hello, Node: node, Incarnation: inc, Backends: []peer.Backend{{Name: "tcp"}}, Features: features})
}

func announced(name string, role statemachine.Role, size int32, ranks ...int32) peer.Group {
	return peer.Group{Name: name, Role: role, Size: size, Ranks: ranks, Layout: peer.Layout(testLayout)}
}

func (n groupNode) announce(node string, g peer.Group) {
	n.peerEvent(peer.Event{Kind: peer.GroupUp, Node: node, Group: g})
}

// told returns what the core was told of groups since the last call, one line an event.
func (n groupNode) told() string {
	var out []string
	for _, e := range n.events {
		if e.Kind != core.PeerGroup {
			continue
		}
		line := fmt.Sprintf("%s with %s at %s", e.PeerGroup, e.Group, n.peerNames[e.Peer])
		switch {
		case e.Size == 0:
			line += ": gone"
		case e.Reason != statemachine.None:
			line += fmt.Sprintf(": %v: %s", e.Reason, e.Detail)
		default:
			line += fmt.Sprintf(": %v %v of %d by %v", e.Role, e.Ranks, e.Size, e.Backends)
		}
		out = append(out, line)
	}
	n.events = nil
	return strings.Join(out, "\n")
}

func (n groupNode) expect(what string, lines ...string) {
	n.t.Helper()
	if got, want := n.told(), strings.Join(lines, "\n"); got != want {
		n.t.Errorf("%s: the core was told\n%s\nwant\n%s", what, got, want)
	}
}

const (
	src = statemachine.Source
	dst = statemachine.Destination
)

// TestGroupOfSeveralEngines: the core hears of each engine that hosts ranks of a group, of the own group's other
// ranks as well, and of what goes away.
func TestGroupOfSeveralEngines(t *testing.T) {
	n := newGroupNode(t, "b")
	n.host("decode", dst, 2, 0)
	for _, p := range []string{"a", "c", "p"} {
		n.hello(p, 1, featureGroups)
	}
	n.expect("nothing announced")
	n.announce("p", announced("prefill", src, 2, 0))
	n.expect("a part of the counterpart", "decode with prefill at p: source [0] of 2 by [tcp]")
	n.announce("a", announced("prefill", src, 2, 1))
	n.expect("its other part", "decode with prefill at a: source [1] of 2 by [tcp]")
	n.announce("c", announced("decode", dst, 2, 1))
	n.expect("a part of the own group", "decode with decode at c: destination [1] of 2 by []")
	n.announce("c", announced("decode", dst, 2, 1))
	n.expect("the same again")

	n.peerEvent(peer.Event{Kind: peer.GroupGone, Node: "a", Group: peer.Group{Name: "prefill", Role: dst}})
	n.expect("a group of that name with another role is gone")
	n.peerEvent(peer.Event{Kind: peer.GroupGone, Node: "a", Group: peer.Group{Name: "prefill", Role: src}})
	n.expect("a part is gone", "decode with prefill at a: gone")

	n.hello("c", 2, featureGroups)
	n.expect("another incarnation", "decode with decode at c: gone")
	n.announce("c", announced("decode", dst, 2, 1))
	n.expect("and its announcement", "decode with decode at c: destination [1] of 2 by []")
	n.hello("c", 2, featureGroups)
	n.expect("the same incarnation on another stream")
}

// TestGroupOfOldRelease: an engine that does not say that it serves groups over engines makes the group one
// that nobody can use.
func TestGroupOfOldRelease(t *testing.T) {
	n := newGroupNode(t, "b")
	n.host("decode", dst, 1, 0)
	n.hello("a", 1, featureGroups)
	n.hello("c", 1)
	n.announce("a", announced("prefill", src, 2, 0))
	n.announce("c", announced("prefill", src, 2, 1))
	why := `: layout_mismatch: group "prefill" spans engines, rank 0 at "a", rank 1 at "c", and the release of "c" does not serve such groups: upgrade it`
	n.expect("an old release", "decode with prefill at a: source [0] of 2 by [tcp]", "decode with prefill at a"+why, "decode with prefill at c"+why)
	n.announce("c", announced("other", src, 1, 0))
	n.expect("its own groups", "decode with other at c: source [0] of 1 by [tcp]")
	larger := announced("other", src, 1, 0)
	larger.Layout.PageTokens = 32
	n.announce("c", larger)
	n.expect("with other pages, hence another map", "decode with other at c: source [0] of 1 by [tcp]")
}

// TestGroupMoves: whatever parts of a group come and go, the core has what this engine sees. A part that goes is
// taken from what the core knows of the group, and the others stay.
func TestGroupMoves(t *testing.T) {
	n := newGroupNode(t, "b")
	n.host("decode", dst, 2, 0, 1)
	for _, node := range []string{"a", "c"} {
		n.hello(node, 1, featureGroups)
	}
	gone := func(node string) {
		n.peerEvent(peer.Event{Kind: peer.GroupGone, Node: node, Group: peer.Group{Name: "prefill", Role: src}})
	}
	var out core.Effects
	for _, c := range []struct {
		what string
		do   func()
		want string
	}{
		{"incomplete", func() { n.announce("a", announced("prefill", src, 2, 0)) }, "a [0]"},
		{"whole at two", func() { n.announce("c", announced("prefill", src, 2, 1)) }, "a [0]; c [1]"},
		{"one is gone", func() { gone("a") }, "c [1]"},
		{"and is back", func() { n.announce("a", announced("prefill", src, 2, 0)) }, "a [0]; c [1]"},
		{"taken twice", func() { n.announce("a", announced("prefill", src, 2, 0, 1)) }, "refused"},
		{"whole at one", func() { gone("c") }, "a all"},
		{"its ranks go one by one", func() {
			n.announce("a", announced("prefill", src, 2, 1))
			n.announce("c", announced("prefill", src, 2, 0))
		}, "c [0]; a [1]"},
		{"another incarnation", func() { n.hello("a", 2, featureGroups) }, "c [0]"},
		{"its announcement", func() { n.announce("a", announced("prefill", src, 2, 1)) }, "c [0]; a [1]"},
		{"nobody", func() { gone("a"); gone("c") }, ""},
	} {
		c.do()
		n.m.Step(1, n.events, &out)
		n.events = nil
		var got []string
		for _, g := range n.m.Groups() {
			switch {
			case g.Reason != statemachine.None:
				got = []string{"refused"}
			case g.Ranks == nil:
				got = append(got, n.peerNames[g.Peer]+" all")
			default:
				got = append(got, fmt.Sprintf("%s %v", n.peerNames[g.Peer], g.Ranks))
			}
		}
		want := strings.Split(c.want, "; ")
		if c.want == "" {
			want = nil
		}
		slices.Sort(got) // Groups goes by the peers' numbers
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: the core has %q, want %q", c.what, got, want)
		}
	}
}

// TestGroupClash: what the parts of a group contradict each other in is found in the same words by every engine,
// and makes the group one that nobody can use.
func TestGroupClash(t *testing.T) {
	other := announced("g", dst, 4, 2, 3)
	other.Layout.PageTokens = 32
	for _, c := range []struct {
		theirs peer.Group
		field  string
		detail string
	}{
		{announced("g", dst, 4, 2, 3), "", ""},
		{announced("g", dst, 4, 1, 2), "rank", `rank 1 of group "g" is at engine "a" and at engine "b": stop one of the two workers`},
		{announced("g", dst, 8, 2, 3), "size", `group "g" has size 4 at engine "a" and 8 at engine "b": its workers must agree`},
		{announced("g", src, 4, 2, 3), "role", `group "g" has role destination at engine "a" and source at engine "b": its workers must agree`},
		{other, "layout.page_tokens", `group "g" has layout.page_tokens 16 at engine "a" and 32 at engine "b": its workers must agree`},
	} {
		parts := map[string]peer.Group{"a": announced("g", dst, 4, 0, 1), "b": c.theirs}
		for _, pair := range [][2]string{{"a", "b"}, {"b", "a"}} { // as either sees it
			self, other := pair[0], pair[1]
			mine := parts[self]
			n := newGroupNode(t, self)
			n.host("g", mine.Role, mine.Size, mine.Ranks...)
			n.groups["g"].layout = layout.Cache(mine.Layout)
			n.hello(other, 1, featureGroups)
			n.announce(other, parts[other])
			told := n.told()
			v := n.views()["g"]
			if c.field == "" {
				if v.clash != nil || !strings.Contains(told, "of 4 by") {
					t.Errorf("no clash: %+v; %s", v.clash, told)
				}
				continue
			}
			if v.clash == nil || v.clash.field != c.field || v.clash.detail != c.detail || !strings.Contains(told, "layout_mismatch: "+c.detail) {
				t.Errorf("%s at %s: %+v; told %s", c.field, self, v.clash, told)
			}
		}
	}
}

// TestDeadPartOfGroup: what a dead engine left behind does not keep a group from going on elsewhere. Where nobody
// else hosts the group, it stays what it was.
func TestDeadPartOfGroup(t *testing.T) {
	n := newGroupNode(t, "b")
	n.host("decode", dst, 1, 0)
	n.hello("a", 1)
	n.hello("c", 1)
	n.announce("a", announced("prefill", src, 1, 0))
	n.expect("at one engine", "decode with prefill at a: source [0] of 1 by [tcp]")
	n.verdicts["a"] = verdict{word: "dead"}
	n.pairGroups()
	n.expect("that died")
	n.announce("c", announced("prefill", src, 1, 0))
	n.expect("its worker went on elsewhere", "decode with prefill at a: gone", "decode with prefill at c: source [0] of 1 by [tcp]")
	n.verdicts["a"] = verdict{}
	n.pairGroups()
	if told := n.told(); !strings.Contains(told, `rank 0 of group "prefill" is at engine "a" and at engine "c"`) {
		t.Errorf("it was not dead: %s", told)
	}
}

func TestRanksText(t *testing.T) {
	for _, c := range []struct {
		ranks []int32
		want  string
	}{{nil, "no rank"}, {[]int32{3}, "rank 3"}, {[]int32{0, 1}, "ranks 0 and 1"}, {[]int32{0, 1, 2, 3}, "ranks 0-3"}, {[]int32{0, 2, 4, 5, 6, 9}, "ranks 0, 2, 4-6 and 9"}} {
		if got := ranksText("rank", c.ranks); got != c.want {
			t.Errorf("%v: %q, want %q", c.ranks, got, c.want)
		}
	}
}

// TestGroupWhy: one sentence says what a group waits for, or why it is refused.
func TestGroupWhy(t *testing.T) {
	n := newGroupNode(t, "b")
	why := func(what, name string, want ...string) {
		t.Helper()
		views := n.views()
		v := views[name]
		if v == nil {
			t.Fatalf("%s: no group %q", what, name)
		}
		if got := n.groupWhy(views, v); !slices.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	n.host("decode", dst, 4, 0, 1)
	n.hello("c", 1, featureGroups)
	why("alone", "decode", `group "decode" (destination, 4 ranks) waits for ranks 2 and 3 to connect, with ranks 0 and 1 at "b"; no source group is known to work with it.`)
	n.announce("c", announced("decode", dst, 4, 2))
	n.announce("c", announced("prefill", src, 1, 0))
	why("a part elsewhere", "decode", `group "decode" (destination, 4 ranks) waits for rank 3 to connect, with ranks 0 and 1 at "b", rank 2 at "c".`, `group "decode" with "prefill" at engine "c" waits for rank 3 of "decode", 0 live rooms.`)
	why("the counterpart", "prefill", `group "prefill" (source, 1 rank) is complete: rank 0 at "c".`, `group "prefill" at engine "c" with "decode" waits for rank 3 of "decode", 0 live rooms.`)
	n.announce("c", announced("decode", dst, 4, 1))
	why("a clash", "decode", `group "decode" (destination, 4 ranks) is refused: rank 1 of group "decode" is at engine "b" and at engine "c": stop one of the two workers.`)
}

// TestGroupOfAnotherLayoutIsToldAnew: a group that comes back with other pages is mapped in another way.
func TestGroupOfAnotherLayoutIsToldAnew(t *testing.T) {
	n := newGroupNode(t, "b")
	n.host("decode", dst, 1, 0)
	n.hello("a", 1, featureGroups)
	n.announce("a", announced("prefill", src, 1, 0))
	n.expect("equal pages", "decode with prefill at a: source [0] of 1 by [tcp]")
	other := announced("prefill", src, 1, 0)
	other.Layout.PageTokens = 32
	n.announce("a", other)
	n.expect("larger pages", "decode with prefill at a: source [0] of 1 by [tcp]")
}
