package conformance

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Trace is the conversation of one case as a trace file holds it: a header line, then a line an event.
type Trace struct {
	TraceHeader
	Entries []Entry
}

// TraceHeader is the first line of a trace file.
type TraceHeader struct {
	Case     string  `json:"case"`
	Rule     string  `json:"rule"`
	Outcome  Outcome `json:"outcome"`
	Plugin   string  `json:"plugin"`
	Contract uint32  `json:"contract"`
	Seed     uint64  `json:"seed"`
}

// WriteTrace writes a trace file.
func WriteTrace(w io.Writer, t Trace) error {
	b := bufio.NewWriter(w)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(t.TraceHeader); err != nil {
		return fmt.Errorf("write trace: %w", err)
	}
	for _, e := range t.Entries {
		if err := enc.Encode(e); err != nil {
			return fmt.Errorf("write trace: %w", err)
		}
	}
	if err := b.Flush(); err != nil {
		return fmt.Errorf("write trace: %w", err)
	}
	return nil
}

// Bounds of a trace file that is read: it may be anybody's.
const (
	maxTraceLine    = 1 << 20
	maxTraceEntries = 1 << 20
)

// ErrTrace: the text is not a trace file. The error names the line.
var ErrTrace = errors.New("not a trace file")

// ReadTrace reads what WriteTrace wrote.
func ReadTrace(r io.Reader) (*Trace, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), maxTraceLine)
	t, n := &Trace{}, 0
	for lines.Scan() {
		n++
		bad := func(err error) error { return fmt.Errorf("%w: line %d: %w", ErrTrace, n, err) }
		if n == 1 {
			if err := json.Unmarshal(lines.Bytes(), &t.TraceHeader); err != nil {
				return nil, bad(err)
			}
			if t.Case == "" {
				return nil, bad(errors.New(`want the header, an object with "case"`))
			}
			continue
		}
		if n > maxTraceEntries {
			return nil, bad(fmt.Errorf("more than %d lines", maxTraceEntries))
		}
		var e Entry
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, bad(err)
		}
		if last := len(t.Entries) - 1; last >= 0 && e.At < t.Entries[last].At {
			return nil, bad(fmt.Errorf("ms: it runs back, from %s to %s; the run wrote the events in order, so the file was changed", t.Entries[last].At, e.At))
		}
		t.Entries = append(t.Entries, e)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: after line %d: %w", ErrTrace, n, err)
	}
	switch n {
	case 0:
		return nil, fmt.Errorf("%w: it is empty", ErrTrace)
	case 1:
		return nil, fmt.Errorf("%w: it has a header and no event", ErrTrace)
	}
	return t, nil
}

// Breach is a rule that a conversation breaks.
type Breach struct {
	Entry    int // index of the offending entry; -1: of none, something did not come
	Node     string
	Rule     string
	Expected string
	Got      string
}

func (b Breach) String() string {
	return fmt.Sprintf("%s at %s: expected %s; got %s", b.Rule, b.Node, b.Expected, b.Got)
}

// Replay judges a recorded conversation by the ledger that judges live ones: the order of the events of
// each op, and that each op ended and became quiet. What needs the memory of the run (bytes, canaries) is
// not judged again. unjudged counts events of ops whose Submit is not in the trace: it was too large, or fell
// into a gap.
func Replay(entries []Entry) (breaches []Breach, unjudged int, err error) {
	r := replay{nodes: map[string]*replayNode{}}
	for i, e := range entries {
		if err := r.step(i, e); err != nil {
			return nil, 0, fmt.Errorf("%w: event %d: %w", ErrTrace, i+1, err)
		}
	}
	r.unended()
	return r.breaches, r.unjudged, nil
}

type replay struct {
	nodes    map[string]*replayNode
	order    []string
	gap      bool // an event is missing
	unjudged int
	breaches []Breach
}

type replayNode struct {
	ops   map[uint64]*opState
	order []uint64
	lost  bool
}

func (r *replay) step(i int, e Entry) error {
	m, err := e.event()
	if err != nil {
		return err
	}
	var p *contract.PluginEvent
	switch m := m.(type) {
	case nil:
		r.gap = true
		return nil
	case *contract.Fault:
		r.node(e.Node).lost = true
		return nil
	case *contract.HostEvent:
		if s := m.GetSubmit(); s != nil {
			n := r.node(e.Node)
			if n.ops[s.Op] == nil {
				n.order = append(n.order, s.Op)
			}
			n.ops[s.Op] = &opState{size: s.Bytes}
		}
		return nil
	case *contract.PluginEvent:
		p = m
	}
	id, end, isOp := opEvent(p)
	if !isOp {
		return nil
	}
	op := r.node(e.Node).ops[id]
	switch {
	case op == nil && r.gap:
		r.unjudged++
	case op == nil:
		r.breach(i, e.Node, "R8", "events of ops that were submitted", Describe(p)+" of an unknown op")
	default:
		if rule, expected, got := op.step(p, end); rule != "" {
			r.breach(i, e.Node, rule, expected, fmt.Sprintf("%s (op %d)", got, id))
		}
	}
	return nil
}

func (r *replay) node(name string) *replayNode {
	n := r.nodes[name]
	if n == nil {
		n = &replayNode{ops: map[uint64]*opState{}}
		r.nodes[name] = n
		r.order = append(r.order, name)
	}
	return n
}

func (r *replay) breach(entry int, node, rule, expected, got string) {
	r.breaches = append(r.breaches, Breach{entry, node, rule, expected, got})
}

// unended finds the ops that the conversation left open, unless the plugin died or events are missing.
func (r *replay) unended() {
	for _, name := range r.order {
		n := r.nodes[name]
		if n.lost || r.gap {
			continue
		}
		for _, id := range n.order {
			switch op := n.ops[id]; {
			case op.end == nil:
				r.breach(-1, name, "R1", fmt.Sprintf("an end of op %d", id), "none up to the end of the trace")
			case !op.quiet:
				r.breach(-1, name, "R4", fmt.Sprintf("Quiesced of op %d", id), fmt.Sprintf("none after %s", op.end))
			}
		}
	}
}
