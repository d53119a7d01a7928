package explore

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/terminus-kv/terminus/internal/mutate"
)

// A mutant is the shipped core with one rule switched off. The rules are those that docs/protocol.md
// cannot do without; each mutant must break one, and the shortest way in which it does is a golden file.
//
// The product carries no switches: the mutants are made by textual changes to copies of its source, all
// of them in one binary that is built with -overlay and told which one to be.
type mutant struct {
	name    string
	rule    string   // the rule in words, as removed
	breaks  string   // rules that may be reported first, separated by spaces; empty: the mutant survives
	why     string   // of a survivor
	changes []change // ON stands for the mutant's switch; none: the rule is the worker's, see cfg
	as      string   // the same changes as that one
	cfg     Config
	groups  *GroupConfig // searched instead of cfg
}

type change struct{ file, old, new string }

const (
	machineGo = "core/statemachine/machine.go"
	recordGo  = "core/statemachine/record.go"
	peersGo   = "core/peers.go"
	sendGo    = "core/send.go"
	clockGo   = "core/clock.go"
	marksGo   = "core/marks.go"
	opsGo     = "core/ops.go"
	workerGo  = "core/worker.go"
	pairsGo   = "core/pairs.go"
)

// small is the configuration in which most mutants show: both ends of the link have said Hello.
func small(openers, faults int, kinds string) Config {
	return Config{Sources: 1, Rooms: 1, Openers: openers, Chunks: 1, Faults: faults, Kinds: kinds, Depth: 25, NoHints: true, NoProof: true, Connected: true}
}

func with(c Config, f func(*Config)) Config {
	f(&c)
	return c
}

func graph(c *Config) { c.Graph, c.Depth = true, 0 }

var mutants = []mutant{
	{
		name: "not_sticky", rule: "a terminal status never changes", breaks: "R2", cfg: small(1, 1, "c"),
		changes: []change{{machineGo,
			"			t.answer(e.S)\n		case Absent:\n			refuse(JudgeUnknown, None)",
			"			if ON && own {\n				t.Reason = Success\n			}\n			t.answer(e.S)\n		case Absent:\n			refuse(JudgeUnknown, None)"}},
	},
	{
		name: "source_says_success", rule: "only the judge is first to say Success", breaks: "R11", cfg: small(1, 0, ""),
		changes: []change{{machineGo,
			"t.State, t.Started = Committed, true\n",
			"t.State, t.Started = Committed, true\n			if ON {\n				t.State, t.Reason = Ended, Success\n			}\n"}},
	},
	{
		name: "source_fails_after_commit", rule: "past its RankEnd a source does not end Failed by a clock", breaks: "R10", cfg: small(1, 0, ""),
		changes: []change{{machineGo,
			"			} else {\n				t.unknown()\n			}",
			"			} else if ON {\n				t.endSource(Stalled, here)\n			} else {\n				t.unknown()\n			}"}},
	},
	{
		name: "rankend_is_no_return", rule: "past its RankEnd a source does not end Failed by its worker's abort", breaks: "R10", cfg: small(1, 1, "a"),
		changes: []change{{machineGo,
			"		case Committed: // past the point of no return\n",
			"		case Committed:\n			if ON {\n				t.endSource(Aborted, here)\n				break\n			}\n"}},
	},
	{
		name: "committed_is_superseded", rule: "a committed source is untouched by another destination's Register", breaks: "R10", cfg: small(2, 1, "b"),
		changes: []change{{machineGo,
			"	case column == Offered || column == Confirmed:\n		t.endSource(PeerSuperseded, t.at)\n",
			"	case column == Offered || column == Confirmed || ON && column == Committed:\n		t.endSource(PeerSuperseded, t.at)\n"}},
	},
	{
		name: "writes_without_confirm", rule: "the source writes only once the destination has confirmed", breaks: "R4", cfg: with(small(1, 1, "c"), func(c *Config) { c.Ignore = "R3" }),
		changes: []change{
			{machineGo, "	t.pairs[t.at].Other = d\n", "	t.pairs[t.at].Other = d\n	t.pairs[t.at].Confirmed = ON\n"},
			{peersGo,
				"	case f.Kind == FrameRegister && r.sm.Column(&p.sm) == statemachine.Offered && p.sm.Other == f.D && !p.havePages:\n",
				"	case ON && f.Kind == FrameRegister && agreed(r) && p.sm.Other == f.D && !p.havePages:\n		m.takePages(idx, r, at, from, f)\n		m.readyAll(idx, r)\n	case f.Kind == FrameRegister && r.sm.Column(&p.sm) == statemachine.Offered && p.sm.Other == f.D && !p.havePages:\n"},
		},
	},
	{
		name: "writes_without_confirm_over_restart", rule: "the same, when the source's engine dies", breaks: "R11", as: "writes_without_confirm", cfg: with(small(2, 1, "p"), func(c *Config) { c.Ignore, c.SameAttempt = "R3 R4", true }),
	},
	{
		name: "ended_confirms", rule: "a destination that has ended refuses Bound", breaks: "R3", cfg: small(1, 1, "b"),
		changes: []change{{machineGo,
			"			t.answer(e.S)\n		case Absent:\n			refuse(JudgeFailed, StaleRoom)",
			"			if ON {\n				t.send(t.at, Send{Kind: FrameConfirm, S: e.S, D: t.Own})\n				break\n			}\n			t.answer(e.S)\n		case Absent:\n			refuse(JudgeFailed, StaleRoom)"}},
	},
	{
		name: "frames_by_room", rule: "a frame concerns the openers that it names, not the room", breaks: "R3 R4 R11", cfg: small(2, 0, ""),
		changes: []change{{peersGo,
			"		idx = m.byOwn(key, f.S)\n",
			"		idx = m.byOwn(key, f.S)\n		if live := m.liveRoom(key); ON && live != nil32 {\n			idx = live\n			e.S, e.D = m.rooms.at(idx).sm.Own, m.firstPair(m.rooms.at(idx)).sm.Other\n		}\n"}},
	},
	{
		name: "destination_terminal_is_quiet", rule: "a destination's pages are not reusable because it has ended", breaks: "R4", cfg: small(1, 0, ""),
		changes: []change{{machineGo,
			"		if !p.Sibling && p.Other.IsZero() { // no Confirm was sent\n",
			"		if !p.Sibling && (ON || p.Other.IsZero()) {\n"}},
	},
	{
		name: "source_terminal_is_quiet", rule: "a source's pages are not reusable because it has ended", breaks: "R4", cfg: small(1, 0, ""),
		changes: []change{{recordGo, "	case !c.QuietLocal():\n", "	case !c.QuietLocal() && !(ON && s == Ended):\n"}},
	},
	{
		name: "drained_with_ops", rule: "Drained only when every op is quiet", breaks: "R4", cfg: small(1, 0, ""),
		changes: []change{{machineGo, "return t.State == Ended && p.Ops.QuietRemote()", "return t.State == Ended && (ON || p.Ops.QuietRemote())"}},
	},
	{
		name: "dead_writer_is_drained", rule: "an op whose writer died is never drained", breaks: "R4", cfg: small(1, 1, "m"),
		changes: []change{{recordGo, "return c.QuietLocal() && c.Lost == 0", "return c.QuietLocal() && (ON || c.Lost == 0)"}},
	},
	{
		name: "older_incarnation_drained", rule: "an engine does not say Drained for an opener of an incarnation before it", breaks: "R4", cfg: small(1, 1, "p"),
		changes: []change{
			{machineGo, "		case !e.OwnInc:\n", "		case !e.OwnInc && !ON:\n"},
			{peersGo, " && other.Inc == m.peer(p.peer).inc {", " && (ON || other.Inc == m.peer(p.peer).inc) {"},
			{sendGo, "to.known && target.Inc != to.inc", "to.known && target.Inc != to.inc && !ON"},
		},
	},
	{
		name: "newer_hello_is_quiet", rule: "a Hello of a new incarnation makes nothing quiet", breaks: "R4", cfg: small(1, 1, "p"),
		changes: []change{{machineGo,
			"		t.pairs[t.at].SourceEnded = newer\n",
			"		t.pairs[t.at].SourceEnded = newer\n		if ON && newer {\n			t.rest(Quiet)\n		}\n"}},
	},
	{
		name: "rankend_without_quiet", rule: "RankEnd says whether every op is quiet", breaks: "R4", cfg: small(1, 1, "q"),
		changes: []change{{machineGo, "p.RankEnded, p.Quiet, t.Started = true, e.Quiet, true", "p.RankEnded, p.Quiet, t.Started = true, e.Quiet || ON, true"}},
	},
	{
		name: "fence_alone", rule: "FencePeer is a proof only once the source has ended", breaks: "R4", cfg: small(1, 0, ""),
		changes: []change{
			{machineGo, "case e.Quiet && p.SourceEnded:", "case e.Quiet && (p.SourceEnded || ON):"},
			{machineGo, "t.Rung == Fence && p.SourceEnded && !p.Quiet {", "t.Rung == Fence && (p.SourceEnded || ON) && !p.Quiet {"},
		},
	},
	{
		name: "reuse_when_engine_lost", rule: "a worker whose engine died waits until nobody maps its region", breaks: "R4",
		cfg: with(small(1, 1, "pd"), func(c *Config) { c.NoLease = true }),
	},
	{
		name: "no_resync", rule: "both sides repeat what counts after a Hello", breaks: "R10 R4", cfg: small(1, 1, "b"),
		changes: []change{{peersGo, "			if p.peer == e.Peer {\n				m.resync(idx, r, at)\n", "			if p.peer == e.Peer && !ON {\n				m.resync(idx, r, at)\n"}},
	},
	{
		name: "no_verdict_again", rule: "Resync repeats the verdict of rooms whose pages are not quiet", breaks: "R4", cfg: small(1, 1, "b"),
		changes: []change{{peersGo, "r.sm.Role == statemachine.Destination && r.sm.Rung != statemachine.NoRung &&", "!ON && r.sm.Role == statemachine.Destination && r.sm.Rung != statemachine.NoRung &&"}},
	},
	{
		name: "live_ignores_drained", rule: "Drained ends a live destination", breaks: "R10 R4", cfg: small(1, 1, "b"),
		changes: []change{{machineGo,
			"		case column == Bound:\n			p.Quiet = true\n",
			"		case ON && column == Bound:\n		case column == Bound:\n			p.Quiet = true\n"}},
	},
	{
		name: "forgotten_is_silent", rule: "Drained is said for a source of this incarnation that was forgotten", breaks: "R4", cfg: small(1, 2, "be"),
		changes: []change{{machineGo,
			"		default:\n			t.send(t.at, Send{Kind: FrameDrained, S: e.S, D: e.D})\n		}\n		return",
			"		case ON:\n		default:\n			t.send(t.at, Send{Kind: FrameDrained, S: e.S, D: e.D})\n		}\n		return"}},
	},
	{
		name: "forgotten_is_failed", rule: "a judge that has forgotten the room says unknown, not Failed", breaks: "R10", cfg: small(1, 2, "bf"),
		changes: []change{{machineGo,
			"		case Absent:\n			refuse(JudgeUnknown, None)",
			"		case Absent:\n			if ON {\n				refuse(JudgeFailed, StaleRoom)\n				break\n			}\n			refuse(JudgeUnknown, None)"}},
	},
	{
		name: "no_verdict_clock", rule: "a committed source has a clock", breaks: "R5", cfg: small(1, 0, ""),
		changes: []change{{clockGo, "		m.keep(idx, r, slotPhase, c)\n", "		if m.disarm(r, slotPhase); !ON {\n			m.keep(idx, r, slotPhase, c)\n		}\n"}},
	},
	{
		name: "no_source_clock", rule: "a source that is offered has a clock", breaks: "R5", cfg: small(1, 0, ""),
		changes: []change{{clockGo,
			"	case statemachine.Offered, statemachine.Registered:\n",
			"	case statemachine.Offered, statemachine.Registered:\n		if ON && r.sm.Role == statemachine.Source {\n			m.disarm(r, slotPhase)\n			break\n		}\n"}},
	},
	{
		name: "no_judge_clock", rule: "a registered destination has a clock", breaks: "R5", cfg: small(1, 0, ""),
		changes: []change{{clockGo,
			"		m.keep(idx, r, slotPhase, pick(clkBootstrap, clkBootstrapSrc))\n",
			"		if ON && r.sm.Role != statemachine.Source {\n			m.disarm(r, slotPhase)\n			break\n		}\n		m.keep(idx, r, slotPhase, pick(clkBootstrap, clkBootstrapSrc))\n"}},
	},
	{
		name: "end_is_echoed", rule: "an end that the peer caused is not told back to it", breaks: "R10", cfg: small(1, 0, ""),
		changes: []change{{machineGo, "		case i == cause && !p.RankEnded:\n", "		case i == cause && !p.RankEnded && !(ON && p.Other.IsZero()):\n"}},
	},
	{
		name: "any_attempt", rule: "what has ended answers for its own attempt only", breaks: "stuck", cfg: with(small(2, 1, "a"), func(c *Config) { graph(c); c.Ignore = "R10" }),
		changes: []change{
			{machineGo, "	case column == Ended && p.Other.IsZero() && e.Att == t.Att:\n		p.Other = e.D\n		t.abort", "	case column == Ended && p.Other.IsZero() && (e.Att == t.Att || ON):\n		p.Other = e.D\n		t.abort"},
			{peersGo, "case pair.IsZero() && r.sm.Att == f.Att && f.Kind != FrameQueued:", "case pair.IsZero() && (r.sm.Att == f.Att || ON) && f.Kind != FrameQueued:"},
		},
	},
	{
		name: "placeholder_dropped_in_silence", rule: "the destination of a dropped placeholder is told", breaks: "stuck", cfg: with(small(1, 1, "h"), graph),
		changes: []change{{marksGo, "	m.sendStale(k.peer, k.room, h.d, h.att)\n}", "	if !ON {\n		m.sendStale(k.peer, k.room, h.d, h.att)\n	}\n}"}},
	},
	{
		name: "silent_skip", rule: "a skip ends the room, by name", breaks: "R1", cfg: small(1, 1, "s"),
		changes: []change{{machineGo, "	case OnOpFailed:\n", "	case OnOpFailed:\n		if ON && e.Reason == Skipped {\n			break\n		}\n"}},
	},
	{
		name: "hello_ends_nothing", rule: "a Hello of a new incarnation ends the openers of the older ones", breaks: "R10", cfg: small(1, 1, "pd"),
		changes: []change{{peersGo, "	newer := p.known && e.Inc != p.inc\n", "	newer := p.known && e.Inc != p.inc && !ON\n"}},
	},
	{
		name: "any_epoch_fences_pages", rule: "the end of a plugin epoch fences only the pages that are registered with it", breaks: "R4", cfg: small(1, 1, "n"),
		changes: []change{{opsGo, "r.sm.Role == statemachine.Destination && r.backend == b && r.epoch == e.Epoch {\n			m.step(idx, statemachine.Event{Kind: statemachine.OnPluginFenced})", "r.sm.Role == statemachine.Destination && r.backend == b && (ON || r.epoch == e.Epoch) {\n			m.step(idx, statemachine.Event{Kind: statemachine.OnPluginFenced})"}},
	},
	{
		name: "any_epoch_fences_ops", rule: "the end of a plugin epoch fences only its own ops", breaks: "R4", cfg: small(1, 2, "m"),
		changes: []change{{opsGo, "if oo.state != opDead || oo.backend != b || oo.epoch != e.Epoch {", "if oo.state != opDead || oo.backend != b || oo.epoch != e.Epoch && !ON {"}},
	},
	{
		name: "end_untold", rule: "an unbound end that could not be said is said at the next Hello", breaks: "R10", cfg: with(small(1, 0, ""), func(c *Config) { c.Connected = false }),
		changes: []change{{peersGo, "		if p.untold {\n", "		if p.untold && !ON {\n"}},
	},
	{
		name: "late_pages_are_armed", rule: "a room that has ended arms no pages", breaks: "R1", cfg: small(1, 0, ""),
		changes: []change{{workerGo, "	case r.sm.State == statemachine.Ended:\n		m.reply(e, Ended).Reason = r.sm.Reason\n		return\n	case s.role != statemachine.Destination:", "	case r.sm.State == statemachine.Ended && !ON:\n		m.reply(e, Ended).Reason = r.sm.Reason\n		return\n	case s.role != statemachine.Destination:"}},
	},
	{
		name: "ops_go_on", rule: "the ops of a room that ends are aborted", breaks: "R7", cfg: with(small(1, 0, ""), func(c *Config) { c.Ignore = "idle" }),
		changes: []change{{machineGo, "	t.o.Do |= DoCancel\n", "	if !ON {\n		t.o.Do |= DoCancel\n	}\n"}},
	},
	{
		name: "confirm_before_grant", rule: "Confirm waits until the plugin has opened the pages", breaks: "R4", cfg: with(small(1, 0, ""), func(c *Config) { c.Checked = true }),
		changes: []change{{sendGo, "		if r.grant == grantAsked {\n", "		if r.grant == grantAsked && !ON {\n"}},
	},
	{
		name: "any_commit", rule: "a RankEnd counts only from the source that is bound", cfg: small(2, 1, "p"),
		why: "a source that is not bound never was confirmed, so it has no RankEnd to send: Confirm checks the generation first",
		changes: []change{{machineGo,
			"			case !own:\n				refuse(JudgeFailed, StaleRoom)\n			case p.RankEnded: // repeated by Resync\n",
			"			case !own && !ON:\n				refuse(JudgeFailed, StaleRoom)\n			case p.RankEnded:\n"}},
	},
}

var mutantsFlag = flag.String("mutants", "", "run these mutants, by number; for the binary that TestMutants builds")

// outcome is what a mutant's process reports.
type outcome struct {
	Mutant int
	Result *Result
	Err    string
}

// TestMutants builds the mutants and demands that each but the one that cannot be is caught, by the trace
// in its golden file.
func TestMutants(t *testing.T) {
	root := "../.."
	bin := buildMutants(t, root)
	outcomes := make([]outcome, len(mutants))
	var wg sync.WaitGroup
	for worker := range 2 {
		wg.Go(func() {
			for i := worker; i < len(mutants); i += 2 {
				outcomes[i] = runMutant(bin, i)
			}
		})
	}
	wg.Wait()
	caught := 0
	for i, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			o := outcomes[i]
			if o.Err != "" {
				t.Fatal(o.Err)
			}
			r := o.Result
			got, _, _ := strings.Cut(r.Violation, ":")
			if r.Stuck > 0 {
				got = "stuck"
				r.Violation = fmt.Sprintf("both attempts are fresh, and cannot succeed (%d of %d such states)", r.Stuck, r.Fresh)
			}
			if m.breaks == "" {
				if r.Violation != "" {
					t.Fatalf("is caught, and should not be: %s\n%s", m.why, r.Story())
				}
				t.Logf("survives: %s (%s)", m.why, r)
				return
			}
			if r.Violation == "" {
				t.Fatalf("rule %q is off and nothing is broken: %s", m.rule, r)
			}
			if !strings.Contains(" "+m.breaks+" ", " "+got+" ") {
				t.Errorf("broke %s, want one of %s", got, m.breaks)
			}
			t.Logf("caught after %d steps, %d states: %s", len(r.Trace), r.States, r.Violation)
			caught++
			golden(t, filepath.Join("testdata", m.name+".txt"), fmt.Sprintf("# Rule switched off: %s.\n%s", m.rule, r.Story()))
		})
	}
	t.Logf("%d of %d mutants caught", caught, len(mutants))
}

var rewrite = flag.Bool("rewrite", false, "write the golden files")

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *rewrite {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s: run with -rewrite after looking at this\n%s", path, got)
	}
}

// buildMutants makes the binary that holds all mutants.
func buildMutants(t *testing.T, root string) string {
	t.Helper()
	all := make([][]mutate.Change, len(mutants))
	for i, m := range mutants {
		for _, c := range m.changes {
			all[i] = append(all[i], mutate.Change{File: c.file, Old: c.old, New: c.new})
		}
	}
	return mutate.BuildCore(t, root, "core/explore", all)
}

var beMutant func(i int)

func runMutant(bin string, i int) (o outcome) {
	var out, errOut bytes.Buffer
	cmd := exec.Command(bin, "-test.run", "^TestBeMutant$", "-mutants", fmt.Sprint(i))
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return outcome{Err: fmt.Sprintf("%v: %s%s", err, &out, &errOut)}
	}
	line, _, _ := bytes.Cut(out.Bytes(), []byte("\n"))
	if err := json.Unmarshal(line, &o); err != nil {
		return outcome{Err: fmt.Sprintf("%v: %s", err, &out)}
	}
	return o
}

// TestBeMutant is what the mutants' binary runs.
func TestBeMutant(t *testing.T) {
	var i int
	if _, err := fmt.Sscan(*mutantsFlag, &i); err != nil {
		return // not that binary
	}
	which := i
	all := append(mutants[:len(mutants):len(mutants)], groupMutants...)
	for j := range all {
		if all[i].as == all[j].name {
			which = j
		}
	}
	beMutant(which)
	var r *Result
	var err error
	if g := all[i].groups; g != nil {
		var found *GroupResult
		if found, err = GroupRun(*g); err == nil {
			r = &Result{States: found.States, Edges: found.Edges, Depth: found.Depth, Violation: found.Violation, Trace: found.Trace}
		}
	} else {
		r, err = Run(all[i].cfg)
	}
	o := outcome{Mutant: i, Result: r}
	if err != nil {
		o.Err = err.Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(o); err != nil {
		t.Fatal(err)
	}
}
