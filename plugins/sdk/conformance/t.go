package conformance

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/internal/pluginhost"
)

// T is what a case talks to. Its methods end the case (by runtime.Goexit) when the plugin does not
// answer as it must; they may be called from the case's own goroutine only.
type T struct {
	Case *Case

	run    *runner
	result *Result
	trace  *recorder
	rand   *rand.Rand
	nodes  []*Node // that this case may use; the first two are the pair
	fresh  []*Node // launched for this case
	paths  []*Path
	broken chan struct{} // closed by the first failure
	over   <-chan struct{}
	timer  *time.Timer // closes over
	ending bool        // the case itself is done, the checks of every case run
	late   bool        // its time was over before it was

	mu       sync.Mutex
	failures []Failure
	losses   int    // how many of them, the first, are losses of plugins
	reason   string // of Unsupported
	outcome  Outcome
	notes    []string
}

// Failure is one thing that was wrong.
type Failure struct {
	Rule     string `json:"rule"`
	Expected string `json:"expected"`
	Got      string `json:"got"`
}

func (f Failure) String() string { return fmt.Sprintf("expected %s; got %s", f.Expected, f.Got) }

// Fail records a failure of the rule and ends the case.
func (t *T) Fail(rule, expected, format string, args ...any) {
	t.violate(rule, expected, fmt.Sprintf(format, args...), nil)
	t.stop()
}

// Check is Fail unless ok.
func (t *T) Check(ok bool, rule, expected, format string, args ...any) {
	if !ok {
		t.Fail(rule, expected, format, args...)
	}
}

// Unsupported ends the case: this machine or plugin lacks what it needs. A case that finds out that a
// feature which the plugin declares is not served fails instead.
func (t *T) Unsupported(format string, args ...any) {
	t.mu.Lock()
	t.outcome, t.reason = t.outcome.Raise(Unsupported), fmt.Sprintf(format, args...)
	t.mu.Unlock()
	runtime.Goexit()
}

// leave ends the case undecided: the run is partial.
func (t *T) leave(format string, args ...any) {
	t.mu.Lock()
	t.outcome, t.reason = t.outcome.Raise(Skipped), fmt.Sprintf(format, args...)
	t.mu.Unlock()
	runtime.Goexit()
}

// Notef adds a line to the result: something worth knowing that is not wrong.
func (t *T) Notef(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.notes) < 100 {
		t.notes = append(t.notes, fmt.Sprintf(format, args...))
	}
}

// maxFailures bounds what one case reports; the first is what matters.
const maxFailures = 20

// violate records a failure; mark, if any, marks the offending frame. Called from any goroutine.
func (t *T) violate(rule, expected, got string, mark func(string)) {
	if mark != nil {
		mark(rule + ": " + got)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.record(len(t.failures), Failure{rule, expected, got})
}

// lost records the loss of a plugin. It goes before all else: what else was wrong most likely came of it, but was
// seen first, as the end of a process shows in what is missing before its host is told. When the host has ended a plugin
// that broke the contract, that breach is the first.
func (t *T) lost(node string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := len(t.failures)
	if !errors.Is(err, pluginhost.ErrViolation) {
		at = t.losses
		t.losses++
	}
	t.record(at, Failure{"R12", "the plugin to live as long as its host wants it", fmt.Sprintf("the loss of the plugin of %s: %v", node, err)})
}

// record puts a failure at a place among the others. Called with the lock held.
func (t *T) record(at int, f Failure) {
	if len(t.failures) == 0 {
		close(t.broken)
	}
	t.failures = slices.Insert(t.failures, at, f)
	t.failures = t.failures[:min(len(t.failures), maxFailures)]
	t.outcome = t.outcome.Raise(Failed)
}

// stop ends the case. The checks of every case go on after a failure of theirs, so that nothing is left.
func (t *T) stop() { runtime.Goexit() }

func (t *T) failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.failures) > 0
}

// Rand is random by the seed of the run and the id of the case.
func (t *T) Rand() *rand.Rand {
	if t.rand == nil {
		h := fnv.New64a()
		h.Write([]byte(t.Case.ID))
		t.rand = rand.New(rand.NewPCG(t.run.cfg.Seed, h.Sum64()))
	}
	return t.rand
}

// Bound is how long the plugin has for one answer.
func (t *T) Bound() time.Duration { return t.scaled(answerBound) }

// answerBound is for one answer; measured answers take milliseconds.
const answerBound = 5 * time.Second

func (t *T) scaled(d time.Duration) time.Duration { return time.Duration(float64(d) * t.run.cfg.Scale) }

// Sleep waits for d, not scaled. For cases whose point is that time passes; nothing else may sleep.
func (t *T) Sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.over:
		t.inTime()
	case <-t.broken:
		if !t.ending {
			t.stop()
		}
	}
}

// inTime ends the case if its time is over. It is called when a wait is done and cuts none short: what the plugin owes
// it owes within the bound of that wait, and a plugin that keeps each of them is slow, which is no breach.
func (t *T) inTime() {
	select {
	case <-t.over:
	default:
		return
	}
	if t.run.ctx.Err() != nil {
		t.Fail(t.Case.Rule, "the conversation to end", "%s", interrupted)
	}
	t.late = true
	if t.ending {
		t.leave("the checks after the case did not fit into %v; --scale gives them more time", t.scaled(DefaultTimeout))
	}
	ended, all := 0, 0
	for _, n := range t.nodes {
		n.mu.Lock()
		for _, o := range n.ops {
			all++
			if o.state.end != nil {
				ended++
			}
		}
		n.mu.Unlock()
	}
	t.leave("the case did not fit into %v: %d of the %d ops so far had ended; --scale gives it more time", t.timeout(), ended, all)
}

// extend gives the case its whole time again: the plugin said that it is at a long call.
func (t *T) extend() {
	if t.timer.Stop() {
		t.timer.Reset(t.timeout())
	}
}

func (t *T) timeout() time.Duration {
	d := t.Case.Timeout
	if d == 0 {
		d = DefaultTimeout
	}
	return t.scaled(d)
}

// A and B are the pair: A writes into the memory of B, unless a case turns it around.
func (t *T) A() *Node { return t.nodes[0] }

// B is the other end.
func (t *T) B() *Node { return t.nodes[1] }

// Has tells whether the plugin declares a feature.
func (t *T) Has(feature string) bool { return slices.Contains(t.A().Hello().GetFeatures(), feature) }

// Launch starts a further epoch, as an engine of the given name and incarnation. For an engine that was not there
// before, take the name from newNode.
func (t *T) Launch(node string, incarnation uint64, epoch uint32) *Node {
	n, err := t.run.launch(node, Identity{Node: node, Incarnation: incarnation, Epoch: epoch, HostID: hostID()})
	if err != nil {
		t.Fail("R6", "a further process of the plugin to become ready", "%v", err)
	}
	t.adopt(n)
	return n
}

func (t *T) adopt(n *Node) {
	n.attach(t)
	t.nodes = append(t.nodes, n)
	t.fresh = append(t.fresh, n)
}

// forgetPath is called when a case tears a path down itself.
func (t *T) forgetPath(p *Path) {
	t.paths = slices.DeleteFunc(t.paths, func(o *Path) bool { return o == p })
}

func list(errs []string) string { return strings.Join(errs, "; ") }
