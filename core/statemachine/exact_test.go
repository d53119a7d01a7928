package statemachine

import "testing"

// lax says what is wrong with what Step made of r and e, beyond what change shows: the identity that a
// record and its frames carry, and whose doing an end is.
func lax(r one, e Event, next one, out Out) string {
	opened := r.State == Absent && e.Kind == OnOpen
	for _, f := range out.Sends {
		switch f.Kind {
		case FrameBound, FrameRegister, FrameAbort:
			if next.State != Absent && f.Att != next.Att {
				return f.Kind.String() + " without the attempt"
			}
		}
	}
	switch {
	case opened && (next.Own != e.Own || next.Att != e.Att || next.Role != e.Role):
		return "the record is not what was opened"
	case opened && next.Admitted != (e.Admitted || e.Marked):
		return "the record waits for the wrong thing"
	case next.State != Ended || r.State == Ended:
		return ""
	}
	// An end is the peer's when a frame brought it, but for those that this side finds out by itself.
	byPeer := e.Kind == OnFrame
	switch next.Reason {
	case Success, OutcomeUnknown, LengthMismatch:
		byPeer = false
	}
	if opened {
		byPeer = true // the abort mark
	}
	if next.ByPeer != byPeer {
		return "the end is laid at the wrong door"
	}
	return ""
}

// TestOpenOnce: a record that is there, live or ended, is not opened again.
func TestOpenOnce(t *testing.T) {
	var rows []row
	for _, r := range records {
		if r.State != Absent {
			rows = append(rows, row{r.Role.String() + " " + r.State.String(), r, Event{Kind: OnOpen, Role: r.Role, Own: s2, Att: att + 1, Admitted: true}, "drop"})
		}
	}
	check(t, "open", rows)
	check(t, "open, not admitted", []row{
		{"– placeholder", pAbsent, Event{Kind: OnOpen, Role: Source, Own: s, Att: att, D: d}, "unbound"},
		{"– abort mark", pAbsent, Event{Kind: OnOpen, Role: Source, Own: s, Att: att, Marked: true}, "ended(peer_aborted)"},
	})
}

// TestForeignEvents: events of the other role and unknown ones are dropped in every state, and so are
// frames that only the other role gets.
func TestForeignEvents(t *testing.T) {
	kinds := map[Role][]Kind{
		Source:      {OnPages, OnDrainClock, OnFenced, OnRevoked, OnPluginFenced, NumKinds},
		Destination: {OnSend, OnSubmit, OnOps, OnOpFailed, OnComplete, NumKinds},
	}
	frames := map[Role][]FrameKind{
		Source:      {0, FrameBound, FrameProgress, FrameRankEnd, FrameDrained, FrameReady, FrameGroupVerdict, FrameGroupAbort, NumFrameKinds},
		Destination: {0, FrameQueued, FrameRegister, FrameConfirm, FrameVerdict, FrameReady, FrameGroupVerdict, FrameGroupAbort, NumFrameKinds},
	}
	for _, r := range records {
		var rows []row
		for _, k := range kinds[r.Role] {
			rows = append(rows, row{r.State.String(), r, Event{Kind: k, Quiet: true, Complete: true, Admitted: true, Reason: Stalled}, "drop"})
		}
		for _, k := range frames[r.Role] {
			rows = append(rows, row{r.State.String() + " " + k.String(), r, Event{Kind: OnFrame, Frame: k, S: s, D: d, Att: att, Complete: true, OwnInc: true}, "drop"})
		}
		check(t, "foreign to "+r.Role.String(), rows)
	}
}

// TestNobody: frames that name nobody bind nobody, and reach no record that has no pair.
func TestNobody(t *testing.T) {
	nobody := Opener{}
	zero := func(k FrameKind, o Outcome) Event {
		return Event{Kind: OnFrame, Frame: k, S: s, Att: att, Outcome: o, Reason: Stalled}
	}
	check(t, "from d = 0", []row{
		{"B Register", pB, register(nobody, att), "drop"},
		{"O Register", pO, register(nobody, att), "drop"},
		{"T Register", pTU, register(nobody, att), "drop"},
		{"– Register", pAbsent, register(nobody, att), "drop"},
		{"B Verdict failed", pB, zero(FrameVerdict, JudgeFailed), "drop_placeholder drop"},
		{"B Verdict unknown", pB, zero(FrameVerdict, JudgeUnknown), "drop_placeholder drop"},
		{"B Verdict success", pB, zero(FrameVerdict, JudgeSuccess), "drop_placeholder drop"},
	})
	check(t, "from s = 0", []row{
		{"R Bound", dR, frame(FrameBound, nobody, d), "drop"},
		{"R RankEnd", dR, frame(FrameRankEnd, nobody, d), "drop"},
		{"T Bound", dT, frame(FrameBound, nobody, d), "drop"},
		{"– RankEnd", dAbsent, frame(FrameRankEnd, nobody, d), "drop"},
		{"– Abort(s,0) of attempt 0", dAbsent, abort(s, nobody, 0), "mark"},
	})
}

// TestRepeatedRows are rows of docs/protocol.md in columns that look like their neighbours.
func TestRepeatedRows(t *testing.T) {
	other := frame(FrameConfirm, s, d2)
	check(t, "Confirm of another pair", []row{
		{"W", pW, other, "drop"},
		{"C", pC, other, "drop"},
	})
	check(t, "C quiet=no, not drained", []row{
		{"Verdict unknown", pCUnq, verdict(JudgeUnknown, None), "ended(outcome_unknown) drop_placeholder"},
		{"verdict clock", pCUnq, Event{Kind: OnClock, Reason: OutcomeUnknown}, "ended(outcome_unknown)"},
	})
	check(t, "ops move in a live record", []row{
		{"B", pB, Event{Kind: OnOps}, "-"},
		{"O", pO, Event{Kind: OnOps}, "-"},
		{"W", pW, Event{Kind: OnOps}, "-"},
		{"C", pC, Event{Kind: OnOps}, "-"},
		{"C late", pCLate, Event{Kind: OnOps}, "-"},
		{"B op failed", pB, Event{Kind: OnOpFailed, Reason: Skipped}, "-"},
		{"C op failed", pC, Event{Kind: OnOpFailed, Reason: Skipped}, "-"},
	})
	unknown := with(pTOK, func(r *one) { r.Reason = OutcomeUnknown })
	check(t, "ops move in an ended record", []row{
		{"unpaired", pTU, Event{Kind: OnOps}, "-"},
		{"outcome_unknown after quiet=yes", unknown, Event{Kind: OnOps}, "-"},
		{"outcome_unknown after quiet=no", with(unknown, func(r *one) { r.RankQuiet = false }), Event{Kind: OnOps}, "Drained(s,d)"},
		{"failed after quiet=yes", with(pTOK, func(r *one) { r.Reason = Stalled }), Event{Kind: OnOps}, "Drained(s,d)"},
		{"plugin lost, quiet", with(pTBusy, func(r *one) { r.Ops = Counts{} }), Event{Kind: OnPluginLost, Reason: PluginLost}, "Drained(s,d)"},
	})
	waiting := with(dQ, func(r *one) { r.Admitted = false })
	check(t, "D register", []row{
		{"Q not admitted", waiting, Event{Kind: OnPages, Admitted: true}, "armed"},
		{"Q twice", with(waiting, func(r *one) { r.Armed = true }), Event{Kind: OnPages, Admitted: true}, "drop"},
	})
	check(t, "T, source ended before", []row{
		{"peer dead", dT3S, Event{Kind: OnPeerDead}, "fence"},
		{"newer", dT3S, Event{Kind: OnHelloNewer}, "fence"},
		{"peer dead alone proves nothing", dT3, Event{Kind: OnPeerDead}, "-"},
	})
}

// TestDrainedOnce: Drained is sent when it becomes true, once, whichever event finds it first.
func TestDrainedOnce(t *testing.T) {
	ops := Event{Kind: OnOps}
	for _, c := range []struct {
		name  string
		r     one
		steps []Event
		want  []string
	}{
		{"with the answer", pO, []Event{register(d2, att), ops}, []string{"ended(peer_superseded) Drained(s,d) cancel placeholder", "-"}},
		{"with the end", pW, []Event{{Kind: OnAbort}, ops}, []string{"ended(aborted) Abort(s,d:aborted) Drained(s,d) cancel", "-"}},
		{"later", with(pTBusy, func(r *one) { r.Ops = Counts{} }), []Event{ops, ops}, []string{"Drained(s,d)", "-"}},
	} {
		r := c.r
		for i, e := range c.steps {
			next, out := step(r, e)
			if got := change(r, next, out); got != c.want[i] {
				t.Errorf("%s, step %d: %s, want %s", c.name, i, got, c.want[i])
			}
			r = next
		}
	}
}

// TestCause is how each reason of the counterpart is recorded here.
func TestCause(t *testing.T) {
	const numReasons = 29 // a new one needs a decision here
	if NumReasons != numReasons {
		t.Errorf("%d reasons", NumReasons)
	}
	theirs := map[Reason]bool{None: true, Success: true, Aborted: true, OutcomeUnknown: true, EngineLost: true}
	for r := range NumReasons + 3 {
		want := r
		if theirs[r] || r >= NumReasons {
			want = PeerAborted
		}
		if got := cause(r); got != want {
			t.Errorf("cause(%s) = %s, want %s", r, got, want)
		}
	}
}

// TestRepeat: what Resync re-sends is the verdict of the pair.
func TestRepeat(t *testing.T) {
	for _, c := range []struct {
		r    one
		want Send
	}{
		{dT, Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: Aborted, S: s, D: d}},
		{dTOK, Send{Kind: FrameVerdict, Outcome: JudgeSuccess, Reason: Success, S: s, D: d}},
	} {
		if got := c.r.Repeat(&c.r.Pair); got != c.want {
			t.Errorf("%+v, want %+v", got, c.want)
		}
	}
}
