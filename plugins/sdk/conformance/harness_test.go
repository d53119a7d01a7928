package conformance

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		pattern, id string
		want        bool
	}{
		{"abort/twice", "abort/twice", true},
		{"abort/twice", "abort/twice-more", false},
		{"abort/*", "abort/twice", true},
		{"abort/*", "abort/deep/twice", false},
		{"abort/**", "abort/deep/twice", true},
		{"abort/**", "abort", true}, // ** is any number of words, none among them
		{"**", "abort/twice", true},
		{"**/twice", "abort/twice", true},
		{"**/twice", "twice", true},
		{"*", "abort/twice", false},
		{"*/*", "abort/twice", true},
		{"*ort/tw*e", "abort/twice", true},
		{"*ort/tw*e", "abort/two", false},
		{"a*b*c/x", "aXbYbc/x", true},
		{"a*b*c/x", "aXcYb/x", false},
		{"abort", "abort/twice", false},
		{"", "abort/twice", false},
		{"abort/", "abort/twice", false},
		{"ABORT/*", "abort/twice", false},
	} {
		if got := Match(c.pattern, c.id); got != c.want {
			t.Errorf("Match(%q, %q) is %v", c.pattern, c.id, got)
		}
	}
}

func TestOutcomesAreALattice(t *testing.T) {
	order := []Outcome{Unknown, Unsupported, Skipped, Passed, Failed, Errored}
	for i, a := range order {
		for j, b := range order {
			if got := a.Raise(b); got != order[max(i, j)] {
				t.Errorf("%v raised to %v is %v", a, b, got)
			}
		}
		text, err := json.Marshal(a)
		var back Outcome
		if err != nil || json.Unmarshal(text, &back) != nil || back != a {
			t.Errorf("%v became %s and then %v (%v)", a, text, back, err)
		}
	}
	if err := new(Outcome).UnmarshalText([]byte("fine")); err == nil {
		t.Error("an unknown outcome was read")
	}
}

// TestVerdict: a case that is left out decides nothing, a broken suite says nothing about the plugin, and a
// known failure must fail.
// TestKnownFailingThatDidNotRun: a pattern all of whose cases were unsupported or left out stood in the list for ever,
// unseen.
func TestKnownFailingThatDidNotRun(t *testing.T) {
	cfg := Config{KnownFailing: []string{"a/*", "b/*", "c/one", "d/none"}}
	result := func(id string, o Outcome, reason string) *Result {
		return &Result{Case: &Case{ID: id}, Outcome: o, Reason: reason}
	}
	got := cfg.idle([]*Result{
		result("a/one", Unsupported, "no GPU"), result("a/two", Unsupported, "no GPU"),
		result("b/one", Unsupported, "no GPU"), result("b/two", Failed, ""),
		result("c/one", Skipped, "it was not asked for"), result("c/two", Passed, ""),
	})
	want := []string{
		`known-failing pattern "a/*" did not run here: no GPU`,
		`known-failing pattern "c/one" did not run here: it was not asked for`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		name  string
		cases []*Result
		extra []string
		want  Verdict
	}{
		{"all passed", []*Result{{Outcome: Passed}, {Outcome: Unsupported}}, nil, Conformant},
		{"one left out", []*Result{{Outcome: Passed}, {Outcome: Skipped}}, nil, Partial},
		{"one failed", []*Result{{Outcome: Skipped}, {Outcome: Failed}}, nil, NotConformant},
		{"failed as expected", []*Result{{Outcome: Failed, Expected: true}, {Outcome: Passed}}, nil, Conformant},
		{"passed unexpectedly", []*Result{{Outcome: Passed, Expected: true}}, nil, NotConformant},
		{"unmatched pattern", []*Result{{Outcome: Passed}}, []string{"pattern"}, NotConformant},
		{"suite broke", []*Result{{Outcome: Failed}, {Outcome: Errored}}, []string{"pattern"}, Broken},
	} {
		if got := (&Results{Cases: c.cases, Problems: c.extra}).Verdict(); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestRulesAreThoseOfTheContract: the sentences that failures print are the sentences of docs/contract.md.
func TestRulesAreThoseOfTheContract(t *testing.T) {
	doc, err := os.ReadFile("../../../docs/contract.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| \*\*(R\d+)\*\* [^|]*\| [^|]* \| (.*) \|$`).FindAllStringSubmatch(string(doc), -1) {
		seen[m[1]] = m[2]
	}
	if !reflect.DeepEqual(seen, rules) {
		for id := range rules {
			if seen[id] != rules[id] {
				t.Errorf("%s: the suite says %q, docs/contract.md %q", id, rules[id], seen[id])
			}
		}
		if len(seen) != len(rules) {
			t.Errorf("%d rules in docs/contract.md, %d in the suite", len(seen), len(rules))
		}
	}
}

// binding are the rules of docs/contract.md that bind plugins, or the host in ways that a plugin must
// answer.
var binding = []string{"R1", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R12"}

func TestEveryBindingRuleHasCases(t *testing.T) {
	count := map[string]int{}
	for _, c := range Cases() {
		count[c.Rule]++
	}
	for _, rule := range binding {
		if count[rule] < 2 {
			t.Errorf("%s has %d cases, want at least 2", rule, count[rule])
		}
	}
	if n := len(Cases()); n < 80 {
		t.Errorf("%d cases, want at least 80", n)
	}
}

func TestCasesAreWrittenOut(t *testing.T) {
	known := []string{NeedProcess, NeedCUDAIPC, NeedCUDAVMM, NeedCollective, sdk.FeatureReceiverChecked, sdk.FeatureByteProgress,
		sdk.FeatureFencePeer, sdk.FeatureStrided, sdk.FeatureLayerRange, sdk.FeatureRepage}
	seen := map[string]bool{}
	for _, c := range Cases() {
		if seen[c.ID] {
			t.Errorf("%s is there twice", c.ID)
		}
		seen[c.ID] = true
		if len(c.ID) > 40 || len(c.Title) > 140 {
			t.Errorf("%s: an id of %d bytes, a title of %d; keep them on a line", c.ID, len(c.ID), len(c.Title))
		}
		if strings.HasSuffix(c.Title, ".") || strings.Contains(c.Title, "\n") {
			t.Errorf("%s: the title %q is no line without a full stop", c.ID, c.Title)
		}
		sends := false
		for i, line := range strings.Split(c.Script, "\n") {
			step := strings.HasPrefix(line, "> ") || strings.HasPrefix(line, "< ") || strings.HasPrefix(line, "= ")
			if more := strings.HasPrefix(line, "  "); !step && (!more || i == 0) {
				t.Errorf("%s: line %d of its script is no step: %q", c.ID, i+1, line)
			}
			sends = sends || strings.HasPrefix(line, "> ")
		}
		if !sends {
			t.Errorf("%s: its script sends nothing", c.ID)
		}
		for _, need := range c.Needs {
			if !slices.Contains(known, need) {
				t.Errorf("%s needs %q, which no plugin can have", c.ID, need)
			}
		}
		if incident := regexp.MustCompile(`^[A-Za-z0-9._-]+#\d+: .`); c.Incident != "" && !incident.MatchString(c.Incident) {
			t.Errorf("%s: the incident %q is not \"project#number: what happened\"", c.ID, c.Incident)
		}
	}
}

func TestRegisterRefuses(t *testing.T) {
	good := Case{ID: "harness/good", Title: "t", Rule: "R1", Profile: TransferCore, Script: "> x", Run: func(*T) {}}
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Case){
		"id without a group": func(c *Case) { c.ID = "good" },
		"id in capitals":     func(c *Case) { c.ID = "harness/Good" },
		"id of three words":  func(c *Case) { c.ID = "harness/good/more" },
		"id used twice":      func(c *Case) { c.ID = registry[0].ID },
		"no title":           func(c *Case) { c.Title = "" },
		"no script":          func(c *Case) { c.Script = " \n" },
		"no run":             func(c *Case) { c.Run = nil },
		"unknown rule":       func(c *Case) { c.Rule = "R13" },
		"unknown profile":    func(c *Case) { c.Profile = "core" },
	} {
		c := good
		spoil(&c)
		if c.check() == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// TestLedger: every order of events that the contract forbids is found, under the right rule.
func TestLedger(t *testing.T) {
	const size = 100
	accepted := &contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: 1}}}
	quiesced := &contract.PluginEvent{Event: &contract.PluginEvent_Quiesced{Quiesced: &contract.Quiesced{Op: 1}}}
	progress := func(n uint64) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: 1, Bytes: n}}}
	}
	done := func(n uint64, quiet bool) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: 1, Bytes: n, Quiet: quiet, Lane: contract.Lane_LANE_TCP}}}
	}
	failed := func(detail string, quiet bool) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: 1, Cause: contract.Cause_CAUSE_TRANSPORT, Detail: detail, Quiet: quiet}}}
	}
	skipped := &contract.PluginEvent{Event: &contract.PluginEvent_Skipped{Skipped: &contract.Skipped{Op: 1, Cause: contract.Cause_CAUSE_EMPTY, Quiet: true}}}
	aborted := func(quiet bool) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: 1, Quiet: quiet}}}
	}
	type events = []*contract.PluginEvent
	for _, c := range []struct {
		name string
		say  events
		rule string // "" for a legal order; else what the last event breaks
	}{
		{"done", events{accepted, progress(1), progress(100), done(size, true)}, ""},
		{"done at once", events{accepted, done(size, true)}, ""},
		{"done, quiet later", events{accepted, done(size, false), quiesced}, ""},
		{"failed, quiet later", events{accepted, progress(7), failed("x", false), quiesced}, ""},
		{"skipped", events{accepted, skipped}, ""},
		{"aborted", events{accepted, progress(5), aborted(true)}, ""},
		{"a detail of 256 bytes", events{accepted, failed(strings.Repeat("x", 256), true)}, ""},

		{"progress before accepted", events{progress(1)}, "R8"},
		{"done before accepted", events{done(size, true)}, "R8"},
		{"failed before accepted", events{failed("x", true)}, "R8"},
		{"skipped before accepted", events{skipped}, "R8"},
		{"aborted before accepted", events{aborted(true)}, "R8"},
		{"quiesced before accepted", events{quiesced}, "R4"},
		{"accepted twice", events{accepted, accepted}, "R8"},
		{"accepted after the end", events{accepted, done(size, true), accepted}, "R8"},
		{"progress that stands", events{accepted, progress(5), progress(5)}, "R8"},
		{"progress that goes back", events{accepted, progress(5), progress(4)}, "R8"},
		{"progress of nothing", events{accepted, progress(0)}, "R8"},
		{"progress beyond the size", events{accepted, progress(size + 1)}, "R9"},
		{"progress after done", events{accepted, done(size, true), progress(100)}, "R8"},
		{"progress after failed", events{accepted, progress(5), failed("x", false), progress(6)}, "R8"},
		{"progress after aborted", events{accepted, aborted(false), progress(6)}, "R8"},
		{"done twice", events{accepted, done(size, true), done(size, true)}, "R1"},
		{"done after failed", events{accepted, failed("x", false), done(size, true)}, "R1"},
		{"failed after done", events{accepted, done(size, true), failed("x", true)}, "R1"},
		{"aborted after done", events{accepted, done(size, true), aborted(true)}, "R1"},
		{"failed after aborted", events{accepted, aborted(true), failed("x", true)}, "R1"},
		{"skipped after aborted", events{accepted, aborted(true), skipped}, "R1"},
		{"done after quiesced", events{accepted, failed("x", false), quiesced, done(size, true)}, "R1"},
		{"done with less", events{accepted, done(size-1, true)}, "R1"},
		{"done with more", events{accepted, done(size+1, true)}, "R1"},
		{"quiesced before the end", events{accepted, quiesced}, "R4"},
		{"quiesced after a quiet end", events{accepted, done(size, true), quiesced}, "R4"},
		{"quiesced twice", events{accepted, aborted(false), quiesced, quiesced}, "R4"},
		{"a detail of 257 bytes", events{accepted, failed(strings.Repeat("x", 257), true)}, "R12"},
	} {
		o := opState{size: size}
		for i, e := range c.say {
			id, end, ok := opEvent(e)
			if !ok || id != 1 {
				t.Fatalf("%s: event %d is no op's", c.name, i)
			}
			rule, expected, got := o.step(e, end)
			want := ""
			if i == len(c.say)-1 {
				want = c.rule
			}
			if rule != want {
				t.Errorf("%s: event %d breaks %q, want %q (%s; %s)", c.name, i, rule, want, expected, got)
			}
			if (rule != "") != (expected != "" && got != "") {
				t.Errorf("%s: %q is not explained: expected %q, got %q", c.name, rule, expected, got)
			}
		}
	}
}

// TestExpand: our own arithmetic against spans written down by hand.
func TestExpand(t *testing.T) {
	a, b := &Region{ID: 1}, &Region{ID: 2}
	// Pages of 10 bytes every 12, from 100; two layers behind each other.
	src := &Pool{Pages: 8, Tensors: []Tensor{
		{Region: a, Offset: 100, PageStride: 12, PageBytes: 10, Layer: 3},
		{Region: a, Offset: 300, PageStride: 12, PageBytes: 10, Layer: 5},
	}}
	dst := &Pool{Pages: 8, Tensors: []Tensor{
		{Region: b, Offset: 1000, PageStride: 20, PageBytes: 20, Layer: 3},
		{Region: b, Offset: 2000, PageStride: 20, PageBytes: 20, Layer: 5},
	}}
	whole := []*contract.Slice{{SrcTensor: 0, DstTensor: 0, Len: 10, Count: 1}, {SrcTensor: 1, DstTensor: 1, Len: 10, Count: 1}}
	type piece struct{ src, dst, n uint64 }
	for _, c := range []struct {
		name     string
		plan     *Plan
		src, dst []sdk.Run
		from, to uint32
		want     []piece
	}{
		{"two pages of two layers", &Plan{SrcPages: 1, DstPages: 1, Slices: whole}, Pages(2, 2), Pages(5, 2), 0, 9,
			[]piece{{124, 1100, 10}, {324, 2100, 10}, {136, 1120, 10}, {336, 2120, 10}}},
		{"one layer", &Plan{SrcPages: 1, DstPages: 1, Slices: whole}, Pages(0, 1), Pages(7, 1), 4, 6, []piece{{300, 2140, 10}}},
		{"the end of the range is outside", &Plan{SrcPages: 1, DstPages: 1, Slices: whole}, Pages(0, 1), Pages(0, 1), 3, 5, []piece{{100, 1000, 10}}},
		{"no layer", &Plan{SrcPages: 1, DstPages: 1, Slices: whole}, Pages(0, 1), Pages(0, 1), 4, 5, nil},
		{"strided runs", &Plan{SrcPages: 1, DstPages: 1, Slices: whole[:1]}, []sdk.Run{{Start: 1, Count: 3, Stride: 2}},
			[]sdk.Run{{Start: 6, Count: 1, Stride: 1}, {Start: 0, Count: 2, Stride: 3}}, 0, 9,
			[]piece{{112, 1120, 10}, {136, 1000, 10}, {160, 1060, 10}}},
		{"strided slices", &Plan{SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{{SrcOff: 1, DstOff: 2, Len: 2, SrcStride: 4, DstStride: 7, Count: 3}}},
			Pages(1, 1), Pages(1, 1), 0, 9, []piece{{113, 1022, 2}, {117, 1029, 2}, {121, 1036, 2}}},
		{"two pages to one", &Plan{SrcPages: 2, DstPages: 1, Slices: []*contract.Slice{{Len: 10, Count: 1}, {SrcPage: 1, DstOff: 10, Len: 10, Count: 1}}},
			[]sdk.Run{{Start: 7, Count: 1, Stride: 1}, {Start: 0, Count: 3, Stride: 1}}, Pages(3, 2), 0, 9,
			[]piece{{184, 1060, 10}, {100, 1070, 10}, {112, 1080, 10}, {124, 1090, 10}}},
		{"one page to two", &Plan{SrcPages: 1, DstPages: 2, Slices: []*contract.Slice{{Len: 5, Count: 1}, {SrcOff: 5, DstPage: 1, Len: 5, Count: 1}}},
			Pages(4, 1), []sdk.Run{{Start: 6, Count: 1, Stride: 1}, {Start: 1, Count: 1, Stride: 1}}, 0, 9,
			[]piece{{148, 1120, 5}, {153, 1020, 5}}},
	} {
		c.plan.Src, c.plan.Dst = src, dst
		var got []piece
		for _, s := range c.plan.expand(pages(c.src), pages(c.dst), c.from, c.to) {
			if s.src != a || s.dst != b {
				t.Fatalf("%s: a span between other regions", c.name)
			}
			got = append(got, piece{s.srcOff, s.dstOff, s.n})
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %v\nwant %v", c.name, got, c.want)
		}
	}
}

// harness is a case without a plugin, and a node of it.
func harness(t *testing.T) *Node {
	t.Helper()
	r := &runner{cfg: Config{Seed: 1, Scale: 1}}
	n := &Node{Name: "A", run: t.Context(), ops: map[uint64]*Op{}, changed: make(chan struct{})}
	n.attach(&T{Case: &Case{ID: "harness/test", Rule: "R4"}, run: r, trace: &recorder{}, broken: make(chan struct{}), nodes: []*Node{n, n}})
	t.Cleanup(func() {
		for _, region := range r.regions {
			region.free()
		}
	})
	return n
}

// TestRegionCheck: a byte that nobody may write is found wherever it lies; one that an open op may write is
// not.
func TestRegionCheck(t *testing.T) {
	n := harness(t)
	r := n.NewMemory(10000)
	if bad := r.check(); bad != "" {
		t.Fatal("fresh memory: " + bad)
	}
	for _, off := range []int{0, 4095, 4096, 9999} {
		r.Bytes[off] ^= 1
		if bad := r.check(); !strings.Contains(bad, "byte "+strconv.Itoa(off)+" of region") {
			t.Errorf("byte %d was changed; check says %q", off, bad)
		}
		r.Bytes[off] ^= 1
	}
	for _, off := range []int{0, guardBytes - 1} {
		r.all[10000+off] = 0
		if bad := r.check(); !strings.Contains(bad, "behind the end") {
			t.Errorf("byte %d of the guard was changed; check says %q", off, bad)
		}
		r.all[10000+off] = guardByte
	}
	op := &Op{node: n, spans: []span{{dst: r, dstOff: 500, n: 100}}}
	r.open[op] = true
	r.Bytes[500], r.Bytes[599] = ^r.Bytes[500], ^r.Bytes[599]
	if bad := r.check(); bad != "" {
		t.Errorf("what an open op may write is held against it: %s", bad)
	}
	r.Bytes[600] ^= 1
	if bad := r.check(); !strings.Contains(bad, "byte 600 ") {
		t.Errorf("the byte behind an open op was changed; check says %q", bad)
	}
	r.Bytes[600] ^= 1
	delete(r.open, op)
	if bad := r.check(); !strings.Contains(bad, "byte 500 ") {
		t.Errorf("a byte of an op that is over was changed; check says %q", bad)
	}
}

// TestRegionCheckOfManyOpenOps: the check took minutes when a plugin had lost thousands of ops, each byte being
// held against each of them.
func TestRegionCheckOfManyOpenOps(t *testing.T) {
	n := harness(t)
	const ops, each = 8192, 64
	r := n.NewMemory(ops * each)
	for i := range uint64(ops) {
		r.open[&Op{node: n, spans: []span{{dst: r, dstOff: i * each, n: each - 1}}}] = true
	}
	for i := range r.Bytes {
		if i%each != each-1 {
			r.Bytes[i] ^= 1
		}
	}
	began := time.Now()
	if bad := r.check(); bad != "" {
		t.Errorf("what open ops may write is held against them: %s", bad)
	}
	r.Bytes[5000*each+each-1] ^= 1
	if bad := r.check(); !strings.Contains(bad, "byte "+strconv.Itoa(5000*each+each-1)+" ") {
		t.Errorf("a byte between open ops was changed; check says %q", bad)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("two checks took %v", took)
	}
}

// TestLanded: Done before the bytes is found; a write after quiet is found; pages of an op that is quiet are
// the worker's.
func TestLanded(t *testing.T) {
	for _, c := range []struct {
		name        string
		early, late bool // the bytes come too late for Done; something is written after quiet
	}{{"honest", false, false}, {"done before the bytes", true, false}, {"written after quiet", false, true}} {
		n := harness(t)
		src, dst := n.NewMemory(4096), n.NewMemory(4096)
		pool := func(r *Region) *Pool {
			return &Pool{Pages: 4, Tensors: []Tensor{{Region: r, PageStride: 1000, PageBytes: 1000}}, node: n}
		}
		p := &Path{From: n, To: n, Lane: contract.Lane_LANE_ANY, Generation: &contract.Generation{}}
		p.Plan = &Plan{Src: pool(src), Dst: pool(dst), SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{{Len: 1000, Count: 1}}}
		op, m := p.prepare(Submit{Src: Pages(1, 1), Dst: Pages(2, 1)})
		n.enter(op, m)
		if !c.early {
			copy(dst.Bytes[2000:], src.Bytes[1000:2000])
		}
		n.arrive(Arrival{Frame: &contract.PluginFrame{Events: []*contract.PluginEvent{
			{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: op.ID}}},
			{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op.ID, Bytes: 1000, Quiet: true, Lane: contract.Lane_LANE_SHM}}},
		}}})
		if c.late {
			copy(dst.Bytes[2000:], src.Bytes[1000:2000])
		}
		if got := n.t.failed(); got != c.early {
			t.Errorf("%s: %v", c.name, n.t.failures)
		}
		if bad := dst.check(); (bad != "") != c.late {
			t.Errorf("%s: check says %q", c.name, bad)
		}
	}
}
