package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// boundary measures what crossing from the engine to a plugin process and back costs.
var boundary = Bench{
	Name:  "boundary",
	Short: "what an event and a round trip cost between the engine and a plugin process",
	Long: "A real plugin process (plugin host, gRPC, plugin SDK) whose backend ends every op at once, against a bare gRPC " +
		"stream between two processes that carries the same messages; both decode everything",
	Run:   runBoundary,
	Child: boundaryChild,
}

const (
	boundaryBatch  = 64 // events a message
	boundaryWindow = 32 // messages under way, at most
	// boundaryEvents is how many events an op is: Submit to the plugin, Accepted and Done back.
	boundaryEvents = 3
	boundaryRounds = 40                    // at most, in which the two are measured in turn, so that they see the same machine
	boundaryRound  = 25 * time.Millisecond // at least
)

func runBoundary(ctx context.Context, o Options) ([]Result, error) {
	echo, err := startEcho(ctx, o)
	if err != nil {
		return nil, err
	}
	defer echo.stop()
	bare, err := startBareGRPC(ctx, o)
	if err != nil {
		return nil, err
	}
	defer bare.stop()

	var trip, bareTrip latencies
	var stream, bareStream rates
	rounds := int(min(max(o.Duration/boundaryRound, 1), boundaryRounds))
	slice := o.Duration / time.Duration(rounds)
	for round := range rounds {
		if round%10 == 0 {
			o.progress("round %d of %d", round+1, rounds)
		}
		for _, m := range []struct {
			p     pipe
			trips *latencies
			rates *rates
		}{{echo, &trip, &stream}, {bare, &bareTrip, &bareStream}} {
			if err := pingPong(ctx, m.p, slice, m.trips); err != nil {
				return nil, err
			}
			if err := pour(ctx, m.p, slice, m.rates); err != nil {
				return nil, err
			}
		}
	}
	const bareName = "bare gRPC stream"
	events, bareEvents := stream.best(), bareStream.best()
	return []Result{
		{Name: "event", Value: events, Unit: "µs", Better: Lower, Samples: len(stream.perEvent),
			Reference: &Reference{bareName, bareEvents}, Target: &Target{OfValue, 0.5},
			Note: fmt.Sprintf("best round; %d ops a message out, %.0f events a message back", boundaryBatch, stream.perFrame())},
		{Name: "ping_pong_p50", Value: trip.quantile(0.50), Unit: "µs", Better: Lower, Samples: len(trip),
			Reference: &Reference{bareName, bareTrip.quantile(0.50)}, Target: &Target{OfRatio, 1.3},
			Note: "Submit to Done of one op"},
		{Name: "ping_pong_p99", Value: trip.quantile(0.99), Unit: "µs", Better: Lower, Samples: len(trip),
			Reference: &Reference{bareName, bareTrip.quantile(0.99)}},
		{Name: "ops", Value: 1e6 / (events * boundaryEvents), Unit: "ops/s", Better: Higher,
			Reference: &Reference{bareName, 1e6 / (bareEvents * boundaryEvents)}},
	}, nil
}

// pipe is a way to a process that ends ops.
type pipe interface {
	// submit sends n ops in one message.
	submit(n int) error
	// ended waits for what comes back next: how many ops have ended, in how many events and messages.
	ended(ctx context.Context) (arrived, error)
}

// arrived is what came back.
type arrived struct{ ops, events, frames int }

// pingPong measures round trips of one op for about d.
func pingPong(ctx context.Context, p pipe, d time.Duration, out *latencies) error {
	for end := time.Now().Add(d); ; {
		began := time.Now()
		if began.After(end) {
			return ctx.Err()
		}
		if err := p.submit(1); err != nil {
			return err
		}
		for ops := 0; ops < 1; {
			a, err := p.ended(ctx)
			if err != nil {
				return err
			}
			ops += a.ops
		}
		*out = append(*out, time.Since(began))
	}
}

// pour keeps boundaryWindow messages of boundaryBatch ops under way for about d.
func pour(ctx context.Context, p pipe, d time.Duration, out *rates) error {
	began := time.Now()
	end := began.Add(d)
	sent, done := 0, 0
	for {
		now := time.Now()
		if now.Before(end) {
			for sent-done <= (boundaryWindow-1)*boundaryBatch {
				if err := p.submit(boundaryBatch); err != nil {
					return err
				}
				sent += boundaryBatch
			}
		}
		if sent == done {
			out.perEvent = append(out.perEvent, float64(now.Sub(began).Nanoseconds())/1000/float64(done*boundaryEvents))
			return ctx.Err()
		}
		a, err := p.ended(ctx)
		if err != nil {
			return err
		}
		done += a.ops
		out.events += a.events
		out.frames += a.frames
	}
}

// latencies are samples of one round trip.
type latencies []time.Duration

// quantile returns µs; the samples get sorted.
func (l latencies) quantile(q float64) float64 {
	if len(l) == 0 {
		return 0
	}
	slices.Sort(l)
	return float64(l[int(q*float64(len(l)-1))].Nanoseconds()) / 1000
}

// rates are the rounds of pour.
type rates struct {
	perEvent       []float64 // µs
	events, frames int       // that came back
}

// best is the round that neighbours disturbed least.
func (r *rates) best() float64     { return slices.Min(r.perEvent) }
func (r *rates) perFrame() float64 { return float64(r.events) / float64(max(r.frames, 1)) }

// boundaryWait bounds every wait for an answer.
const boundaryWait = 20 * time.Second

var errQuiet = errors.New("nothing came back for " + boundaryWait.String())

// numbers makes the ops of one epoch. It uses the memory of old ones again: by then a later one has come
// back, so they have been encoded.
type numbers struct {
	last    uint64
	batches [2 * boundaryWindow][]*contract.HostEvent
	next    int
}

// ops returns the next n ops, at most boundaryBatch: one page each, as an engine submits a small room.
func (c *numbers) ops(n int) []*contract.HostEvent {
	batch := &c.batches[c.next]
	c.next = (c.next + 1) % len(c.batches)
	for len(*batch) < n {
		*batch = append(*batch, newSubmit())
	}
	for _, e := range (*batch)[:n] {
		c.last++
		m := e.GetSubmit()
		page := uint32(c.last % echoPages)
		m.Op, m.Seq = c.last, c.last
		m.Generation.Source.Sequence, m.Generation.Destination.Sequence = c.last, c.last
		m.Source.Start[0], m.Destination.Start[0] = page, page
	}
	return (*batch)[:n]
}

func newSubmit() *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
		Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1}, Destination: &contract.Opener{Incarnation: 2}},
		Direction:  contract.Direction_DIRECTION_WRITE, Peer: echoPeer, Plan: echoPlan,
		Source:      &contract.Runs{Start: []uint32{0}, Count: []uint32{1}},
		Destination: &contract.Runs{Start: []uint32{0}, Count: []uint32{1}},
		LayerTo:     1, Bytes: echoPage,
	}}}
}

// ends counts what a frame of the plugin says.
func ends(frame *contract.PluginFrame) (a arrived, err error) {
	for _, e := range frame.GetEvents() {
		switch e := e.GetEvent().(type) {
		case *contract.PluginEvent_Accepted:
			a.events++
		case *contract.PluginEvent_Done:
			a.events++
			a.ops++
		case *contract.PluginEvent_Failed:
			return a, fmt.Errorf("op %d failed: %s: %s", e.Failed.GetOp(), e.Failed.GetCause(), e.Failed.GetDetail())
		}
	}
	a.frames = 1
	return a, nil
}

// echo is the plugin process.
type echo struct {
	numbers
	host    *pluginhost.Host
	plugin  *pluginhost.Plugin
	memory  *echoMemory
	epoch   uint32
	arrived chan arrived
	setUp   chan *contract.PluginEvent
	lost    chan error
}

func startEcho(ctx context.Context, o Options) (*echo, error) {
	e := &echo{arrived: make(chan arrived, 1024), setUp: make(chan *contract.PluginEvent, 16), lost: make(chan error, 1)}
	host, err := pluginhost.New(pluginhost.Config{
		Node: "bench", Incarnation: 1, HostID: "bench", EngineVersion: "bench", RuntimeDir: o.Dir,
		Log: slog.New(slog.DiscardHandler), Sink: e.sink,
	})
	if err != nil {
		return nil, err
	}
	e.host = host
	if err := e.start(ctx, o); err != nil {
		e.stop()
		return nil, err
	}
	return e, nil
}

func (e *echo) start(ctx context.Context, o Options) (err error) {
	if e.plugin, err = e.host.Start(pluginhost.Spec{Name: echoName, Exec: o.Engine, Args: []string{ChildCommand, "boundary", echoName}}); err != nil {
		return err
	}
	if err := e.plugin.Ready(ctx); err != nil {
		return err
	}
	e.epoch = e.plugin.Status().Epoch
	if e.memory, err = newEchoMemory(); err != nil {
		return err
	}
	if err := e.plugin.SendRegion(e.epoch, echoRegion, e.memory.fd, e.memory.lease); err != nil {
		return err
	}
	return e.prepare(ctx)
}

// prepare makes region, pools, peer and plan known.
func (e *echo) prepare(ctx context.Context) error {
	pool := &contract.PoolAdd{Pool: echoPool, Pages: echoPages, Tensors: []*contract.Tensor{
		{Region: echoRegion, PageStride: echoPage, PageBytes: echoPage},
	}}
	for _, step := range [][]*contract.HostEvent{
		{{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
			Region: echoRegion, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: echoSize, NoCanary: true}}}},
		{{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
			Peer: echoPeer, Node: "other", Incarnation: 2, Epoch: 1, SameHost: true, RequireLane: contract.Lane_LANE_ANY, Token: make([]byte, 32)}}}},
	} {
		if err := e.plugin.Send(e.epoch, step...); err != nil {
			return err
		}
		select {
		case ev := <-e.setUp:
			if ev.GetRegionReady() == nil && ev.GetPeerReady() == nil {
				return fmt.Errorf("the plugin answers %v", ev)
			}
		case err := <-e.lost:
			return err
		case <-time.After(boundaryWait):
			return errQuiet
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return e.plugin.Send(e.epoch,
		&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool}},
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{
			Peer: echoPeer, Pool: proto.CloneOf(pool)}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
			Plan: echoPlan, SrcPool: echoPool, Peer: echoPeer, DstPool: echoPool, SrcPages: 1, DstPages: 1,
			Slices: []*contract.Slice{{Len: echoPage, SrcStride: echoPage, DstStride: echoPage, Count: 1}}}}})
}

// sink is called by the plugin host, one event at a time.
func (e *echo) sink(ev pluginhost.Event) {
	fail := func(err error) {
		select {
		case e.lost <- err:
		default:
		}
	}
	switch ev.Kind {
	case pluginhost.Frame:
		a, err := ends(ev.Frame)
		if err != nil {
			fail(err)
			return
		}
		if a.events > 0 {
			e.arrived <- a // room for more than the window
			return
		}
		for _, s := range ev.Frame.Events {
			select {
			case e.setUp <- s:
			default:
			}
		}
	case pluginhost.Lost, pluginhost.Down:
		fail(fmt.Errorf("the plugin is %s: %w", ev.Kind, ev.Err))
	}
}

func (e *echo) submit(n int) error { return e.plugin.Send(e.epoch, e.ops(n)...) }

func (e *echo) ended(ctx context.Context) (arrived, error) {
	select {
	case a := <-e.arrived:
		return a, nil
	default:
	}
	timeout := time.NewTimer(boundaryWait)
	defer timeout.Stop()
	select {
	case a := <-e.arrived:
		return a, nil
	case err := <-e.lost:
		return arrived{}, err
	case <-timeout.C:
		return arrived{}, errQuiet
	case <-ctx.Done():
		return arrived{}, ctx.Err()
	}
}

func (e *echo) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), boundaryWait)
	defer cancel()
	_ = e.host.Close(ctx)
	if e.memory != nil {
		e.memory.close()
	}
}
