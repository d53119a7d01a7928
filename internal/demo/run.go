package demo

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// workerQuiet is how long the demo's workers go on when nothing happens: longer than any clock that
// could still end a room in engineConfig.
const workerQuiet = 75 * time.Second

// workerGrace is what a worker gets to see its open rooms to their end when it is to stop: longer than
// abortTimeout and then proofTimeout, which end it by itself.
const workerGrace = 35 * time.Second

// maxExamples is how many unexpected failures are shown.
const maxExamples = 5

// Run plays the demo and prints as it goes. The error, if any, says why the demo is not a success:
// wrong options, a machine that cannot run it, or a Result whose Err is not nil. With Output json the
// Result is written in all these cases but the first: of a run that never began it has no rooms, and the
// fault.
func Run(ctx context.Context, o Options) (Result, error) {
	if err := o.check(); err != nil {
		return Result{}, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Deadline, fmt.Errorf("the demo took longer than %v", o.Deadline))
	defer cancel()
	r := &run{o: o, out: o.Stdout}
	if o.Output == "json" {
		r.out, r.o.Terminal = o.Stderr, false
	}
	result, err := r.play(ctx)
	if err != nil {
		result = Result{Reasons: map[string]int{}, Faults: []Fault{}, Errors: []string{err.Error()}}
	} else {
		err = result.Err()
	}
	switch {
	case o.Output == "json":
		err = errors.Join(err, json.NewEncoder(o.Stdout).Encode(result))
	case result.Rooms > 0:
		fmt.Fprintln(r.out)
		printTable(r.out, result, r.figures)
	}
	return result, err
}

// play is both parts. The error means that the second did not begin.
func (r *run) play(ctx context.Context) (Result, error) {
	if !r.o.NoIncident {
		if err := playIncident(r.out); err != nil {
			return Result{}, err
		}
	}
	return r.transfer(ctx)
}

// run is one run of the main job.
type run struct {
	o       Options
	out     io.Writer // the story
	plan    *Plan
	dir     string
	binary  string
	env     []string
	engines [2]*engine // prefill, decode
	workers [2]*process
	sides   [2]*side
	lines   chan update
	figures figures
	faults  []string // the first is what ended the run early
}

// update is one line of a worker.
type update struct {
	worker int
	line   report
	err    error // not a report
}

var roles = [2]string{RolePrefill, RoleDecode}

// transfer brings everything up, replays the trace, takes everything down and joins the reports.
func (r *run) transfer(ctx context.Context) (res Result, err error) {
	if err := r.prepare(); err != nil {
		return res, err
	}
	defer func() {
		r.takeDown()
		if e := os.RemoveAll(r.dir); e != nil {
			err = errors.Join(err, e)
		}
	}()
	r.describe()
	if err := r.bringUp(ctx); err != nil {
		if !errors.Is(err, errBackendDown) { // else the engine has said all
			fmt.Fprint(r.out, r.lastWords())
		}
		return res, err
	}
	if err := r.replay(ctx); err != nil {
		r.faults = append(r.faults, err.Error())
	}
	res = join(r.plan, r.sides[0], r.sides[1])
	r.takeDown()
	res.Errors = append(slices.Clone(r.faults), res.Errors...)
	r.measure(res)
	for _, failure := range r.figures.failures {
		fmt.Fprintf(r.out, "  %s\n", failure)
	}
	if res.Err() != nil {
		fmt.Fprint(r.out, r.lastWords())
	}
	return res, nil
}

func (r *run) prepare() (err error) {
	o := r.o
	r.plan, err = newPlan(planOptions{Trace: o.Trace, Rooms: o.Rooms, Bytes: o.Bytes, Seed: o.Seed, AbortFraction: o.AbortFraction, Arrival: o.Arrival})
	if err != nil {
		return err
	}
	if r.binary = o.Executable; r.binary == "" {
		if r.binary, err = os.Executable(); err != nil {
			return fmt.Errorf("find the engine's own binary: %w", err)
		}
	}
	base := os.TempDir()
	if len(base) > 40 { // the path of a unix socket has 107 bytes
		base = "/tmp"
	}
	if r.dir, err = os.MkdirTemp(base, "terminus-demo-"); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	for _, kv := range os.Environ() { // the demo's engines obey their files alone
		if !strings.HasPrefix(kv, "TERMINUS_") {
			r.env = append(r.env, kv)
		}
	}
	r.lines = make(chan update, 1024)
	for i, role := range roles {
		r.sides[i] = newSide(role)
	}
	return nil
}

// describe prints what is going to be replayed, and at what scale.
func (r *run) describe() {
	s, p, o := r.plan.summary(), r.plan, r.o
	fmt.Fprintf(r.out, "Trace: %s\n", traceSource(o.Trace))
	if text := p.sizeNote(o.Bytes); text != "" {
		fmt.Fprintf(r.out, "  %s\n", text)
	}
	fmt.Fprintf(r.out, "  %d rooms, %d with several chunks of %d tokens, %d fully cached (zero pages); %s in %d pages, %d more pages shared by prefix\n",
		s.Rooms, s.Several, p.ChunkTokens, s.Empty, sizeText(s.Bytes), s.Pages, s.CachedPages)
	fmt.Fprintf(r.out, "  scale: 1/%.0f of a 70B model's bytes a token, %.1f times the trace's speed; arrival %s, seed %d; %d rooms are to be aborted\n",
		1/s.Scale, p.Speed, o.Arrival, o.Seed, s.Aborts)
}

func (r *run) bringUp(ctx context.Context) error {
	for _, d := range []string{"run", "state"} {
		if err := os.Mkdir(filepath.Join(r.dir, d), 0o700); err != nil {
			return err
		}
	}
	plugin := strings.TrimPrefix(r.o.Plugin, "exec:")
	if plugin != "" {
		var err error
		if plugin, err = filepath.Abs(plugin); err != nil {
			return err
		}
	}
	for i, role := range roles {
		e, err := newEngine(r.dir, role+"-0", plugin)
		if err != nil {
			return err
		}
		if err := e.start(r.binary, r.env); err != nil {
			return err
		}
		r.engines[i] = e
	}
	for _, e := range r.engines {
		if err := e.waitReady(ctx); err != nil {
			return err
		}
	}
	return r.startWorkers(ctx)
}

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
		wo := WorkerOptions{Role: role, Socket: r.engines[i].worker, Schedule: schedule, Quiet: workerQuiet}
		wo.setGroups()
		argv := wo.argv(r.binary)
		if role == RoleDecode && python != "" {
			if argv, err = wo.pythonArgv(python, r.dir); err != nil {
				return err
			}
		}
		r.workers[i], err = startProcess("worker "+role, argv, r.env, func(text []byte) { r.take(i, text) })
		if err != nil {
			return err
		}
	}
	return nil
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

// replay shows progress until both workers are done. Its error ends the run early: an engine or a
// worker that died, the deadline.
func (r *run) replay(ctx context.Context) error {
	bar := progressBar{w: r.out, terminal: r.o.Terminal, total: len(r.plan.Rooms), start: time.Now()}
	defer bar.clear()
	start := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	halted := false
	halt := func() { // the workers get the time to see their rooms to an end, and to report
		if !halted {
			halted = true
			for _, w := range r.workers {
				w.signal(stopSignal)
			}
			time.AfterFunc(workerGrace, func() { r.workers[0].kill(); r.workers[1].kill() })
		}
	}
	var failure error
	fail := func(err error) { // the first reason
		if failure == nil {
			failure = err
		}
		halt()
	}
	done := [2]<-chan struct{}{r.workers[0].done, r.workers[1].done}
	gone := [2]<-chan struct{}{r.engines[0].proc.done, r.engines[1].proc.done}
	ended := ctx.Done()
	for done[0] != nil || done[1] != nil {
		i := -1
		select {
		case u := <-r.lines:
			if u.err != nil {
				fail(u.err)
			}
			r.add(ctx, u)
		case <-tick.C:
			p := r.sides[1].progress
			bar.show(p.Ended, p.Bytes)
		case <-ended:
			fail(context.Cause(ctx))
			ended = nil
		case <-gone[0]:
			gone[0] = nil
			fail(r.engines[0].proc.obituary())
		case <-gone[1]:
			gone[1] = nil
			fail(r.engines[1].proc.obituary())
		case <-done[0]:
			i = 0
		case <-done[1]:
			i = 1
		}
		if i >= 0 {
			done[i] = nil
			r.drainLines(ctx)
			switch s := r.sides[i]; {
			case s.end == nil:
				fail(r.workers[i].obituary())
			case s.end.Error != "": // join reports it; the other worker would wait for it
				halt()
			case done[1-i] != nil && s.unfinished() != "": // the other worker would wait for these rooms
				fail(errors.New("the " + roles[i] + " worker is done but for " + s.unfinished()))
			}
		}
	}
	r.figures.wall = time.Since(start)
	return failure
}

// drainLines takes what is buffered. A worker's own lines are all buffered once it is done.
func (r *run) drainLines(ctx context.Context) {
	for {
		select {
		case u := <-r.lines:
			r.add(ctx, u)
		default:
			return
		}
	}
}

// add takes a report. About the first room that a worker aborted it asks the engine at once, as
// `engine rooms why` does.
func (r *run) add(ctx context.Context, u update) {
	if u.err != nil {
		return
	}
	r.sides[u.worker].add(u.line)
	if u.line.Asked && u.line.Reason == reasonAborted && r.figures.why == nil {
		why, err := r.engines[u.worker].why(ctx, u.line.Room)
		if err != nil {
			why = []string{"(" + err.Error() + ")"}
		}
		r.figures.why, r.figures.whyRoom = why, u.line.Room
	}
}

// measure fills in the figures of the table.
func (r *run) measure(res Result) {
	f := &r.figures
	f.aborts = r.plan.summary().Aborts
	for _, e := range r.engines {
		f.cpu += e.proc.cpu()
	}
	var times []int64
	for i := range r.plan.Rooms {
		id := r.plan.Rooms[i].ID
		src, dst := r.sides[0].rooms[id], r.sides[1].rooms[id]
		switch {
		case dst.Status == statusSuccess:
			times = append(times, dst.Micros)
		case dst.Status == statusFailed && dst.Reason != reasonAborted && dst.Reason != reasonPeerAborted && len(f.failures) < maxExamples:
			f.failures = append(f.failures, fmt.Sprintf("room %d failed: %s at the destination (%s), %s at the source (%s)",
				id, dst.Reason, cmp.Or(dst.Detail, "no detail"), cmp.Or(src.Reason, "no verdict"), cmp.Or(src.Detail, "no detail")))
		}
	}
	if len(times) > 0 {
		slices.Sort(times)
		at := func(p int) time.Duration { return time.Duration(times[len(times)*p/100]) * time.Microsecond }
		f.p50, f.p99 = at(50), at(99)
	}
	if end := r.sides[1].end; end != nil {
		f.pages, f.runs = end.Pages, end.Runs
	}
	f.copied = plainCopy(r.plan.PlanHeader, res.Bytes)
}

// plainCopy is how long a copy of so many bytes takes, tensor page by tensor page, from one pool to
// another in one process. A part is copied and the time scaled up.
func plainCopy(h PlanHeader, total int64) time.Duration {
	const pool, most = 64 << 20, 256 << 20
	if total <= 0 {
		return 0
	}
	pages := pool / h.PageBytes
	src, dst := make([]byte, pages*h.PageBytes), make([]byte, pages*h.PageBytes)
	for i := range src { // touched, so that no page fault is measured
		src[i], dst[i] = byte(i), 1
	}
	n := int64(0)
	start := time.Now()
	for i := 0; n < min(total, most); i++ {
		from, to := i%pages*h.PageBytes, (i*7919)%pages*h.PageBytes
		n += int64(copy(dst[to:to+h.PageBytes], src[from:from+h.PageBytes]))
	}
	return time.Duration(float64(time.Since(start)) * float64(total) / float64(n))
}

// takeDown stops what runs: workers first, then both engines at once. It may be called again.
func (r *run) takeDown() {
	for _, w := range r.workers {
		if w != nil {
			w.kill()
		}
	}
	for _, e := range r.engines {
		if e != nil && e.proc != nil {
			e.proc.signal(stopSignal)
		}
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for _, w := range r.workers {
			if w != nil {
				<-w.done
			}
		}
		for _, e := range r.engines {
			if e != nil && e.proc != nil {
				e.proc.stop(stopGrace)
			}
		}
	}()
	for {
		select {
		case <-r.lines: // a worker must not hang on a full buffer
		case <-stopped:
			return
		}
	}
}

func (r *run) lastWords() string {
	var b strings.Builder
	for _, e := range r.engines {
		if e != nil && e.proc != nil {
			b.WriteString(e.proc.lastWords())
		}
	}
	for _, w := range r.workers {
		if w != nil {
			b.WriteString(w.lastWords())
		}
	}
	return b.String()
}

// Worker runs one worker until every room of its schedule has ended and all pages are back.
func Worker(ctx context.Context, o WorkerOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	o.setGroups()
	plan, err := o.loadPlan()
	if err != nil {
		return err
	}
	if o.Python {
		return runPythonWorker(ctx, o, plan)
	}
	return runWorker(ctx, o, plan)
}

// setGroups names the groups that were not named.
func (o *WorkerOptions) setGroups() {
	other := map[string]string{RolePrefill: RoleDecode, RoleDecode: RolePrefill}[o.Role]
	if o.Group == "" {
		o.Group = o.Role
	}
	if o.PeerGroup == "" {
		o.PeerGroup = other
	}
}

// argv is the command line of a Go worker with this schedule.
func (o WorkerOptions) argv(binary string) []string {
	return []string{
		binary, "demo", "worker", "--role", o.Role, "--socket", o.Socket, "--schedule", o.Schedule,
		"--group", o.Group, "--peer-group", o.PeerGroup, "--quiet", o.Quiet.String(),
	}
}

// pythonArgv unpacks the Python worker below dir and returns its command line.
func (o WorkerOptions) pythonArgv(python, dir string) ([]string, error) {
	script, err := unpackPython(dir)
	if err != nil {
		return nil, err
	}
	return []string{
		python, "-B", script, "--socket", o.Socket, "--schedule", o.Schedule, "--group", o.Group,
		"--peer-group", o.PeerGroup, "--quiet", strconv.FormatFloat(o.Quiet.Seconds(), 'f', -1, 64),
	}, nil
}

// runPythonWorker runs the Python worker as a child, for those who start workers by hand.
func runPythonWorker(ctx context.Context, o WorkerOptions, plan *Plan) error {
	if o.Role != RoleDecode {
		return errors.New("--python: the Python worker is a decode worker; use --role decode")
	}
	python, err := findPython(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "terminus-worker-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	o.Schedule = filepath.Join(dir, "schedule.jsonl")
	f, err := os.Create(o.Schedule)
	if err != nil {
		return err
	}
	if err := errors.Join(plan.write(f), f.Close()); err != nil {
		return err
	}
	argv, err := o.pythonArgv(python, dir)
	if err != nil {
		return err
	}
	var sum tally
	p, err := startProcess("worker", argv, os.Environ(), func(text []byte) {
		var line report
		if json.Unmarshal(text, &line) == nil {
			sum.add(line)
			if line.T == "waiting" {
				fmt.Fprintln(o.Stderr, line.Detail)
			}
		}
		o.Stdout.Write(text)
	})
	if err != nil {
		return err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.stop(workerGrace)
	}
	if p.err != nil && sum.fault == "" {
		return fmt.Errorf("%w\n%s", p.obituary(), p.lastWords())
	}
	fmt.Fprintln(o.Stderr, &sum)
	if sum.fault != "" {
		return errors.New(sum.fault)
	}
	return sum.err()
}
