package node_test

import (
	"context"
	"encoding/binary"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// breacher is a plugin without the SDK: it takes regions and peers as it should and breaks the contract
// at the first Submit, in the way its mode says.
type breacher struct {
	contract.UnimplementedPluginServer
	mode string
	once sync.Once
	send func(...*contract.PluginEvent) error // to the host, from any goroutine
	fds  chan [2]int
	op   uint64 // the last one submitted
	seq  uint64
}

func breacherMain(mode string) {
	b := &breacher{mode: mode, fds: make(chan [2]int, 16)}
	go b.control()
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig: sdk.HandshakeConfig,
		Plugins:         goplugin.PluginSet{sdk.PluginName: &sdk.GRPCPlugin{Service: b}},
		Logger:          hclog.NewNullLogger(),
		GRPCServer:      goplugin.DefaultGRPCServer,
	})
}

// control reads regions' descriptors and exits with the host.
func (b *breacher) control() {
	const ctrl = 3
	buf, oob := make([]byte, 8), make([]byte, unix.CmsgSpace(8))
	for {
		n, oobn, _, _, err := unix.Recvmsg(ctrl, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			os.Exit(0)
		}
		ms, _ := unix.ParseSocketControlMessage(oob[:oobn])
		fds, _ := unix.ParseUnixRights(&ms[0])
		b.fds <- [2]int{fds[0], fds[1]}
	}
}

func (b *breacher) Handshake(_ context.Context, r *contract.HandshakeRequest) (*contract.HandshakeResponse, error) {
	for b.mode == "gated" && r.Epoch > 1 { // until the file is there that the next argument names
		if _, err := os.Stat(os.Args[len(os.Args)-1]); err == nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if b.mode == "refuses" {
		return &contract.HandshakeResponse{Error: "the library is missing; install it"}, nil
	}
	return &contract.HandshakeResponse{
		Version: 1, Name: "tcp", PluginVersion: "breaks " + b.mode, Kinds: []contract.Kind{contract.Kind_KIND_TRANSFER}, Endpoint: []byte("none"),
	}, nil
}

func (b *breacher) Control(s grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	for seq := uint64(1); ; seq++ {
		if err := s.Send(event(&contract.PluginEvent{Event: &contract.PluginEvent_Beat{Beat: &contract.Beat{Seq: seq}}})); err != nil {
			return err
		}
		select {
		case <-s.Context().Done():
			return nil
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func event(e *contract.PluginEvent) *contract.PluginFrame {
	return &contract.PluginFrame{Events: []*contract.PluginEvent{e}}
}

func (b *breacher) Session(s grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	var mu sync.Mutex
	b.send = func(events ...*contract.PluginEvent) error {
		mu.Lock()
		defer mu.Unlock()
		for _, out := range events {
			if err := s.Send(event(out)); err != nil {
				return err
			}
		}
		return nil
	}
	for {
		f, err := s.Recv()
		if err != nil {
			return err
		}
		for _, ev := range f.Events {
			if err := b.send(b.answer(ev)...); err != nil {
				return err
			}
		}
	}
}

// dieOnce ends the process unless the file is there that the next argument names, which it makes.
func dieOnce() {
	mark := os.Args[len(os.Args)-1]
	if _, err := os.Stat(mark); err != nil {
		if err := os.WriteFile(mark, nil, 0o600); err != nil {
			panic(err)
		}
		os.Exit(1)
	}
}

func (b *breacher) answer(ev *contract.HostEvent) []*contract.PluginEvent {
	switch v := ev.Event.(type) {
	case *contract.HostEvent_RegionAdd:
		switch b.mode {
		case "mute":
			return nil
		case "dies-before-canary":
			dieOnce()
		}
		fds := <-b.fds
		mem, err := unix.Mmap(fds[0], 0, int(v.RegionAdd.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			os.Exit(1)
		}
		if !v.RegionAdd.NoCanary {
			binary.LittleEndian.PutUint64(mem[v.RegionAdd.CanaryOffset:], ^v.RegionAdd.Canary)
		}
		switch b.mode {
		case "dies-after-canary":
			dieOnce()
		case "dies-always":
			os.Exit(1)
		case "late":
			b.once.Do(func() { go scribble(mem, 1) }) // the first region only
		case "squatter", "squatter-ctrl", "squatter-lease":
			if !v.RegionAdd.NoCanary { // not the epoch that comes next
				squat(b.mode, fds)
			}
		}
		return []*contract.PluginEvent{{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: v.RegionAdd.Region}}}}
	case *contract.HostEvent_PeerAdd:
		lane := contract.Lane_LANE_ANY
		switch b.mode {
		case "slow-peer":
			time.Sleep(time.Second)
		case "cma":
			lane = contract.Lane_LANE_CMA
		}
		return []*contract.PluginEvent{{Event: &contract.PluginEvent_PeerReady{PeerReady: &contract.PeerReady{Peer: v.PeerAdd.Peer, Lane: lane}}}}
	case *contract.HostEvent_Stats:
		stats := &contract.Stats{Id: v.Stats.Id, LastSeq: b.seq}
		if b.mode == "silent" || b.mode == "stuck" || b.mode == "slow" {
			stats.OpenOps = []uint64{b.op}
		}
		return []*contract.PluginEvent{{Event: &contract.PluginEvent_Stats{Stats: stats}}}
	case *contract.HostEvent_Drain:
		return []*contract.PluginEvent{{Event: &contract.PluginEvent_Drained{Drained: &contract.Drained{}}}}
	case *contract.HostEvent_Submit:
		return b.breach(v.Submit)
	}
	return nil
}

func (b *breacher) breach(m *contract.Submit) []*contract.PluginEvent {
	b.op = m.Op
	accepted := &contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: m.Op}}}
	done := func(op, n uint64) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Bytes: n, Quiet: true, Lane: contract.Lane_LANE_TCP}}}
	}
	progress := func(n uint64) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: m.Op, Bytes: n}}}
	}
	b.seq++
	if m.Seq != b.seq { // what the SDK refuses
		return []*contract.PluginEvent{accepted, {Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: m.Op, Cause: contract.Cause_CAUSE_PROTOCOL, Detail: "gap in Submit.seq", Quiet: true}}}}
	}
	switch b.mode {
	case "slow": // behaves, and takes a second
		time.AfterFunc(time.Second, func() { b.send(done(m.Op, m.Bytes)) })
		return []*contract.PluginEvent{accepted}
	case "slow-peer": // behaves, but for its peer
		return []*contract.PluginEvent{accepted, done(m.Op, m.Bytes)}
	case "end-twice":
		failed := &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: m.Op, Cause: contract.Cause_CAUSE_TRANSPORT}}}
		return []*contract.PluginEvent{accepted, failed, failed}
	case "never-accepted":
		return []*contract.PluginEvent{done(m.Op, m.Bytes)}
	case "foreign-op":
		return []*contract.PluginEvent{accepted, done(m.Op+1, m.Bytes)}
	case "progress-backwards":
		return []*contract.PluginEvent{accepted, progress(4096), progress(512)}
	case "cma-done":
		by := done(m.Op, m.Bytes)
		by.GetDone().Lane = contract.Lane_LANE_CMA
		return []*contract.PluginEvent{accepted, by}
	case "short-done":
		return []*contract.PluginEvent{accepted, done(m.Op, m.Bytes-1)}
	case "forgets", "silent", "stuck":
		if len(os.Args) > 4 { // a file that says that the op is here
			if err := os.WriteFile(os.Args[4], nil, 0o600); err != nil {
				os.Exit(1)
			}
		}
		return []*contract.PluginEvent{accepted}
	}
	return nil
}

// A plugin that breaks the contract ends its own rooms, with a reason, at both ends; the engine goes on
// and says what happened.
func TestPluginBreachesEndItsRooms(t *testing.T) {
	for mode, want := range map[string]client.Reason{
		"end-twice": "transfer_failed", "never-accepted": "plugin_lost", "foreign-op": "plugin_lost",
		"progress-backwards": "plugin_lost", "short-done": "plugin_lost", "forgets": "lost_by_plugin", "silent": "stalled",
		"cma": "transfer_failed", "cma-done": "plugin_lost",
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			dir := tempDir(t)
			self, err := os.Executable()
			must(t, err)
			set := []string{"plugins.tcp.exec=" + self, `plugins.tcp.args=["plugin","breach","` + mode + `"]`}
			if mode == "silent" {
				set = append(set, "clocks.stall=1s")
			}
			pe, de := start(t, dir, "p", set...), start(t, dir, "d")
			p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
			ctx := short(t)
			rs, err := p.Open(ctx, client.OpenOptions{Room: 1})
			must(t, err)
			rd, err := d.Open(ctx, client.OpenOptions{Room: 1, PeerGroup: "prefill"})
			must(t, err)
			must(t, rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: []int32{5, 6}}))
			must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1, 2}}}, Last: true}))
			for _, r := range []*client.Room{rs, rd} {
				st, err := r.WaitTerminal(ctx)
				must(t, err)
				if f, _ := r.Failure(ctx); st != client.Failed || f.Reason != want {
					t.Errorf("%v, want Failed(%s): %+v\n%s", st, want, f, explain(1))
				}
			}
			must(t, rd.WaitReusable(ctx))
			if mode == "end-twice" || want == "plugin_lost" {
				eventually(t, "the breach is counted and named", func() bool {
					ps, err := pe.admin.Plugins(ctx)
					return err == nil && strings.Contains(ps[0].Detail, "R")
				})
			}
			if st, err := pe.admin.Status(ctx); err != nil || st.Rooms != 0 {
				t.Errorf("status %+v, %v", st, err)
			}
		})
	}
}

// Ops that are aborted while they wait for their peer to be ready leave no gap in Submit.seq: the ops
// after them are not refused.
func TestAbortWhileWaitingForPeerLeavesNoGap(t *testing.T) {
	dir := tempDir(t)
	self, err := os.Executable()
	must(t, err)
	pe := start(t, dir, "p", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","breach","slow-peer"]`)
	de := start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	var rooms []*client.Room
	for i := range int64(3) {
		rs, err := p.Open(ctx, client.OpenOptions{Room: i})
		must(t, err)
		rd, err := d.Open(ctx, client.OpenOptions{Room: i, PeerGroup: "prefill"})
		must(t, err)
		must(t, rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: []int32{int32(i)}}))
		must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}, Last: true}))
		eventually(t, "submitted", func() bool { return rs.Poll() == client.Transferring })
		rooms = append(rooms, rs)
	}
	must(t, rooms[0].Abort(ctx)) // the plugin takes a second to be ready with the peer
	must(t, rooms[0].WaitReusable(ctx))
	for _, r := range rooms[1:] {
		st, err := r.WaitTerminal(ctx)
		must(t, err)
		if st != client.Success {
			t.Error(explain(r.ID()))
		}
	}
}
