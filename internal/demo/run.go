package demo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/terminus-kv/terminus/internal/trace"
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
		result = Result{Reasons: map[string]int{}, Faults: []Fault{}, LostAttempts: map[string]int{}, Errors: []string{err.Error()}}
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
	argv    [2][][]string // of the workers, by rank
	engines [2]*engine    // prefill, decode
	relays  [2]*relay     // to them; nil without the fault that cuts the link
	store   *store        // nil without one
	workers [2][]*process // by rank
	ranks   [2]*ranks
	sides   [2]*side
	lines   chan update
	strikes []*fault
	router  *router
	figures figures
	faults  []string // the first is what ended the run early
}

// update is one line of a worker.
type update struct {
	worker int // side
	rank   int
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
	r.judgeFaults(&res)
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
	size, err := ranksOf(o.Ranks)
	if err != nil {
		return err
	}
	r.plan, err = newPlan(planOptions{Trace: o.Trace, Rooms: o.Rooms, Bytes: o.Bytes, Seed: o.Seed, AbortFraction: o.AbortFraction, Arrival: o.Arrival, Ranks: size})
	if err != nil {
		return err
	}
	if r.binary = o.Executable; r.binary == "" {
		if r.binary, err = os.Executable(); err != nil {
			return fmt.Errorf("find the engine's own binary: %w", err)
		}
	}
	kinds, err := o.strikes()
	if err != nil {
		return err
	}
	if n := len(r.plan.Rooms); n < leastRooms(len(kinds)) {
		return fmt.Errorf("the trace has %d rooms: too few to have %d faults strike while others are in flight; --faults none", n, len(kinds))
	}
	r.strikes = planFaults(kinds, len(r.plan.Rooms), o.Seed)
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
		r.ranks[i] = newRanks(size[i])
	}
	return nil
}

// describe prints what is going to be replayed, and at what scale.
func (r *run) describe() {
	s, p, o := r.plan.summary(), r.plan, r.o
	fmt.Fprintf(r.out, "Trace: %s\n", trace.Source(o.Trace))
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
	plugin := "" // the entry in the configuration
	if kind, path, ok := strings.Cut(r.o.Plugin, ":"); ok {
		path, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		plugin = fmt.Sprintf("{%s: %q}", kind, path)
	}
	if r.o.Peers == PeersEtcd {
		var err error
		if r.store, err = newStore(ctx, r.binary, r.dir, r.env); err != nil {
			return err
		}
		fmt.Fprintf(r.out, "Membership by etcd: a store of one member at %s; the record of an engine outlives it by %v\n", r.store.addr, storeLease)
	}
	cable := slices.ContainsFunc(r.strikes, func(f *fault) bool { return f.kind == faultLink })
	for i, role := range roles {
		node := role + "-0"
		peers, err := r.peers(i, node, cable)
		if err != nil {
			return err
		}
		e, err := newEngine(r.dir, node, plugin, peers)
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

// peers is the entry of an engine's membership. The relay, where there is one, is what it advertises.
func (r *run) peers(i int, node string, cable bool) (string, error) {
	listen, entry := "unix:"+peerSocket(r.dir, node), "driver: local"
	if r.store != nil {
		var err error
		if listen, err = freePort(); err != nil {
			return "", err
		}
		entry = fmt.Sprintf("driver: etcd, listen: %q, etcd: {endpoints: %q, lease: %s}", listen, "http://"+r.store.addr, storeLease)
	}
	if cable {
		var err error
		if r.relays[i], err = newRelay(listen); err != nil {
			return "", err
		}
		entry += fmt.Sprintf(", advertise: %q", r.relays[i].addr())
	}
	return "{" + entry + "}", nil
}

// measure fills in the figures of the table.
func (r *run) measure(res Result) {
	f := &r.figures
	f.aborts = r.plan.summary().Aborts
	for _, e := range r.engines {
		f.cpu += e.cpu()
	}
	var times []int64
	for i := range r.plan.Rooms {
		id := attemptID{room: r.plan.Rooms[i].ID}
		for next := id; r.sides[1].has(next); next.attempt++ {
			id = next
		}
		src, dst := r.sides[0].rooms[id], r.sides[1].rooms[id]
		switch {
		case dst.Status == statusSuccess:
			times = append(times, dst.Ended-dst.Opened)
		case dst.Status == statusFailed && !dst.aborted() && len(r.strikes) == 0 && len(f.failures) < maxExamples:
			f.failures = append(f.failures, fmt.Sprintf("room %d failed: %s at the destination (%s), %s at the source (%s)",
				id.room, dst.Reason, cmp.Or(dst.Detail, "no detail"), cmp.Or(src.Reason, "no verdict"), cmp.Or(src.Detail, "no detail")))
		}
	}
	if len(times) > 0 {
		slices.Sort(times)
		at := func(p int) time.Duration { return time.Duration(times[len(times)*p/100]) }
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
	for _, w := range r.processes() {
		w.kill()
	}
	for _, e := range r.engines {
		if e != nil && e.proc != nil {
			e.proc.signal(syscall.SIGCONT) // it may be stopped
			e.proc.signal(stopSignal)
		}
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for _, w := range r.processes() {
			<-w.done
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
			for _, c := range r.relays {
				if c != nil {
					c.close()
				}
			}
			if r.store != nil && r.store.proc != nil {
				r.store.proc.kill()
				<-r.store.proc.done
			}
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
	for _, w := range r.processes() {
		b.WriteString(w.lastWords())
	}
	return b.String()
}

// processes are the workers that were started last, of both sides.
func (r *run) processes() []*process { return slices.Concat(r.workers[0], r.workers[1]) }
