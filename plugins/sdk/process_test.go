package sdk_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// process is a real plugin process: this test binary, re-executed (see TestMain).
type process struct {
	t       testing.TB
	cmd     *exec.Cmd
	client  *goplugin.Client
	plugin  contract.PluginClient
	ctrl    int // host end of the control socketpair
	session grpc.BidiStreamingClient[contract.HostFrame, contract.PluginFrame]
	control grpc.BidiStreamingClient[contract.HostFrame, contract.PluginFrame]
	stderr  bytes.Buffer
}

func startProcess(t testing.TB) *process {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, ctrl: pair[0], cmd: exec.Command(os.Args[0])}
	child := os.NewFile(uintptr(pair[1]), "control")
	p.cmd.ExtraFiles = []*os.File{child}
	p.cmd.Env = append(os.Environ(), "SDK_TEST_PLUGIN=1", sdk.ControlFDEnv+"=3")
	p.client = goplugin.NewClient(&goplugin.ClientConfig{
		HandshakeConfig: sdk.HandshakeConfig, Plugins: sdk.HostPlugins(), Cmd: p.cmd,
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC}, GRPCDialOptions: sdk.HostDialOptions(),
		Logger: hclog.NewNullLogger(), Stderr: &p.stderr, StartTimeout: sdktest.Wait,
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: dir},
	})
	t.Cleanup(func() {
		p.client.Kill()
		if p.ctrl >= 0 {
			unix.Close(p.ctrl)
		}
		os.RemoveAll(dir)
	})
	protocol, err := p.client.Client()
	if err != nil {
		t.Fatal(err)
	}
	child.Close()
	raw, err := protocol.Dispense(sdk.PluginName)
	if err != nil {
		t.Fatal(err)
	}
	p.plugin = raw.(contract.PluginClient)
	return p
}

// open does the handshake and opens both streams.
func (p *process) open() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), sdktest.Wait)
	p.t.Cleanup(cancel)
	resp, err := p.plugin.Handshake(ctx, &contract.HandshakeRequest{Versions: []uint32{1}, Node: "n", Incarnation: 1, Epoch: 1, RuntimeDir: "/"})
	if err != nil || resp.Error != "" {
		p.t.Fatal(err, resp.GetError())
	}
	if p.session, err = p.plugin.Session(ctx); err != nil {
		p.t.Fatal(err)
	}
	if p.control, err = p.plugin.Control(ctx); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) send(events ...*contract.HostEvent) {
	p.t.Helper()
	if err := p.session.Send(&contract.HostFrame{Events: events}); err != nil {
		p.t.Fatal(err)
	}
}

// until reads events of the session until one matches.
func (p *process) until(match func(*contract.PluginEvent) bool) {
	p.t.Helper()
	for {
		frame, err := p.session.Recv()
		if err != nil {
			p.t.Fatal(err)
		}
		for _, e := range frame.Events {
			if match(e) {
				return
			}
		}
	}
}

func (p *process) region(id uint64) *sdktest.Region {
	p.t.Helper()
	r, memory, lease, err := sdktest.NewMemory(16 * pageSize)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(r.Free)
	if err := sdk.SendRegion(p.ctrl, id, memory, lease); err != nil {
		p.t.Fatal(err)
	}
	unix.Close(memory)
	unix.Close(lease)
	binary.LittleEndian.PutUint64(r.Bytes, 77)
	p.send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
		Region: id, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: 16 * pageSize, Canary: 77,
	}}})
	p.until(func(e *contract.PluginEvent) bool { return e.GetRegionReady().GetRegion() == id })
	if got := binary.LittleEndian.Uint64(r.Bytes); got != ^uint64(77) {
		p.t.Fatalf("canary %#x", got)
	}
	r.ID = id
	return r
}

// exit waits for the end of the process and returns its exit code.
func (p *process) exit() int {
	p.t.Helper()
	eventually(p.t, "exit of the plugin", p.client.Exited)
	return p.cmd.ProcessState.ExitCode()
}

func pool(id uint64, r *sdktest.Region) *contract.PoolAdd {
	return &contract.PoolAdd{Pool: id, Pages: 16, Tensors: []*contract.Tensor{{Region: r.ID, PageStride: pageSize, PageBytes: pageSize}}}
}

// TestProcess moves bytes between two memfds through a real plugin process, then stops it in good order.
func TestProcess(t *testing.T) {
	p := startProcess(t)
	p.open()
	src, dst := p.region(1), p.region(2)
	for i := range src.Bytes {
		src.Bytes[i] = byte(i * 7)
	}
	slice := &contract.Slice{Len: pageSize, Count: 1}
	p.send(
		&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool(1, src)}},
		&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{Peer: 1, Token: make([]byte, 32), RequireLane: contract.Lane_LANE_ANY}}})
	p.until(func(e *contract.PluginEvent) bool { return e.GetPeerReady() != nil })
	p.send(
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: 1, Pool: pool(2, dst)}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{Plan: 1, SrcPool: 1, Peer: 1, DstPool: 2, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{slice}}}},
		&contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
			Op: 1, Seq: 1, Direction: contract.Direction_DIRECTION_WRITE, Peer: 1, Plan: 1, LayerTo: 1, Bytes: 16 * pageSize,
			Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 1, Sequence: 2}},
			Source:     sdktest.Runs(sdktest.Pages(0, 16)), Destination: sdktest.Runs(sdktest.Pages(0, 16)),
		}}})
	p.until(func(e *contract.PluginEvent) bool { return e.GetDone().GetOp() == 1 })
	if !bytes.Equal(src.Bytes, dst.Bytes) {
		t.Error("the bytes differ")
	}
	frame, err := p.control.Recv()
	if err != nil || len(frame.Events) != 1 || frame.Events[0].GetBeat().GetSeq() == 0 {
		t.Errorf("beat %v, %v", frame, err)
	}
	if err := p.session.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if code := p.exit(); code != 0 {
		t.Errorf("exit code %d after the end of the session: %s", code, p.stderr.String())
	}
	if !src.LeaseEnded() || !dst.LeaseEnded() {
		t.Error("a lease survived the process")
	}
}

// TestHostGone: the end of the control socketpair is the death of the host.
func TestHostGone(t *testing.T) {
	p := startProcess(t)
	p.open()
	r := p.region(1)
	unix.Close(p.ctrl)
	p.ctrl = -1
	if code := p.exit(); code != 3 || !strings.Contains(p.stderr.String(), "the engine is gone") {
		t.Errorf("exit code %d: %s", code, p.stderr.String())
	}
	if !r.LeaseEnded() {
		t.Error("the lease survived the process")
	}
}

// TestHostGoneLate: the end of a session is the first that a plugin sees of the death of its host when the
// machine is busy. It went on to close in good order, and left its children running.
func TestHostGoneLate(t *testing.T) {
	t.Setenv("SDK_TEST_CLOSE", "1m")
	p := startProcess(t)
	p.open()
	if err := p.session.CloseSend(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(250 * time.Millisecond) // longer than the plugin waits for the reason
	unix.Close(p.ctrl)
	p.ctrl = -1
	if code := p.exit(); code != 3 || !strings.Contains(p.stderr.String(), "the engine is gone") {
		t.Errorf("exit code %d: %s", code, p.stderr.String())
	}
}

func TestSignals(t *testing.T) {
	p := startProcess(t)
	p.open()
	if err := p.cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	p.region(1) // still there
	if err := p.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := p.exit(); code != 0 {
		t.Errorf("exit code %d: %s", code, p.stderr.String())
	}
}

// TestControlGarbage: what is not 8 bytes and two descriptors harms nothing and leaks nothing.
func TestControlGarbage(t *testing.T) {
	p := startProcess(t)
	p.open()
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	for _, m := range []struct {
		data []byte
		fds  []int
	}{{[]byte("x"), nil}, {make([]byte, 8), []int{pipe[1]}}, {make([]byte, 9), []int{pipe[1], pipe[1]}}, {make([]byte, 8), []int{pipe[1], pipe[1], pipe[1]}}, {make([]byte, 4096), nil}} {
		if err := unix.Sendmsg(p.ctrl, m.data, unix.UnixRights(m.fds...), nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	unix.Close(pipe[1])
	p.region(1)
	if n, err := unix.Read(pipe[0], make([]byte, 1)); n != 0 || err != nil { // end of file: nobody kept the other end
		t.Errorf("read %d, %v", n, err)
	}
}

func TestStreamsNeedTheHandshake(t *testing.T) {
	p := startProcess(t)
	stream, err := p.plugin.Session(context.Background())
	if err == nil {
		_, err = stream.Recv()
	}
	if err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a session without a handshake: %v", err)
	}
}

func TestByHand(t *testing.T) {
	run := func(env []string, args ...string) (out, problems string, code int) {
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env = append(append(os.Environ(), "SDK_TEST_PLUGIN=1"), env...)
		var o, e strings.Builder
		cmd.Stdout, cmd.Stderr = &o, &e
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return o.String(), e.String(), cmd.ProcessState.ExitCode()
	}
	if out, problems, code := run(nil); code != 2 || out != "" || !strings.Contains(problems, "script 1.2.3 is a Terminus transfer plugin") {
		t.Errorf("by hand: %d %q %q", code, out, problems)
	}
	cookie := sdk.HandshakeConfig.MagicCookieKey + "=" + sdk.HandshakeConfig.MagicCookieValue
	for _, fd := range []string{"", "x", "1", "999"} {
		if _, problems, code := run([]string{cookie, sdk.ControlFDEnv + "=" + fd}); code != 2 || !strings.Contains(problems, sdk.ControlFDEnv) {
			t.Errorf("control descriptor %q: %d %q", fd, code, problems)
		}
	}
	out, _, code := run(nil, "info")
	var d struct {
		Name, Version    string
		Features         []string
		ContractVersions []uint32        `json:"contract_versions"`
		ConfigSchema     json.RawMessage `json:"config_schema"`
	}
	if err := json.Unmarshal([]byte(out), &d); err != nil || code != 0 || d.Name != "script" || len(d.Features) != 5 ||
		len(d.ContractVersions) != 1 || !bytes.Contains(d.ConfigSchema, []byte(`"lanes"`)) {
		t.Errorf("info: %d %v %s", code, err, out)
	}
}

// BenchmarkSubmit measures the cost of an op through a real process: Submit, Accepted, Done, 64 in
// flight, no bytes.
func BenchmarkSubmit(b *testing.B) {
	p := startProcess(b)
	p.open()
	src, dst := p.region(1), p.region(2)
	slice := &contract.Slice{Len: pageSize, Count: 1}
	p.send(
		&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool(1, src)}},
		&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{Peer: 1, Token: make([]byte, 32), RequireLane: contract.Lane_LANE_ANY}}})
	p.until(func(e *contract.PluginEvent) bool { return e.GetPeerReady() != nil })
	p.send(
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: 1, Pool: pool(2, dst)}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{Plan: 1, SrcPool: 1, Peer: 1, DstPool: 2, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{slice}}}})
	op := uint64(0)
	submit := func(n int) {
		frame := &contract.HostFrame{}
		for range n {
			op++
			frame.Events = append(frame.Events, &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
				Op: op, Seq: op, Direction: contract.Direction_DIRECTION_WRITE, Peer: 1, Plan: 1, LayerTo: 1,
				Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 1, Sequence: 2}},
			}}})
		}
		if err := p.session.Send(frame); err != nil {
			b.Fatal(err)
		}
	}
	b.ResetTimer()
	submit(min(64, b.N))
	for done := 0; done < b.N; {
		frame, err := p.session.Recv()
		if err != nil {
			b.Fatal(err)
		}
		fresh := 0
		for _, e := range frame.Events {
			if e.GetDone() != nil {
				fresh++
			}
		}
		if done += fresh; fresh > 0 && int(op) < b.N {
			submit(min(fresh, b.N-int(op)))
		}
	}
	b.StopTimer()
}
