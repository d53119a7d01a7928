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
	python, several := "", r.plan.Heads > 1
	size := [2]int{len(r.ranks[0].lines), len(r.ranks[1].lines)}
	if several {
		r.figures.workers = fmt.Sprintf("prefill in %d ranks, decode in %d, in Go", size[0], size[1])
	} else if r.o.NoPython {
		r.figures.workers = "prefill in Go, decode in Go (--no-python)"
	} else if python, err = findPython(ctx); err != nil {
		r.figures.workers = "prefill in Go, decode in Go because " + err.Error()
	} else {
		r.figures.workers = "prefill in Go, decode in Python"
	}
	fmt.Fprintf(r.out, "Two engines as `engine run` starts them, %d worker processes: %s\n", size[0]+size[1], r.figures.workers)

	for i, role := range roles {
		wo := WorkerOptions{Role: role, Socket: r.engines[i].worker, Size: size[i], Schedule: schedule, Orders: true, Quiet: workerQuiet}
		wo.setGroups()
		for wo.Rank = range size[i] {
			r.argv[i] = append(r.argv[i], wo.argv(r.binary))
		}
		if role == RoleDecode && python != "" {
			if r.argv[i][0], err = wo.pythonArgv(python, r.dir); err != nil {
				return err
			}
		}
		if err := r.startSide(i); err != nil {
			return err
		}
	}
	return nil
}

// startSide starts the worker of a role, or its ranks.
func (r *run) startSide(i int) error {
	r.workers[i] = nil
	r.ranks[i] = newRanks(len(r.argv[i]))
	for rank, argv := range r.argv[i] {
		name := "worker " + roles[i]
		if r.ranks[i].several() {
			name += fmt.Sprint(" rank ", rank)
		}
		w, err := startProcess(name, argv, r.env, func(text []byte) { r.take(i, rank, text) })
		if err != nil {
			return err
		}
		r.workers[i] = append(r.workers[i], w)
	}
	return nil
}

// take hands one line of a worker to the owner of the run. It waits when that is behind: so does the
// worker then.
func (r *run) take(worker, rank int, text []byte) {
	u := update{worker: worker, rank: rank}
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
	done    [2]int             // ranks of the side that are to be done yet
	over    chan rankDone      // of the workers
	gone    [2]<-chan struct{} // of the engines
	halted  bool
	told    bool // the workers know that no more rooms come
	failure error
}

// rankDone says that the process of a worker has ended.
type rankDone struct{ side, rank int }

// await has the end of the side's processes told.
func (s *stage) await(i int) {
	s.done[i] = len(s.workers[i])
	for rank, w := range s.workers[i] {
		go func() {
			<-w.done
			s.over <- rankDone{i, rank}
		}()
	}
}

// replay has the trace played until both workers are done. Its error ends the run early: an engine or a
// worker that died and was not to, the deadline.
func (r *run) replay(ctx context.Context) error {
	s := &stage{run: r, bar: progressBar{w: r.out, terminal: r.o.Terminal, total: len(r.plan.Rooms), start: time.Now()}, over: make(chan rankDone, 4*maxRanks)}
	defer s.bar.clear()
	start := time.Now()
	r.router = newRouter(r.plan, r.sides, s.order)
	for i := range r.ranks {
		r.router.several[i] = r.ranks[i].several()
	}
	actions, cancel := context.WithCancel(ctx)
	s.striker = newStriker(actions, s)
	defer s.striker.repairs.Wait()
	defer cancel()
	tick := time.NewTicker(stepEvery)
	defer tick.Stop()
	for i := range roles {
		s.await(i)
		s.gone[i] = r.engines[i].proc.done
	}
	ended := ctx.Done()
	for s.done[0]+s.done[1] > 0 {
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
		case w := <-s.over:
			s.workerDone(ctx, w)
		}
	}
	r.figures.wall = time.Since(start)
	return s.failure
}

// order tells a worker, all its ranks. One that is dead or dying is not told: its successor will be.
func (s *stage) order(worker int, o order) error {
	if s.striker.strikesWorker(worker) {
		return nil
	}
	for _, w := range s.workers[worker] {
		if w.exited() {
			continue
		}
		err := w.write(o.line())
		if err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, os.ErrClosed) { // else it has just died: workerDone says so
			return err
		}
	}
	return nil
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
	workers := s.processes()
	for _, w := range workers {
		w.signal(stopSignal)
	}
	time.AfterFunc(workerGrace, func() {
		for _, w := range workers {
			w.kill()
		}
	})
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
		for _, w := range s.processes() {
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
	var whole bool
	if u.line, whole = s.ranks[u.worker].add(u.rank, u.line); !whole {
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

// workerDone takes the end of a worker's process: a new one takes its place if a fault killed it, and all its ranks.
func (s *stage) workerDone(ctx context.Context, w rankDone) {
	i := w.side
	s.done[i]--
	s.drainLines(ctx)
	side := s.sides[i]
	if s.striker.strikesWorker(i) && side.end == nil && !s.halted {
		if s.done[i] == 0 {
			s.replaceWorker(i)
		}
		return
	}
	switch {
	case side.end == nil && (s.done[i] == 0 || !s.ranks[i].lines[w.rank].ended):
		s.fail(s.workers[i][w.rank].obituary())
	case side.end == nil: // the other ranks are to end yet
	case side.end.Error != "": // join reports it; the other worker would wait for it
		s.halt()
	case s.done[1-i] > 0 && side.unfinished() != "":
		s.fail(errors.New("the " + roles[i] + " worker is done but for " + side.unfinished()))
	}
}

func (s *stage) replaceWorker(i int) {
	side := s.sides[i]
	side.written += side.progress.Written
	side.bytes += side.progress.Bytes
	side.progress = report{}
	s.router.died(i, time.Now())
	if err := s.startSide(i); err != nil {
		s.fail(err)
		return
	}
	s.await(i)
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
