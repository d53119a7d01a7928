package demo

import (
	"errors"
	"fmt"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// node is one engine's core for the replay, with its host reduced to this: frames go to the other
// node, grants are granted, and submitted ops stay out until the replay ends them.
type node struct {
	name    string
	machine *core.Machine
	out     core.Effects
	other   *node
	inbox   []core.Event

	word    core.WordEffect // of the one room
	reply   core.Reply      // the last
	ops     []core.OpID     // submitted, not ended
	aborted bool            // the core asked the plugin to abort an op
	epoch   uint32
}

const (
	replayRoom    = 42
	replayPages   = 16
	replayBackend = "tcp"
)

// replayClock is core time: the process's monotonic clock.
type replayClock struct{ start time.Time }

func (c replayClock) now() int64 { return int64(time.Since(c.start)) }

func newNode(name string, incarnation uint64) (*node, error) {
	m, err := core.New(core.Config{Incarnation: incarnation, Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()})
	if err != nil {
		return nil, err
	}
	return &node{name: name, machine: m, epoch: uint32(incarnation)}, nil
}

// step hands events to the core and carries out what it asks for.
func (n *node) step(c replayClock, events ...core.Event) {
	n.out.Reset()
	n.machine.Step(c.now(), events, &n.out)
	for _, w := range n.out.Words {
		n.word = w
	}
	for _, r := range n.out.Replies {
		n.reply = r
	}
	for i := range n.out.Frames {
		n.other.inbox = append(n.other.inbox, core.Event{Kind: core.PeerFrame, Peer: 0, Frame: n.out.Frames[i].Frame.Clone()})
	}
	for i := range n.out.Plugin {
		p := &n.out.Plugin[i]
		switch p.Kind {
		case core.PluginSubmit:
			n.ops = append(n.ops, p.Op)
		case core.PluginAbort:
			n.aborted = true
		case core.PluginGrant:
			n.inbox = append(n.inbox, core.Event{Kind: core.Granted, Backend: p.Backend, Epoch: p.Epoch, Grant: p.Grant})
		case core.PluginRevoke:
			n.inbox = append(n.inbox, core.Event{Kind: core.Revoked, Backend: p.Backend, Epoch: p.Epoch, Grant: p.Grant, Quiet: true})
		}
	}
}

// settle lets both nodes work until nothing is on the way.
func settle(c replayClock, nodes ...*node) error {
	for range 1000 {
		idle := true
		for _, n := range nodes {
			if len(n.inbox) > 0 {
				in := n.inbox
				n.inbox = nil
				n.step(c, in...)
				idle = false
			}
		}
		if idle {
			return nil
		}
	}
	return errors.New("the two engines did not come to rest")
}

// pair makes two engines that know each other, with one worker each.
func replayPair(c replayClock) (p, d *node, err error) {
	if p, err = newNode("engine-p", 1); err != nil {
		return nil, nil, err
	}
	if d, err = newNode("engine-d", 2); err != nil {
		return nil, nil, err
	}
	p.other, d.other = d, p
	role := func(n *node) (statemachine.Role, string) {
		if n == p {
			return statemachine.Source, RolePrefill
		}
		return statemachine.Destination, RoleDecode
	}
	for _, n := range []*node{p, d} {
		ownRole, own := role(n)
		otherRole, otherGroup := role(n.other)
		pool := core.Event{Pages: replayPages, Layers: 1, PageBytes: 1 << 20}
		up, far := pool, pool
		up.Kind, up.Session, up.Pool = core.PoolUp, 1, 10+uint64(n.epoch)
		far.Kind, far.Peer, far.Pool = core.PeerPool, 0, 10+uint64(n.other.epoch)
		n.step(c,
			core.Event{Kind: core.PluginUp, Backend: replayBackend, Epoch: n.epoch, ReceiverChecked: true, MaxOpBytes: 64 << 20},
			core.Event{Kind: core.SessionUp, Session: 1, Group: own, Role: ownRole, Size: 1, Slots: 8}, up,
			core.Event{Kind: core.PeerHello, Peer: 0, Node: n.other.name, Inc: uint64(n.other.epoch)},
			core.Event{Kind: core.PeerGroup, Peer: 0, Group: otherGroup, PeerGroup: own, Role: otherRole, Size: 1, Backends: []string{replayBackend}}, far,
		)
	}
	return p, d, settle(c, p, d)
}

// replayCore takes the steps of the incident with the engine's own core, the code that `engine run`
// runs.
func replayCore() (incident, error) {
	var in incident
	clock := replayClock{time.Now()}
	p, d, err := replayPair(clock)
	if err != nil {
		return in, err
	}
	step := 0
	done := func(note string) error {
		in.status[step], in.note[step] = p.word.Status.String(), note
		step++
		return settle(clock, p, d)
	}
	var seq uint64
	ask := func(n *node, e core.Event) error {
		seq++
		e.Session, e.Seq, e.Slot, e.Room = 1, seq, 0, replayRoom
		n.reply = core.Reply{}
		n.step(clock, e)
		if n.reply.Seq != seq {
			return fmt.Errorf("%s: request %d was not answered", n.name, seq)
		}
		if n.reply.Code == core.Refused {
			return fmt.Errorf("%s: refused: %s", n.name, n.reply.Detail)
		}
		return settle(clock, p, d)
	}
	pages := func(from, count int32) []core.Part {
		return []core.Part{{Runs: []layout.Run{{Start: from, Count: count, Stride: 1}}}}
	}

	err = errors.Join(
		ask(p, core.Event{Kind: core.Open}), done(""),
		ask(d, core.Event{Kind: core.Open, PeerGroup: RolePrefill}), done(""),
		ask(d, core.Event{Kind: core.Register, Parts: pages(0, 16)}), done("three steps: each side knows that the other knows"),
		ask(p, core.Event{Kind: core.Send, Parts: pages(0, 8)}), done(""),
	)
	if err != nil {
		return in, err
	}
	if len(p.ops) != 1 {
		return in, fmt.Errorf("send made %d operations, not one", len(p.ops))
	}
	if err := errors.Join(done("an operation is out"), done("")); err != nil {
		return in, err
	}

	aborted := time.Now()
	if err := ask(p, core.Event{Kind: core.Abort}); err != nil {
		return in, err
	}
	took := time.Since(aborted)
	err = errors.Join(
		done(fmt.Sprintf("%s; the destination: %s(%s)", p.word.Reason, d.word.Status, d.word.Reason)),
		done("no: the record stays until its pages are quiet, now "+p.word.Residency.String()),
	)
	if err != nil {
		return in, err
	}

	p.step(clock, core.Event{Kind: core.OpEnd, Backend: replayBackend, Epoch: p.epoch, Op: p.ops[0], End: core.EndDone, Quiet: true, Bytes: 8 << 20})
	if err := settle(clock, p, d); err != nil {
		return in, err
	}
	if err := done("the pages are " + p.word.Residency.String() + "; only now the source may reuse them"); err != nil {
		return in, err
	}
	dropped := p.machine.Stats().Dropped
	p.step(clock, core.Event{Kind: core.OpProgress, Backend: replayBackend, Epoch: p.epoch, Op: p.ops[0], Bytes: 8 << 20})
	if p.machine.Stats().Dropped != dropped+1 {
		return in, errors.New("a progress report that came after the end was not counted as dropped")
	}
	err = errors.Join(
		done("too late: counted and dropped, a terminal status never changes"),
		ask(p, core.Event{Kind: core.Send, Parts: pages(8, 8), Last: true}),
	)
	if err != nil {
		return in, err
	}
	if p.reply.Code != core.Ended {
		return in, errors.New("the last chunk of an ended room was taken")
	}
	if err := done("answered: the room has ended, " + p.reply.Reason.String()); err != nil {
		return in, err
	}
	in.polls = 1
	s := p.word.Status
	in.pinned = !s.Terminal() || !d.word.Status.Terminal() || !p.word.Residency.Reusable() || !d.word.Residency.Reusable()
	if err := done("1 poll: " + s.String()); err != nil {
		return in, err
	}
	in.verdict = fmt.Sprintf("%s(%s) on this side and %s(%s) on the other, %.3f ms after the abort; no page is held.",
		s, p.word.Reason, d.word.Status, d.word.Reason, float64(took.Microseconds())/1000)
	return in, nil
}
