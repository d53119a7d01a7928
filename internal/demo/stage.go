package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// stepEvery is how often the router and the faults are looked after.
const stepEvery = 2 * time.Millisecond

// startWorkers starts both, as processes that play what the router orders.
func (r *run) startWorkers(ctx context.Context) error {
	schedule := filepath.Join(r.dir, "schedule.jsonl")
	f, err := os.OpenFile(schedule, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(r.plan.write(f), f.Close()); err != nil {
		return fmt.Errorf("write the schedule: %w", err)
	}
	python := ""
	if r.o.NoPython {
		r.figures.workers = "prefill in Go, decode in Go (--no-python)"
	} else if python, err = findPython(ctx); err != nil {
		r.figures.workers = "prefill in Go, decode in Go because " + err.Error()
	} else {
		r.figures.workers = "prefill in Go, decode in Python"
	}
	fmt.Fprintf(r.out, "Two engines as `engine run` starts them, two worker processes: %s\n", r.figures.workers)

	for i, role := range roles {
		wo := WorkerOptions{Role: role, Socket: r.engines[i].worker, Schedule: schedule, Orders: true, Quiet: workerQuiet}
		wo.setGroups()
		r.argv[i] = wo.argv(r.binary)
		if role == RoleDecode && python != "" {
			if r.argv[i], err = wo.pythonArgv(python, r.dir); err != nil {
				return err
			}
		}
		if err := r.startWorker(i); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) startWorker(i int) (err error) {
	r.workers[i], err = startProcess("worker "+roles[i], r.argv[i], r.env, func(text []byte) { r.take(i, text) })
	return err
}

// take hands one line of a worker to the owner of the run. It waits when that is behind: so does the
// worker then.
func (r *run) take(worker int, text []byte) {
	u := update{worker: worker}
	if err := json.Unmarshal(bytes.TrimSpace(text), &u.line); err != nil {
		u.err = fmt.Errorf("the %s worker wrote %.80q instead of a report", roles[worker], text)
	}
	r.lines <- u
}

// stage is a replay under way. One goroutine owns it.
type stage struct {
	*run
	bar     progressBar
	striker *striker
	done    [2]<-chan struct{} // of the workers; nil: taken notice of
	gone    [2]<-chan struct{} // of the engines
	halted  bool
	told    bool // the workers know that no more rooms come
	failure error
}

// replay has the trace played until both workers are done. Its error ends the run early: an engine or a
// worker that died and was not to, the deadline.
func (r *run) replay(ctx context.Context) error {
	s := &stage{run: r, bar: progressBar{w: r.out, terminal: r.o.Terminal, total: len(r.plan.Rooms), start: time.Now()}}
	defer s.bar.clear()
	start := time.Now()
	r.router = newRouter(r.plan, r.sides, s.order)
	actions, cancel := context.WithCancel(ctx)
	s.striker = newStriker(actions, s)
	defer s.striker.repairs.Wait()
	defer cancel()
	tick := time.NewTicker(stepEvery)
	defer tick.Stop()
	for i := range roles {
		s.done[i], s.gone[i] = r.workers[i].done, r.engines[i].proc.done
	}
	ended := ctx.Done()
	for s.done[0] != nil || s.done[1] != nil {
		select {
		case u := <-r.lines:
			s.take(ctx, u)
		case now := <-tick.C:
			s.step(now)
		case <-ended:
			s.fail(context.Cause(ctx))
			ended = nil
		case <-s.gone[0]:
			s.engineGone(0)
		case <-s.gone[1]:
			s.engineGone(1)
		case <-s.done[0]:
			s.workerDone(ctx, 0)
		case <-s.done[1]:
			s.workerDone(ctx, 1)
		}
	}
	r.figures.wall = time.Since(start)
	return s.failure
}

// order tells a worker. One that is dead or dying is not told: its successor will be.
func (s *stage) order(worker int, o order) error {
	if s.striker.strikesWorker(worker) || s.workers[worker].exited() {
		return nil
	}
	err := s.workers[worker].write(o.line())
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, os.ErrClosed) {
		return nil // it has just died: workerDone says so
	}
	return err
}

// halt gives the workers the time to see their rooms to an end, and to report.
func (s *stage) halt() {
	if s.halted {
		return
	}
	s.halted = true
	for _, e := range s.engines {
		e.proc.signal(syscall.SIGCONT)
	}
	for _, w := range s.workers {
		w.signal(stopSignal)
	}
	a, b := s.workers[0], s.workers[1]
	time.AfterFunc(workerGrace, func() { a.kill(); b.kill() })
}

// fail halts the run; the first reason stays.
func (s *stage) fail(err error) {
	if s.failure == nil {
		s.failure = err
	}
	s.halt()
}

// step looks after what is due.
func (s *stage) step(now time.Time) {
	p := s.sides[1]
	s.bar.show(int64(s.router.final), p.bytes+p.progress.Bytes)
	if s.halted || s.sides[0].language == "" || s.sides[1].language == "" { // not both are ready yet
		return
	}
	if err := errors.Join(s.striker.step(now), s.router.step(now)); err != nil {
		s.fail(err)
		return
	}
	if s.router.done() && s.striker.done() && !s.told {
		s.told = true
		for _, w := range s.workers {
			w.in.Close()
		}
	}
}

// take takes a report.
func (s *stage) take(ctx context.Context, u update) {
	if u.err != nil {
		s.fail(u.err)
		return
	}
	s.run.add(ctx, u)
	s.router.report(u.worker, u.line, time.Now())
	s.striker.report(u.worker, u.line)
}

// drainLines takes what is buffered. A worker's own lines are all buffered once it is done.
func (s *stage) drainLines(ctx context.Context) {
	for {
		select {
		case u := <-s.lines:
			s.take(ctx, u)
		default:
			return
		}
	}
}

// engineGone takes the end of an engine's process: it is started again if a fault killed it.
func (s *stage) engineGone(i int) {
	s.gone[i] = nil
	if !s.striker.strikesEngine(i) || s.halted {
		s.fail(s.engines[i].proc.obituary())
		return
	}
	if err := s.engines[i].start(s.binary, s.env); err != nil {
		s.fail(err)
		return
	}
	s.gone[i] = s.engines[i].proc.done
	s.striker.repair(s.engines[i].waitReady)
}

// workerDone takes the end of a worker's process: a new one takes its place if a fault killed it.
func (s *stage) workerDone(ctx context.Context, i int) {
	s.done[i] = nil
	s.drainLines(ctx)
	side := s.sides[i]
	if s.striker.strikesWorker(i) && side.end == nil && !s.halted {
		s.replaceWorker(i)
		return
	}
	switch {
	case side.end == nil:
		s.fail(s.workers[i].obituary())
	case side.end.Error != "": // join reports it; the other worker would wait for it
		s.halt()
	case s.done[1-i] != nil && side.unfinished() != "":
		s.fail(errors.New("the " + roles[i] + " worker is done but for " + side.unfinished()))
	}
}

func (s *stage) replaceWorker(i int) {
	side := s.sides[i]
	side.written += side.progress.Written
	side.bytes += side.progress.Bytes
	side.progress = report{}
	s.router.died(i, time.Now())
	if err := s.startWorker(i); err != nil {
		s.fail(err)
		return
	}
	s.done[i] = s.workers[i].done
	s.striker.workerReplaced()
	if err := s.router.reorder(i); err != nil {
		s.fail(err)
	}
}

// add takes a report. About the first room that a worker aborted it asks the engine at once, as
// `engine rooms why` does.
func (r *run) add(ctx context.Context, u update) {
	r.sides[u.worker].add(u.line)
	if u.line.Asked && u.line.Reason == reasonAborted && r.figures.why == nil {
		why, err := r.engines[u.worker].why(ctx, u.line.Room)
		if err != nil {
			why = []string{"(" + err.Error() + ")"}
		}
		r.figures.why, r.figures.whyRoom = why, u.line.Room
	}
}
