package statemachine

import (
	"fmt"
	"strings"
	"testing"
)

// The openers of the table tests: s, s2 at the source engine, d, d2 at the destination engine, s0 and
// d0 of their older incarnations.
var (
	s, s2, s0 = Opener{10, 1}, Opener{10, 2}, Opener{9, 1}
	d, d2, d0 = Opener{20, 1}, Opener{20, 2}, Opener{19, 1}
	openers   = map[Opener]string{{}: "0", s: "s", s2: "s2", s0: "s0", d: "d", d2: "d2", d0: "d0"}
)

const att = 7

// one is a record with its only pair: both sides on one engine each.
type one struct {
	Record
	Pair
}

// step is the transition of a record with one pair.
func step(r one, e Event) (one, Out) {
	o := Out{}
	r.Step([]*Pair{&r.Pair}, 0, &e, &o)
	return r, o
}

// The columns at P. Held pages are armed; busy columns have an op at the plugin.
var (
	pAbsent = one{Record{Role: Source}, Pair{Judge: true}}
	pB      = with(pAbsent, func(r *one) { r.State, r.Own, r.Att, r.Admitted = Unbound, s, att, true })
	pBQueue = with(pB, func(r *one) { r.Admitted = false })
	pO      = with(pB, func(r *one) { r.State, r.Other, r.Armed = Offered, d, true })
	pW      = with(pO, func(r *one) { r.State, r.Confirmed = Confirmed, true })
	pWBusy  = with(pW, func(r *one) { r.Started, r.Ops.Open = true, 1 })
	pC      = with(pW, func(r *one) { r.State, r.Started, r.RankQuiet = Committed, true, true })
	pCUnq   = with(pC, func(r *one) { r.RankQuiet, r.Ops.Linger = false, 1 })
	pCLate  = with(pC, func(r *one) { r.RankQuiet = false }) // quiesced after RankEnd said no
	pT      = with(pW, func(r *one) { r.State, r.Reason, r.DrainedSent = Ended, Aborted, true })
	pTBusy  = with(pWBusy, func(r *one) { r.State, r.Reason = Ended, Aborted })
	pTLost  = with(pW, func(r *one) { r.State, r.Reason, r.Ops.Lost = Ended, PluginLost, 1 })
	pTU     = with(pB, func(r *one) { r.State, r.Reason = Ended, Aborted })
	pTOK    = with(pC, func(r *one) { r.State, r.Reason = Ended, Success })
	pTOKUnq = with(pCUnq, func(r *one) { r.State, r.Reason = Ended, Success })
)

// The columns at D.
var (
	dAbsent = one{Record: Record{Role: Destination}}
	dQ      = with(dAbsent, func(r *one) { r.State, r.Own, r.Att, r.Admitted = Opened, d, att, true })
	dR      = with(dQ, func(r *one) { r.State, r.Armed, r.Pages = Registered, true, Armed })
	dW      = with(dR, func(r *one) { r.State, r.Other = Bound, s })
	dT      = with(dW, func(r *one) { r.State, r.Reason, r.Pages, r.Rung = Ended, Aborted, Quiescing, Drain })
	dT3     = with(dT, func(r *one) { r.Rung = Fence })
	dT3S    = with(dT3, func(r *one) { r.SourceEnded = true })
	dT4     = with(dT, func(r *one) { r.Rung, r.Pages = Quarantine, Quarantined })
	dTQuiet = with(dT, func(r *one) { r.Rung, r.Pages, r.Quiet = NoRung, Quiet, true })
	dTOK    = with(dTQuiet, func(r *one) { r.Reason, r.Started, r.RankEnded = Success, true, true })
	dTU     = with(dR, func(r *one) { r.State, r.Reason, r.Pages, r.Quiet = Ended, Aborted, Quiet, true })
)

func with[T any](r T, set func(*T)) T {
	set(&r)
	return r
}

// change prints what Step did: what changed in the record, what is sent, what is asked.
func change(old, r one, o Out) string {
	var w []string
	add := func(cond bool, format string, args ...any) {
		if cond {
			w = append(w, fmt.Sprintf(format, args...))
		}
	}
	if r.State != old.State || r.Reason != old.Reason {
		if r.State == Ended {
			add(true, "ended(%s)", r.Reason)
		} else {
			add(true, "%s", r.State)
		}
	}
	add(r.Admitted != old.Admitted && old.State != Absent, "admitted=%v", r.Admitted)
	add(r.Started != old.Started, "started")
	add(r.Armed != old.Armed, "armed")
	add(r.Other != old.Other, "pair=%s", openers[r.Other])
	add(r.Pages != old.Pages, "pages=%s", r.Pages)
	add(r.Rung != old.Rung, "rung=%d", r.Rung)
	add(r.SourceEnded != old.SourceEnded, "source_ended")
	for _, f := range o.Sends {
		switch f.Kind {
		case FrameVerdict:
			word := [...]string{"", "success", "failed", "unknown"}[f.Outcome]
			if f.Outcome == JudgeFailed && f.Reason != Success {
				word = f.Reason.String()
			}
			add(true, "Verdict(%s,%s,%s)", word, openers[f.S], openers[f.D])
		case FrameAbort:
			add(true, "Abort(%s,%s:%s)", openers[f.S], openers[f.D], f.Reason)
		case FrameRankEnd:
			add(true, "RankEnd(%s,%s,quiet=%v)", openers[f.S], openers[f.D], f.Quiet)
		case FrameRegister:
			add(true, "Register(%s)", openers[f.D])
		default:
			add(true, "%s(%s,%s)", f.Kind, openers[f.S], openers[f.D])
		}
	}
	for i, name := range []string{"submit", "cancel", "mark", "placeholder", "drop_placeholder", "revoke", "fence", "drop"} {
		add(o.Do&(1<<i) != 0, "%s", name)
	}
	if len(w) == 0 {
		return "-"
	}
	return strings.Join(w, " ")
}

type row struct {
	at    string // column of the table in docs/protocol.md
	rec   one
	event Event
	want  string
}

func check(t *testing.T, table string, rows []row) {
	t.Helper()
	for _, c := range rows {
		t.Run(table+"/"+c.at, func(t *testing.T) {
			next, out := step(c.rec, c.event)
			if got := change(c.rec, next, out); got != c.want {
				t.Errorf("%+v\n got %s\nwant %s", c.event, got, c.want)
			}
			if why := lax(c.rec, c.event, next, out); why != "" {
				t.Errorf("%+v\n→ %+v\n%+v: %s", c.event, next, out.Sends, why)
			}
		})
	}
}

func register(d Opener, att uint64) Event {
	return Event{Kind: OnFrame, Frame: FrameRegister, D: d, Att: att}
}

func frame(k FrameKind, s, d Opener) Event {
	return Event{Kind: OnFrame, Frame: k, S: s, D: d, Att: att}
}

func verdict(o Outcome, why Reason) Event {
	return Event{Kind: OnFrame, Frame: FrameVerdict, S: s, D: d, Outcome: o, Reason: why}
}

func own(e Event, inc bool) Event {
	e.OwnInc = inc
	return e
}

func abort(s, d Opener, att uint64) Event {
	return Event{Kind: OnFrame, Frame: FrameAbort, S: s, D: d, Att: att, Reason: Aborted}
}

// TestFramesAtP is "Frames at P" of docs/protocol.md, row by row.
func TestFramesAtP(t *testing.T) {
	newer := Event{Kind: OnHelloNewer}
	check(t, "Hello newer", []row{
		{"–", pAbsent, newer, "-"},
		{"B", pB, newer, "-"},
		{"O", pO, newer, "ended(peer_lost) cancel"},
		{"W", pWBusy, newer, "ended(peer_lost) cancel"},
		{"C", pC, newer, "ended(outcome_unknown)"},
		{"T", pT, newer, "-"},
	})
	reg := register(d, att)
	check(t, "Register own pair", []row{
		{"O", pO, reg, "Bound(s,d)"},
		{"W", pW, reg, "Bound(s,d)"},
		{"C", pC, reg, "Bound(s,d)"},
		{"T", pT, reg, "Abort(s,d:aborted) Drained(s,d)"},
		{"T not drained", pTBusy, reg, "Abort(s,d:aborted)"},
		{"T lost with its writer", pTLost, reg, "Abort(s,d:plugin_lost)"},
		{"–", pAbsent, reg, "placeholder"},
	})
	reg = register(d2, att)
	check(t, "Register same att", []row{
		{"B", pB, reg, "offered pair=d2 Bound(s,d2) drop_placeholder"},
		{"B waits for admission", pBQueue, reg, "placeholder"},
		{"O", pO, reg, "ended(peer_superseded) Drained(s,d) cancel placeholder"},
		{"W", pWBusy, reg, "ended(peer_superseded) Abort(s,d:peer_superseded) cancel placeholder"},
		{"C", pC, reg, "placeholder"},
		{"T paired", pT, reg, "placeholder"},
		{"T unpaired", pTU, reg, "pair=d2 Abort(s,d2:aborted)"},
		{"–", pAbsent, reg, "placeholder"},
	})
	reg = register(d2, att+1)
	check(t, "Register other", []row{
		{"B", pB, reg, "placeholder"},
		{"O", pO, reg, "ended(peer_superseded) Drained(s,d) cancel placeholder"},
		{"W", pW, reg, "ended(peer_superseded) Drained(s,d) cancel placeholder"},
		{"C", pC, reg, "placeholder"},
		{"T", pT, reg, "placeholder"},
		{"T unpaired", pTU, reg, "placeholder"},
		{"–", pAbsent, reg, "placeholder"},
	})
	conf := frame(FrameConfirm, s, d)
	check(t, "Confirm", []row{
		{"B", pB, conf, "drop"},
		{"O", pO, conf, "confirmed submit"},
		{"O other pair", pO, frame(FrameConfirm, s, d2), "drop"},
		{"W", pW, conf, "-"},
		{"C", pC, conf, "-"},
		{"T", pT, conf, "Abort(s,d:aborted) Drained(s,d)"},
		{"T not drained", pTBusy, conf, "Abort(s,d:aborted)"},
		{"T other pair", pT, frame(FrameConfirm, s, d2), "drop"},
		{"– own inc", pAbsent, own(conf, true), "Abort(s,d:stale_room) Drained(s,d)"},
		{"– older inc", pAbsent, own(conf, false), "Abort(s,d:stale_room)"},
		{"– perhaps lost", pAbsent, Event{Kind: OnFrame, Frame: FrameConfirm, S: s, D: d, OwnInc: true, Unproven: true}, "Abort(s,d:stale_room)"},
	})
	v := verdict(JudgeSuccess, None)
	check(t, "Verdict Success", []row{
		{"B", pB, v, "drop_placeholder drop"},
		{"O", pO, v, "drop_placeholder drop"},
		{"W", pW, v, "drop_placeholder drop"},
		{"C", pC, v, "ended(success) drop_placeholder"},
		{"C quiet=no, not drained", pCUnq, v, "ended(success) drop_placeholder"},
		{"C quiet=no, drained since", pCLate, v, "ended(success) Drained(s,d) drop_placeholder"},
		{"C other pair", pC, Event{Kind: OnFrame, Frame: FrameVerdict, Outcome: JudgeSuccess, S: s, D: d2}, "drop_placeholder drop"},
		{"T drained", pT, v, "Drained(s,d) drop_placeholder"},
		{"T not drained", pTBusy, v, "Abort(s,d:aborted) drop_placeholder"},
		{"– own inc", pAbsent, own(v, true), "Drained(s,d) drop_placeholder"},
		{"– older inc", pAbsent, own(v, false), "drop_placeholder drop"},
	})
	v = verdict(JudgeFailed, Stalled)
	check(t, "Verdict Failed", []row{
		{"O", pO, v, "ended(stalled) Drained(s,d) cancel drop_placeholder"},
		{"W", pWBusy, v, "ended(stalled) Abort(s,d:stalled) cancel drop_placeholder"},
		{"C", pC, v, "ended(stalled) Drained(s,d) cancel drop_placeholder"},
		{"C quiet=no", pCUnq, v, "ended(stalled) Abort(s,d:stalled) cancel drop_placeholder"},
		{"T drained", pT, v, "Drained(s,d) drop_placeholder"},
		{"T not drained", pTBusy, v, "Abort(s,d:aborted) drop_placeholder"},
		{"– own inc", pAbsent, own(v, true), "Drained(s,d) drop_placeholder"},
		{"– older inc", pAbsent, own(v, false), "drop_placeholder drop"},
		{"– perhaps lost", pAbsent, Event{Kind: OnFrame, Frame: FrameVerdict, Outcome: JudgeFailed, S: s, D: d, OwnInc: true, Unproven: true}, "Abort(s,d:stale_room) drop_placeholder"},
	})
	check(t, "Verdict Failed aborted", []row{
		{"W", pW, verdict(JudgeFailed, Aborted), "ended(peer_aborted) Drained(s,d) cancel drop_placeholder"},
	})
	v = verdict(JudgeUnknown, None)
	check(t, "Verdict unknown", []row{
		{"O", pO, v, "ended(peer_lost) Drained(s,d) cancel drop_placeholder"},
		{"W", pWBusy, v, "ended(peer_lost) Abort(s,d:peer_lost) cancel drop_placeholder"},
		{"C", pC, v, "ended(outcome_unknown) drop_placeholder"},
		{"C quiet=no, drained since", pCLate, v, "ended(outcome_unknown) Drained(s,d) drop_placeholder"},
		{"T", pT, v, "Drained(s,d) drop_placeholder"},
		{"–", pAbsent, own(v, true), "Drained(s,d) drop_placeholder"},
	})
	a := abort(Opener{}, d, att)
	check(t, "Abort(d), D unbound", []row{
		{"B same att", pB, a, "ended(peer_aborted) pair=d Drained(s,d) cancel drop_placeholder"},
		{"B other att", pB, abort(Opener{}, d, att+1), "mark drop_placeholder"},
		{"O other att", pO, abort(Opener{}, d2, att+1), "mark drop_placeholder"},
		{"W other att", pW, abort(Opener{}, d2, att+1), "mark drop_placeholder"},
		{"C other att", pC, abort(Opener{}, d2, att+1), "mark drop_placeholder"},
		{"O", pO, a, "ended(peer_aborted) Drained(s,d) cancel drop_placeholder"},
		{"O other d", pO, abort(Opener{}, d2, att), "drop_placeholder drop"},
		{"W", pW, a, "drop_placeholder drop"},
		{"C", pC, a, "drop_placeholder drop"},
		{"T pair d", pT, a, "drop_placeholder drop"},
		{"T unpaired, same att", pTU, a, "pair=d drop_placeholder"},
		{"T unpaired, other att", pTU, abort(Opener{}, d, att+1), "mark drop_placeholder"},
		{"T other pair", pT, abort(Opener{}, d2, att), "mark drop_placeholder"},
		{"–", pAbsent, a, "mark drop_placeholder"},
		{"–, attempt 0", pAbsent, abort(Opener{}, d, 0), "mark drop_placeholder"},
	})
	check(t, "Queued", []row{
		{"B", pB, frame(FrameQueued, Opener{}, d), "-"},
		{"O", pO, frame(FrameQueued, Opener{}, d), "-"},
		{"W", pW, frame(FrameQueued, Opener{}, d), "drop"},
		{"–", pAbsent, frame(FrameQueued, Opener{}, d), "drop"},
	})
}

// TestFramesAtD is "Frames at D" of docs/protocol.md, row by row.
func TestFramesAtD(t *testing.T) {
	newer := Event{Kind: OnHelloNewer}
	check(t, "Hello newer", []row{
		{"Q", dQ, newer, "-"},
		{"R", dR, newer, "-"}, // Register again is Resync's
		{"W", dW, newer, "ended(peer_lost) pages=quiescing rung=1 source_ended revoke"},
		{"T", dT, newer, "source_ended"},
		{"T rung 3", dT3, newer, "source_ended fence"},
		{"–", dAbsent, newer, "-"},
	})
	b := frame(FrameBound, s, d)
	check(t, "Bound", []row{
		{"Q", dQ, b, "drop"},
		{"R", dR, b, "bound pair=s Confirm(s,d)"},
		{"W", dW, b, "Confirm(s,d)"},
		{"W other s", dW, frame(FrameBound, s2, d), "ended(peer_superseded) pages=quiescing rung=1 Verdict(peer_superseded,s2,d) revoke"},
		{"T", dT, b, "Verdict(aborted,s,d)"},
		{"T other s", dT, frame(FrameBound, s2, d), "Verdict(stale_room,s2,d)"},
		{"T unpaired", dTU, b, "Verdict(stale_room,s,d)"},
		{"T success", dTOK, b, "Verdict(success,s,d)"},
		{"–", dAbsent, b, "Verdict(stale_room,s,d)"},
	})
	end := func(s Opener, complete, quiet bool) Event {
		e := frame(FrameRankEnd, s, d)
		e.Complete, e.Quiet = complete, quiet
		return e
	}
	check(t, "RankEnd", []row{
		{"Q", dQ, end(s, true, true), "drop"},
		{"R", dR, end(s, true, true), "Verdict(stale_room,s,d)"},
		{"W quiet=yes", dW, end(s, true, true), "ended(success) started pages=quiet Verdict(success,s,d) revoke"},
		{"W quiet=no", dW, end(s, true, false), "ended(success) started pages=quiescing rung=1 Verdict(success,s,d) revoke"},
		{"W R11 fails", dW, end(s, false, true), "ended(length_mismatch) pages=quiescing rung=1 Verdict(length_mismatch,s,d) revoke"},
		{"W other s", dW, end(s2, true, true), "Verdict(stale_room,s2,d)"},
		{"T", dT, end(s, true, true), "Verdict(aborted,s,d)"},
		{"T success", dTOK, end(s, true, true), "Verdict(success,s,d)"},
		{"T other s", dTOK, end(s2, true, true), "Verdict(stale_room,s2,d)"},
		{"–", dAbsent, end(s, true, true), "Verdict(unknown,s,d)"},
	})
	check(t, "Abort(s,d)", []row{
		{"Q", dQ, abort(s, d, att), "drop"},
		{"R", dR, abort(s, d, att), "ended(peer_aborted) pages=quiet revoke"},
		{"W", dW, abort(s, d, att), "ended(peer_aborted) pages=quiescing rung=1 source_ended revoke"},
		{"W other s", dW, abort(s2, d, att), "drop"},
		{"T", dT, abort(s, d, att), "source_ended"},
		{"T rung 3", dT3, abort(s, d, att), "source_ended fence"},
		{"T rung 4", dT4, abort(s, d, att), "source_ended fence"},
		{"T other s", dT, abort(s2, d, att), "drop"},
		{"–", dAbsent, abort(s, d, att), "drop"},
	})
	check(t, "Abort(s,0)", []row{
		{"Q", dQ, abort(s, Opener{}, att), "ended(peer_aborted)"},
		{"R", dR, abort(s, Opener{}, att), "ended(peer_aborted) pages=quiet revoke"},
		{"R other att", dR, abort(s, Opener{}, att+1), "mark"},
		{"W", dW, abort(s, Opener{}, att), "drop"},
		{"W other att", dW, abort(s, Opener{}, att+1), "mark"},
		{"T same att", dT, abort(s, Opener{}, att), "drop"},
		{"T other att", dT, abort(s, Opener{}, att+1), "mark"},
		{"–", dAbsent, abort(s, Opener{}, att), "mark"},
	})
	check(t, "Abort(0,d)", []row{
		{"Q", dQ, abort(Opener{}, d, att), "drop"},
		{"R", dR, abort(Opener{}, d, att), "ended(stale_room) pages=quiet revoke"},
		{"W", dW, abort(Opener{}, d, att), "drop"},
		{"T", dT, abort(Opener{}, d, att), "drop"},
		{"–", dAbsent, abort(Opener{}, d, att), "drop"},
	})
	dr := frame(FrameDrained, s, d)
	check(t, "Drained", []row{
		{"Q", dQ, dr, "drop"},
		{"R", dR, dr, "drop"},
		{"W", dW, dr, "ended(peer_aborted) pages=quiet source_ended revoke"},
		{"W other s", dW, frame(FrameDrained, s2, d), "drop"},
		{"T rung 1", dT, dr, "pages=quiet rung=0 source_ended"},
		{"T rung 3", dT3, dr, "pages=quiet rung=0 source_ended"},
		{"T rung 4", dT4, dr, "pages=quiet rung=0 source_ended"},
		{"T quiet", dTQuiet, dr, "drop"},
		{"T other s", dT, frame(FrameDrained, s2, d), "drop"},
		{"–", dAbsent, dr, "drop"},
	})
	check(t, "Progress", []row{
		{"W", dW, frame(FrameProgress, s, d), "started"},
		{"W other s", dW, frame(FrameProgress, s2, d), "drop"},
		{"R", dR, frame(FrameProgress, s, d), "drop"},
		{"T", dT, frame(FrameProgress, s, d), "drop"},
	})
}

// TestLocalEvents is "Local events" of docs/protocol.md.
func TestLocalEvents(t *testing.T) {
	open := Event{Kind: OnOpen, Role: Source, Own: s, Att: att, Admitted: true}
	held, marked := open, open
	held.D, marked.Marked, marked.Admitted = d, true, false
	check(t, "P open", []row{
		{"–", pAbsent, open, "unbound"},
		{"– placeholder", pAbsent, held, "offered pair=d Bound(s,d) drop_placeholder"},
		{"– abort mark", pAbsent, marked, "ended(peer_aborted)"},
	})
	check(t, "P admit", []row{
		{"B", pBQueue, Event{Kind: OnAdmit}, "admitted=true"},
		{"B placeholder", pBQueue, Event{Kind: OnAdmit, D: d}, "offered admitted=true pair=d Bound(s,d) drop_placeholder"},
		{"B again", pB, Event{Kind: OnAdmit, D: d}, "drop"},
		{"T", pT, Event{Kind: OnAdmit}, "drop"},
	})
	send := Event{Kind: OnSend}
	check(t, "P send", []row{
		{"B", pB, send, "armed"},
		{"O", with(pO, func(r *one) { r.Armed = false }), send, "armed"},
		{"C", with(pC, func(r *one) { r.Armed = false }), send, "-"},
		{"T", pTU, send, "-"},
		{"W submitted", pW, Event{Kind: OnSubmit}, "started"},
	})
	check(t, "P op end", []row{
		{"W all Done", pWBusy, Event{Kind: OnOps}, "-"},
		{"W complete", pW, Event{Kind: OnComplete}, "committed started RankEnd(s,d,quiet=true)"},
		{"W complete quiet=no", with(pW, func(r *one) { r.Started, r.Ops.Linger = true, 1 }), Event{Kind: OnComplete}, "committed RankEnd(s,d,quiet=false)"},
		{"W complete, writer lost", with(pW, func(r *one) { r.Started, r.Ops.Lost = true, 1 }), Event{Kind: OnComplete}, "committed RankEnd(s,d,quiet=false)"},
		{"T complete", pT, Event{Kind: OnComplete}, "-"},
		{"W skipped", pW, Event{Kind: OnOpFailed, Reason: Skipped}, "ended(skipped) Abort(s,d:skipped) Drained(s,d) cancel"},
		{"W failed, others open", pWBusy, Event{Kind: OnOpFailed, Reason: TransferFailed}, "ended(transfer_failed) Abort(s,d:transfer_failed) cancel"},
		{"T last op quiet", with(pTBusy, func(r *one) { r.Ops.Open = 0 }), Event{Kind: OnOps}, "Drained(s,d)"},
		{"T last op failed, quiet", with(pTBusy, func(r *one) { r.Ops.Open = 0 }), Event{Kind: OnOpFailed, Reason: Aborted}, "Drained(s,d)"},
		{"T not quiet", pTBusy, Event{Kind: OnOps}, "-"},
		{"T writer lost", pTLost, Event{Kind: OnOps}, "-"},
		{"T drained once", pT, Event{Kind: OnOps}, "-"},
		{"T Success quiet=yes", pTOK, Event{Kind: OnOps}, "-"},
		{"T Success quiet=no, quiesced", with(pTOKUnq, func(r *one) { r.Ops.Linger = 0 }), Event{Kind: OnOps}, "Drained(s,d)"},
	})
	for _, c := range []struct {
		name string
		e    Event
		why  Reason
	}{
		{"worker abort", Event{Kind: OnAbort}, Aborted}, {"clock", Event{Kind: OnClock, Reason: InputTimeout}, InputTimeout},
		{"worker lost", Event{Kind: OnWorkerLost}, WorkerLost},
	} {
		check(t, "P "+c.name, []row{
			{"B", pB, c.e, fmt.Sprintf("ended(%s) Abort(s,0:%s) cancel", c.why, c.why)},
			{"O", pO, c.e, fmt.Sprintf("ended(%s) Abort(s,d:%s) Drained(s,d) cancel", c.why, c.why)},
			{"W", pWBusy, c.e, fmt.Sprintf("ended(%s) Abort(s,d:%s) cancel", c.why, c.why)},
		})
		check(t, "D "+c.name, []row{
			{"Q", dQ, c.e, fmt.Sprintf("ended(%s) Abort(0,d:%s)", c.why, c.why)},
			{"R", dR, c.e, fmt.Sprintf("ended(%s) pages=quiet Abort(0,d:%s) revoke", c.why, c.why)},
			{"W", dW, c.e, fmt.Sprintf("ended(%s) pages=quiescing rung=1 Verdict(%s,s,d) revoke", c.why, c.why)},
		})
	}
	check(t, "P past RankEnd", []row{
		{"C worker abort", pC, Event{Kind: OnAbort}, "Abort(s,d:aborted)"},
		{"C deadline", pC, Event{Kind: OnClock, Reason: Deadline}, "Abort(s,d:deadline)"},
		{"C verdict clock", pC, Event{Kind: OnClock, Reason: OutcomeUnknown}, "ended(outcome_unknown)"},
		{"C peer dead", pC, Event{Kind: OnPeerDead}, "ended(outcome_unknown)"},
		{"C worker lost", pC, Event{Kind: OnWorkerLost}, "-"},
		{"C draining", pC, Event{Kind: OnClock, Reason: Draining}, "ended(outcome_unknown)"},
	})
	check(t, "abort of T or none", []row{
		{"P T", pT, Event{Kind: OnAbort}, "drop"},
		{"P –", pAbsent, Event{Kind: OnAbort}, "drop"},
		{"D T", dT, Event{Kind: OnAbort}, "drop"},
		{"D –", dAbsent, Event{Kind: OnAbort}, "drop"},
		{"P T clock", pT, Event{Kind: OnClock, Reason: Deadline}, "drop"},
		{"D T clock", dT, Event{Kind: OnClock, Reason: Deadline}, "drop"},
	})
	lost := Event{Kind: OnPluginLost, Reason: PluginLost}
	check(t, "plugin epoch EOF", []row{
		{"P W op without end", with(pW, func(r *one) { r.Ops.Dead = 1 }), lost, "ended(plugin_lost) Abort(s,d:plugin_lost) cancel"},
		{"P W only Done quiet=no", with(pW, func(r *one) { r.Ops.Dead = 1 }), Event{Kind: OnPluginLost}, "-"},
		{"P T", pTBusy, lost, "-"},
		{"P C", pCUnq, lost, "-"},
		{"D R", dR, lost, "ended(plugin_lost) pages=quiet Abort(0,d:plugin_lost) revoke"},
		{"D W", dW, lost, "ended(plugin_lost) pages=quiescing rung=1 Verdict(plugin_lost,s,d) revoke"},
		{"D T", dT, lost, "drop"},
		{"D W peer dead", dW, Event{Kind: OnPeerDead}, "ended(peer_lost) pages=quiescing rung=1 revoke"},
		{"P O peer dead", pO, Event{Kind: OnPeerDead}, "ended(peer_lost) cancel"},
		{"P B peer dead", pB, Event{Kind: OnPeerDead}, "-"},
		{"D R peer dead", dR, Event{Kind: OnPeerDead}, "-"},
	})
	dopen := Event{Kind: OnOpen, Role: Destination, Own: d, Att: att, Admitted: true}
	dmark := dopen
	dmark.Marked = true
	check(t, "D open", []row{
		{"–", dAbsent, dopen, "opened"},
		{"– abort mark", dAbsent, dmark, "ended(peer_aborted)"},
	})
	pages := Event{Kind: OnPages, Admitted: true}
	check(t, "D register", []row{
		{"Q", dQ, pages, "registered armed pages=armed Register(d)"},
		{"Q waits for memory", dQ, Event{Kind: OnPages}, "admitted=false armed"},
		{"Q admitted", with(dQ, func(r *one) { r.Armed, r.Admitted = true, false }), Event{Kind: OnAdmit}, "registered admitted=true pages=armed Register(d)"},
		{"R", dR, pages, "drop"},
		{"W", dW, pages, "drop"},
		{"T", dT, pages, "drop"},
	})
}

// TestPagesOfTerminalD is the ladder under "Pages" of docs/protocol.md.
func TestPagesOfTerminalD(t *testing.T) {
	clock, gone := Event{Kind: OnDrainClock}, Event{Kind: OnPluginFenced}
	fenced := func(quiet bool) Event { return Event{Kind: OnFenced, Quiet: quiet} }
	check(t, "rung 1", []row{
		{"drain clock", dT, clock, "rung=3"},
		{"drain clock, source ended", with(dT, func(r *one) { r.SourceEnded = true }), clock, "rung=3 fence"},
		{"receiver check (rung 2)", dT, Event{Kind: OnRevoked, Quiet: true}, "pages=quiet rung=0"},
		{"receiver check unknown", dT, Event{Kind: OnRevoked}, "-"},
		{"plugin fenced", dT, gone, "pages=fenced rung=0"},
	})
	check(t, "rung 3", []row{
		{"quiet", dT3S, fenced(true), "pages=quiet rung=0"},
		{"quiet without source_ended is no proof", dT3, fenced(true), "pages=quarantined rung=4"},
		{"unknown", dT3S, fenced(false), "pages=quarantined rung=4"},
		{"drain clock", dT3S, clock, "pages=quarantined rung=4"},
		{"plugin fenced", dT3, gone, "pages=fenced rung=0"},
	})
	check(t, "rung 4", []row{
		{"clock", dT4, clock, "-"},
		{"unknown", dT4, fenced(false), "-"},
		{"late quiet", with(dT4, func(r *one) { r.SourceEnded = true }), fenced(true), "pages=quiet rung=0"},
		{"source ended only now: the fence is asked late", dT4, Event{Kind: OnHelloNewer}, "source_ended fence"},
		{"and once", with(dT4, func(r *one) { r.SourceEnded = true }), Event{Kind: OnHelloNewer}, "-"},
		{"death by the clock is no end", dT4, Event{Kind: OnPeerDead}, "-"},
		{"nor after the end", with(dT4, func(r *one) { r.SourceEnded = true }), Event{Kind: OnPeerDead}, "-"},
		{"receiver check", dT4, Event{Kind: OnRevoked, Quiet: true}, "pages=quiet rung=0"},
		{"lease EOF", dT4, gone, "pages=fenced rung=0"},
	})
	check(t, "live or quiet", []row{
		{"W fenced", dW, fenced(true), "-"},
		{"W revoked", dW, Event{Kind: OnRevoked, Quiet: true}, "-"},
		{"W plugin fenced", dW, gone, "-"},
		{"T quiet", dTQuiet, gone, "-"},
		{"T quiet clock", dTQuiet, clock, "-"},
	})
}
