package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// rooms measures whole requests, from open to verdict.
var rooms = Bench{
	Name:  "rooms",
	Short: "rooms a second end to end: two engines, Go workers, small payloads",
	Long: fmt.Sprintf("Two engines as `engine run -c` starts them, with the built-in backend; a prefill and a decode worker, both in this process. "+
		"A room is open on both sides, register, send of one page of %d KiB and %d bytes of aux, verdict on both sides, aux, release; "+
		"once as many as go with %d under way, once %d a second", kvPageBytes>>10, auxBytes, roomsWindow, roomsPaced),
	Run: runRooms,
}

const (
	roomsTarget = 5000 // rooms/s
	roomsPaced  = 1000 // rooms/s
	roomsWindow = 256  // rooms under way, at most
	auxBytes    = 64
	// roomBound is how long one room may take, whatever else the machine does.
	roomBound = 60 * time.Second
)

func runRooms(ctx context.Context, o Options) (results []Result, err error) {
	c, err := startCluster(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.stop()
	t, err := startTraffic(ctx, c, roomsWindow)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.stop()) }()

	o.progress("warming up")
	if _, err := t.measure(ctx, o.Duration/4, 0); err != nil {
		return nil, err
	}
	o.progress("as many rooms as go")
	full, err := t.measure(ctx, o.Duration, 0)
	if err != nil {
		return nil, err
	}
	o.progress("%d rooms a second", roomsPaced)
	paced, err := t.measure(ctx, o.Duration, roomsPaced)
	if err != nil {
		return nil, err
	}
	if err := c.wantIdle(ctx); err != nil {
		return nil, err
	}
	all := full.engines + full.plugins + full.workers
	return []Result{
		{Name: "rooms", Value: full.rate, Unit: "rooms/s", Better: Higher, Target: &Target{OfValue, roomsTarget}, Samples: len(full.latencies),
			Note: fmt.Sprintf("wall time; %d under way; both workers in one process", roomsWindow)},
		{Name: "rooms_of_two_cores", Value: 2e6 / all, Unit: "rooms/s", Better: Higher, Target: &Target{OfValue, roomsTarget},
			Note: "two seconds of processor time by that of a room: all that was used, engines, plugins and workers"},
		{Name: "engine_cpu", Value: full.engines, Unit: "µs/room", Better: Lower, Note: "processor time of both engines, without plugins"},
		{Name: "plugin_cpu", Value: full.plugins, Unit: "µs/room", Better: Lower, Note: "of both plugins"},
		{Name: "worker_cpu", Value: full.workers, Unit: "µs/room", Better: Lower, Note: "of both workers"},
		{Name: "verdict_p50", Value: full.latencies.quantile(0.50) / 1000, Unit: "ms", Better: Lower, Samples: len(full.latencies),
			Note: "first open until both workers read Success, as many as go"},
		{Name: "verdict_p99", Value: full.latencies.quantile(0.99) / 1000, Unit: "ms", Better: Lower, Samples: len(full.latencies)},
		{Name: "paced_rooms", Value: paced.rate, Unit: "rooms/s", Better: Higher, Note: fmt.Sprintf("%d were asked for", roomsPaced)},
		{Name: "paced_verdict_p50", Value: paced.latencies.quantile(0.50) / 1000, Unit: "ms", Better: Lower, Samples: len(paced.latencies),
			Note: "from when the room was due, so that a delay before its open counts"},
		{Name: "paced_verdict_p99", Value: paced.latencies.quantile(0.99) / 1000, Unit: "ms", Better: Lower, Samples: len(paced.latencies)},
		{Name: "paced_engine_cpu", Value: paced.engines, Unit: "µs/room", Better: Lower},
	}, nil
}

// traffic keeps rooms under way between two workers, each in a lane of its own: a goroutine, a page on
// either side, and room ids that are the lane's number modulo the number of lanes.
type traffic struct {
	cluster *cluster
	workers [2]*worker
	lanes   int
	rounds  []int64           // of each lane: rooms so far
	ended   [2][]chan sight   // to each lane, from the goroutine that reads the status page
	told    [2][]*client.Room // by lane: the last that was handed on
	wg      sync.WaitGroup
	errs    [2]error // of the watchers
	ending  context.CancelFunc
}

// sight is the end of a room as its worker saw it.
type sight struct {
	room   int64
	status client.Status
	at     time.Time
}

// traversal is what one measurement saw.
type traversal struct {
	rate                      float64 // rooms/s
	engines, plugins, workers float64 // µs of processor time a room
	latencies                 latencies
}

func startTraffic(ctx context.Context, c *cluster, lanes int) (*traffic, error) {
	t := &traffic{cluster: c, lanes: lanes, rounds: make([]int64, lanes)}
	for side := range t.workers {
		w, err := c.dial(ctx, "rooms", side, 4*lanes, lanes)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("worker of %s: %w", nodeNames[side], err), t.stop())
		}
		t.workers[side] = w
		t.told[side] = make([]*client.Room, lanes)
		for range lanes {
			t.ended[side] = append(t.ended[side], make(chan sight, 1))
		}
	}
	watching, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t.ending = cancel
	for side := range t.workers {
		t.wg.Go(func() { t.errs[side] = t.watch(watching, side) })
	}
	return t, nil
}

// stop closes the sessions. Its error says what went wrong while nobody asked.
func (t *traffic) stop() error {
	if t.ending != nil {
		t.ending()
	}
	t.wg.Wait()
	err := errors.Join(t.errs[:]...)
	for _, w := range t.workers {
		if w != nil {
			err = errors.Join(err, w.close())
		}
	}
	return err
}

// watch reads a worker's status page and tells each lane when its room has ended and its pages are its
// own again.
func (t *traffic) watch(ctx context.Context, side int) error {
	w := t.workers[side]
	for {
		if err := w.Wait(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("worker of %s: %w", nodeNames[side], err)
		}
		now := time.Now()
		w.Changes(func(ch client.Change) {
			lane := int(ch.Room.ID()) % t.lanes
			if !ch.Status.Terminal() || !ch.Residency.Reusable() || t.told[side][lane] == ch.Room {
				return
			}
			t.told[side][lane] = ch.Room
			t.ended[side][lane] <- sight{ch.Room.ID(), ch.Status, now}
		})
	}
}

// load runs rooms at a rate until ctx ends.
func (t *traffic) load(ctx context.Context, rate float64) error {
	for ctx.Err() == nil {
		// In slices, each of which ends by itself: no room is cut.
		if _, err := t.measure(context.WithoutCancel(ctx), time.Second/4, rate); err != nil {
			return err
		}
	}
	return nil
}

// measure runs rooms for about d: as many as go, or rate a second.
func (t *traffic) measure(ctx context.Context, d time.Duration, rate float64) (*traversal, error) {
	ctx, cancel := context.WithTimeout(ctx, d+roomBound)
	defer cancel()
	due := make(chan time.Time, 1<<16)
	var out traversal
	var mu sync.Mutex
	var failure error
	began := time.Now()
	before, err := t.cpu(ctx)
	if err != nil {
		return nil, err
	}
	var lanes sync.WaitGroup
	for lane := range t.lanes {
		lanes.Go(func() {
			var mine latencies
			err := t.serve(ctx, lane, func() (time.Time, bool) {
				if rate > 0 {
					at, ok := <-due
					return at, ok
				}
				now := time.Now()
				return now, now.Sub(began) < d
			}, &mine)
			mu.Lock()
			defer mu.Unlock()
			out.latencies = append(out.latencies, mine...)
			if err != nil && failure == nil {
				failure = fmt.Errorf("lane %d: %w", lane, err)
				cancel()
			}
		})
	}
	if rate > 0 {
		pace(ctx, began, d, rate, due)
	}
	close(due)
	lanes.Wait()
	wall := time.Since(began)
	if failure != nil {
		return nil, failure
	}
	after, err := t.cpu(ctx)
	if err != nil {
		return nil, err
	}
	n := float64(max(len(out.latencies), 1))
	micro := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / n }
	out.rate = n / wall.Seconds()
	out.engines, out.plugins, out.workers = micro(after.engines-before.engines), micro(after.plugins-before.plugins), micro(after.workers-before.workers)
	return &out, nil
}

// pace says when rooms are due, in time.
func pace(ctx context.Context, began time.Time, d time.Duration, rate float64, due chan<- time.Time) {
	for i := 0; ; i++ {
		at := began.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		if at.Sub(began) >= d || ctx.Err() != nil {
			return
		}
		time.Sleep(time.Until(at))
		select {
		case due <- at:
		case <-ctx.Done():
			return
		}
	}
}

// serve runs one room after the other in a lane while next gives it one.
func (t *traffic) serve(ctx context.Context, lane int, next func() (time.Time, bool), out *latencies) error {
	for {
		at, ok := next()
		if !ok {
			return nil
		}
		id := t.rounds[lane]*int64(t.lanes) + int64(lane)
		t.rounds[lane]++
		end, err := t.room(ctx, id, lane)
		if err != nil {
			return fmt.Errorf("room %d: %w", id, err)
		}
		*out = append(*out, end.Sub(at))
	}
}

// room is the whole life of one room; it returns when both workers have read Success.
func (t *traffic) room(ctx context.Context, id int64, lane int) (end time.Time, err error) {
	r, err := t.open(ctx, id)
	if err != nil {
		return end, err
	}
	aux := t.write(id, lane)
	page := []int32{int32(lane)}
	registered, err := r[decode].StartRegister(ctx, client.RegisterPart{Pool: t.workers[decode].pool, Pages: page})
	if err != nil {
		return end, err
	}
	sent, err := r[prefill].StartSend(ctx, client.Chunk{Parts: []client.Part{{Pool: t.workers[prefill].pool, Pages: page}}, Last: true, Aux: aux})
	if err != nil {
		return end, err
	}
	for side := range r {
		select {
		case s := <-t.ended[side][lane]:
			if s.room != id || s.status != client.Success {
				f, _ := r[side].Failure(ctx)
				return end, fmt.Errorf("%s: %s of room %d: %s %s", nodeNames[side], s.status, s.room, f.Reason, f.Detail)
			}
			if s.at.After(end) {
				end = s.at
			}
		case <-ctx.Done():
			return end, fmt.Errorf("%s: still %s: %w", nodeNames[side], r[side].Poll(), context.Cause(ctx))
		}
	}
	if err := t.check(ctx, r[decode], lane, aux); err != nil {
		return end, err
	}
	var released [2]*client.Pending
	for side := range r {
		if released[side], err = r[side].StartRelease(ctx); err != nil {
			return end, err
		}
	}
	for _, p := range []*client.Pending{registered, sent, released[prefill], released[decode]} {
		if err := p.Wait(ctx); err != nil {
			return end, err
		}
	}
	return end, nil
}

// open opens a room on both sides.
func (t *traffic) open(ctx context.Context, id int64) (r [2]*client.Room, err error) {
	var p [2]*client.PendingRoom
	for side := range p {
		if p[side], err = t.workers[side].StartOpen(ctx, client.OpenOptions{Room: id, PeerGroup: t.workers[side].peer}); err != nil {
			return r, err
		}
	}
	for side := range p {
		if r[side], err = p[side].Room(ctx); err != nil {
			return r, err
		}
	}
	return r, nil
}

// write puts what only this room holds into the source's page and returns its aux record.
func (t *traffic) write(id int64, lane int) []byte {
	w := t.workers[prefill]
	for _, mem := range [][]byte{w.k, w.v} {
		page := mem[lane*kvTensor : (lane+1)*kvTensor]
		binary.LittleEndian.PutUint64(page, uint64(id))
		binary.LittleEndian.PutUint64(page[kvTensor-8:], ^uint64(id))
	}
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, uint64(id)), auxBytes/8)
}

// check wants the aux record and the page that were sent.
func (t *traffic) check(ctx context.Context, r *client.Room, lane int, aux []byte) error {
	got, err := r.Aux(ctx)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, aux) {
		return fmt.Errorf("aux is %x, sent was %x", got, aux)
	}
	from, to := t.workers[prefill], t.workers[decode]
	span := func(mem []byte) []byte { return mem[lane*kvTensor : (lane+1)*kvTensor] }
	if !bytes.Equal(span(from.k), span(to.k)) || !bytes.Equal(span(from.v), span(to.v)) {
		return errors.New("the page differs from what was sent")
	}
	return nil
}

// used is processor time.
type used struct{ engines, plugins, workers time.Duration }

func (t *traffic) cpu(ctx context.Context) (u used, err error) {
	for _, e := range t.cluster.engines {
		cpu, err := processCPU(e.pid)
		if err != nil {
			return u, err
		}
		pid, _, err := e.plugin(ctx)
		if err != nil {
			return u, err
		}
		plugin, err := processCPU(pid)
		if err != nil {
			return u, err
		}
		u.engines += cpu
		u.plugins += plugin
	}
	u.workers, err = processCPU(os.Getpid())
	return u, err
}
