package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"
)

// spare is how many rooms are kept back until the last fault is over, to see that it is.
const spare = 8

// striker has the faults strike, one after another, each when the one before is over. The owner of the
// stage owns it.
type striker struct {
	s       *stage
	ctx     context.Context // of repairs; cancelled when the replay ends
	faults  []*fault
	next    int // the fault that is due, or under way
	phase   phase
	since   time.Time   // of the phase
	burst   []attemptID // the rooms that came at once
	worker  bool        // the new worker in place of the one that was killed has started
	repairs sync.WaitGroup
	result  chan error // of the repair
}

// phase is how far a fault is.
type phase int

const (
	phaseDue      phase = iota // its room has not come yet
	phaseBurst                 // its burst has come, and is being opened at the decode worker
	phaseBegin                 // nearly all of that is done: the prefill worker opens the burst as well
	phaseAim                   // some of that is done: it strikes after its delay
	phaseStruck                // until what it broke is repaired
	phaseRepaired              // until a room that was opened since has succeeded
)

func newStriker(ctx context.Context, s *stage) *striker {
	k := &striker{s: s, ctx: ctx, faults: s.strikes, result: make(chan error, 1)}
	k.holdUp()
	return k
}

func (k *striker) done() bool { return k.next == len(k.faults) }

func (k *striker) fault() *fault { return k.faults[k.next] }

// holdUp has arrivals wait at the room of the next fault; those after the last one but for the spare
// wait for nothing.
func (k *striker) holdUp() {
	next := k.next
	if k.phase != phaseDue {
		next++
	}
	switch {
	case len(k.faults) == 0:
	case next < len(k.faults):
		k.s.router.hold = k.faults[next].at
	default:
		k.s.router.hold = len(k.s.plan.Rooms) - spare
	}
}

func (k *striker) enter(p phase, now time.Time) {
	k.phase, k.since = p, now
	k.s.router.probing = p == phaseRepaired
}

// step goes on with the fault that is due or under way.
func (k *striker) step(now time.Time) (err error) {
	if k.done() {
		return nil
	}
	f, router := k.fault(), k.s.router
	switch k.phase {
	case phaseDue:
		if router.next < f.at {
			k.since = now
			return nil
		}
		if router.active > calm && now.Sub(k.since) < calmWait {
			return nil // arrivals are held up: the burst is to find room at the workers
		}
		if k.burst, err = router.burst(now, f.burst); err != nil {
			return err
		}
		k.enter(phaseBurst, now)
		k.holdUp()
	case phaseBurst:
		if 8*k.opened(1) >= 7*len(k.burst) || now.Sub(k.since) > burstWait {
			k.enter(phaseBegin, now)
			return router.catchUp()
		}
	case phaseBegin:
		if 4*k.opened(0) >= len(k.burst) || now.Sub(k.since) > burstWait {
			k.enter(phaseAim, now)
		}
	case phaseAim:
		if now.Sub(k.since) >= f.delay {
			k.enter(phaseStruck, now)
			return k.strike(f)
		}
	case phaseStruck:
		select {
		case err := <-k.result:
			if err != nil {
				return fmt.Errorf("after the fault %s: %w", f.kind, err)
			}
			k.repaired(now)
		default:
		}
	}
	switch {
	case k.phase == phaseStruck && now.Sub(k.since) > repairTime:
		return fmt.Errorf("what the fault %s broke (%s) is not whole again after %v", f.kind, f.what, repairTime)
	case k.phase == phaseRepaired && now.Sub(k.since) > recoverTime:
		return fmt.Errorf("after the fault %s (%s) was repaired, no new room succeeded within %v", f.kind, f.what, recoverTime)
	}
	return nil
}

// opened counts the rooms of the burst that a worker has opened.
func (k *striker) opened(worker int) int {
	n := 0
	for _, id := range k.burst {
		if k.s.router.attempts[id].opened[worker] {
			n++
		}
	}
	return n
}

// repaired notes that what the fault broke is whole again.
func (k *striker) repaired(now time.Time) {
	k.fault().repaired = monotonic()
	k.enter(phaseRepaired, now)
}

// report looks in a worker's line for the end of the fault.
func (k *striker) report(worker int, line report) {
	if k.done() {
		return
	}
	f := k.fault()
	switch {
	case k.phase == phaseStruck && f.kind == faultWorker && k.worker && worker == f.target && line.T == "ready":
		k.repaired(time.Now())
	case k.phase == phaseStruck && f.kind == faultStore && f.over == 0 && worker == 1 && line.T == "ended" && line.Status == statusSuccess && line.Opened >= f.struck:
		f.over = monotonic() // while the store is away
	case k.phase == phaseRepaired && worker == 1 && line.T == "ended" && line.Status == statusSuccess && line.Opened >= f.repaired:
		if f.over == 0 {
			f.over = monotonic()
		}
		k.next++
		k.worker = false
		k.enter(phaseDue, time.Now())
		if k.done() {
			k.s.router.resume(time.Now())
		}
	}
}

// strikesWorker and strikesEngine say that the process has been killed by the fault that is under way.
func (k *striker) strikesWorker(i int) bool {
	return !k.done() && k.phase == phaseStruck && k.fault().kind == faultWorker && k.fault().target == i && !k.worker
}

func (k *striker) strikesEngine(i int) bool {
	return !k.done() && k.phase == phaseStruck && k.fault().kind == faultEngine && k.fault().target == i
}

// workerReplaced says that the new worker has started: it is ready when it says so.
func (k *striker) workerReplaced() { k.worker = true }

// strike does it.
func (k *striker) strike(f *fault) error {
	e := k.s.engines[f.target]
	switch f.kind {
	case faultPlugin:
		name, p, err := e.plugin(k.ctx)
		if err != nil {
			return fmt.Errorf("find the plugin to kill: %w", err)
		}
		k.tell(f, "SIGKILL to the %s plugin of %s", name, e.node)
		if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil {
			return fmt.Errorf("kill the %s plugin of %s, process %d: %w", name, e.node, p.PID, err)
		}
		k.repair(func(ctx context.Context) error { return e.waitPlugin(ctx, p.Epoch) })
	case faultUpgrade:
		name, p, err := e.plugin(k.ctx)
		if err != nil {
			return fmt.Errorf("find the plugin to upgrade: %w", err)
		}
		k.tell(f, "the %s plugin of %s is upgraded", name, e.node)
		k.repair(func(ctx context.Context) error { return e.upgrade(ctx, name, p.Epoch) })
	case faultEngine:
		k.tell(f, "SIGKILL to engine %s, started again at once", e.node)
		e.proc.signal(syscall.SIGKILL) // the stage starts it again
	case faultWorker:
		if ranks := k.s.workers[f.target]; len(ranks) == 1 {
			k.tell(f, "SIGKILL to the %s worker, a new one in its place", roles[f.target])
		} else {
			k.tell(f, "SIGKILL to the %d ranks of the %s worker, new ones in their place", len(ranks), roles[f.target])
		}
		for _, w := range k.s.workers[f.target] {
			w.signal(syscall.SIGKILL) // the stage replaces it
		}
	case faultPause:
		k.tell(f, "SIGSTOP to engine %s, SIGCONT after %v", e.node, pauseTime)
		proc := e.proc
		proc.signal(syscall.SIGSTOP)
		k.repair(func(ctx context.Context) error {
			defer proc.signal(syscall.SIGCONT)
			return sleep(ctx, pauseTime)
		})
	case faultStore:
		k.tell(f, "SIGKILL to etcd, started again after %v", storeTime)
		st := k.s.store
		st.proc.signal(syscall.SIGKILL)
		k.repair(func(ctx context.Context) error {
			<-st.proc.done
			return st.outage(ctx, k.s.engines[:])
		})
	case faultLink:
		k.tell(f, "the link between the engines is cut for %v", cutTime)
		cut := 0
		for _, c := range k.s.relays {
			cut += c.sever()
		}
		if cut == 0 {
			return errors.New("cut the link: the engines are not connected through it")
		}
		k.repair(func(ctx context.Context) error {
			err := sleep(ctx, cutTime)
			for _, c := range k.s.relays {
				c.mend()
			}
			return err
		})
	}
	return nil
}

// repair runs what ends the damage, or waits for that, beside the stage.
func (k *striker) repair(f func(context.Context) error) {
	k.repairs.Go(func() {
		err := f(k.ctx)
		select {
		case k.result <- err:
		case <-k.ctx.Done():
		}
	})
}

// tell puts down what happens at this moment.
func (k *striker) tell(f *fault, format string, args ...any) {
	f.what = fmt.Sprintf(format, args...)
	f.second = time.Since(k.s.bar.start).Seconds()
	k.s.bar.clear()
	fmt.Fprintf(k.s.out, "  %s: %s, at %.1f s\n", strings.ToUpper(f.kind), f.what, f.second)
	f.struck = monotonic()
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// waitPlugin waits until a later epoch of the plugin is up.
func (e *engine) waitPlugin(ctx context.Context, after uint32) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("the plugin of %s is not up again after %v", e.node, readyTimeout))
	defer cancel()
	for {
		if _, p, err := e.plugin(ctx); err == nil && p.Epoch > after {
			return nil
		}
		if err := sleep(ctx, readyPoll); err != nil {
			return err
		}
	}
}

// judgeFaults puts the faults into the result, and what no fault explains among its errors.
func (r *run) judgeFaults(res *Result) {
	if len(r.strikes) == 0 {
		return
	}
	for _, f := range r.strikes {
		if f.struck == 0 {
			continue // the run ended before: its errors say why
		}
		t := fateOf(f, r.sides)
		res.Faults = append(res.Faults, t.result(f.kind))
		r.figures.fates = append(r.figures.fates, struckBy{f, t})
	}
	wrong := unexplained(r.plan, r.sides, r.router, r.strikes)
	if n := len(wrong); n > 0 {
		res.Errors = append(res.Errors, fmt.Sprintf("%d attempts failed that no fault explains", n))
		r.figures.failures = append(r.figures.failures, wrong[:min(n, maxExamples)]...)
	}
}
