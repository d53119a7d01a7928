package conformance

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Config is one run of the suite.
type Config struct {
	Carrier Carrier
	// Profiles to run; empty means all.
	Profiles []Profile
	// Run and Skip are patterns of case ids (see Match). Run leaves out what it does not match; both are
	// for people at work: a run that leaves out a case is partial.
	Run, Skip []string
	// KnownFailing are patterns of cases that must fail: they run, a failure is expected, and a pass, like
	// a pattern that matches nothing, makes the run not conformant. One whose cases did not run is noted.
	KnownFailing []string
	// Seed of everything random; 0 draws one. The report names it.
	Seed uint64
	// Scale multiplies every bound, for slow machines; 0 means 1.
	Scale float64
	// HandshakeTimeout is from the spawn of a plugin to the answer of its handshake; 0 means the contract's
	// 15 s, scaled.
	HandshakeTimeout time.Duration
	// Fresh gives every case plugins of its own; otherwise cases that do not upset them share a pair.
	Fresh bool
	// OnStart, of cases that run, and OnResult, of all, are told of the progress, if set; one call at a time. OnResult is
	// called again, behind all others, for a case that was found to have failed when the run ended.
	OnStart  func(*Case)
	OnResult func(*Result)

	// each, if set, is called for every case and calls run, or does not: Test wraps it in a subtest.
	each func(c *Case, run func() *Result)
	// cuda is the library of the CUDA driver, for tests; "" means that of the machine.
	cuda string
}

// Result is how one case ended.
type Result struct {
	Case     *Case
	Outcome  Outcome
	Expected bool   // a failure that KnownFailing names
	Reason   string // of Unsupported and Skipped
	Failures []Failure
	Notes    []string
	Took     time.Duration
	Trace    []Entry
	Stderr   map[string]string // by node, the tail; of failures
}

// Verdict is what a run says about a plugin.
type Verdict string

// The verdicts.
const (
	Conformant    Verdict = "conformant"
	NotConformant Verdict = "not conformant"
	// Partial: nothing failed, but a case was left out by Run, Skip or Profiles, so nothing is decided.
	Partial Verdict = "partial"
	// Broken: the suite itself broke.
	Broken Verdict = "broken"
)

// Results of a run.
type Results struct {
	Plugin  string // what the carrier calls itself
	Program string // the file that was executed, as its digest names it; "" for a plugin in this process
	SHA256  string // of Program
	Hello   *contract.HandshakeResponse
	Seed    uint64
	Began   time.Time
	Took    time.Duration
	Cases   []*Result
	// Late are those of Cases that had ended well, and were found to have failed when the run ended: memory of theirs was
	// written, or kept, after they had given it back.
	Late     []*Result
	Problems []string // not of one case: a known-failing pattern that matches nothing
	// Notes are not of one case either, and worth knowing: a known-failing pattern none of whose cases ran here.
	Notes []string
	// Interrupted: the context ended before the last case did.
	Interrupted bool
}

// Verdict of the run.
func (r *Results) Verdict() Verdict {
	v := Conformant
	for _, c := range r.Cases {
		switch {
		case c.Outcome == Errored:
			return Broken
		case c.Outcome == Failed && !c.Expected, c.Outcome == Passed && c.Expected:
			v = NotConformant
		case (c.Outcome == Skipped || c.Outcome == Unknown) && v == Conformant:
			v = Partial
		}
	}
	if len(r.Problems) > 0 && v != Broken {
		v = NotConformant
	}
	return v
}

// Count returns how many cases have the outcome.
func (r *Results) Count(o Outcome) (n int) {
	for _, c := range r.Cases {
		if c.Outcome == o {
			n++
		}
	}
	return n
}

// ErrNotReady: the plugin never became ready, so no case could run. The text says why, in one line.
var ErrNotReady = errors.New("the plugin never became ready")

// A plugin is told what a host in production tells it: nothing shows it that it is under test.
const hostVersion = sdk.Version

// hostID is the machine that all engines of the suite are on: this one.
var hostID = sync.OnceValue(func() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "this-machine"
	}
	return strings.TrimSpace(string(id))
})

// newNode draws the name of an engine that no other of the run has.
func (r *runner) newNode() string {
	r.nodes++
	rand := mathrand.New(mathrand.NewPCG(r.cfg.Seed, 0))
	at := rand.Uint32() + uint32(r.nodes)*7919 // an odd step: no two are equal
	return fmt.Sprintf("ip-10-%d-%d-%d", byte(at>>16), byte(at>>8), byte(at))
}

// launchBound is for one start of the plugin, handshake included.
const launchBound = 30 * time.Second

// Run runs the suite. The error is ErrNotReady (wrapped), about cfg, or that of ctx when it ended before the
// first case; whatever a case finds is in the results. When ctx ends later, the rest of the cases is Skipped.
func Run(ctx context.Context, cfg Config) (*Results, error) {
	if cfg.Seed == 0 {
		cfg.Seed = drawSeed()
	}
	if cfg.Scale == 0 {
		cfg.Scale = 1
	}
	selected, err := cfg.selection()
	if err != nil {
		return nil, err
	}
	r := &runner{ctx: ctx, cfg: cfg}
	defer r.gpu.close()
	defer r.past.free()
	defer func() { r.close(closeBound, r.pair...) }()
	res := &Results{Plugin: cfg.Carrier.String(), Seed: cfg.Seed, Began: time.Now()}
	if res.Hello, err = r.probe(); ctx.Err() != nil {
		return nil, ctx.Err()
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	r.hello = res.Hello
	if d, ok := cfg.Carrier.(digester); ok {
		if res.Program, res.SHA256, err = d.digest(); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNotReady, err)
		}
	}
	for i := range selected {
		s := &selected[i]
		result := r.one(ctx, s)
		res.Cases = append(res.Cases, result)
		if cfg.OnResult != nil {
			cfg.OnResult(result)
		}
	}
	if ctx.Err() == nil {
		res.Late = r.past.look(r.processes())
		for _, result := range res.Late {
			if cfg.OnResult != nil {
				cfg.OnResult(result)
			}
		}
	}
	res.Took = time.Since(res.Began)
	res.Interrupted = ctx.Err() != nil
	res.Problems = cfg.unmatched()
	if !res.Interrupted {
		res.Notes = cfg.idle(res.Cases)
	}
	return res, nil
}

// Why cases were left out.
const (
	interrupted = "the run was interrupted"
	notChosen   = "go test -run did not choose it"
)

// one runs a case, unless it is left out.
func (r *runner) one(ctx context.Context, s *selected) *Result {
	result := &Result{Case: &s.Case, Outcome: Skipped, Reason: notChosen}
	run := func() *Result {
		switch {
		case ctx.Err() != nil:
			result.Reason = interrupted
		case s.skip != "":
			result.Reason = s.skip
		default:
			if r.cfg.OnStart != nil {
				r.cfg.OnStart(&s.Case)
			}
			result = r.runCase(ctx, &s.Case)
			if ctx.Err() != nil && result.Outcome == Failed {
				// The case was cut short: whether what it saw was a failure is not known.
				result = &Result{Case: &s.Case, Outcome: Skipped, Reason: interrupted}
			}
			result.Expected = s.known
		}
		return result
	}
	if r.cfg.each != nil {
		r.cfg.each(&s.Case, run)
	} else {
		run()
	}
	return result
}

// digester is a carrier that can tell what it executes.
type digester interface {
	digest() (file, sum string, err error)
}

func drawSeed() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])>>12 | 1 // 52 bits: exact in every JSON reader
}

// runner runs the cases of one run.
type runner struct {
	ctx   context.Context // its end ends launches
	cfg   Config
	hello *contract.HandshakeResponse
	pair  []*Node // shared by the cases that are not Fresh
	nodes int     // named so far
	gpu   gpu

	past past // of the cases before

	mu      sync.Mutex
	regions []*Region // of the running case
}

// processes tells whether plugins are processes.
func (r *runner) processes() bool {
	p, ok := r.cfg.Carrier.(interface{ InProcess() bool })
	return !ok || !p.InProcess()
}

func (r *runner) keep(region *Region) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.regions = append(r.regions, region)
}

func (r *runner) launch(name string, id Identity) (*Node, error) {
	if id.HandshakeTimeout = r.cfg.HandshakeTimeout; id.HandshakeTimeout == 0 {
		id.HandshakeTimeout = time.Duration(float64(15*time.Second) * r.cfg.Scale)
	}
	return launch(r.ctx, r.cfg.Carrier, time.Duration(float64(launchBound)*r.cfg.Scale), name, id)
}

// probe starts the plugin once, to know what it declares.
func (r *runner) probe() (*contract.HandshakeResponse, error) {
	n, err := r.launch("probe", Identity{Node: r.newNode(), Incarnation: 1, Epoch: 1, HostID: hostID()})
	if err != nil {
		return nil, err
	}
	hello := n.Hello()
	r.close(closeBound, n)
	return hello, nil
}

// A plugin has closeBound to finish what it is at before it is asked to exit. One of a case that failed most likely has
// nothing left that it could finish.
const (
	closeBound       = 10 * time.Second
	closeFailedBound = time.Second
)

// close ends plugins, all at once, and waits until they are gone.
func (r *runner) close(bound time.Duration, nodes ...*Node) {
	var work sync.WaitGroup
	for _, n := range nodes {
		work.Go(func() { _ = n.close(time.Duration(float64(bound) * r.cfg.Scale)) })
	}
	work.Wait()
}

// newPair starts both at once: the start is what takes the time when an interpreter runs the plugin.
func (r *runner) newPair() ([]*Node, error) {
	names, nodes := []string{"A", "B"}, []string{r.newNode(), r.newNode()}
	pair, errs := make([]*Node, len(names)), make([]error, len(names))
	var work sync.WaitGroup
	for i, name := range names {
		work.Go(func() {
			pair[i], errs[i] = r.launch(name, Identity{
				Node: nodes[i], Incarnation: uint64(1000*r.nodes + i + 1), Epoch: 1, HostID: hostID(),
			})
		})
	}
	work.Wait()
	for _, err := range errs {
		if err != nil {
			r.close(closeBound, slices.DeleteFunc(pair, func(n *Node) bool { return n == nil })...)
			return nil, err
		}
	}
	return pair, nil
}

// runCase runs one case and everything that is checked after it.
func (r *runner) runCase(ctx context.Context, c *Case) *Result {
	began := time.Now()
	result := &Result{Case: c}
	defer func() { result.Took = time.Since(began) }()
	if lacks := r.lacks(c); lacks != "" {
		result.Outcome, result.Reason = Unsupported, lacks
		return result
	}
	own := c.Fresh || r.cfg.Fresh || r.pair == nil
	pair := r.pair
	if own {
		var err error
		if pair, err = r.newPair(); err != nil {
			result.Outcome = Failed
			result.Failures = []Failure{{"R6", "the plugin to start again, as it did at first", err.Error()}}
			return result
		}
		if !c.Fresh && !r.cfg.Fresh {
			r.pair = pair
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t := &T{Case: c, run: r, result: result, trace: &recorder{began: time.Now()}, broken: make(chan struct{}), outcome: Unknown}
	t.timer = time.AfterFunc(t.timeout(), cancel)
	defer t.timer.Stop()
	t.over = ctx.Done()
	for _, n := range pair {
		n.attach(t)
	}
	t.nodes = slices.Clone(pair)
	if own && c.Fresh || r.cfg.Fresh {
		t.fresh = slices.Clone(pair)
	}
	for _, n := range pair {
		n.measure()
	}
	t.do(c.Run)
	for _, n := range t.nodes {
		n.release()
	}
	t.ending = true
	// What every case checks has time of its own, however long the case took.
	cleanup, stop := context.WithTimeout(r.ctx, t.scaled(DefaultTimeout))
	t.over = cleanup.Done()
	if r.ctx.Err() == nil {
		t.do((*T).finish)
	}
	stop()
	t.settle(result)
	r.put(t, pair)
	return result
}

// do runs one part of the case in a goroutine of its own, which Fail may end.
func (t *T) do(f func(*T)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				t.broke("panic: %v\n%s", p, debug.Stack())
			}
		}()
		f(t)
	}()
	<-done
}

// broke says that the suite itself failed and, from the case's goroutine, ends the case.
func (t *T) broke(format string, args ...any) {
	t.errored(format, args...)
	runtime.Goexit()
}

// errored is broke for any goroutine: the case goes on.
func (t *T) errored(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.outcome = t.outcome.Raise(Errored)
	t.failures = append(t.failures, Failure{"-", "the suite to work", fmt.Sprintf(format, args...)})
}

// settle writes the outcome down.
func (t *T) settle(result *Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.outcome == Unknown {
		t.outcome = Passed
	}
	result.Outcome, result.Reason, result.Failures, result.Notes = t.outcome, t.reason, slices.Clone(t.failures), t.notes
	result.Trace = t.trace.entries()
	if t.outcome >= Failed {
		result.Stderr = map[string]string{}
		for _, n := range t.nodes {
			if p := n.Process(); p != nil {
				result.Stderr[n.Name] = p.Stderr()
			}
		}
	}
}

// put ends what the case launched, and the shared pair, too, if the case went wrong or ended it.
func (r *runner) put(t *T, pair []*Node) {
	for _, n := range t.nodes {
		n.mu.Lock()
		n.t = nil
		n.mu.Unlock()
	}
	ending, bound := t.fresh, closeBound
	if t.failed() {
		bound = closeFailedBound
	}
	if t.failed() || t.late || r.ctx.Err() != nil || slices.ContainsFunc(r.pair, func(n *Node) bool { return n.Lost() != nil }) {
		ending = slices.Concat(ending, r.pair)
		r.pair = nil
	}
	r.close(bound, ending...)
	r.mu.Lock()
	regions := r.regions
	r.regions = nil
	r.mu.Unlock()
	for _, region := range regions {
		if t.failed() {
			region.free()
		} else {
			r.past.keep(region, t.result)
		}
	}
}

// lacks says what a case needs and does not get, "" if nothing.
func (r *runner) lacks(c *Case) string {
	for _, need := range c.Needs {
		switch need {
		case NeedProcess:
			if !r.processes() {
				return "needs a plugin that is a process; the carrier is memory"
			}
		case NeedCUDAIPC, NeedCUDAVMM:
			kind := contract.MemoryKind_MEMORY_KIND_CUDA_IPC
			if need == NeedCUDAVMM {
				kind = contract.MemoryKind_MEMORY_KIND_CUDA_VMM
			}
			if !slices.Contains(r.hello.MemoryKinds, kind) {
				return "the plugin does not take " + need[len("mem:"):] + " memory"
			}
			if lacks := r.gpu.lacks(r.cfg.cuda, kind); lacks != "" {
				return lacks
			}
		case NeedCollective:
			if !slices.Contains(r.hello.Kinds, contract.Kind_KIND_COLLECTIVE) {
				return "the plugin serves no collectives"
			}
		default:
			if !slices.Contains(r.hello.Features, need) {
				return "the plugin does not declare " + need
			}
		}
	}
	transfer := c.Profile != CollectiveCore
	if transfer && !slices.Contains(r.hello.Kinds, contract.Kind_KIND_TRANSFER) {
		return "the plugin serves no transfers"
	}
	return ""
}
