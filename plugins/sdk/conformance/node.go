package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Node is one end: an engine, played by the suite, with the plugin under test.
type Node struct {
	Name   string // in traces
	ID     Identity
	plugin Plugin
	run    context.Context // of the run: closing is hasty once it is over

	mu      sync.Mutex
	t       *T            // the case that has it now, nil between two
	changed chan struct{} // closed and replaced when anything arrives
	events  []*contract.PluginEvent
	seen    int // events that were dropped from the front
	ops     map[uint64]*Op
	lost    error
	reaped  bool
	mayDie  bool // the case is about the plugin's death
	silent  bool // it did not answer in this case
	beats   int
	beat    *contract.Beat
	beatAt  time.Time // when the last one came
	endAt   time.Time // when the last end of an op came
	logs    []string
	gate    chan struct{} // not nil: arrivals on Session wait until it is closed (Hold)
	pools   []uint64      // of the case
	sent    uint64        // seq of the last Submit that was sent
	drained uint64        // that of the last one before Drain, 0 without a Drain

	// Counters, for the life of the node: ids are never used twice (R3).
	id      uint64
	seq     uint64
	handle  uint32
	base    footprint // of the process, with nothing open
	hasBase bool
}

// launch starts a plugin. Its node belongs to nobody until attach.
func launch(ctx context.Context, c Carrier, bound time.Duration, name string, id Identity) (*Node, error) {
	n := &Node{Name: name, ID: id, run: ctx, changed: make(chan struct{}), ops: map[uint64]*Op{}}
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	p, err := c.Launch(ctx, id, n.arrive)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.plugin = p
	n.mu.Unlock()
	n.ID.Epoch = p.Epoch()
	return n, nil
}

// attach gives the node to a case.
func (n *Node) attach(t *T) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.t, n.events, n.seen, n.ops, n.mayDie, n.silent, n.logs = t, nil, 0, map[uint64]*Op{}, false, false, nil
	n.pools, n.drained = nil, 0
	if n.lost != nil {
		t.lost(n.Name, fmt.Errorf("before the case began: %w", n.lost))
	}
}

// Hello is what the plugin answered to the handshake.
func (n *Node) Hello() *contract.HandshakeResponse { return n.plugin.Hello() }

// Process is nil for a plugin in this process.
func (n *Node) Process() ProcessControl { return n.plugin.Process() }

// MayDie says that the case ends the plugin, so that its loss is no failure.
func (n *Node) MayDie() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mayDie = true
}

// Hold makes everything that the plugin sends on its Session wait, as a host does that stands still, until
// release is called, or the case ends by itself.
func (n *Node) Hold() (release func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gate == nil {
		n.gate = make(chan struct{})
	}
	return n.release
}

// release lets go what Hold holds up, if anything.
func (n *Node) release() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gate != nil {
		close(n.gate)
		n.gate = nil
	}
}

// arrive is the sink of the plugin's events.
func (n *Node) arrive(a Arrival) {
	if !a.Control && a.Frame != nil {
		n.mu.Lock()
		gate := n.gate
		n.mu.Unlock()
		if gate != nil {
			<-gate
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case a.Reaped:
		n.reaped = true
	case a.Frame == nil:
		n.lose(a.Lost)
	case n.lost != nil:
	default:
		for _, e := range a.Frame.GetEvents() {
			n.take(e, a.Control)
		}
	}
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *Node) lose(err error) {
	n.lost = err
	if n.t == nil {
		return
	}
	n.t.trace.add(n.Name, true, false, &contract.Fault{Rule: "-", Detail: "the plugin is lost: " + err.Error()})
	if !n.mayDie {
		n.t.lost(n.Name, err)
	}
}

// take is called with the lock held.
func (n *Node) take(e *contract.PluginEvent, control bool) {
	if b := e.GetBeat(); b != nil {
		n.beats++
		n.beat, n.beatAt = b, time.Now()
		return
	}
	if n.t == nil {
		return
	}
	mark := n.t.trace.add(n.Name, true, control, e)
	if l := e.GetLog(); l != nil {
		if len(n.logs) < 100 {
			n.logs = append(n.logs, l.Message)
		}
		return
	}
	id, end, isOp := opEvent(e)
	if !isOp {
		n.account(e, mark)
		n.events = append(n.events, e)
		return
	}
	op := n.ops[id]
	if op == nil {
		n.t.violate("R8", "events of ops that were submitted", fmt.Sprintf("%s of an unknown op", Describe(e)), mark)
		return
	}
	if end != nil {
		end.At = time.Now()
		n.endAt = end.At
	}
	if rule, expected, got := op.state.step(e, end); rule != "" {
		n.t.violate(rule, expected, fmt.Sprintf("%s (op %d)", got, id), mark)
		return
	}
	op.landed(e, end, mark)
}

// until waits until ok holds; ok is called with the lock held. rule and what name the failure.
func (n *Node) until(rule, what string, ok func() bool) {
	if got := n.waitFor(n.case_().Bound(), ok); got != "" {
		n.fail(rule, what, "%s", got)
	}
}

// lossGrace is how much longer than for an answer the end of the plugin is waited for. What ends a plugin that
// does not answer (a crash, or the budget of a guest's call, which is as long as an answer may take) tells why.
const lossGrace = time.Second

// fail ends the case because the plugin did not do what it was to do, unless its loss, which is a failure of its own,
// is the reason.
func (n *Node) fail(rule, expected, format string, args ...any) {
	t := n.case_()
	n.mu.Lock()
	n.silent = true
	n.mu.Unlock()
	grace := time.NewTimer(max(lossGrace, t.scaled(lossGrace)))
	defer grace.Stop()
	for waiting := true; waiting; {
		n.mu.Lock()
		lost, mayDie, changed := n.lost != nil, n.mayDie, n.changed
		n.mu.Unlock()
		switch {
		case lost && !mayDie:
			t.stop()
		case mayDie:
			waiting = false
			continue
		}
		select {
		case <-changed:
		case <-grace.C:
			waiting = false
		case <-n.run.Done():
			waiting = false
		}
	}
	t.Fail(rule, expected, format, args...)
}

func (n *Node) case_() *T {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.t
}

// A plugin that declares a long call (registering, connecting, first post) by its beats is waited for as a host
// waits: busyBound, if the last of them is not older than staleBeat.
const (
	busyBound = 120 * time.Second
	staleBeat = 3 * time.Second
)

func (n *Node) busy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.beat.GetBusy()) > 0 && time.Since(n.beatAt) < staleBeat
}

// waitFor waits until ok holds and returns "", or what came instead.
func (n *Node) waitFor(bound time.Duration, ok func() bool) string {
	t := n.case_()
	timer := time.NewTimer(bound)
	defer timer.Stop()
	began := time.Now()
	broken := t.broken
	if t.ending {
		broken = nil
	}
	for {
		n.mu.Lock()
		done, lost, mayDie, silent, changed := ok(), n.lost, n.mayDie, n.silent, n.changed
		n.mu.Unlock()
		switch {
		case done:
			t.inTime()
			return ""
		case lost != nil && !mayDie, silent: // that is a failure already
			t.stop()
		case lost != nil:
			return "the loss of the plugin: " + lost.Error()
		}
		select {
		case <-changed:
		case <-broken:
			t.stop()
		case <-timer.C:
			if n.busy() && time.Since(began) < t.scaled(busyBound) {
				t.extend()
				timer.Reset(bound)
				continue
			}
			return fmt.Sprintf("nothing within %v", bound)
		case <-n.run.Done():
			return interrupted
		}
	}
}

// Until waits for an event, past or coming, that is not an op's, and returns the first that fits.
func (n *Node) Until(rule, what string, fits func(*contract.PluginEvent) bool) *contract.PluginEvent {
	var found *contract.PluginEvent
	seen := 0
	n.until(rule, what+" from "+n.Name, func() bool {
		for ; seen < len(n.events); seen++ {
			if fits(n.events[seen]) {
				found = n.events[seen]
				return true
			}
		}
		return false
	})
	return found
}

// Count returns how many events so far fit.
func (n *Node) Count(fits func(*contract.PluginEvent) bool) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	k := 0
	for _, e := range n.events {
		if fits(e) {
			k++
		}
	}
	return k
}

// Send sends one frame on the Session stream.
func (n *Node) Send(events ...*contract.HostEvent) { n.send(false, events) }

// SendControl sends one frame on the Control stream.
func (n *Node) SendControl(events ...*contract.HostEvent) { n.send(true, events) }

func (n *Node) send(control bool, events []*contract.HostEvent) {
	t := n.case_()
	n.noteDrain(events)
	for _, e := range events {
		t.trace.add(n.Name, false, control, e)
	}
	send := n.plugin.Send
	if control {
		send = n.plugin.SendControl
	}
	if err := n.patiently(func() error { return send(events...) }); err != nil {
		n.mu.Lock()
		mayDie := n.mayDie
		n.mu.Unlock()
		if mayDie {
			return
		}
		n.fail("R12", "the plugin to take what it is sent", "%v", err)
	}
}

// patiently tries again while the queue towards the plugin is full: the suite sends in bursts.
func (n *Node) patiently(send func() error) error {
	const bound, pause = 10 * time.Second, 2 * time.Millisecond
	for deadline := time.Now().Add(bound); ; {
		err := send()
		if !errors.Is(err, pluginhost.ErrFull) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-n.run.Done():
			return err
		}
	}
}

// NewID returns an id that was never used at this node: of an op, region, pool, plan, grant or fence.
func (n *Node) NewID() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.id++
	return n.id
}

// passID makes NewID go on behind id: the plugin here was told something of it and may remember it.
func (n *Node) passID(id uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.id = max(n.id, id)
}

func (n *Node) newHandle() uint32 {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.handle++
	return n.handle
}

// Beats returns the number of beats so far and the last one.
func (n *Node) Beats() (int, *contract.Beat) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.beats, n.beat
}

// Lost returns why the plugin is gone, nil while it lives.
func (n *Node) Lost() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost
}

// UntilLost waits for the plugin's end and returns the reason.
func (n *Node) UntilLost(bound time.Duration, rule, what string) error {
	n.MayDie()
	n.wait(bound, rule, what, func() bool { return n.lost != nil })
	return n.Lost()
}

// UntilReaped waits until every process of the plugin is gone.
func (n *Node) UntilReaped(bound time.Duration) {
	n.MayDie()
	n.wait(bound, "R6", "every process of the plugin to be gone", func() bool { return n.reaped })
}

// wait is waitFor of something that a lost plugin can still bring about.
func (n *Node) wait(bound time.Duration, rule, what string, ok func() bool) {
	t := n.case_()
	timer := time.NewTimer(t.scaled(bound))
	defer timer.Stop()
	for {
		n.mu.Lock()
		done, lost, changed := ok(), n.lost != nil && !n.mayDie, n.changed
		n.mu.Unlock()
		if done {
			t.inTime()
			return
		}
		if lost { // that is a failure already
			t.stop()
		}
		select {
		case <-changed:
		case <-timer.C:
			t.Fail(rule, fmt.Sprintf("%s within %v", what, t.scaled(bound)), "nothing")
		case <-n.run.Done():
			t.Fail(rule, what, "%s", interrupted)
		}
	}
}

// Stats asks for a report: a barrier behind everything that was sent before on the Session stream.
func (n *Node) Stats() *contract.Stats {
	id := n.NewID()
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_Stats{Stats: &contract.StatsRequest{Id: id}}})
	return n.Until("R12", fmt.Sprintf("Stats %d", id), func(e *contract.PluginEvent) bool {
		return e.GetStats() != nil && e.GetStats().Id == id
	}).GetStats()
}

// Drain asks the plugin to finish and returns the number of ops that it says are left.
func (n *Node) Drain(deadline time.Duration) uint32 {
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{DeadlineNs: uint64(deadline)}}})
	return n.Until("R5", "Drained", func(e *contract.PluginEvent) bool { return e.GetDrained() != nil }).GetDrained().OpenOps
}

// Fence asks whether every writer of that peer epoch is gone for good. epoch 0: all of the incarnation.
func (n *Node) Fence(node string, incarnation uint64, epoch uint32) contract.FenceResult {
	id := n.NewID()
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_FencePeer{FencePeer: &contract.FencePeer{
		Fence: id, Node: node, Incarnation: incarnation, Epoch: epoch,
	}}})
	return n.Until("R4", "Fenced", func(e *contract.PluginEvent) bool {
		return e.GetFenced() != nil && e.GetFenced().Fence == id
	}).GetFenced().Result
}

// openOps returns the ops that have not ended or are not quiet, by id.
func (n *Node) openOps() (open []*Op) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, o := range n.ops {
		if o.state.end == nil || !o.state.quiet {
			open = append(open, o)
		}
	}
	slices.SortFunc(open, func(a, b *Op) int { return int(int64(a.ID) - int64(b.ID)) })
	return open
}

// close ends the plugin, in good order within bound unless the run is interrupted.
func (n *Node) close(bound time.Duration) error {
	ctx, cancel := context.WithTimeout(n.run, bound)
	defer cancel()
	return n.plugin.Close(ctx)
}

// mutate copies a message, so that what was traced is not changed afterwards.
func clone[M proto.Message](m M) M { return proto.Clone(m).(M) }
