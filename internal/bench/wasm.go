package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/shm"
)

// wasm measures what it costs to have a backend's decisions made by a WASM guest.
var wasm = Bench{
	Name:  "wasm",
	Short: "what a WASM guest costs beside the same backend as a program",
	Long: "The re-paging guest of the source tree (or --module) in a plugin process that hosts it, against a Go plugin that copies by " +
		"the same package; both copy between pages of one region, and take turns",
	Run:   runWasm,
	Child: wasmChild,
}

const (
	wasmExec   = "exec plugin"
	wasmRounds = 10
	wasmLarge  = 256 // pages of a large op: 1 MiB
	wasmWindow = 8   // large ops under way
)

func runWasm(ctx context.Context, o Options) ([]Result, error) {
	module, err := guestModule(ctx, o)
	if err != nil {
		return nil, err
	}
	guest, err := startCopier(ctx, o, pluginhost.Spec{Name: "guest", Exec: o.Engine, Wasm: module, WasmCache: filepath.Join(o.Dir, "cache")})
	if err != nil {
		return nil, err
	}
	defer guest.stop()
	program, err := startCopier(ctx, o, pluginhost.Spec{Name: "program", Exec: o.Engine, Args: []string{ChildCommand, "wasm", "copier"}})
	if err != nil {
		return nil, err
	}
	defer program.stop()

	var trips, otherTrips latencies
	var small, otherSmall rates
	var large, otherLarge rates
	slice := o.Duration / wasmRounds
	for round := range wasmRounds {
		o.progress("round %d of %d", round+1, wasmRounds)
		for _, m := range []struct {
			e     *echo
			trips *latencies
			small *rates
			large *rates
		}{{guest, &trips, &small, &large}, {program, &otherTrips, &otherSmall, &otherLarge}} {
			if err := pingPong(ctx, m.e, slice, m.trips); err != nil {
				return nil, err
			}
			if err := pour(ctx, m.e, slice, m.small); err != nil {
				return nil, err
			}
			if err := pourLarge(ctx, m.e, slice, m.large); err != nil {
				return nil, err
			}
		}
	}
	return []Result{
		{Name: "event", Value: small.best(), Unit: "µs", Better: Lower, Samples: len(small.perEvent),
			Reference: &Reference{wasmExec, otherSmall.best()},
			Note:      fmt.Sprintf("best round; %d ops of one page a message, an op is three events", boundaryBatch)},
		{Name: "ping_pong_p50", Value: trips.quantile(0.50), Unit: "µs", Better: Lower, Samples: len(trips),
			Reference: &Reference{wasmExec, otherTrips.quantile(0.50)}, Note: "Submit to Done of one op of one page"},
		{Name: "ping_pong_p99", Value: trips.quantile(0.99), Unit: "µs", Better: Lower, Samples: len(trips),
			Reference: &Reference{wasmExec, otherTrips.quantile(0.99)}},
		{Name: "mib", Value: large.best(), Unit: "µs/MiB", Better: Lower, Samples: len(large.perEvent),
			Reference: &Reference{wasmExec, otherLarge.best()}, Note: fmt.Sprintf("best round; ops of 1 MiB, %d under way, in the processor's cache", wasmWindow)},
	}, nil
}

// guestModule is --module, or the guest of the source tree, built.
func guestModule(ctx context.Context, o Options) (string, error) {
	if o.Module != "" {
		return o.Module, nil
	}
	const source = "github.com/terminus-kv/terminus/plugins/sdk/example/repage"
	file := filepath.Join(o.Dir, "repage.wasm")
	o.progress("building %s", source)
	build := exec.CommandContext(ctx, "go", "build", "-ldflags", "-s -w", "-buildmode=c-shared", "-o", file, source)
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the guest: %w: %s; run this in the source tree with Go installed, or name a module with --module", err, out)
	}
	return file, nil
}

// startCopier starts a plugin that is its own peer.
func startCopier(ctx context.Context, o Options, spec pluginhost.Spec) (*echo, error) {
	e := &echo{arrived: make(chan arrived, 1024), setUp: make(chan *contract.PluginEvent, 16), lost: make(chan error, 1)}
	dir := filepath.Join(o.Dir, spec.Name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	host, err := pluginhost.New(pluginhost.Config{
		Node: "bench", Incarnation: 1, HostID: "bench", EngineVersion: "bench", RuntimeDir: dir,
		Log: slog.New(slog.DiscardHandler), Sink: e.sink,
	})
	if err != nil {
		return nil, err
	}
	e.host = host
	if err := e.copier(ctx, spec); err != nil {
		e.stop()
		return nil, err
	}
	return e, nil
}

func (e *echo) copier(ctx context.Context, spec pluginhost.Spec) (err error) {
	if e.plugin, err = e.host.Start(spec); err != nil {
		return err
	}
	if err := e.plugin.Ready(ctx); err != nil {
		return err
	}
	status := e.plugin.Status()
	e.epoch = status.Epoch
	if e.memory, err = newEchoMemory(); err != nil {
		return err
	}
	if err := e.plugin.SendRegion(e.epoch, echoRegion, e.memory.fd, e.memory.lease); err != nil {
		return err
	}
	token, endpoint := make([]byte, 32), status.Handshake.GetEndpoint()
	for _, step := range [][]*contract.HostEvent{
		{{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
			Region: echoRegion, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: echoSize, NoCanary: true}}}},
		{{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{
			Peer: echoPeer + 1, Node: "bench", Incarnation: 1, Epoch: e.epoch, SameHost: true, Token: token, Endpoint: endpoint}}},
			{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
				Peer: echoPeer, Node: "bench", Incarnation: 1, Epoch: e.epoch, Endpoint: endpoint, SameHost: true,
				RequireLane: contract.Lane_LANE_ANY, Token: token}}}},
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
	pool := &contract.PoolAdd{Pool: echoPool, Pages: echoPages, Tensors: []*contract.Tensor{
		{Region: echoRegion, PageStride: echoPage, PageBytes: echoPage},
	}}
	return e.plugin.Send(e.epoch,
		&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool}},
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: echoPeer, Pool: proto.CloneOf(pool)}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
			Plan: echoPlan, SrcPool: echoPool, Peer: echoPeer, DstPool: echoPool, SrcPages: 1, DstPages: 1,
			Slices: []*contract.Slice{{Len: echoPage, SrcStride: echoPage, DstStride: echoPage, Count: 1}}}}})
}

// pourLarge keeps wasmWindow ops of 1 MiB under way for about d.
func pourLarge(ctx context.Context, e *echo, d time.Duration, out *rates) error {
	began := time.Now()
	end := began.Add(d)
	sent, done := 0, 0
	for {
		now := time.Now()
		for now.Before(end) && sent-done < wasmWindow {
			e.last++
			if err := e.plugin.Send(e.epoch, largeSubmit(e.last)); err != nil {
				return err
			}
			sent++
		}
		if sent == done {
			out.perEvent = append(out.perEvent, float64(now.Sub(began).Nanoseconds())/1000/float64(max(done, 1)))
			return ctx.Err()
		}
		a, err := e.ended(ctx)
		if err != nil {
			return err
		}
		done += a.ops
	}
}

// largeSubmit copies the first or second MiB of the region to the third or fourth.
func largeSubmit(op uint64) *contract.HostEvent {
	e := newSubmit()
	m := e.GetSubmit()
	m.Op, m.Seq, m.Bytes = op, op, wasmLarge*echoPage
	m.Generation.Source.Sequence, m.Generation.Destination.Sequence = op, op
	m.Source.Start[0], m.Source.Count[0] = uint32(op%2)*wasmLarge, wasmLarge
	m.Destination.Start[0], m.Destination.Count[0] = (2+uint32(op%2))*wasmLarge, wasmLarge
	return e
}

// wasmChild is the program that the guest is compared with.
func wasmChild(_ context.Context, args []string) error {
	if len(args) != 1 || args[0] != "copier" {
		return errors.New("want copier")
	}
	sdk.Main(&copier{}) // does not return
	return nil
}

// copier is plugins/sdk/example/copy without options.
type copier struct{ *shm.Share }

func (*copier) Info() sdk.Info { return sdk.Info{Name: "copier", Version: sdk.Version} }

func (c *copier) Start(_ context.Context, s sdk.Start) (endpoint []byte, err error) {
	c.Share, err = shm.Listen(s)
	return c.Share.Endpoint(), err
}

func (c *copier) Transfer(op *sdk.Op) {
	peer := op.Peer().Data.(*shm.Remote)
	for p := range op.Pieces(1 << 20) {
		if op.Context().Err() != nil {
			op.Aborted(true)
			return
		}
		if err := peer.Write(op.Context(), p.DstRegion, p.DstOff, p.Src.Bytes[p.SrcOff:][:p.Len]); err != nil {
			op.Fail(contract.Cause_CAUSE_TRANSPORT, true, "%v", err)
			return
		}
	}
	op.Done(contract.Lane_LANE_SHM)
}
