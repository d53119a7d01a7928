package bench

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	// setupBound is how long a plugin may take for one answer while it is set up.
	setupBound = 60 * time.Second
	// stallBound is how long a measurement may go on without the end of an op.
	stallBound = 60 * time.Second

	wireRegion  = 1
	wirePeer    = 1
	wireCanary  = 0x5ca1ab1edeadbeef
	wireHostID  = "bench"
	smallPages  = 1 // ids of pools and plans: of pages of 4 KiB
	normalPages = 2 // of kvPage
)

// poolPages are the page sizes of the pools, by id.
var poolPages = map[uint64]int{smallPages: 4 << 10, normalPages: kvPage}

// side is one engine's half: a plugin host with one plugin and the memory of one worker.
type side struct {
	node    string
	host    *pluginhost.Host
	plugin  *pluginhost.Plugin
	epoch   uint32
	up      *contract.HandshakeResponse
	answers chan *contract.PluginEvent // of the setup
	lost    chan error                 // 1
	memory  []byte
	fds     []int

	mu  sync.Mutex
	run *transferRun
}

// wire is a writer and a receiver, ready for ops.
type wire struct {
	from, to *side
	lane     lane
	region   int
	lastOp   uint64
}

// transferRun is one measurement. Guarded by side.mu.
type transferRun struct {
	w               *wire
	size            int
	total           int
	submitted, done int
	err             error
	changed         chan struct{} // 1: done grew, or err is set
}

// startWire starts both plugins with the lane's options and makes everything known to them.
func startWire(ctx context.Context, o Options, l lane, region int) (_ *wire, err error) {
	w := &wire{lane: l, region: region}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.to, err = startSide(ctx, o, "to", l, region); err != nil {
		return w, err
	}
	if w.from, err = startSide(ctx, o, "from", l, region); err != nil {
		return w, err
	}
	token := make([]byte, 32)
	if _, err := rand.Read(token); err != nil {
		return w, err
	}
	to := []*contract.HostEvent{{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{
		Peer: wirePeer, Node: w.from.node, Incarnation: 1, Epoch: w.from.epoch, SameHost: true, Token: token, Endpoint: w.from.up.Endpoint,
	}}}}
	for id := range poolPages {
		pool := w.pool(id)
		to = append(to, &contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool}},
			&contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: &contract.Grant{
				Grant: id, Destination: opener(id), Parts: []*contract.GrantPart{{Pool: id, Pages: pages(0, pool.Pages)}},
			}}})
	}
	if err := w.to.plugin.Send(w.to.epoch, to...); err != nil {
		return w, err
	}
	for range poolPages {
		if err := w.to.await(ctx, "Granted", func(e *contract.PluginEvent) bool { return e.GetGranted() != nil }); err != nil {
			return w, err
		}
	}
	if err := w.from.plugin.Send(w.from.epoch, &contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
		Peer: wirePeer, Node: w.to.node, Incarnation: 1, Epoch: w.to.epoch, Endpoint: w.to.up.Endpoint, SameHost: true,
		RequireLane: l.want, Token: token,
	}}}); err != nil {
		return w, err
	}
	if err := w.from.await(ctx, "PeerReady", func(e *contract.PluginEvent) bool { return e.GetPeerReady() != nil }); err != nil {
		return w, err
	}
	var from []*contract.HostEvent
	for id, bytes := range poolPages {
		from = append(from,
			&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: w.pool(id)}},
			&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: wirePeer, Pool: w.pool(id)}}},
			&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
				Plan: id, SrcPool: id, Peer: wirePeer, DstPool: id, SrcPages: 1, DstPages: 1,
				Slices: []*contract.Slice{{Len: uint64(bytes), Count: 1}},
			}}})
	}
	return w, w.from.plugin.Send(w.from.epoch, from...)
}

// pool covers the whole region with pages of one size.
func (w *wire) pool(id uint64) *contract.PoolAdd {
	n := poolPages[id]
	return &contract.PoolAdd{Pool: id, Pages: uint32(w.region / n), Tensors: []*contract.Tensor{
		{Region: wireRegion, PageStride: uint64(n), PageBytes: uint64(n)},
	}}
}

func opener(pool uint64) *contract.Opener { return &contract.Opener{Incarnation: 1, Sequence: pool} }

func pages(start, count uint32) *contract.Runs {
	return &contract.Runs{Start: []uint32{start}, Count: []uint32{count}}
}

// close stops both plugins and gives the memory back.
func (w *wire) close() {
	for _, s := range []*side{w.from, w.to} { // the writer first
		if s != nil {
			s.close()
		}
	}
}

// startSide starts one host with one plugin and hands it the memory.
func startSide(ctx context.Context, o Options, node string, l lane, region int) (_ *side, err error) {
	s := &side{node: node, answers: make(chan *contract.PluginEvent, 16), lost: make(chan error, 1)}
	defer func() {
		if err != nil {
			s.close()
			err = fmt.Errorf("%s: %w", node, err)
		}
	}()
	up := make(chan pluginhost.Event, 1)
	dir := filepath.Join(o.Dir, l.name+"-"+node)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return s, err
	}
	s.host, err = pluginhost.New(pluginhost.Config{
		Node: node, Incarnation: 1, HostID: wireHostID, EngineVersion: "bench", RuntimeDir: dir,
		Features: []string{"receiver_checked", "byte_progress", "fence_peer", "strided", "layer_range"},
		Log:      slog.New(slog.NewTextHandler(io.Discard, nil)),
		Sink: func(e pluginhost.Event) {
			switch e.Kind {
			case pluginhost.Up:
				select {
				case up <- e:
				default:
				}
			case pluginhost.Frame:
				s.frame(e.Frame)
			case pluginhost.Lost, pluginhost.Down:
				s.fail(e.Err)
			}
		},
	})
	if err != nil {
		return s, err
	}
	if s.plugin, err = s.host.Start(pluginhost.Spec{Name: "tcp", Exec: o.Engine, Args: []string{"plugin", "tcp"}, Options: []byte(l.options)}); err != nil {
		return s, err
	}
	ready, cancel := context.WithTimeout(ctx, setupBound)
	defer cancel()
	select {
	case e := <-up:
		s.epoch, s.up = e.Epoch, e.Handshake
	case err := <-s.lost:
		return s, err
	case <-ready.Done():
		return s, fmt.Errorf("the plugin did not start: %w", ready.Err())
	}
	return s, s.addMemory(ctx, region)
}

// addMemory makes the region, touches it and hands it to the plugin.
func (s *side) addMemory(ctx context.Context, size int) error {
	fd, err := unix.MemfdCreate("terminus-bench", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	s.fds = append(s.fds, fd)
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return fmt.Errorf("memory of %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("memory: seals: %w", err)
	}
	if s.memory, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("memory of %d bytes: map: %w", size, err)
	}
	for i := 0; i < size; i += 8 {
		binary.LittleEndian.PutUint64(s.memory[i:], uint64(i)*0x9e3779b97f4a7c15)
	}
	out, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("memory: re-open: %w", err)
	}
	s.fds = append(s.fds, out)
	lease, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("memory: lease: %w", err)
	}
	s.fds = append(s.fds, lease[0], lease[1])
	canary := s.memory[size-8:]
	binary.LittleEndian.PutUint64(canary, wireCanary)
	if err := s.plugin.SendRegion(s.epoch, wireRegion, out, lease[1]); err != nil {
		return err
	}
	if err := s.plugin.Send(s.epoch, &contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
		Region: wireRegion, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: uint64(size), CanaryOffset: uint64(size - 8), Canary: wireCanary,
	}}}); err != nil {
		return err
	}
	return s.await(ctx, "RegionReady", func(e *contract.PluginEvent) bool { return e.GetRegionReady() != nil })
}

// await waits for one answer of the setup.
func (s *side) await(ctx context.Context, what string, match func(*contract.PluginEvent) bool) error {
	ctx, cancel := context.WithTimeout(ctx, setupBound)
	defer cancel()
	select {
	case e := <-s.answers:
		if !match(e) {
			return fmt.Errorf("%s: the plugin answered %v instead of %s", s.node, e, what)
		}
		return nil
	case err := <-s.lost:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: no %s: %w", s.node, what, ctx.Err())
	}
}

func (s *side) close() {
	if s.host != nil {
		ctx, cancel := context.WithTimeout(context.Background(), setupBound)
		defer cancel()
		_ = s.host.Close(ctx) // it has logged what it could not do
	}
	for _, fd := range s.fds {
		unix.Close(fd)
	}
	if s.memory != nil {
		_ = unix.Munmap(s.memory) // it is mapped
	}
}

// frame takes what the plugin said. Called by the host, one frame at a time.
func (s *side) frame(f *contract.PluginFrame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	done := 0
	for _, e := range f.GetEvents() {
		switch ev := e.GetEvent().(type) {
		case *contract.PluginEvent_Accepted, *contract.PluginEvent_Progress:
		case *contract.PluginEvent_Done:
			if s.run == nil || ev.Done.Lane != s.run.w.lane.want || int(ev.Done.Bytes) != s.run.size || !ev.Done.Quiet {
				s.end(fmt.Errorf("unexpected end of an op: %v", ev.Done))
				continue
			}
			done++
		case *contract.PluginEvent_Failed, *contract.PluginEvent_Skipped, *contract.PluginEvent_Aborted:
			s.end(fmt.Errorf("an op did not end as done: %v", e))
		default:
			select {
			case s.answers <- e:
			default: // nobody waits for so many
			}
		}
	}
	if done > 0 && s.run.err == nil {
		s.run.done += done
		s.submit()
	}
}

// submit fills the window of the present measurement. s.mu is held.
func (s *side) submit() {
	r := s.run
	n := min(r.done+transferDepth, r.total) - r.submitted
	if n > 0 {
		events := make([]*contract.HostEvent, n)
		for i := range events {
			events[i] = r.w.op(r.size, r.submitted+i)
		}
		r.submitted += n
		if err := s.plugin.Send(s.epoch, events...); err != nil {
			r.err = err
		}
	}
	r.notify()
}

func (r *transferRun) notify() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// op is op k of a measurement: the k-th piece of the memory, around and around.
func (w *wire) op(size, k int) *contract.HostEvent {
	pool := uint64(normalPages)
	if size < kvPage {
		pool = smallPages
	}
	per := size / poolPages[pool]
	runs := pages(uint32(k%(w.region/size)*per), uint32(per))
	w.lastOp++
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
		Op: w.lastOp, Seq: w.lastOp, Generation: &contract.Generation{Source: opener(pool), Destination: opener(pool)},
		Direction: contract.Direction_DIRECTION_WRITE, Peer: wirePeer, Plan: pool, Source: runs, Destination: runs,
		LayerTo: 1, Bytes: uint64(size),
	}}}
}

// end makes the present measurement fail. s.mu is held.
func (s *side) end(err error) {
	if s.run != nil && s.run.err == nil {
		s.run.err = err
		s.run.notify()
	}
}

// fail is called when the plugin is over.
func (s *side) fail(err error) {
	if err == nil {
		err = errors.New("the plugin ended")
	}
	s.mu.Lock()
	s.end(err)
	s.mu.Unlock()
	select {
	case s.lost <- err:
	default:
	}
}

// measure moves ops of size bytes, from the first Submit to the last Done.
func (w *wire) measure(ctx context.Context, size, ops int) (moved, error) {
	s := w.from
	before, err := w.cpu()
	if err != nil {
		return moved{}, err
	}
	r := &transferRun{w: w, size: size, total: ops, changed: make(chan struct{}, 1)}
	begin := time.Now()
	s.mu.Lock()
	s.run = r
	s.submit()
	s.mu.Unlock()
	stall := time.NewTimer(stallBound)
	defer stall.Stop()
	for {
		s.mu.Lock()
		done, err := r.done, r.err
		s.mu.Unlock()
		if err != nil {
			return moved{}, err
		}
		if done == ops {
			break
		}
		select {
		case <-r.changed:
			stall.Reset(stallBound)
		case err := <-w.to.lost:
			return moved{}, fmt.Errorf("the receiver: %w", err)
		case <-stall.C:
			return moved{}, fmt.Errorf("no op ended for %s (%d of %d)", stallBound, done, ops)
		case <-ctx.Done():
			return moved{}, ctx.Err()
		}
	}
	wall := time.Since(begin)
	after, err := w.cpu()
	return moved{bytes: size * ops, wall: wall, cpu: after - before}, err
}

// cpu is the processor time of both plugins and of this process, which is their engine.
func (w *wire) cpu() (sum time.Duration, err error) {
	for _, pid := range []int{os.Getpid(), w.from.plugin.Status().PID, w.to.plugin.Status().PID} {
		var t unix.Timespec
		// The processor clock of a process, as clock_getcpuclockid(3) makes it.
		if err := unix.ClockGettime(int32(^pid)<<3|2, &t); err != nil {
			return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
		}
		sum += time.Duration(t.Nano())
	}
	return sum, nil
}
