package statemachine

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// Groups over two engines a side: P1 and P2, D1 (the judge) and D2. The record under test is that of P1, D1 or
// D2; its openers are s1, d1 and d2, s2 is that of P2.
var (
	s1, s1x = Opener{10, 1}, Opener{10, 2}
	sp2     = Opener{11, 1}
	d1      = Opener{20, 1}
	dj2     = Opener{21, 1}
	named   = map[Opener]string{{}: "0", s1: "s1", s1x: "s1'", sp2: "s2", d1: "d1", dj2: "d2"}
)

// wide is a record with the pairs of a group that spans engines.
type wide struct {
	Record
	Pairs [3]Pair
	n     int
}

const (
	toD1, toD2    = 0, 1 // pairs of P1
	toP1, toP2    = 0, 1 // pairs of D1 and D2
	toSibling     = 2    // D1's pair with D2, or the other way round
	nobodyAtThese = -1
)

func stepWide(r wide, at int, e Event) (wide, Out) {
	var o Out
	r.Step(r.pairs(), at, &e, &o)
	return r, o
}

func (r *wide) pairs() (p []*Pair) {
	for i := range r.n {
		p = append(p, &r.Pairs[i])
	}
	return p
}

// The columns at P1.
var (
	gNone = wide{Record{Role: Source}, [3]Pair{{Judge: true}, {}}, 2}
	gB    = with(gNone, func(r *wide) { r.State, r.Own, r.Att, r.Admitted, r.Armed = Unbound, s1, att, true, true })
	gB1   = with(gB, func(r *wide) { r.Pairs[toD1].Other = d1 })
	gB1W  = with(gB1, func(r *wide) { r.Pairs[toD1].Confirmed = true }) // D2 is not there yet
	gB1WB = with(gB1W, func(r *wide) { r.Started, r.Pairs[toD1].Ops.Open = true, 1 })
	gO    = with(gB1, func(r *wide) { r.State, r.Pairs[toD2].Other = Offered, dj2 })
	gO1W  = with(gO, func(r *wide) { r.Pairs[toD1].Confirmed = true })
	gW    = with(gO1W, func(r *wide) { r.State, r.Pairs[toD2].Confirmed = Confirmed, true })
	gWB   = with(gW, func(r *wide) { r.Started, r.Pairs[toD1].Ops.Open, r.Pairs[toD2].Ops.Open = true, 1, 1 })
	gC    = with(gW, func(r *wide) {
		r.State, r.Started, r.Pairs[toD1].RankQuiet, r.Pairs[toD2].RankQuiet = Committed, true, true, true
	})
	gCNo  = with(gC, func(r *wide) { r.Pairs[toD2].RankQuiet, r.Pairs[toD2].Ops.Linger = false, 1 })
	gT    = with(gWB, func(r *wide) { r.State, r.Reason = Ended, Aborted })
	gT1   = with(gB1W, func(r *wide) { r.State, r.Reason, r.Pairs[toD1].DrainedSent = Ended, Aborted, true })
	gTOK  = with(gC, func(r *wide) { r.State, r.Reason = Ended, Success })
	gTOKN = with(gCNo, func(r *wide) { r.State, r.Reason = Ended, Success })
)

// The columns at D1 and D2. R1: bound to P1 only. RE1, RE: the RankEnd of P1, of both, has come.
var (
	jNone = wide{Record{Role: Destination}, [3]Pair{{}, {}, {Sibling: true}}, 3}
	jQ    = with(jNone, func(r *wide) { r.State, r.Own, r.Att, r.Admitted = Opened, d1, att, true })
	jR    = with(jQ, func(r *wide) { r.State, r.Armed, r.Pages = Registered, true, Armed })
	jR1   = with(jR, func(r *wide) { r.Pairs[toP1].Other = s1 })
	jW    = with(jR1, func(r *wide) { r.State, r.Pairs[toP2].Other = Bound, sp2 })
	jRE1  = with(jW, func(r *wide) { r.Started, r.Pairs[toP1].RankEnded, r.Pairs[toP1].Quiet = true, true, true })
	jRE   = with(jRE1, func(r *wide) { r.Pairs[toP2].RankEnded, r.Pairs[toP2].Quiet = true, true })
	jV    = with(jW, func(r *wide) { r.Pairs[toSibling].Other = dj2 }) // D2 has voted
	jV1   = with(jRE1, func(r *wide) { r.Pairs[toSibling].Other = dj2 })
	jT    = with(jW, func(r *wide) { r.State, r.Reason, r.Pages, r.Rung = Ended, Aborted, Quiescing, Drain })
	jT3   = with(jT, func(r *wide) { r.Rung = Fence })
	jTOK  = with(jRE, func(r *wide) {
		r.State, r.Reason, r.Pages, r.Pairs[toSibling].Other = Ended, Success, Quiet, dj2
	})

	voterOf = func(r wide) wide {
		return with(r, func(r *wide) {
			r.Pairs[toSibling] = Pair{Sibling: true, Judge: true}
			if r.State != Absent {
				r.Own = dj2
			}
		})
	}
	vNone, vQ, vR, vR1, vW, vRE1 = voterOf(jNone), voterOf(jQ), voterOf(jR), voterOf(jR1), voterOf(jW), voterOf(jRE1)
	vV                           = with(voterOf(jRE), func(r *wide) { r.State = Voted })
	vVNo                         = with(vV, func(r *wide) { r.Pairs[toP2].Quiet = false }) // P2 said quiet=no
	vT                           = voterOf(jT)
	vTU                          = with(vV, func(r *wide) { r.State, r.Reason, r.Pages = Ended, OutcomeUnknown, Quiet })
	vTOK                         = with(vV, func(r *wide) { r.State, r.Reason, r.Pages = Ended, Success, Quiet })
)

// changeWide prints what Step did: of the record, of each pair, of each frame the engine that it goes to.
func changeWide(old, r wide, o Out) string {
	names := []string{"P1", "P2", "D2"}
	switch {
	case r.Role == Source:
		names = []string{"D1", "D2"}
	case r.Pairs[toSibling].Judge:
		names[2] = "D1"
	}
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
	add(r.ByPeer, "by_peer")
	add(r.Admitted != old.Admitted && old.State != Absent, "admitted=%v", r.Admitted)
	add(r.Started != old.Started, "started")
	add(r.Armed != old.Armed, "armed")
	add(r.Pages != old.Pages, "pages=%s", r.Pages)
	add(r.Rung != old.Rung, "rung=%d", r.Rung)
	for i := range r.n {
		p, q := old.Pairs[i], r.Pairs[i]
		add(q.Other != p.Other, "%s=%s", names[i], named[q.Other])
		add(q.Confirmed != p.Confirmed, "%s.confirmed", names[i])
		add(q.RankEnded != p.RankEnded, "%s.rank_ended", names[i])
		add(q.RankQuiet != p.RankQuiet, "%s.rank_quiet", names[i])
		add(q.Quiet != p.Quiet, "%s.quiet", names[i])
		add(q.SourceEnded != p.SourceEnded, "%s.source_ended", names[i])
	}
	for _, f := range o.Sends {
		to := names[f.At]
		switch f.Kind {
		case FrameVerdict, FrameGroupVerdict:
			word := [...]string{"", "success", "failed", "unknown"}[f.Outcome]
			if f.Outcome == JudgeFailed {
				word = f.Reason.String()
			}
			add(true, "%s(%s,%s,%s)→%s", f.Kind, word, named[f.S], named[f.D], to)
			add(f.Kind == FrameGroupVerdict && f.Att != att, "without the attempt")
			add(f.Outcome == JudgeUnknown && f.Reason != None && f.Reason != OutcomeUnknown, "for a reason")
		case FrameAbort, FrameGroupAbort:
			add(true, "%s(%s,%s:%s)→%s", f.Kind, named[f.S], named[f.D], f.Reason, to)
			add(f.Att != att && !f.S.IsZero() && r.State != Absent, "without the attempt")
		case FrameRankEnd:
			add(true, "RankEnd(%s,%s,quiet=%v)→%s", named[f.S], named[f.D], f.Quiet, to)
		default:
			add(true, "%s(%s,%s)→%s", f.Kind, named[f.S], named[f.D], to)
		}
	}
	for i, name := range []string{"submit", "cancel", "mark", "placeholder", "drop_placeholder", "revoke", "fence", "drop"} {
		add(o.Do&(1<<i) != 0, "%s", name)
	}
	for _, i := range o.Fence {
		add(true, "of %s", names[i])
	}
	if len(w) == 0 {
		return "-"
	}
	return strings.Join(w, " ")
}

type wideRow struct {
	at    string
	rec   wide
	pair  int
	event Event
	want  string
}

func checkWide(t *testing.T, table string, rows []wideRow) {
	t.Helper()
	for _, c := range rows {
		t.Run(table+"/"+c.at, func(t *testing.T) {
			next, out := stepWide(c.rec, c.pair, c.event)
			if got := changeWide(c.rec, next, out); got != c.want {
				t.Errorf("%+v\n got %s\nwant %s", c.event, got, c.want)
			}
		})
	}
}

func in(k FrameKind, s, d Opener) Event {
	return Event{Kind: OnFrame, Frame: k, S: s, D: d, Att: att, Reason: Aborted}
}

func judged(k FrameKind, o Outcome, s, d Opener) Event {
	e := in(k, s, d)
	e.Outcome, e.Reason = o, Stalled
	return e
}

func rankEnd(s, d Opener, complete, quiet bool) Event {
	e := in(FrameRankEnd, s, d)
	e.Complete, e.Quiet = complete, quiet
	return e
}

func ready(match bool) Event {
	e := in(FrameReady, Opener{}, dj2)
	e.Complete = match
	return e
}

// TestGroupsAtP is docs/protocol.md, "Groups", at a source engine.
func TestGroupsAtP(t *testing.T) {
	open := Event{Kind: OnOpen, Role: Source, Own: s1, Att: att, Admitted: true}
	held, marked := open, open
	held.D, marked.Marked, marked.Admitted = d1, true, false
	told := with(gNone, func(r *wide) { r.Pairs[toD2].Told = true })
	checkWide(t, "open", []wideRow{
		{"–", gNone, nobodyAtThese, open, "unbound"},
		{"– placeholder of D1", gNone, toD1, held, "unbound D1=d1 Bound(s1,d1)→D1 drop_placeholder"},
		{"B placeholder of D2 too", gB1, toD2, Event{Kind: OnHeld, D: dj2}, "offered D2=d2 Bound(s1,d2)→D2 drop_placeholder"},
		{"B placeholder of a pair that has one", gB1, toD1, Event{Kind: OnHeld, D: d1}, "drop"},
		{"B placeholder of nobody", gB, toD1, Event{Kind: OnHeld}, "drop"},
		{"B placeholder, not admitted", with(gB, func(r *wide) { r.Admitted = false }), toD1, Event{Kind: OnHeld, D: d1}, "drop"},
		{"– marked by D1", gNone, toD1, marked, "ended(peer_aborted) by_peer Abort(s1,0:peer_aborted)→D2"},
		{"– marked by D2", gNone, toD2, marked, "ended(peer_aborted) by_peer Abort(s1,0:peer_aborted)→D1"},
		{"– marked by D1, placeholder of D2", told, toD1, marked, "ended(peer_aborted) by_peer"},
		{"T the placeholder of D2", with(gT1, func(r *wide) { r.Reason = PeerAborted }), toD2, Event{Kind: OnHeld, D: dj2}, "D2=d2 Abort(s1,d2:peer_aborted)→D2"},
		{"admitted, placeholder of D2", with(gB, func(r *wide) { r.Admitted = false }), toD2, Event{Kind: OnAdmit, D: dj2}, "admitted=true D2=d2 Bound(s1,d2)→D2 drop_placeholder"},
		{"admitted, none", with(gB, func(r *wide) { r.Admitted = false }), nobodyAtThese, Event{Kind: OnAdmit}, "admitted=true"},
	})
	reg := in(FrameRegister, Opener{}, dj2)
	checkWide(t, "Register of D2", []wideRow{
		{"B, D1 not there", gB, toD2, reg, "D2=d2 Bound(s1,d2)→D2 drop_placeholder"},
		{"B, D1 offered", gB1, toD2, reg, "offered D2=d2 Bound(s1,d2)→D2 drop_placeholder"},
		{"B, D1 confirmed", gB1WB, toD2, reg, "offered D2=d2 Bound(s1,d2)→D2 drop_placeholder"},
		{"C", gC, toD2, reg, "Bound(s1,d2)→D2"},
		{"T unpaired", gT1, toD2, reg, "D2=d2 Abort(s1,d2:aborted)→D2"},
		{"another d at D1: superseded", gWB, toD1, in(FrameRegister, Opener{}, dj2), "ended(peer_superseded) by_peer Abort(s1,d1:peer_superseded)→D1 Abort(s1,d2:peer_superseded)→D2 cancel placeholder"},
	})
	conf := func(d Opener) Event { return in(FrameConfirm, s1, d) }
	checkWide(t, "Confirm", []wideRow{
		{"of D1, D2 unbound", gB1, toD1, conf(d1), "D1.confirmed submit"},
		{"of D1, D2 offered", gO, toD1, conf(d1), "D1.confirmed submit"},
		{"of D2 first", gO, toD2, conf(dj2), "D2.confirmed submit"},
		{"of D2, the last", gO1W, toD2, conf(dj2), "confirmed D2.confirmed submit"},
		{"of D1 is none of D2", gO, toD2, conf(d1), "drop"},
	})
	checkWide(t, "ops of a pair", []wideRow{
		{"submitted, other pair unbound", gB1W, toD1, Event{Kind: OnSubmit}, "started"},
		{"not submitted to an unbound pair", gB1W, toD2, Event{Kind: OnSubmit}, "-"},
		{"failed, other pair unbound", gB1WB, toD1, Event{Kind: OnOpFailed, Reason: Skipped}, "ended(skipped) Abort(s1,d1:skipped)→D1 Abort(s1,0:skipped)→D2 cancel"},
		{"plugin lost, other pair unbound", gB1WB, toD1, Event{Kind: OnPluginLost, Reason: PluginLost}, "ended(plugin_lost) Abort(s1,d1:plugin_lost)→D1 Abort(s1,0:plugin_lost)→D2 cancel"},
		{"plugin lost, of an unbound pair", gB1WB, toD2, Event{Kind: OnPluginLost, Reason: PluginLost}, "-"},
		{"plugin lost, of no pair", gB1WB, nobodyAtThese, Event{Kind: OnPluginLost, Reason: PluginLost}, "-"},
		{"complete, a pair unbound", gB1W, nobodyAtThese, Event{Kind: OnComplete}, "-"},
		{"complete, a pair unconfirmed", gO1W, nobodyAtThese, Event{Kind: OnComplete}, "-"},
		{"complete", gW, nobodyAtThese, Event{Kind: OnComplete}, "committed started D1.rank_quiet D2.rank_quiet RankEnd(s1,d1,quiet=true)→D1 RankEnd(s1,d2,quiet=true)→D2"},
		{"complete, one lingers to D2", with(gW, func(r *wide) { r.Pairs[toD2].Ops.Linger = 1 }), nobodyAtThese, Event{Kind: OnComplete}, "committed started D1.rank_quiet RankEnd(s1,d1,quiet=true)→D1 RankEnd(s1,d2,quiet=false)→D2"},
		{"T drained to D1 only", with(gT, func(r *wide) { r.Pairs[toD1].Ops.Open = 0 }), nobodyAtThese, Event{Kind: OnOps}, "Drained(s1,d1)→D1"},
		{"T drained to D2 only", with(gT, func(r *wide) { r.Pairs[toD2].Ops.Open = 0 }), nobodyAtThese, Event{Kind: OnOps}, "Drained(s1,d2)→D2"},
		{"T Success, quiesced to D2", with(gTOKN, func(r *wide) { r.Pairs[toD2].Ops.Linger = 0 }), nobodyAtThese, Event{Kind: OnOps}, "Drained(s1,d2)→D2"},
		{"T Success, quiet before", gTOK, nobodyAtThese, Event{Kind: OnOps}, "-"},
	})
	abort, deadline := Event{Kind: OnAbort}, Event{Kind: OnClock, Reason: Deadline}
	checkWide(t, "endS", []wideRow{
		{"B", gB, nobodyAtThese, abort, "ended(aborted) Abort(s1,0:aborted)→D1 Abort(s1,0:aborted)→D2 cancel"},
		{"B, D1 confirmed", gB1WB, nobodyAtThese, abort, "ended(aborted) Abort(s1,d1:aborted)→D1 Abort(s1,0:aborted)→D2 cancel"},
		{"W", gWB, nobodyAtThese, abort, "ended(aborted) Abort(s1,d1:aborted)→D1 Abort(s1,d2:aborted)→D2 cancel"},
		{"W drained to D2", with(gWB, func(r *wide) { r.Pairs[toD2].Ops.Open = 0 }), nobodyAtThese, abort,
			"ended(aborted) Abort(s1,d1:aborted)→D1 Abort(s1,d2:aborted)→D2 Drained(s1,d2)→D2 cancel"},
		{"W clock", gWB, nobodyAtThese, Event{Kind: OnClock, Reason: Stalled}, "ended(stalled) Abort(s1,d1:stalled)→D1 Abort(s1,d2:stalled)→D2 cancel"},
		{"W worker lost", gWB, nobodyAtThese, Event{Kind: OnWorkerLost}, "ended(worker_lost) Abort(s1,d1:worker_lost)→D1 Abort(s1,d2:worker_lost)→D2 cancel"},
		{"C worker abort is a request to the judge only", gC, nobodyAtThese, abort, "Abort(s1,d1:aborted)→D1"},
		{"C deadline", gC, nobodyAtThese, deadline, "Abort(s1,d1:deadline)→D1"},
		{"C worker lost", gC, nobodyAtThese, Event{Kind: OnWorkerLost}, "-"},
		{"C verdict clock", gC, nobodyAtThese, Event{Kind: OnClock, Reason: OutcomeUnknown}, "ended(outcome_unknown)"},
		{"C verdict clock, quiesced since", with(gCNo, func(r *wide) { r.Pairs[toD2].Ops.Linger = 0 }), nobodyAtThese, Event{Kind: OnClock, Reason: OutcomeUnknown},
			"ended(outcome_unknown) Drained(s1,d2)→D2"},
		{"W Abort(0,d) of D2 is not for a confirmed pair", gW, toD2, in(FrameAbort, Opener{}, dj2), "drop_placeholder drop"},
		{"O Abort(0,d) of D2", gO1W, toD2, in(FrameAbort, Opener{}, dj2), "ended(peer_aborted) by_peer Abort(s1,d1:peer_aborted)→D1 Drained(s1,d1)→D1 Drained(s1,d2)→D2 cancel drop_placeholder"},
		{"B Abort(0,d) of D2", gB1W, toD2, in(FrameAbort, Opener{}, dj2), "ended(peer_aborted) by_peer D2=d2 Abort(s1,d1:peer_aborted)→D1 Drained(s1,d1)→D1 Drained(s1,d2)→D2 cancel drop_placeholder"},
	})
	checkWide(t, "Verdict", []wideRow{
		{"W Failed of D2", gWB, toD2, judged(FrameVerdict, JudgeFailed, s1, dj2), "ended(stalled) by_peer Abort(s1,d1:stalled)→D1 Abort(s1,d2:stalled)→D2 cancel drop_placeholder"},
		{"W Failed of D2, D1 unbound", with(gB, func(r *wide) { r.Pairs[toD2] = Pair{Other: dj2, Confirmed: true} }), toD2, judged(FrameVerdict, JudgeFailed, s1, dj2),
			"ended(stalled) by_peer Abort(s1,0:stalled)→D1 Drained(s1,d2)→D2 cancel drop_placeholder"},
		{"W unknown of D2", gW, toD2, judged(FrameVerdict, JudgeUnknown, s1, dj2), "ended(peer_lost) by_peer Abort(s1,d1:peer_lost)→D1 Drained(s1,d1)→D1 Drained(s1,d2)→D2 cancel drop_placeholder"},
		{"C Success of D1", gC, toD1, judged(FrameVerdict, JudgeSuccess, s1, d1), "ended(success) drop_placeholder"},
		{"C Success of D1, lingers to D2", gCNo, toD1, judged(FrameVerdict, JudgeSuccess, s1, d1), "ended(success) drop_placeholder"},
		{"C Success of D1, quiesced to D2", with(gCNo, func(r *wide) { r.Pairs[toD2].Ops.Linger = 0 }), toD1, judged(FrameVerdict, JudgeSuccess, s1, d1),
			"ended(success) Drained(s1,d2)→D2 drop_placeholder"},
		{"C Success of D2 is only repeated", gC, toD2, judged(FrameVerdict, JudgeSuccess, s1, dj2), "drop_placeholder drop"},
		{"C Failed of D1", gC, toD1, judged(FrameVerdict, JudgeFailed, s1, d1), "ended(stalled) by_peer Drained(s1,d1)→D1 Abort(s1,d2:stalled)→D2 Drained(s1,d2)→D2 cancel drop_placeholder"},
		{"C Failed of D2 makes success impossible", gC, toD2, judged(FrameVerdict, JudgeFailed, s1, dj2), "ended(stalled) by_peer Abort(s1,d1:stalled)→D1 Drained(s1,d1)→D1 Drained(s1,d2)→D2 cancel drop_placeholder"},
		{"C unknown of D1", gC, toD1, judged(FrameVerdict, JudgeUnknown, s1, d1), "ended(outcome_unknown) drop_placeholder"},
		{"C unknown of D2", gC, toD2, judged(FrameVerdict, JudgeUnknown, s1, dj2), "drop_placeholder drop"},
		{"T asked by D2", gT, toD2, judged(FrameVerdict, JudgeUnknown, s1, dj2), "Abort(s1,d2:aborted)→D2 drop_placeholder"},
		{"T Success asked by D2", with(gTOKN, func(r *wide) { r.Pairs[toD2].Ops.Linger = 0 }), toD2, judged(FrameVerdict, JudgeSuccess, s1, dj2), "Drained(s1,d2)→D2 drop_placeholder"},
	})
	newer, dead := Event{Kind: OnHelloNewer}, Event{Kind: OnPeerDead}
	for _, c := range []struct {
		name string
		e    Event
	}{{"newer", newer}, {"dead", dead}} {
		checkWide(t, c.name, []wideRow{
			{"B, of D1, unbound", gB, toD1, c.e, "-"},
			{"B, of D2, unbound", gB1WB, toD2, c.e, "-"},
			{"B, of D1, bound", gB1WB, toD1, c.e, "ended(peer_lost) Abort(s1,0:peer_lost)→D2 cancel"},
			{"W, of D2", gWB, toD2, c.e, "ended(peer_lost) Abort(s1,d1:peer_lost)→D1 cancel"},
			{"C, of D1", gC, toD1, c.e, "ended(outcome_unknown)"},
			{"C, of D2: D1 decides", gC, toD2, c.e, "-"},
			{"T", gT, toD2, c.e, "-"},
		})
	}
}

// TestGroupsAtD is docs/protocol.md, "Groups", at a destination engine, towards the sources.
func TestGroupsAtD(t *testing.T) {
	open := Event{Kind: OnOpen, Role: Destination, Own: d1, Att: att, Marked: true}
	checkWide(t, "open", []wideRow{
		{"D1 marked by P1", jNone, toP1, open, "ended(peer_aborted) by_peer Abort(0,d1:peer_aborted)→P2 GroupAbort(0,0:peer_aborted)→D2"},
		{"D1 marked by D2", jNone, toSibling, open, "ended(peer_aborted) by_peer Abort(0,d1:peer_aborted)→P1 Abort(0,d1:peer_aborted)→P2"},
		{"D2 marked by P1", vNone, toP1, open, "ended(peer_aborted) by_peer Abort(0,d1:peer_aborted)→P2 GroupAbort(0,0:peer_aborted)→D1"},
	})
	checkWide(t, "register", []wideRow{
		{"D1", jQ, nobodyAtThese, Event{Kind: OnPages, Admitted: true}, "registered armed pages=armed Register(0,d1)→P1 Register(0,d1)→P2"},
		{"D2", vQ, nobodyAtThese, Event{Kind: OnPages, Admitted: true}, "registered armed pages=armed Register(0,d2)→P1 Register(0,d2)→P2"},
	})
	checkWide(t, "Bound", []wideRow{
		{"of P1", jR, toP1, in(FrameBound, s1, d1), "P1=s1 Confirm(s1,d1)→P1"},
		{"of P2, the last", jR1, toP2, in(FrameBound, sp2, d1), "bound P2=s2 Confirm(s2,d1)→P2"},
		{"again", jW, toP1, in(FrameBound, s1, d1), "Confirm(s1,d1)→P1"},
		{"other s", jW, toP1, in(FrameBound, s1x, d1), "ended(peer_superseded) by_peer pages=quiescing rung=1 Verdict(peer_superseded,s2,d1)→P2 GroupAbort(0,0:peer_superseded)→D2 Verdict(peer_superseded,s1',d1)→P1 revoke"},
		{"–", jNone, toP1, in(FrameBound, s1, d1), "Verdict(stale_room,s1,d1)→P1"},
		{"V own", vV, toP1, in(FrameBound, s1, dj2), "drop"},
		{"V other s", vV, toP1, in(FrameBound, s1x, dj2), "Verdict(stale_room,s1',d2)→P1"},
		{"T outcome_unknown", vTU, toP1, in(FrameBound, s1, dj2), "drop"},
		{"T outcome_unknown, other s", vTU, toP1, in(FrameBound, s1x, dj2), "Verdict(stale_room,s1',d2)→P1"},
	})
	checkWide(t, "RankEnd", []wideRow{
		{"of P1", jW, toP1, rankEnd(s1, d1, true, true), "started P1.rank_ended P1.quiet"},
		{"of P1, quiet=no", jW, toP1, rankEnd(s1, d1, true, false), "started P1.rank_ended"},
		{"of P1 while P2 is unbound", jR1, toP1, rankEnd(s1, d1, true, true), "started P1.rank_ended P1.quiet"},
		{"again", jRE1, toP1, rankEnd(s1, d1, true, true), "-"},
		{"of P2, the last, D2 has not voted", jRE1, toP2, rankEnd(sp2, d1, true, true), "P2.rank_ended P2.quiet"},
		{"of P2, the last, D2 has voted", jV1, toP2, rankEnd(sp2, d1, true, true),
			"ended(success) pages=quiet P2.rank_ended P2.quiet Verdict(success,s1,d1)→P1 Verdict(success,s2,d1)→P2 GroupVerdict(success,0,d2)→D2 revoke"},
		{"quiet=no", jV1, toP2, rankEnd(sp2, d1, true, false),
			"ended(success) pages=quiescing rung=1 P2.rank_ended Verdict(success,s1,d1)→P1 Verdict(success,s2,d1)→P2 GroupVerdict(success,0,d2)→D2 revoke"},
		{"R11 fails", jV1, toP2, rankEnd(sp2, d1, false, true),
			"ended(length_mismatch) pages=quiescing rung=1 Verdict(length_mismatch,s1,d1)→P1 Verdict(length_mismatch,s2,d1)→P2 GroupVerdict(length_mismatch,0,d2)→D2 revoke"},
		{"D2: the last", vRE1, toP2, rankEnd(sp2, dj2, true, true), "voted P2.rank_ended P2.quiet Ready(0,d2)→D1"},
		{"D2: R11 fails", vRE1, toP2, rankEnd(sp2, dj2, false, true),
			"ended(length_mismatch) pages=quiescing rung=1 Verdict(length_mismatch,s1,d2)→P1 Verdict(length_mismatch,s2,d2)→P2 GroupAbort(0,0:length_mismatch)→D1 revoke"},
		{"V again", vV, toP1, rankEnd(s1, dj2, true, true), "-"},
		{"V other s", vV, toP1, rankEnd(s1x, dj2, true, true), "Verdict(stale_room,s1',d2)→P1"},
		{"T outcome_unknown: the judge answers", vTU, toP1, rankEnd(s1, dj2, true, true), "drop"},
		{"T outcome_unknown, other s", vTU, toP1, rankEnd(s1x, dj2, true, true), "Verdict(stale_room,s1',d2)→P1"},
		{"T Success of D2", vTOK, toP1, rankEnd(s1, dj2, true, true), "Verdict(success,s1,d2)→P1"},
		{"–", jNone, toP1, rankEnd(s1, d1, true, true), "Verdict(unknown,s1,d1)→P1"},
		{"T of D2", vT, toP1, rankEnd(s1, dj2, true, true), "Verdict(aborted,s1,d2)→P1"},
	})
	checkWide(t, "endD", []wideRow{
		{"D1 Q", jQ, nobodyAtThese, Event{Kind: OnAbort}, "ended(aborted) Abort(0,d1:aborted)→P1 Abort(0,d1:aborted)→P2 GroupAbort(0,0:aborted)→D2"},
		{"D1 R", jR, nobodyAtThese, Event{Kind: OnAbort}, "ended(aborted) pages=quiet P1.quiet P2.quiet Abort(0,d1:aborted)→P1 Abort(0,d1:aborted)→P2 GroupAbort(0,0:aborted)→D2 revoke"},
		{"D1 R, bound to P1", jR1, nobodyAtThese, Event{Kind: OnAbort}, "ended(aborted) pages=quiescing rung=1 P2.quiet Verdict(aborted,s1,d1)→P1 Abort(0,d1:aborted)→P2 GroupAbort(0,0:aborted)→D2 revoke"},
		{"D1 W clock", jRE1, nobodyAtThese, Event{Kind: OnClock, Reason: Stalled}, "ended(stalled) pages=quiescing rung=1 Verdict(stalled,s1,d1)→P1 Verdict(stalled,s2,d1)→P2 GroupAbort(0,0:stalled)→D2 revoke"},
		{"D1 W, D2 has voted", jV, nobodyAtThese, Event{Kind: OnAbort}, "ended(aborted) pages=quiescing rung=1 Verdict(aborted,s1,d1)→P1 Verdict(aborted,s2,d1)→P2 GroupVerdict(aborted,0,d2)→D2 revoke"},
		{"D2 W", vW, nobodyAtThese, Event{Kind: OnAbort}, "ended(aborted) pages=quiescing rung=1 Verdict(aborted,s1,d2)→P1 Verdict(aborted,s2,d2)→P2 GroupAbort(0,0:aborted)→D1 revoke"},
		{"D1 W plugin lost", jW, nobodyAtThese, Event{Kind: OnPluginLost, Reason: PluginLost},
			"ended(plugin_lost) pages=quiescing rung=1 Verdict(plugin_lost,s1,d1)→P1 Verdict(plugin_lost,s2,d1)→P2 GroupAbort(0,0:plugin_lost)→D2 revoke"},
		{"D1 W worker lost", jW, nobodyAtThese, Event{Kind: OnWorkerLost},
			"ended(worker_lost) pages=quiescing rung=1 Verdict(worker_lost,s1,d1)→P1 Verdict(worker_lost,s2,d1)→P2 GroupAbort(0,0:worker_lost)→D2 revoke"},
		{"D1 T plugin lost", jT, nobodyAtThese, Event{Kind: OnPluginLost, Reason: PluginLost}, "drop"},
	})
	checkWide(t, "Abort", []wideRow{
		{"(s,d) of P1", jW, toP1, in(FrameAbort, s1, d1), "ended(peer_aborted) by_peer pages=quiescing rung=1 P1.source_ended Verdict(peer_aborted,s2,d1)→P2 GroupAbort(0,0:peer_aborted)→D2 revoke"},
		{"(s,d) of P1, its RankEnd is recorded: a request, answered", jRE1, toP1, in(FrameAbort, s1, d1),
			"ended(peer_aborted) by_peer pages=quiescing rung=1 P1.source_ended Verdict(peer_aborted,s1,d1)→P1 Verdict(peer_aborted,s2,d1)→P2 GroupAbort(0,0:peer_aborted)→D2 revoke"},
		{"(s,d) of P1, D2 has voted", jV1, toP1, in(FrameAbort, s1, d1),
			"ended(peer_aborted) by_peer pages=quiescing rung=1 P1.source_ended Verdict(peer_aborted,s1,d1)→P1 Verdict(peer_aborted,s2,d1)→P2 GroupVerdict(peer_aborted,0,d2)→D2 revoke"},
		{"(s,d) other s", jRE1, toP1, in(FrameAbort, s1x, d1), "drop"},
		{"(s,d) of P2, unbound", jR1, toP2, in(FrameAbort, sp2, d1), "ended(peer_aborted) by_peer pages=quiescing rung=1 P2.quiet Verdict(peer_aborted,s1,d1)→P1 GroupAbort(0,0:peer_aborted)→D2 revoke"},
		{"(s,0) of P2", jR1, toP2, in(FrameAbort, sp2, Opener{}), "ended(peer_aborted) by_peer pages=quiescing rung=1 P2.quiet Verdict(peer_aborted,s1,d1)→P1 GroupAbort(0,0:peer_aborted)→D2 revoke"},
		{"(s,0) of P1, bound", jR1, toP1, in(FrameAbort, s1, Opener{}), "drop"},
		{"(s,d) V", vV, toP1, in(FrameAbort, s1, dj2), "P1.source_ended"},
		{"(s,d) V other s", vV, toP1, in(FrameAbort, s1x, dj2), "drop"},
		{"(s,0) V", vV, toP1, in(FrameAbort, s1, Opener{}), "drop"},
		{"(0,d) of P2", jR1, toP2, in(FrameAbort, Opener{}, d1), "ended(stale_room) by_peer pages=quiescing rung=1 P2.quiet Verdict(stale_room,s1,d1)→P1 GroupAbort(0,0:stale_room)→D2 revoke"},
		{"(0,d) V", vV, toP1, in(FrameAbort, Opener{}, dj2), "drop"},
	})
	checkWide(t, "Drained", []wideRow{
		{"W of P1", jW, toP1, in(FrameDrained, s1, d1), "ended(peer_aborted) by_peer pages=quiescing rung=1 P1.quiet P1.source_ended Verdict(peer_aborted,s2,d1)→P2 GroupAbort(0,0:peer_aborted)→D2 revoke"},
		{"W of P1, P2 unbound", jR1, toP1, in(FrameDrained, s1, d1), "ended(peer_aborted) by_peer pages=quiet P1.quiet P1.source_ended P2.quiet Abort(0,d1:peer_aborted)→P2 GroupAbort(0,0:peer_aborted)→D2 revoke"},
		{"V", vVNo, toP2, in(FrameDrained, sp2, dj2), "P2.quiet P2.source_ended"},
		{"V other s", vVNo, toP2, in(FrameDrained, s1x, dj2), "drop"},
		{"T of P1", jT, toP1, in(FrameDrained, s1, d1), "P1.quiet P1.source_ended"},
		{"T of P2, the last", with(jT, func(r *wide) { r.Pairs[toP1].Quiet = true }), toP2, in(FrameDrained, sp2, d1), "pages=quiet rung=0 P2.quiet P2.source_ended"},
		{"T rung 4, of P1", with(jT, func(r *wide) { r.Rung, r.Pages = Quarantine, Quarantined }), toP1, in(FrameDrained, s1, d1), "P1.quiet P1.source_ended"},
	})
	newer, dead := Event{Kind: OnHelloNewer}, Event{Kind: OnPeerDead}
	checkWide(t, "source lost", []wideRow{
		{"R newer P2, unbound", jR1, toP2, newer, "-"},
		{"R newer P1", jR1, toP1, newer, "ended(peer_lost) pages=quiescing rung=1 P1.source_ended P2.quiet Abort(0,d1:peer_lost)→P2 GroupAbort(0,0:peer_lost)→D2 revoke"},
		{"W dead P1, its RankEnd is recorded", jRE1, toP1, dead, "ended(peer_lost) pages=quiescing rung=1 Verdict(peer_lost,s2,d1)→P2 GroupAbort(0,0:peer_lost)→D2 revoke"},
		{"V newer", vVNo, toP2, newer, "P2.source_ended"},
		{"V dead", vVNo, toP2, dead, "-"},
		{"T newer", jT3, toP2, newer, "P2.source_ended fence of P2"},
		{"T newer, quiet before", with(jT3, func(r *wide) { r.Pairs[toP2].Quiet = true }), toP2, newer, "P2.source_ended"},
		{"T rung 4 newer, quiet before", with(jT3, func(r *wide) { r.Pairs[toP2].Quiet, r.Rung, r.Pages = true, Quarantine, Quarantined }), toP2, newer, "P2.source_ended"},
	})
	ended := func(r wide) wide {
		return with(r, func(r *wide) { r.Pairs[toP1].SourceEnded, r.Pairs[toP2].SourceEnded = true, true })
	}
	fenced := func(quiet bool) Event { return Event{Kind: OnFenced, Quiet: quiet} }
	checkWide(t, "ladder", []wideRow{
		{"drain clock, nobody has ended", jT, nobodyAtThese, Event{Kind: OnDrainClock}, "rung=3"},
		{"drain clock, both have", ended(jT), nobodyAtThese, Event{Kind: OnDrainClock}, "rung=3 fence of P1 of P2"},
		{"drain clock, one is quiet", with(ended(jT), func(r *wide) { r.Pairs[toP1].Quiet = true }), nobodyAtThese, Event{Kind: OnDrainClock}, "rung=3 fence of P2"},
		{"fenced P1", ended(jT3), toP1, fenced(true), "P1.quiet"},
		{"fenced P2, the last", with(ended(jT3), func(r *wide) { r.Pairs[toP1].Quiet = true }), toP2, fenced(true), "pages=quiet rung=0 P2.quiet"},
		{"fenced before the source ended", jT3, toP1, fenced(true), "pages=quarantined rung=4"},
		{"unknown", ended(jT3), toP1, fenced(false), "pages=quarantined rung=4"},
		{"refused for good", jT, nobodyAtThese, Event{Kind: OnRevoked, Quiet: true}, "pages=quiet rung=0"},
		{"plugin fenced", jT, nobodyAtThese, Event{Kind: OnPluginFenced}, "pages=fenced rung=0"},
		{"plugin fenced, not known whose", jT, nobodyAtThese, fenced(true), "drop"},
	})
}

// TestGroupsJudge is docs/protocol.md, "Groups", between D1 and D2.
func TestGroupsJudge(t *testing.T) {
	checkWide(t, "Ready", []wideRow{
		{"–", jNone, toSibling, ready(true), "GroupVerdict(unknown,0,d2)→D2"},
		{"Q", jQ, toSibling, ready(false), "GroupVerdict(unknown,0,d2)→D2"},
		{"R, other sources", jW, toSibling, ready(false), "GroupVerdict(unknown,0,d2)→D2"},
		{"R, own RankEnds missing", jW, toSibling, ready(true), "D2=d2"},
		{"R, all RankEnds are in", jRE, toSibling, ready(true),
			"ended(success) pages=quiet D2=d2 Verdict(success,s1,d1)→P1 Verdict(success,s2,d1)→P2 GroupVerdict(success,0,d2)→D2 revoke"},
		{"again", jV, toSibling, ready(true), "-"},
		{"R of nobody", jRE, toSibling, Event{Kind: OnFrame, Frame: FrameReady, Att: att, Complete: true}, "drop"},
		{"T", jT, toSibling, ready(true), "GroupVerdict(aborted,0,d2)→D2"},
		{"T, other sources", jT, toSibling, ready(false), "GroupVerdict(unknown,0,d2)→D2"},
		{"T Success", jTOK, toSibling, ready(true), "GroupVerdict(success,0,d2)→D2"},
		{"at D2", vW, toSibling, ready(true), "drop"},
		{"of a source", jRE, toP1, ready(true), "drop"},
	})
	gv := func(o Outcome) Event { return judged(FrameGroupVerdict, o, Opener{}, dj2) }
	checkWide(t, "GroupVerdict", []wideRow{
		{"V Success", vV, toSibling, gv(JudgeSuccess), "ended(success) pages=quiet revoke"},
		{"V Success, P2 said quiet=no", vVNo, toSibling, gv(JudgeSuccess), "ended(success) pages=quiescing rung=1 revoke"},
		{"V Failed", vV, toSibling, gv(JudgeFailed), "ended(stalled) by_peer pages=quiet revoke"},
		{"V unknown", vV, toSibling, gv(JudgeUnknown), "ended(outcome_unknown) pages=quiet revoke"},
		{"V no word", vV, toSibling, gv(0), "drop"},
		{"V of another d", vV, toSibling, judged(FrameGroupVerdict, JudgeSuccess, Opener{}, d1), "drop"},
		{"R", vRE1, toSibling, gv(JudgeSuccess), "drop"},
		{"T", vT, toSibling, gv(JudgeSuccess), "drop"},
		{"T outcome_unknown", vTU, toSibling, gv(JudgeSuccess), "drop"},
		{"–", vNone, toSibling, gv(JudgeSuccess), "drop"},
		{"at D1", with(jW, func(r *wide) { r.State, r.Own = Voted, dj2 }), toSibling, gv(JudgeSuccess), "drop"},
	})
	ga := in(FrameGroupAbort, Opener{}, Opener{})
	other := ga
	other.Att++
	checkWide(t, "GroupAbort", []wideRow{
		{"–", vNone, toSibling, ga, "mark"},
		{"–, attempt 0", vNone, toSibling, Event{Kind: OnFrame, Frame: FrameGroupAbort}, "mark"},
		{"Q", vQ, toSibling, ga, "ended(peer_aborted) by_peer Abort(0,d2:peer_aborted)→P1 Abort(0,d2:peer_aborted)→P2"},
		{"R", vR, toSibling, ga, "ended(peer_aborted) by_peer pages=quiet P1.quiet P2.quiet Abort(0,d2:peer_aborted)→P1 Abort(0,d2:peer_aborted)→P2 revoke"},
		{"W", vW, toSibling, ga, "ended(peer_aborted) by_peer pages=quiescing rung=1 Verdict(peer_aborted,s1,d2)→P1 Verdict(peer_aborted,s2,d2)→P2 revoke"},
		{"other attempt", vW, toSibling, other, "mark"},
		{"V", vV, toSibling, ga, "drop"},
		{"T", vT, toSibling, ga, "drop"},
		{"at D1: the request of one that has voted", jV, toSibling, ga,
			"ended(peer_aborted) by_peer pages=quiescing rung=1 Verdict(peer_aborted,s1,d1)→P1 Verdict(peer_aborted,s2,d1)→P2 GroupVerdict(peer_aborted,0,d2)→D2 revoke"},
		{"at D1: Q", jQ, toSibling, ga, "ended(peer_aborted) by_peer Abort(0,d1:peer_aborted)→P1 Abort(0,d1:peer_aborted)→P2"},
	})
	checkWide(t, "V", []wideRow{
		{"worker abort is a request", vV, nobodyAtThese, Event{Kind: OnAbort}, "GroupAbort(0,0:aborted)→D1"},
		{"deadline", vV, nobodyAtThese, Event{Kind: OnClock, Reason: Deadline}, "GroupAbort(0,0:deadline)→D1"},
		{"verdict clock", vV, nobodyAtThese, Event{Kind: OnClock, Reason: OutcomeUnknown}, "ended(outcome_unknown) pages=quiet revoke"},
		{"verdict clock, P2 said quiet=no", vVNo, nobodyAtThese, Event{Kind: OnClock, Reason: OutcomeUnknown}, "ended(outcome_unknown) pages=quiescing rung=1 revoke"},
		{"drain", vV, nobodyAtThese, Event{Kind: OnClock, Reason: Draining}, "ended(outcome_unknown) pages=quiet revoke"},
		{"worker lost", vV, nobodyAtThese, Event{Kind: OnWorkerLost}, "-"},
		{"plugin lost", vV, nobodyAtThese, Event{Kind: OnPluginLost, Reason: PluginLost}, "-"},
		{"plugin fenced", vVNo, nobodyAtThese, Event{Kind: OnPluginFenced}, "P2.quiet"},
		{"Progress", vV, toP1, in(FrameProgress, s1, dj2), "drop"},
	})
	for _, c := range []struct {
		name string
		e    Event
	}{{"newer", Event{Kind: OnHelloNewer}}, {"dead", Event{Kind: OnPeerDead}}} {
		checkWide(t, "sibling "+c.name, []wideRow{
			{"D2 Q", vQ, toSibling, c.e, "-"},
			{"D2 R unbound", vR, toSibling, c.e, "-"},
			{"D2 R bound", vR1, toSibling, c.e, "ended(peer_lost) pages=quiescing rung=1 P2.quiet Verdict(peer_lost,s1,d2)→P1 Abort(0,d2:peer_lost)→P2 revoke"},
			{"D2 W", vW, toSibling, c.e, "ended(peer_lost) pages=quiescing rung=1 Verdict(peer_lost,s1,d2)→P1 Verdict(peer_lost,s2,d2)→P2 revoke"},
			{"V", vV, toSibling, c.e, "ended(outcome_unknown) pages=quiet revoke"},
			{"D2 T", vT, toSibling, c.e, "-"},
			{"D1 R unbound", jR, toSibling, c.e, "-"},
			{"D1 W", jW, toSibling, c.e, "ended(peer_lost) pages=quiescing rung=1 Verdict(peer_lost,s1,d1)→P1 Verdict(peer_lost,s2,d1)→P2 revoke"},
		})
	}
	checkWide(t, "sibling lost that voted", []wideRow{
		{"newer", jV, toSibling, Event{Kind: OnHelloNewer}, "ended(peer_lost) pages=quiescing rung=1 D2=0 Verdict(peer_lost,s1,d1)→P1 Verdict(peer_lost,s2,d1)→P2 revoke"},
		{"dead", jV, toSibling, Event{Kind: OnPeerDead}, "ended(peer_lost) pages=quiescing rung=1 Verdict(peer_lost,s1,d1)→P1 Verdict(peer_lost,s2,d1)→P2 revoke"},
		{"T newer", jTOK, toSibling, Event{Kind: OnHelloNewer}, "D2=0"},
	})
}

// TestGroupsResync is what a record sends again to one engine after a Hello, as far as it is not plain.
func TestGroupsResync(t *testing.T) {
	for _, c := range []struct {
		name string
		r    wide
		pair int
		want Send
	}{
		{"Failed", vT, toP1, Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: Aborted, S: s1, D: dj2}},
		{"Success, not Failed", vTOK, toP2, Send{Kind: FrameVerdict, Outcome: JudgeSuccess, Reason: Success, S: sp2, D: dj2}},
		{"unknown, not Failed", vTU, toP1, Send{Kind: FrameVerdict, Outcome: JudgeUnknown, Reason: OutcomeUnknown, S: s1, D: dj2}},
	} {
		if got := c.r.Repeat(&c.r.Pairs[c.pair]); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	var o Out
	vV.Vote(vV.pairs(), &o)
	if len(o.Sends) != 1 || o.Sends[0] != (Send{Kind: FrameReady, At: toSibling, D: dj2, Att: att}) {
		t.Errorf("a vote repeats %+v", o.Sends)
	}
}

// TestGroupsStatus: the word is Success only when the engine's own record says so.
func TestGroupsStatus(t *testing.T) {
	for _, c := range []struct {
		r    wide
		want KVPoll
	}{
		{gB1W, Bootstrapping}, {gB1WB, Bootstrapping}, {gO1W, Bootstrapping}, {gW, WaitingForInput}, {gWB, Transferring}, {gC, Transferring},
		{jR1, Bootstrapping}, {jW, WaitingForInput}, {jRE, Transferring}, {jTOK, Succeeded}, {vV, Transferring}, {vTU, Failed}, {vTOK, Succeeded},
	} {
		if got := c.r.Status(); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.r.Role, c.r.State, got, c.want)
		}
	}
}

var wides = []wide{
	gNone, gB, gB1, gB1W, gB1WB, gO, gO1W, gW, gWB, gC, gCNo, gT, gT1, gTOK, gTOKN,
	jNone, jQ, jR, jR1, jW, jRE1, jRE, jV, jV1, jT, jT3, jTOK,
	vNone, vQ, vR, vR1, vW, vRE1, vV, vVNo, vT, vTU, vTOK,
}

// checkWideStep says which rule of groups a step breaks.
func checkWideStep(old wide, at int, e Event, r wide, o Out) string {
	pairs := r.Pairs[:r.n]
	voter := r.Role == Destination && r.Pairs[toSibling].Judge
	switch {
	case o.Do&DoDrop != 0 && (r != old || len(o.Sends) != 0):
		return "dropped, but changed"
	case old.State == Absent && e.Kind != OnOpen && r != old:
		return "a record out of nothing"
	case old.State == Ended && (r.State != Ended || r.Reason != old.Reason || r.ByPeer != old.ByPeer):
		return "a verdict changed (R2)"
	case old.State != Absent && (r.Own != old.Own || r.Att != old.Att || r.Role != old.Role):
		return "an identity changed"
	case r.State != Ended && r.Reason != None:
		return "a live record has a reason"
	case old.State == Ended && old.Pages.Reusable() && r.Pages != old.Pages:
		return "reusable pages are not any more"
	case old.State == Voted && r.State == Ended && !(e.Kind == OnFrame && e.Frame == FrameGroupVerdict) && r.Reason != OutcomeUnknown:
		return "a vote was taken back"
	case old.State == Voted && r.State != Voted && r.State != Ended:
		return "a vote was forgotten"
	case old.State == Committed && r.State == Ended && r.Reason == Success &&
		!(e.Kind == OnFrame && e.Frame == FrameVerdict && e.Outcome == JudgeSuccess && pairs[at].Judge):
		return "Success of a source without the judge"
	case old.State == Committed && r.State == Ended && r.Reason != Success && r.Reason != OutcomeUnknown && !(e.Kind == OnFrame && e.Frame == FrameVerdict && e.Outcome == JudgeFailed):
		return "a committed source failed by itself"
	}
	if w := r.Status(); old.State != Absent && w < old.Status() && w != Failed {
		return fmt.Sprintf("status went from %s to %s", old.Status(), w)
	}
	if old.State != Ended && r.State == Ended && r.Reason == Success && r.Role == Destination {
		if voter && !(e.Kind == OnFrame && e.Frame == FrameGroupVerdict && e.Outcome == JudgeSuccess) {
			return "Success of a voter without the judge"
		}
		for _, p := range pairs {
			if !p.Sibling && !p.RankEnded || p.Sibling && !p.Judge && p.Other.IsZero() {
				return "Success without a RankEnd or a vote"
			}
		}
	}
	quiet := true
	for i, p := range pairs {
		if q := old.Pairs[i]; !q.Other.IsZero() && p.Other != q.Other && !(p.Sibling && p.Other.IsZero()) && old.State != Absent && !p.Sibling {
			return "a pair changed"
		}
		quiet = quiet && (p.Sibling || p.Quiet)
		if r.Role == Source && old.State != Committed && r.State == Committed && !p.Confirmed {
			return "committed with an unconfirmed pair"
		}
	}
	if r.Role == Destination && old.State != Ended && r.State == Ended && r.Armed && quiet != (r.Pages == Quiet) {
		return "pages do not follow the pairs"
	}
	if r.Role == Destination && r.State == Ended && (r.Rung != NoRung) == r.Pages.Reusable() {
		return "the rung does not fit the pages"
	}
	return ""
}

// TestGroupsTotal: every (record, pair, event, frame) returns and breaks no rule.
func TestGroupsTotal(t *testing.T) {
	n := 0
	openers := []Opener{{}, s1, s1x, sp2}
	for _, r := range wides {
		for at := -1; at <= r.n; at++ {
			for k := Kind(0); k <= NumKinds; k++ {
				for f := FrameKind(0); f <= NumFrameKinds; f++ {
					if k != OnFrame && f > 2 {
						break
					}
					for _, so := range openers {
						for _, do := range []Opener{{}, d1, dj2} {
							for o := Outcome(0); o <= JudgeUnknown+1; o++ {
								n++
								b := (n/7)%2 == 0
								e := Event{Kind: k, Frame: f, S: so, D: do, Att: att + uint64(n%5/4), Outcome: o, Quiet: b, Complete: n%3 > 0, Admitted: true,
									OwnInc: b, Marked: n%4 == 0, Reason: []Reason{Stalled, Deadline, Aborted, PluginLost}[n%4], Role: r.Role, Own: s1x}
								next, out := stepWide(r, at, e)
								if why := checkWideStep(r, at, e, next, out); why != "" {
									t.Fatalf("%s: pair %d, %+v\n%+v\n%s", why, at, e, r, changeWide(r, next, out))
								}
								for _, s := range out.Sends {
									if s.At < 0 || s.At >= r.n {
										t.Fatalf("%+v goes to nobody", s)
									}
								}
							}
						}
					}
				}
			}
		}
	}
	if n < 100_000 {
		t.Fatalf("only %d combinations", n)
	}
}

// TestGroupsSticky: over any sequence of events nothing that was said is taken back.
func TestGroupsSticky(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rapid.SampledFrom(wides).Draw(t, "record")
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			at := rapid.IntRange(0, r.n-1).Draw(t, "pair")
			e := genEvent(t)
			e.S = rapid.SampledFrom([]Opener{{}, s1, s1x, sp2}).Draw(t, "s'")
			e.D = rapid.SampledFrom([]Opener{{}, d1, dj2}).Draw(t, "d'")
			if r.State == Absent {
				e.Role = r.Role
			}
			next, out := stepWide(r, at, e)
			if why := checkWideStep(r, at, e, next, out); why != "" {
				t.Fatalf("%s: pair %d, %+v\n%+v\n%s", why, at, e, r, changeWide(r, next, out))
			}
			r = next
			if r.Role == Source {
				p := &r.Pairs[at]
				p.Ops.Open = max(0, p.Ops.Open-int32(rapid.IntRange(0, 1).Draw(t, "ends")))
			}
		}
	})
}

// TestOutReset: what one transition asked for is not asked for by the next.
func TestOutReset(t *testing.T) {
	o := Out{Sends: make([]Send, 2), Fence: make([]int, 2), Do: DoMark}
	o.Reset()
	if len(o.Sends) != 0 || len(o.Fence) != 0 || o.Do != 0 {
		t.Errorf("%+v", o)
	}
}

// TestCountsAdd: the counts of a record are the sums over its pairs.
func TestCountsAdd(t *testing.T) {
	if got := (Counts{1, 2, 3, 4}).Add(Counts{10, 20, 30, 40}); got != (Counts{11, 22, 33, 44}) {
		t.Errorf("%+v", got)
	}
}
