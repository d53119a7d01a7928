package node_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// The room table, as concurrent workers see it, is linearizable: every call takes effect at one moment
// between its begin and its end, and by those moments each room obeys tableModel. The histories come
// from the core behind an owner goroutine (here, ten thousand) and from a real node (below, fewer).

// tableOp is a call on one room. An attempt is opened at most once in a history, and names the open.
type tableOp struct {
	kind tableKind
	room int64
	att  uint8
}

type tableKind uint8

const (
	opOpen tableKind = iota
	opAbort
	opPoll
	opFailure
	opRelease
	opOperatorAbort // whoever holds the room
	opPeerAbort     // the counterpart ends the attempt att, which may be still to come
)

func (k tableKind) String() string {
	return [...]string{"open", "abort", "poll", "failure", "release", "operator abort", "peer abort"}[k]
}

// tableResult is what a call returned: a status for poll, a reason for failure.
type tableResult struct {
	outcome tableOutcome
	status  statemachine.KVPoll
	reason  statemachine.Reason
}

type tableOutcome uint8

const (
	answered tableOutcome = iota // done, or for failure and poll: see status and reason
	refused                      // nothing changed
)

const maxAttempts = 24 // of a history

// tableState is one room: who holds it and what became of every attempt.
type tableState struct {
	live     uint8 // the attempt that holds the room, 0: none
	attempts [maxAttempts]attemptState
}

type attemptState struct {
	opened, released, marked bool
	ended                    statemachine.Reason
}

// tableModel is the sequential table: absent → live → ended (with a reason, for ever) → released.
var tableModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		rooms := map[int64][]porcupine.Operation{}
		for _, op := range history {
			room := op.Input.(tableOp).room
			rooms[room] = append(rooms[room], op)
		}
		parts := make([][]porcupine.Operation, 0, len(rooms))
		for _, ops := range rooms {
			parts = append(parts, ops)
		}
		return parts
	},
	Init: func() any { return tableState{} },
	Step: func(state, input, output any) (bool, any) {
		s := state.(tableState)
		ok := s.step(input.(tableOp), output.(tableResult))
		return ok, s
	},
	DescribeOperation: func(input, output any) string { return describeOp(input.(tableOp), output.(tableResult)) },
}

func describeOp(op tableOp, out tableResult) string {
	text := fmt.Sprintf("%s(%d, %d)", op.kind, op.room, op.att)
	switch {
	case out.outcome == refused:
		return text + " refused"
	case op.kind == opPoll:
		return text + " → " + out.status.String()
	case op.kind == opFailure:
		return text + " → " + out.reason.String()
	}
	return text
}

// step makes the call op and reports whether it can have returned out.
func (s *tableState) step(op tableOp, out tableResult) bool {
	a := &s.attempts[op.att]
	end := func(att uint8, why statemachine.Reason) {
		s.attempts[att].ended = why
		s.live = 0
	}
	switch op.kind {
	case opOpen: // R3: one live attempt of a room
		if s.live != 0 {
			return out.outcome == refused
		}
		a.opened, s.live = true, op.att
		if a.marked { // R7: its counterpart has ended it already
			end(op.att, statemachine.PeerAborted)
		}
		return out.outcome == answered
	case opAbort:
		if s.live == op.att {
			end(op.att, statemachine.Aborted)
		}
		return out.outcome == answered
	case opPoll:
		want := statemachine.Bootstrapping
		if a.ended != statemachine.None {
			want = statemachine.Failed // R2: for ever
		}
		return out.status == want
	case opFailure:
		if a.released {
			return out.outcome == refused
		}
		return out.outcome == answered && out.reason == a.ended
	case opRelease:
		if a.ended == statemachine.None || a.released {
			return out.outcome == refused
		}
		a.released = true
		return out.outcome == answered
	case opOperatorAbort:
		if s.live != 0 {
			end(s.live, statemachine.Aborted)
		}
		return true
	case opPeerAbort:
		switch {
		case s.live == op.att:
			end(op.att, statemachine.PeerAborted)
		case !a.opened: // also while another attempt holds the room
			a.marked = true
		}
		return true
	}
	return false
}

// roomTable is what a history is made with. Calls may overlap.
type roomTable interface {
	// call makes one call for the client, of the attempt's own session where it has one.
	call(client int, op tableOp) tableResult
}

// historian runs clients against a table and notes what they saw.
type historian struct {
	clients, calls int
	kinds          []tableKind // drawn from, equally often
	rooms          int64
	own            bool // a client calls (but for poll) only for attempts that it opened
}

type openAttempt struct {
	client int
	op     tableOp
}

// record makes one history on rooms from room up.
func (h *historian) record(t roomTable, seed uint64, room int64) []porcupine.Operation {
	var (
		clock   atomic.Int64
		next    atomic.Int32
		mu      sync.Mutex
		opens   []openAttempt // answered
		wg      sync.WaitGroup
		start   = make(chan struct{})
		history = make([][]porcupine.Operation, h.clients)
	)
	for client := range h.clients {
		rnd := rand.New(rand.NewPCG(seed, uint64(client)))
		wg.Go(func() {
			<-start
			do := func(op tableOp) tableResult {
				begin := clock.Add(1)
				for range rnd.IntN(3) { // others may begin, too
					runtime.Gosched()
				}
				out := t.call(client, op)
				history[client] = append(history[client], porcupine.Operation{ClientId: client, Input: op, Call: begin, Output: out, Return: clock.Add(1)})
				return out
			}
			for range h.calls {
				op := tableOp{kind: h.kinds[rnd.IntN(len(h.kinds))], room: room + rnd.Int64N(h.rooms)}
				switch op.kind {
				case opOperatorAbort:
					do(op)
					continue
				case opPeerAbort: // of an attempt that is, was or will be
					op.att = uint8(1 + rnd.IntN(min(maxAttempts-1, int(next.Load())+2)))
					do(op)
					continue
				}
				mu.Lock()
				mine := opens
				if h.own && op.kind != opPoll {
					mine = nil
					for _, o := range opens {
						if o.client == client {
							mine = append(mine, o)
						}
					}
				}
				if len(mine) > 0 {
					op.room, op.att = pick(rnd, mine, op)
				}
				mu.Unlock()
				if op.kind == opOpen || op.att == 0 {
					op.kind, op.att = opOpen, uint8(next.Add(1))
					if op.att >= maxAttempts {
						return
					}
					if do(op).outcome == answered {
						mu.Lock()
						opens = append(opens, openAttempt{client, op})
						mu.Unlock()
					}
					continue
				}
				do(op)
			}
		})
	}
	close(start)
	wg.Wait()
	// Everything is ended and taken back, so that the next history finds an empty table.
	for _, o := range opens {
		for _, kind := range []tableKind{opAbort, opFailure, opRelease, opPoll} {
			begin := clock.Add(1)
			op := tableOp{kind: kind, room: o.op.room, att: o.op.att}
			out := t.call(o.client, op)
			history[o.client] = append(history[o.client], porcupine.Operation{ClientId: o.client, Input: op, Call: begin, Output: out, Return: clock.Add(1)})
		}
	}
	return slices.Concat(history...)
}

// pick prefers the newest attempts: most calls of a worker concern what it has just opened.
func pick(rnd *rand.Rand, opens []openAttempt, op tableOp) (int64, uint8) {
	if op.kind == opOpen {
		return op.room, 0
	}
	o := opens[max(0, len(opens)-1-rnd.IntN(3))]
	return o.op.room, o.op.att
}

// overlaps reports whether two calls on one room ran at the same time.
func overlaps(history []porcupine.Operation) bool {
	for i, a := range history {
		for _, b := range history[i+1:] {
			if a.ClientId != b.ClientId && a.Input.(tableOp).room == b.Input.(tableOp).room && a.Call < b.Return && b.Call < a.Return {
				return true
			}
		}
	}
	return false
}

func printHistory(history []porcupine.Operation) string {
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var b strings.Builder
	for _, op := range history {
		fmt.Fprintf(&b, "\n%3d–%3d client %d: %s", op.Call, op.Return, op.ClientId, describeOp(op.Input.(tableOp), op.Output.(tableResult)))
	}
	return b.String()
}

// coreTable is the core behind an owner goroutine, with as much of the worker API as a call needs:
// status words in memory, reasons by slot.
type coreTable struct {
	inbox chan *coreCall
	done  chan struct{}
	words [tableClients][maxAttempts]atomic.Uint64 // opener<<8 | status
	tags  [maxAttempts]atomic.Uint64               // opener of the attempt, once it is answered
	owner [maxAttempts]atomic.Int32                // session of the attempt
	wrong tableFault
}

const tableClients = 3

// coreCall is a call on its way through the owner.
type coreCall struct {
	client int
	op     tableOp
	result chan tableResult
}

// tableFault is one of the ways in which a table is wrong; the checker must find each.
type tableFault int

const (
	noFault       tableFault = iota
	forgetsR3                // a live room is opened again
	mergesByMax              // incident 1: a status is merged by max(), so Failed never shows
	losesAbort               // an abort that comes with other calls is answered and forgotten
	losesMark                // the counterpart's abort of an attempt still to come is forgotten
	rewritesCause            // a late end overwrites the reason of the first
	keepsSlot                // a release is answered, but the slot stays
)

func newCoreTable(wrong tableFault) *coreTable {
	return &coreTable{inbox: make(chan *coreCall, tableClients), done: make(chan struct{}), wrong: wrong}
}

func (c *coreTable) call(client int, op tableOp) tableResult {
	if op.kind == opOpen {
		c.owner[op.att].Store(int32(client))
	}
	if op.kind == opPoll { // one memory read, past the owner
		w := c.words[c.owner[op.att].Load()][op.att].Load()
		if w>>8 != c.tags[op.att].Load() {
			return tableResult{status: statemachine.Bootstrapping}
		}
		return tableResult{status: statemachine.KVPoll(w & 0xff)}
	}
	q := &coreCall{client: client, op: op, result: make(chan tableResult, 1)}
	c.inbox <- q
	return <-q.result
}

// run is the owner goroutine. Every wait of the inbox gives one batch to the core.
func (c *coreTable) run(t *testing.T) {
	defer close(c.done)
	m, err := core.New(core.Config{Incarnation: 10, Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()})
	if err != nil {
		t.Error(err)
		return
	}
	out := new(core.Effects)
	var in []core.Event
	for i := range tableClients {
		in = append(in, core.Event{Kind: core.SessionUp, Session: core.SessionID(i + 1), Group: fmt.Sprint("prefill-", i), Role: statemachine.Source, Size: 1, Slots: maxAttempts})
	}
	in = append(in, core.Event{Kind: core.PeerHello, Peer: 1, Node: "peer", Inc: 20})
	m.Step(0, in, out)
	var reasons [tableClients][maxAttempts]statemachine.Reason
	var openers uint64 // of the peer
	now := int64(0)
	for first := range c.inbox {
		batch := []*coreCall{first}
		for more := true; more; {
			select {
			case q, ok := <-c.inbox:
				if more = ok; ok {
					batch = append(batch, q)
				}
			default:
				more = false
			}
		}
		in, now = in[:0], now+1000
		for i, q := range batch {
			openers++
			if e, ok := c.event(m, q, uint64(i+1), openers, len(batch)); ok {
				in = append(in, e)
			}
		}
		out.Reset()
		m.Step(now, in, out)
		for i := range out.Words { // before the answers, as the worker API does
			w := &out.Words[i]
			word := w.Opener.Seq<<8 | uint64(w.Status)
			at := &c.words[w.Session-1][w.Slot]
			if old := at.Load(); c.wrong == mergesByMax && old>>8 == word>>8 {
				word = max(old, word)
			}
			at.Store(word)
			if w.Status == statemachine.Failed {
				reasons[w.Session-1][w.Slot] = w.Reason
			} else {
				reasons[w.Session-1][w.Slot] = statemachine.None
			}
		}
		results := make([]tableResult, len(batch))
		for i := range out.Replies {
			r := &out.Replies[i]
			q := batch[r.Seq-1]
			if r.Code == core.Refused {
				results[r.Seq-1].outcome = refused
			}
			if q.op.kind == opOpen && r.Code == core.OK {
				c.tags[q.op.att].Store(r.Opener.Seq)
			}
		}
		for i, q := range batch {
			owner := c.owner[q.op.att].Load()
			switch {
			case q.op.kind == opFailure:
				results[i].reason = reasons[owner][q.op.att]
				if reasons[owner][q.op.att] == released {
					results[i].outcome = refused
				}
			case q.op.kind == opRelease && results[i].outcome == answered && c.wrong != keepsSlot:
				reasons[owner][q.op.att] = released
			case q.op.kind == opPeerAbort && c.wrong == rewritesCause && reasons[owner][q.op.att] == statemachine.Aborted:
				reasons[owner][q.op.att] = statemachine.PeerAborted
			}
			q.result <- results[i]
		}
	}
}

// released stands in reasons for a slot that holds no room.
const released = statemachine.NumReasons + 1

// event is the call as the core gets it; false for one that it does not hear of.
func (c *coreTable) event(m *core.Machine, q *coreCall, seq, opener uint64, batch int) (core.Event, bool) {
	session := core.SessionID(c.owner[q.op.att].Load() + 1)
	e := core.Event{Session: session, Seq: seq, Slot: int32(q.op.att), Room: q.op.room, Att: uint64(q.op.att)}
	switch q.op.kind {
	case opOpen:
		e.Kind = core.Open
		if c.wrong == forgetsR3 {
			e.Room = q.op.room*maxAttempts + int64(q.op.att)
		}
	case opAbort:
		e.Kind = core.Abort
		if c.wrong == losesAbort && batch > 1 {
			return e, false
		}
	case opRelease:
		e.Kind = core.Release
	case opOperatorAbort:
		e = core.Event{Kind: core.AdminAbort, Room: q.op.room}
	case opPeerAbort:
		if c.wrong == losesMark && c.tags[q.op.att].Load() == 0 {
			return e, false
		}
		e = core.Event{Kind: core.PeerFrame, Peer: 1, Frame: core.Frame{
			Kind: statemachine.FrameAbort, Room: q.op.room, D: statemachine.Opener{Inc: 20, Seq: opener}, Att: uint64(q.op.att), Reason: statemachine.Aborted,
		}}
	default:
		return e, false
	}
	return e, true
}

// reset forgets the attempts of the last history, whose slots are free again.
func (c *coreTable) reset() {
	for i := range c.tags {
		c.tags[i].Store(0)
	}
}

// checkTable records n histories of a core with the fault and returns how many overlapped and the
// first that is not linearizable.
func checkTable(t *testing.T, wrong tableFault, seed uint64, n int) (overlapped int, bad []porcupine.Operation) {
	c := newCoreTable(wrong)
	go c.run(t)
	defer func() { close(c.inbox); <-c.done }()
	h := historian{clients: tableClients, calls: 5, rooms: 2, kinds: []tableKind{
		opOpen, opOpen, opAbort, opPoll, opPoll, opFailure, opRelease, opRelease, opOperatorAbort, opPeerAbort,
	}}
	for i := range n {
		c.reset()
		history := h.record(c, seed+uint64(i), int64(i+1)*h.rooms)
		if overlaps(history) {
			overlapped++
		}
		if !porcupine.CheckOperations(tableModel, history) {
			return overlapped, history
		}
	}
	return overlapped, nil
}

// TestRoomTableIsLinearizable checks ten thousand concurrent histories of the core's room table.
func TestRoomTableIsLinearizable(t *testing.T) {
	const histories = 10_000
	seed := rand.Uint64()
	overlapped, bad := checkTable(t, noFault, seed, histories)
	if bad != nil {
		t.Fatalf("seed %d: not linearizable:%s", seed, printHistory(bad))
	}
	t.Logf("%d histories, %d with calls on one room at the same time", histories, overlapped)
	if overlapped < histories/4 {
		t.Errorf("only %d of %d histories have calls on one room at the same time", overlapped, histories)
	}
}

// TestWrongRoomTables: the check that passes ten thousand histories of the right table finds what is
// wrong with each of these.
func TestWrongRoomTables(t *testing.T) {
	for _, c := range []struct {
		name  string
		wrong tableFault
	}{
		{"opens a live room again", forgetsR3},
		{"merges statuses by max", mergesByMax},
		{"loses an abort among others", losesAbort},
		{"loses an abort mark", losesMark},
		{"overwrites a reason", rewritesCause},
		{"keeps a released slot", keepsSlot},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, bad := checkTable(t, c.wrong, 1, 2000)
			if bad == nil {
				t.Fatal("2000 histories pass")
			}
			t.Logf("found in:%s", printHistory(bad))
		})
	}
}
