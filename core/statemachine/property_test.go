package statemachine

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var rewrite = flag.Bool("rewrite", false, "rewrite testdata")

// records are all records that docs/protocol.md speaks of, in both roles.
var records = []one{
	pAbsent, pB, pBQueue, pO, pW, pWBusy, pC, pCUnq, pCLate, pT, pTBusy, pTLost, pTU, pTOK, pTOKUnq,
	dAbsent, dQ, dR, dW, dT, dT3, dT3S, dT4, dTQuiet, dTOK, dTU,
}

// events calls fn with every kind of event and frame in every combination of what matters of its
// fields, one past the known kinds included.
func events(fn func(Event)) {
	bools := []bool{false, true}
	for k := Kind(0); k <= NumKinds; k++ {
		frames := []FrameKind{0}
		if k == OnFrame {
			frames = nil
			for f := FrameKind(0); f <= NumFrameKinds; f++ {
				frames = append(frames, f)
			}
		}
		for _, f := range frames {
			for _, so := range []Opener{{}, s, s2, s0} {
				for _, do := range []Opener{{}, d, d2, d0} {
					for _, a := range []uint64{att, att + 1} {
						for o := Outcome(0); o <= JudgeUnknown+1; o++ {
							for _, b := range bools {
								for _, c := range bools {
									why := Reason(int(o) * 9 % int(NumReasons+2))
									fn(Event{Kind: k, Frame: f, S: so, D: do, Att: a, Outcome: o, Quiet: b, Complete: c, Admitted: c,
										OwnInc: b, Unproven: c, Marked: b && c, Reason: why, Role: Source + Role(o&1), Own: s2})
								}
							}
						}
					}
				}
			}
		}
	}
}

// TestTotal: every (role, state, event, frame) returns; what is dropped changed nothing and sends
// nothing; an absent record stays absent unless it is opened; the record stays sound.
func TestTotal(t *testing.T) {
	n := 0
	for _, r := range records {
		events(func(e Event) {
			n++
			next, out := step(r, e)
			switch {
			case out.Do&DoDrop != 0 && (next != r || len(out.Sends) != 0):
				t.Fatalf("%+v\n%+v: dropped, but %s", r, e, change(r, next, out))
			case r.State == Absent && e.Kind != OnOpen && next != r:
				t.Fatalf("%+v creates a record: %+v", e, next)
			}
			if why := lax(r, e, next, out); why != "" {
				t.Fatalf("%+v\n%+v\n→ %+v\n%+v: %s", r, e, next, out.Sends, why)
			}
			if why := unsound(next); why != "" && e.Reason != None && e.Reason < NumReasons && e.Reason != Success {
				t.Fatalf("%+v\n%+v\n→ %+v: %s", r, e, next, why)
			}
		})
	}
	if n < 100_000 {
		t.Fatalf("only %d combinations", n)
	}
}

// unsound says what is wrong with a record.
func unsound(r one) string {
	switch {
	case r.State != Ended && r.Reason != None:
		return "a live record has a reason"
	case r.State == Ended && r.Reason == None:
		return "an ended record has no reason"
	case (r.State == Offered || r.State == Confirmed || r.State == Committed || r.State == Bound) && r.Other.IsZero():
		return "bound to nobody"
	case r.Role == Destination && r.State == Ended && (r.Rung != NoRung) == r.Pages.Reusable():
		return "the rung does not fit the pages"
	case r.Role == Destination && r.State.Live() && r.Rung != NoRung:
		return "a live record stands on a rung"
	case r.State.Live() && r.Pages.Reusable() && r.Pages != NoPages:
		return "pages of a live destination are reusable"
	}
	return ""
}

func genEvent(t *rapid.T) Event {
	all := []Opener{{}, s, s2, s0, d, d2, d0}
	return Event{
		Kind:     rapid.Custom(func(t *rapid.T) Kind { return Kind(rapid.IntRange(0, int(NumKinds)).Draw(t, "k")) }).Draw(t, "kind"),
		Frame:    FrameKind(rapid.IntRange(0, int(NumFrameKinds)).Draw(t, "frame")),
		Outcome:  Outcome(rapid.IntRange(0, 4).Draw(t, "outcome")),
		Reason:   Reason(rapid.IntRange(2, int(NumReasons)-1).Draw(t, "reason")),
		Quiet:    rapid.Bool().Draw(t, "quiet"),
		Complete: rapid.Bool().Draw(t, "complete"),
		Admitted: rapid.Bool().Draw(t, "admitted"),
		Marked:   rapid.Bool().Draw(t, "marked"),
		OwnInc:   rapid.Bool().Draw(t, "own inc"),
		S:        rapid.SampledFrom(all).Draw(t, "s"),
		D:        rapid.SampledFrom(all).Draw(t, "d"),
		Own:      s,
		Role:     rapid.SampledFrom([]Role{Source, Destination}).Draw(t, "role"),
		Att:      uint64(rapid.IntRange(att, att+1).Draw(t, "att")),
	}
}

// TestSticky (R2, R3): over any sequence of events an ended record keeps state, reason, role, opener
// and attempt; its pair is set once, from zero; the KVPoll word never goes back, except to Failed; and
// pages of an ended destination never go back to a state in which somebody may write.
func TestSticky(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rapid.SampledFrom(records).Draw(t, "record")
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			e := genEvent(t)
			old := r
			next, _ := step(r, e)
			r = next
			if r.Role == Source { // what the caller does with Counts, roughly
				r.Ops.Open = max(0, r.Ops.Open-int32(rapid.IntRange(0, 1).Draw(t, "ends")))
			}
			if old.State == Absent {
				continue
			}
			if r.Own != old.Own || r.Att != old.Att || r.Role != old.Role {
				t.Fatalf("%+v: identity changed: %+v → %+v", e, old, r)
			}
			if old.State == Ended && (r.State != Ended || r.Reason != old.Reason || r.ByPeer != old.ByPeer) {
				t.Fatalf("%+v: verdict changed: %+v → %+v", e, old, r)
			}
			if !old.Other.IsZero() && r.Other != old.Other {
				t.Fatalf("%+v: pair changed: %+v → %+v", e, old, r)
			}
			if w := r.Status(); w < old.Status() && w != Failed {
				t.Fatalf("%+v: status went from %s to %s", e, old.Status(), w)
			}
			if old.State == Ended && old.Pages.Reusable() && r.Pages != old.Pages {
				t.Fatalf("%+v: pages went from %s to %s", e, old.Pages, r.Pages)
			}
		}
	})
}

// TestStatus is the KVPoll word of every column.
func TestStatus(t *testing.T) {
	for _, c := range []struct {
		r    one
		want KVPoll
	}{
		{pB, Bootstrapping}, {pO, Bootstrapping}, {pW, WaitingForInput}, {pWBusy, Transferring}, {pC, Transferring}, {pT, Failed}, {pTOK, Succeeded},
		{dQ, Bootstrapping}, {dR, Bootstrapping}, {dW, WaitingForInput}, {with(dW, func(r *one) { r.Started = true }), Transferring},
		{dT, Failed}, {dTOK, Succeeded},
	} {
		if got := c.r.Status(); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.r.Role, c.r.State, got, c.want)
		}
	}
}

// TestSourceResidency: source pages are reusable in C and T when every op is quiet here, whatever the
// verdict; before that never.
func TestSourceResidency(t *testing.T) {
	for _, c := range []struct {
		s     State
		armed bool
		c     Counts
		want  Residency
	}{
		{Confirmed, false, Counts{}, NoPages}, {Unbound, true, Counts{}, Armed}, {Confirmed, true, Counts{}, Armed},
		{Committed, true, Counts{}, Quiet}, {Committed, true, Counts{Linger: 1}, Armed}, {Committed, true, Counts{Lost: 1}, Fenced},
		{Ended, true, Counts{Open: 1}, Quiescing}, {Ended, true, Counts{Dead: 1}, Quiescing}, {Ended, true, Counts{Lost: 1}, Fenced},
		{Ended, true, Counts{}, Quiet},
	} {
		if got := SourceResidency(c.s, c.armed, c.c); got != c.want {
			t.Errorf("%s %v %+v: %s, want %s", c.s, c.armed, c.c, got, c.want)
		}
	}
}

// TestNames is the list of public names and numbers. A line that changes or moves breaks readers of
// metrics, JSON, status words and peer frames: append, never renumber.
func TestNames(t *testing.T) {
	var b strings.Builder
	seen := map[string]bool{}
	for r := Reason(0); r < NumReasons; r++ {
		fmt.Fprintf(&b, "reason %d %s\n", r, r)
		if back, ok := ParseReason(r.String()); !ok || back != r {
			t.Errorf("ParseReason(%q) = %v, %v", r, back, ok)
		}
		if seen[r.String()] {
			t.Errorf("%s is named twice", r)
		}
		seen[r.String()] = true
		if doc := r.Doc(); len(doc) < 20 || !strings.HasSuffix(doc, ".") || strings.ToUpper(doc[:1]) != doc[:1] {
			t.Errorf("%s: doc is no sentence: %q", r, doc)
		}
	}
	for p := Failed; p <= Succeeded; p++ {
		fmt.Fprintf(&b, "status %d %s\n", p, p)
	}
	for r := NoPages; r <= Released; r++ {
		fmt.Fprintf(&b, "residency %d %s\n", r, r)
	}
	for k := FrameKind(1); k < NumFrameKinds; k++ {
		fmt.Fprintf(&b, "frame %d %s\n", k, k)
	}
	for o := Outcome(1); o <= JudgeUnknown; o++ {
		fmt.Fprintf(&b, "outcome %d\n", o)
	}
	for _, r := range []Role{Source, Destination} {
		fmt.Fprintf(&b, "role %d %s\n", r, r)
	}
	const file = "testdata/names.txt"
	if *rewrite {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("names or numbers changed (-rewrite only to append):\n got\n%s\nwant\n%s", b.String(), want)
	}
	for k := Absent; k < NumStates; k++ {
		if name := k.String(); name == "invalid" || seen[name] {
			t.Errorf("state %d is named %q", k, name)
		}
		seen[k.String()] = true
	}
	for _, invalid := range []string{NumReasons.String(), NumStates.String(), NumFrameKinds.String(), State(99).String(), KVPoll(99).String(), Residency(99).String(), Role(0).String(), FrameKind(0).String()} {
		if !strings.HasPrefix(invalid, "invalid") {
			t.Errorf("%q names what does not exist", invalid)
		}
	}
	if _, ok := ParseReason("no such reason"); ok || NumReasons.Doc() != "" {
		t.Error("an unknown reason is known")
	}
}
