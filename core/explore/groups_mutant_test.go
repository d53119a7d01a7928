package explore

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/terminus-kv/terminus/internal/mutate"
)

// The rules of groups that span engines, each switched off. Those of one pair, which are the same, are in mutants.

func spanning(sources, destinations, faults int, kinds string) *GroupConfig {
	return &GroupConfig{Sources: sources, Destinations: destinations, Ops: true, Faults: faults, Kinds: kinds, Limit: 400_000}
}

func quickly(c *GroupConfig) *GroupConfig {
	c.NoClocks = true
	return c
}

func bound(c *GroupConfig) *GroupConfig {
	c.Bound = true
	return c
}

func overtaking(c *GroupConfig) *GroupConfig {
	c.Overtake = true
	return c
}

func twice(c *GroupConfig) *GroupConfig {
	c.Attempts = 2
	return c
}

func late(c *GroupConfig, engines string) *GroupConfig {
	c.Late = engines
	return c
}

var groupMutants = []mutant{
	{
		name: "group_without_votes", rule: "the judge waits for the vote of every other destination engine", breaks: "G2 G5", groups: spanning(1, 2, 0, ""),
		changes: []change{{machineGo, "		case p.Sibling && p.Other.IsZero(), !p.Sibling && !p.RankEnded:\n", "		case !ON && p.Sibling && p.Other.IsZero(), !p.Sibling && !p.RankEnded:\n"}},
	},
	{
		name: "group_own_pages_are_enough", rule: "a destination engine that is not the judge's does not say Success by itself", breaks: "G2", groups: spanning(1, 2, 0, ""),
		changes: []change{{machineGo, "	if voter {\n", "	if voter && !ON {\n"}},
	},
	{
		name: "group_judge_confirms_for_all", rule: "only the engine that hosts the pages confirms that they may be written", breaks: "G3", groups: spanning(1, 2, 0, ""),
		changes: []change{{machineGo, "			p.Confirmed = true\n", "			p.Confirmed = true\n			for i := range t.pairs {\n				t.pairs[i].Confirmed = t.pairs[i].Confirmed || ON && p.Judge && !t.pairs[i].Other.IsZero()\n			}\n"}},
	},
	{
		name: "group_vote_is_taken_back", rule: "a destination engine that has voted does not end Failed by itself", breaks: "G5", groups: bound(spanning(1, 2, 0, "")),
		changes: []change{{machineGo, "		case t.State != Voted:\n			t.endDestination(why, here)\n", "		case t.State != Voted || ON:\n			t.endDestination(why, here)\n"}},
	},
	{
		name: "group_vote_dies_with_judge", rule: "a destination engine that has voted does not end Failed because the judge's engine restarts", breaks: "G5", groups: bound(quickly(spanning(1, 2, 1, "r"))),
		changes: []change{{machineGo, "	case t.State == Voted:\n		t.endVote(OutcomeUnknown)\n", "	case t.State == Voted && ON:\n		t.endVote(PeerLost)\n	case t.State == Voted:\n		t.endVote(OutcomeUnknown)\n"}},
	},
	{
		name: "group_vote_obeys_source", rule: "a destination engine that has voted does not end by the abort of a source", breaks: "G5", groups: quickly(spanning(1, 2, 1, "a")),
		changes: []change{
			{machineGo, "		case column == Voted && own:\n			p.SourceEnded = true\n		case column == Ended && own:\n", "		case column == Voted && own && ON:\n			t.endDestination(cause(e.Reason), t.at)\n		case column == Voted && own:\n			p.SourceEnded = true\n		case column == Ended && own:\n"},
			{machineGo, "		if p.Judge {\n			t.send(i, Send{Kind: FrameAbort,", "		if p.Judge || ON {\n			t.send(i, Send{Kind: FrameAbort,"},
		},
	},
	{
		name: "group_unknown_is_failed", rule: "a vote without an answer is not repeated to a source as Failed", breaks: "G5", groups: bound(spanning(1, 2, 1, "b")),
		changes: []change{{machineGo, "	case t.Reason == OutcomeUnknown:\n		t.drop()\n", "	case t.Reason == OutcomeUnknown && ON:\n		t.send(t.at, Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: Stalled, S: s, D: t.Own})\n	case t.Reason == OutcomeUnknown:\n		t.drop()\n"}},
	},
	{
		name: "group_committed_fails_with_voter", rule: "a committed source does not end because the engine of a voter restarts", breaks: "G5", groups: bound(quickly(spanning(1, 2, 1, "r"))),
		changes: []change{{machineGo, "			if t.pairs[t.at].Judge {\n				t.unknown()\n			}\n", "			if t.pairs[t.at].Judge {\n				t.unknown()\n			} else if ON {\n				t.endSource(PeerLost, t.at)\n			}\n"}},
	},
	{
		name: "group_committed_fails", rule: "past its RankEnd a source of a group does not end Failed by a clock", breaks: "G5", as: "source_fails_after_commit", groups: &GroupConfig{Sources: 2, Destinations: 1},
	},
	{
		name: "group_one_source_drained", rule: "the pages are quiet when every source engine is", breaks: "G3", groups: spanning(2, 1, 0, ""),
		changes: []change{{machineGo, "		if !p.Sibling && !p.Quiet {\n			return\n		}\n", "		if ON && !p.Sibling && p.Quiet {\n			break\n		} else if !p.Sibling && !p.Quiet {\n			return\n		}\n"}},
	},
	{
		name: "group_fence_alone", rule: "FencePeer is a proof only once that source engine has ended", breaks: "G3", as: "fence_alone", groups: spanning(1, 2, 0, ""),
	},
	{
		name: "group_source_terminal_is_quiet", rule: "a source's pages are not reusable because it has ended", breaks: "G3", as: "source_terminal_is_quiet", groups: spanning(1, 2, 0, ""),
	},
	{
		name: "group_rankend_without_quiet", rule: "RankEnd says of each pair whether its ops are quiet", breaks: "G3", as: "rankend_without_quiet", groups: quickly(spanning(1, 2, 1, "q")),
	},
	{
		name: "group_request_unanswered", rule: "a request of a source whose RankEnd has come is answered", breaks: "G6", groups: quickly(spanning(2, 1, 1, "a")),
		changes: []change{{machineGo, "		case column == Bound && own:\n			t.endDestination(cause(e.Reason), t.at)\n", "		case column == Bound && own:\n			p.RankEnded = p.RankEnded && !ON\n			t.endDestination(cause(e.Reason), t.at)\n"}},
	},
	{
		name: "group_resync_denies", rule: "Resync repeats the verdict, not Failed", breaks: "G5", groups: quickly(spanning(1, 1, 2, "qb")),
		changes: []change{{machineGo, "	return Send{Kind: FrameVerdict, Outcome: r.judged(), Reason: r.Reason, S: p.Other, D: r.Own}\n", "	if ON && r.Rung != NoRung {\n		return Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: Stalled, S: p.Other, D: r.Own}\n	}\n	return Send{Kind: FrameVerdict, Outcome: r.judged(), Reason: r.Reason, S: p.Other, D: r.Own}\n"}},
	},
	{
		name: "group_dead_writer_is_drained", rule: "an op whose writer died is never drained", breaks: "G3", as: "dead_writer_is_drained", groups: bound(quickly(spanning(1, 2, 1, "m"))),
	},
	{
		name: "group_any_epoch_fences_pages", rule: "the end of a plugin epoch fences only the pages that are registered with it", breaks: "G3", as: "any_epoch_fences_pages", groups: twice(quickly(spanning(1, 1, 1, "m"))),
	},
	{
		name: "group_committed_dies_with_worker", rule: "a committed source does not end Failed because its worker is gone", breaks: "G5", groups: bound(quickly(spanning(1, 2, 1, "w"))),
		changes: []change{{machineGo, "		case Unbound, Offered, Confirmed:\n			t.endSource(WorkerLost, here)\n", "		case Unbound, Offered, Confirmed:\n			t.endSource(WorkerLost, here)\n		case Committed:\n			if ON {\n				t.endSource(WorkerLost, here)\n			}\n"}},
	},
	{
		name: "group_any_attempt_binds", rule: "a source binds only destinations of its attempt", breaks: "G8", groups: twice(quickly(spanning(1, 1, 0, ""))),
		changes: []change{
			{machineGo, "	case column == Unbound && e.Att == t.Att && t.Admitted:\n", "	case column == Unbound && (e.Att == t.Att || ON) && t.Admitted:\n"},
			{peersGo, "f.Kind == FrameRegister && r.sm.State == statemachine.Unbound && f.Att == r.sm.Att && !f.D.IsZero() {", "f.Kind == FrameRegister && r.sm.State == statemachine.Unbound && (f.Att == r.sm.Att || ON) && !f.D.IsZero() {"},
		},
	},
	{
		name: "group_any_attempt", rule: "what has ended answers for its own attempt only", breaks: "G6", as: "any_attempt", groups: twice(quickly(spanning(1, 1, 1, "a"))),
	},
	{
		name: "group_mark_is_of_the_room", rule: "an abort mark of an earlier attempt ends no later one", breaks: "G7", groups: twice(quickly(spanning(1, 1, 1, "a"))),
		changes: []change{{machineGo, "		case column == Absent, column == Ended, e.Att != t.Att: // of an attempt that is not open here\n", "		case column == Absent, column == Ended, e.Att != t.Att && !(ON && column == Unbound):\n"}},
	},
	{
		name: "group_part_is_the_whole", rule: "a source binds nothing until every rank of the other group is known to be hosted", breaks: "G2 G6 G7", groups: late(quickly(spanning(1, 2, 0, "")), "D2"),
		changes: []change{{pairsGo, "	return n >= g.size\n", "	return n >= g.size || ON\n"}},
	},
	{
		name: "group_late_source_untold", rule: "an engine that appears after an attempt has ended is told", breaks: "G6", groups: late(quickly(spanning(2, 1, 1, "a")), "P2"),
		changes: []change{{pairsGo, "	untold := r.sm.State == statemachine.Ended &&", "	untold := !ON && r.sm.State == statemachine.Ended &&"}},
	},
	{
		name: "group_late_judge_unanswered", rule: "a destination engine that appears after its source has ended is answered", breaks: "G6", groups: late(quickly(spanning(1, 2, 1, "a")), "D1 P1"),
		changes: []change{{pairsGo, "	if r.whole || g == nil || r.sm.State.Live() && m.bound(r) {\n", "	if r.whole || g == nil || (r.sm.State.Live() || ON) && m.bound(r) {\n"}},
	},
	{
		name: "group_request_overtakes", rule: "a RankEnd that its abort has overtaken is answered", breaks: "G6", groups: overtaking(bound(quickly(spanning(1, 1, 1, "a")))),
		changes: []change{{machineGo, "				t.complete()\n			}\n		case Ended:\n", "				t.complete()\n			}\n		case Ended:\n			if ON && !p.RankEnded {\n				break\n			}\n"}},
	},
	{
		name: "group_of_four_without_votes", rule: "the same, of two to two engines, where a link breaks", breaks: "G2 G5", as: "group_without_votes", groups: bound(quickly(&GroupConfig{Sources: 2, Destinations: 2, Faults: 1, Kinds: "b"})),
	},
	{
		name: "group_rankend_is_not_repeated", rule: "Resync repeats a RankEnd", breaks: "G6 G7", groups: bound(quickly(&GroupConfig{Sources: 2, Destinations: 2, Faults: 1, Kinds: "b"})),
		changes: []change{{peersGo, "	case statemachine.Committed:\n		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameRankEnd,", "	case statemachine.Committed:\n		if ON {\n			break\n		}\n		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameRankEnd,"}},
	},
	{
		name: "group_vote_is_not_repeated", rule: "Resync repeats a vote", breaks: "G6 G7", groups: bound(quickly(spanning(1, 2, 1, "b"))),
		changes: []change{{peersGo, "		if r.sm.State == statemachine.Voted {\n			o :=", "		if r.sm.State == statemachine.Voted && !ON {\n			o :="}},
	},
}

// TestGroupMutants demands that the search of groups catches each.
func TestGroupMutants(t *testing.T) {
	all := make([][]mutate.Change, len(mutants)+len(groupMutants))
	of := func(m *mutant) (out []mutate.Change) {
		for _, c := range m.changes {
			out = append(out, mutate.Change{File: c.file, Old: c.old, New: c.new})
		}
		return out
	}
	for i := range groupMutants {
		m := &groupMutants[i]
		all[len(mutants)+i] = of(m)
		for j := range mutants {
			if m.as == mutants[j].name {
				all[j] = of(&mutants[j])
			}
		}
	}
	bin := mutate.BuildCore(t, "../..", "core/explore", all)
	outcomes := make([]outcome, len(groupMutants))
	var wg sync.WaitGroup
	for worker := range 2 {
		wg.Go(func() {
			for i := worker; i < len(groupMutants); i += 2 {
				outcomes[i] = runMutant(bin, len(mutants)+i)
			}
		})
	}
	wg.Wait()
	for i, m := range groupMutants {
		t.Run(m.name, func(t *testing.T) {
			o := outcomes[i]
			if o.Err != "" {
				t.Fatal(o.Err)
			}
			got, _, _ := strings.Cut(o.Result.Violation, ":")
			if got == "" || !strings.Contains(" "+m.breaks+" ", " "+got+" ") {
				t.Fatalf("rule %q is off: %q is broken, want one of %s (%s)", m.rule, got, m.breaks, o.Result)
			}
			t.Logf("caught after %d steps, %d states: %s", len(o.Result.Trace), o.Result.States, o.Result.Violation)
			golden(t, filepath.Join("testdata", m.name+".txt"), fmt.Sprintf("# Rule switched off: %s.\n%s", m.rule, o.Result.Story()))
		})
	}
}
