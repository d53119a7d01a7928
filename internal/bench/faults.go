package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"syscall"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// faults measures how long rooms take to end when something dies.
var faults = Bench{
	Name:  "faults",
	Short: "time until rooms are terminal after an abort, and after the death of a plugin or an engine",
	Long: fmt.Sprintf("Two engines as `engine run -c` starts them, with the built-in backend, and Go workers in this process that read their status pages: "+
		"aborts of one of %d bound rooms, from either side in turn, while %d others a second come and go; kill -9 of the decode side's plugin with %d rooms bound; "+
		"kill -9 of the decode side's engine with %d rooms bound, restarted at once", abortField, abortLoad, pluginField, engineField),
	Run: runFaults,
}

const (
	abortField  = 200
	abortLoad   = 1000 // rooms/s
	aborts      = 500
	pluginField = 10_000
	engineField = 1000
	faultRounds = 4
	// fieldBound is how long a field of rooms may take for one step, whatever else the machine does.
	fieldBound = 90 * time.Second

	abortTarget   = 5  // ms
	pluginTarget  = 50 // ms
	engineTarget  = 1000
	restartTarget = 2000
)

// faultPlan is the size of a run.
type faultPlan struct {
	abortField, abortLoad, aborts, pluginField, engineField, rounds int
}

// planFaults scales the run down below half a second of duration.
func planFaults(d time.Duration) faultPlan {
	if d < time.Second/2 {
		return faultPlan{abortField: 8, abortLoad: 20, aborts: 6, pluginField: 50, engineField: 10, rounds: 1}
	}
	return faultPlan{abortField, abortLoad, aborts, pluginField, engineField, faultRounds}
}

var (
	bothSides = []int{prefill, decode}
	survivors = []int{prefill}
)

func runFaults(ctx context.Context, o Options) ([]Result, error) {
	p := planFaults(o.Duration)
	c, err := startCluster(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.stop()
	o.progress("%d aborts", p.aborts)
	abort, err := measureAborts(ctx, c, p)
	if err != nil {
		return nil, fmt.Errorf("aborts: %w", err)
	}
	var plugin, engine, restart latencies
	for round := range p.rounds {
		o.progress("death of a plugin and of an engine, round %d of %d", round+1, p.rounds)
		lat, err := measurePluginDeath(ctx, c, p.pluginField, round)
		if err != nil {
			return nil, fmt.Errorf("death of a plugin: %w", err)
		}
		plugin = append(plugin, lat...)
		lat, back, err := measureEngineDeath(ctx, c, p.engineField, round)
		if err != nil {
			return nil, fmt.Errorf("death of an engine: %w", err)
		}
		engine, restart = append(engine, lat...), append(restart, back)
	}
	if err := c.wantIdle(ctx); err != nil {
		return nil, err
	}
	var results []Result
	add := func(name string, l latencies, q float64, target float64, note string) {
		r := Result{Name: name, Value: l.quantile(q) / 1000, Unit: "ms", Better: Lower, Samples: len(l), Note: note}
		if target > 0 {
			r.Target = &Target{OfValue, target}
		}
		results = append(results, r)
	}
	add("abort_p99", abort, 0.99, abortTarget, fmt.Sprintf("abort until both workers read Failed; %d rooms bound, %d others a second", p.abortField, p.abortLoad))
	add("plugin_killed_p99", plugin, 0.99, pluginTarget, fmt.Sprintf("kill until both workers read Failed; %d rooms bound, %d rounds", p.pluginField, p.rounds))
	add("engine_killed_max", engine, 1, engineTarget, fmt.Sprintf("kill until the other engine's worker reads Failed; %d rooms bound, %d rounds", p.engineField, p.rounds))
	add("engine_restarted_max", restart, 1, restartTarget, "kill until both workers read Success of a new room; restarted at once, Client.Redial")
	add("abort_p50", abort, 0.5, 0, "")
	add("abort_max", abort, 1, 0, "")
	add("plugin_killed_p50", plugin, 0.5, 0, "")
	add("plugin_killed_max", plugin, 1, 0, "")
	add("engine_killed_p50", engine, 0.5, 0, "")
	add("engine_killed_p99", engine, 0.99, 0, "")
	add("engine_restarted_p50", restart, 0.5, 0, "")
	return results, nil
}

// measureAborts aborts one room after the other, from either side in turn, beside other rooms.
func measureAborts(ctx context.Context, c *cluster, p faultPlan) (out latencies, err error) {
	t, err := startTraffic(ctx, c, roomsWindow)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.stop()) }()
	f, err := openField(ctx, c, "abort", 1<<40, p.abortField)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()

	loading, enough := context.WithCancel(ctx)
	var load sync.WaitGroup
	var loadErr error
	load.Go(func() { loadErr = t.load(loading, float64(p.abortLoad)) })
	defer func() {
		enough()
		load.Wait()
		err = errors.Join(err, loadErr)
	}()
	for k := range p.aborts {
		i, side := k%p.abortField, k%2
		began := time.Now()
		if err := f.rooms[side][i].Abort(ctx); err != nil {
			return nil, err
		}
		l, err := f.ended(ctx, began, bothSides, i)
		if err != nil {
			return nil, err
		}
		out = append(out, l...)
		if err := errors.Join(f.release(ctx, bothSides, i), f.open(ctx, i)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// measurePluginDeath kills the plugin of the decode side and waits for its successor.
func measurePluginDeath(ctx context.Context, c *cluster, n, round int) (out latencies, err error) {
	e := c.engines[decode]
	pid, epoch, err := e.plugin(ctx)
	if err != nil {
		return nil, err
	}
	f, err := openField(ctx, c, "plugin"+strconv.Itoa(round), 1<<41+int64(round)<<32, n)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	which := f.all()
	began := time.Now()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return nil, err
	}
	if out, err = f.ended(ctx, began, bothSides, which...); err != nil {
		return nil, err
	}
	if err := f.release(ctx, bothSides, which...); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, clusterReady)
	defer cancel()
	err = until(ctx, func() bool {
		_, now, err := e.plugin(ctx)
		return err == nil && now != epoch
	})
	if err == nil {
		err = c.waitReady(ctx)
	}
	return out, err
}

// measureEngineDeath kills the engine of the decode side, starts it again at once and moves a page through it.
func measureEngineDeath(ctx context.Context, c *cluster, n, round int) (ended latencies, restarted time.Duration, err error) {
	e := c.engines[decode]
	f, err := openField(ctx, c, "engine"+strconv.Itoa(round), 1<<42+int64(round)<<32, n)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	began := time.Now()
	e.kill()
	if err := e.start(); err != nil {
		return nil, 0, err
	}
	done := make(chan error, 1)
	go func() {
		var err error
		ended, err = f.ended(ctx, began, survivors, f.all()...)
		done <- err
	}()
	restarted, err = f.follow(ctx, began)
	if err = errors.Join(err, <-done); err != nil {
		return nil, 0, err
	}
	return ended, restarted, c.waitReady(ctx)
}

// follow goes on with the restarted engine of the decode side, as a worker and a router would: Redial, then
// new attempts until one succeeds. It returns how long after since that was.
func (f *field) follow(ctx context.Context, since time.Time) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, fieldBound)
	defer cancel()
	old := f.workers[decode]
	select {
	case <-old.Done():
	case <-ctx.Done():
		return 0, fmt.Errorf("the worker does not see the end of its engine: %w", ctx.Err())
	}
	next, err := old.Redial(ctx)
	if err != nil {
		return 0, err
	}
	moved := *old
	moved.Client = next
	f.workers[decode] = &moved
	if err := old.Close(); err != nil { // of the session that is over; the memory went on
		return 0, err
	}
	for attempt := int64(1); ; attempt++ {
		status, err := f.tryOne(ctx, f.first-attempt)
		if err != nil {
			return 0, err
		}
		if status == [2]client.Status{client.Success, client.Success} {
			return time.Since(since), nil
		}
		if err := sleepFor(ctx, clusterLook); err != nil {
			return 0, err
		}
	}
}

// tryOne moves page 0 in a room of its own and returns how it ended on either side.
func (f *field) tryOne(ctx context.Context, id int64) (status [2]client.Status, err error) {
	var r [2]*client.Room
	for side, w := range f.workers {
		p, err := w.StartOpen(ctx, client.OpenOptions{Room: id, PeerGroup: w.peer})
		if err == nil {
			r[side], err = p.Room(ctx)
		}
		var refused *client.Error
		var ended *client.EndedError
		if errors.As(err, &refused) || errors.As(err, &ended) {
			if side == decode { // the other is of no use
				err = r[prefill].Abort(ctx)
				return status, err
			}
			return status, nil
		}
		if err != nil {
			return status, err
		}
	}
	page := []int32{0}
	err = r[decode].Register(ctx, client.RegisterPart{Pool: f.workers[decode].pool, Pages: page})
	if err == nil {
		err = r[prefill].Send(ctx, client.Chunk{Parts: []client.Part{{Pool: f.workers[prefill].pool, Pages: page}}, Last: true})
	}
	var ended *client.EndedError
	if err != nil && !errors.As(err, &ended) {
		return status, err
	}
	for side := range r {
		if status[side], err = r[side].WaitTerminal(ctx); err != nil {
			return status, err
		}
	}
	return status, nil
}

func sleepFor(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
