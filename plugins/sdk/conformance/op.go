package conformance

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Op is one submitted op.
type Op struct {
	ID, Seq uint64
	Size    uint64
	node    *Node
	path    *Path
	spans   []span // what it copies, by our own arithmetic; nil for an op that must be refused
	keep    bool   // no canary over its pages
	loose   bool   // its pages are another op's, too: nothing is known about them
	state   opState
}

// landed is called with the node's lock held, from the goroutine that read the event: before the case,
// or anybody else, can know it.
func (o *Op) landed(e *contract.PluginEvent, end *End, mark func(string)) {
	if o.path == nil || len(o.spans) == 0 {
		return
	}
	t := o.node.t
	if end != nil && end.Kind == "done" {
		if want := o.path.Lane; want != contract.Lane_LANE_ANY && end.Lane != want {
			t.violate("R9", fmt.Sprintf("Done on the lane that PeerReady named, %v", want), end.Lane.String(), mark)
		}
		if !o.loose {
			if bad := o.path.arrived(o); bad != "" {
				t.violate("R4", "every byte of the op to be visible to the destination worker when Done comes", bad, mark)
			}
		}
	}
	if o.state.quiet && (end != nil || e.GetQuiesced() != nil) {
		o.path.quiet(o)
	}
}

// Accepted waits for it.
func (o *Op) Accepted() *Op {
	o.await("R8", "Accepted", func() bool { return o.state.accepted })
	return o
}

// End waits for the end.
func (o *Op) End() End {
	o.await("R1", "an end", func() bool { return o.state.end != nil })
	o.node.mu.Lock()
	defer o.node.mu.Unlock()
	return *o.state.end
}

// Quiet waits until the op has ended and is quiet, and returns its end.
func (o *Op) Quiet() End {
	end := o.End()
	o.await("R4", "Quiesced, since its end said quiet=false,", func() bool { return o.state.quiet })
	return end
}

// Done waits for the op to be quiet and fails the case unless it was done.
func (o *Op) Done() End {
	end := o.End()
	o.node.case_().Check(end.Kind == "done", o.node.case_().Case.Rule, fmt.Sprintf("op %d to be done", o.ID), "%s", end)
	return o.Quiet()
}

// Ended tells whether the end has come.
func (o *Op) Ended() bool {
	o.node.mu.Lock()
	defer o.node.mu.Unlock()
	return o.state.end != nil
}

// Progress is the highest Progress so far.
func (o *Op) Progress() uint64 {
	o.node.mu.Lock()
	defer o.node.mu.Unlock()
	return o.state.progress
}

// FirstProgress is the first Progress, 0 if there was none.
func (o *Op) FirstProgress() uint64 {
	o.node.mu.Lock()
	defer o.node.mu.Unlock()
	return o.state.first
}

// Moving waits until the op has made progress or ended.
func (o *Op) Moving() {
	o.await("R9", "progress", func() bool { return o.state.progress > 0 || o.state.end != nil })
}

// Abort sends AbortOp on the Control stream.
func (o *Op) Abort() *Op {
	o.node.SendControl(&contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: o.ID}}})
	return o
}

// probeAfter is how long an op may say nothing before the plugin is asked whether it still has it.
const probeAfter = 200 * time.Millisecond

// await waits for something of the op. A plugin that has forgotten the op is found out by Stats, so that a
// silent loss does not cost the whole bound. The bound begins anew whenever another op ends: the plugin may do them one
// at a time, and in its own order.
func (o *Op) await(rule, what string, ok func() bool) {
	n, t := o.node, o.node.case_()
	bound := t.Bound()
	began := time.Now()
	what = fmt.Sprintf("%s of op %d", what, o.ID)
	probe := min(probeAfter, bound/2)
	for {
		left := bound - time.Since(began)
		if left <= 0 {
			n.fail(rule, what, "nothing within %v; the plugin still lists the op as open", bound)
		}
		got := n.waitFor(min(probe, left), ok)
		if got == "" {
			return
		}
		n.mu.Lock()
		lost, ended := n.lost, n.endAt
		n.mu.Unlock()
		if lost != nil {
			t.Fail("R12", what, "the loss of the plugin: %v", lost)
		}
		if ended.After(began) {
			t.inTime()
			began = ended
		}
		if time.Since(began) >= bound {
			continue
		}
		st := n.Stats()
		n.mu.Lock()
		done := ok()
		n.mu.Unlock()
		if done {
			return
		}
		if st.LastSeq >= o.Seq && !slices.Contains(st.OpenOps, o.ID) {
			t.Fail(rule, what, "silence: the plugin's Stats, which come behind all earlier events, no longer list the op")
		}
		probe *= 2
	}
}

// Submit is what a case asks for; zero values mean the path's plan and generation, all layers, the size
// that plan and runs give.
type Submit struct {
	Src, Dst           []sdk.Run
	Plan               *Plan
	Generation         *contract.Generation
	LayerFrom, LayerTo uint32
	Priority           int32
	Deadline           time.Duration
	Trace              string
	Keep               bool // leave the pages as the op left them; else a canary is put there once it is quiet
	Loose              bool // another op may write the same pages: do not check bytes
	Change             func(*contract.Submit)
}

// Submit sends one op from path.A to path.B.
func (p *Path) Submit(s Submit) *Op {
	op, m := p.prepare(s)
	return p.From.submit(op, m)
}

// prepare makes the op of s, which may write its destination from now on, and its message.
func (p *Path) prepare(s Submit) (*Op, *contract.Submit) {
	m, spans := p.message(s)
	if s.Change != nil {
		s.Change(m)
		spans = nil // what it copies is no longer known
	}
	op := &Op{node: p.From, path: p, spans: spans, keep: s.Keep, loose: s.Loose, Size: m.Bytes}
	p.begin(op)
	return op, m
}

// SubmitAll sends several ops in one frame.
func (p *Path) SubmitAll(list []Submit) []*Op {
	var ops []*Op
	var events []*contract.HostEvent
	for _, s := range list {
		op, m := p.prepare(s)
		p.From.enter(op, m)
		ops = append(ops, op)
		events = append(events, &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}})
	}
	p.From.Send(events...)
	return ops
}

// SubmitRaw sends m after setting its op (when 0) and seq; for what a host must not send.
func (n *Node) SubmitRaw(m *contract.Submit) *Op {
	return n.submit(&Op{node: n, Size: m.Bytes}, m)
}

func (n *Node) submit(op *Op, m *contract.Submit) *Op {
	n.enter(op, m)
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}})
	return op
}

func (n *Node) enter(op *Op, m *contract.Submit) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m.Op == 0 {
		n.id++
		m.Op = n.id
	}
	n.seq++
	m.Seq = n.seq
	op.ID, op.Seq = m.Op, m.Seq
	op.state.size = op.Size
	n.ops[op.ID] = op
}
