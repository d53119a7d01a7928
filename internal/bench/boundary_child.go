package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// boundaryChild is the far end: the plugin, or the bare server.
func boundaryChild(ctx context.Context, args []string) error {
	switch {
	case len(args) == 1 && args[0] == echoName:
		sdk.Main(echoBackend{}) // does not return
		return nil
	case len(args) == 2 && args[0] == "bare":
		return serveBare(ctx, args[1])
	}
	return fmt.Errorf("want %s, or bare SOCKET", echoName)
}

// What the plugin is told about its one region, pool, peer and plan.
const (
	echoName   = "echo"
	echoRegion = 1
	echoPool   = 1
	echoPeer   = 1
	echoPlan   = 1
	echoPages  = 1024
	echoPage   = 4096
	echoSize   = echoPages * echoPage
)

// echoBackend ends every op at once: what is left is the boundary.
type echoBackend struct{}

func (echoBackend) Info() sdk.Info {
	return sdk.Info{Name: echoName, Version: sdk.Version, Limits: &contract.Limits{MaxOps: 1 << 14}}
}
func (echoBackend) Start(context.Context, sdk.Start) ([]byte, error) { return []byte(echoName), nil }
func (echoBackend) AddRegion(*sdk.Region) error                      { return nil }
func (echoBackend) RemoveRegion(*sdk.Region)                         {}
func (echoBackend) AddPeer(*sdk.Peer) (contract.Lane, error)         { return contract.Lane_LANE_SHM, nil }
func (echoBackend) RemovePeer(*sdk.Peer)                             {}
func (echoBackend) Transfer(op *sdk.Op)                              { op.Done(contract.Lane_LANE_SHM) }
func (echoBackend) Close() error                                     { return nil }

// echoMemory is a worker's memory.
type echoMemory struct{ memfd, fd, lease, worker int }

func newEchoMemory() (*echoMemory, error) {
	m := &echoMemory{memfd: -1, fd: -1, lease: -1, worker: -1}
	fail := func(what string, err error) (*echoMemory, error) {
		m.close()
		return nil, fmt.Errorf("memory of the benchmark: %s: %w", what, err)
	}
	var err error
	if m.memfd, err = unix.MemfdCreate("terminus-bench", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return fail("memfd", err)
	}
	if err = unix.Ftruncate(m.memfd, echoSize); err != nil {
		return fail("truncate", err)
	}
	if _, err = unix.FcntlInt(uintptr(m.memfd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fail("seal", err)
	}
	if m.fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", m.memfd), unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return fail("re-open", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fail("lease", err)
	}
	m.worker, m.lease = pair[0], pair[1]
	return m, nil
}

func (m *echoMemory) close() {
	for _, fd := range []int{m.memfd, m.fd, m.lease, m.worker} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// bareServer answers every Submit with Accepted and Done, on the goroutine that reads.
type bareServer struct {
	contract.UnimplementedPluginServer
}

func (bareServer) Session(stream grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	for {
		in, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		out := &contract.PluginFrame{}
		for _, e := range in.GetEvents() {
			op := e.GetSubmit().GetOp()
			out.Events = append(out.Events,
				&contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: op}}},
				&contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{
					Op: op, Bytes: echoPage, Quiet: true, Lane: contract.Lane_LANE_SHM}}})
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

// serveBare serves until ctx ends or stdin, which the parent holds, is closed.
func serveBare(ctx context.Context, socket string) error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(sdk.MaxMessage), grpc.InitialWindowSize(sdk.Window), grpc.InitialConnWindowSize(sdk.Window))
	contract.RegisterPluginServer(s, bareServer{})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	context.AfterFunc(ctx, s.Stop)
	return s.Serve(l)
}

// bareGRPC is the reference: the same messages over a gRPC stream of its own.
type bareGRPC struct {
	numbers
	cmd    *exec.Cmd
	stdin  io.Closer
	conn   *grpc.ClientConn
	stream grpc.BidiStreamingClient[contract.HostFrame, contract.PluginFrame]
}

func startBareGRPC(ctx context.Context, o Options) (*bareGRPC, error) {
	socket := filepath.Join(o.Dir, "bare.sock")
	b := &bareGRPC{cmd: o.child(ctx, "boundary", "bare", socket)}
	b.cmd.Stderr = o.Stderr
	stdin, err := b.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	b.stdin = stdin
	if err := b.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the reference: %w", err)
	}
	if err := b.connect(ctx, socket); err != nil {
		b.stop()
		return nil, fmt.Errorf("connect to the reference: %w", err)
	}
	return b, nil
}

func (b *bareGRPC) connect(ctx context.Context, socket string) (err error) {
	b.conn, err = grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(sdk.Window), grpc.WithInitialConnWindowSize(sdk.Window))
	if err != nil {
		return err
	}
	ready, cancel := context.WithTimeout(ctx, boundaryWait)
	defer cancel()
	for { // until the child listens
		if _, err := os.Stat(socket); err == nil {
			break
		}
		select {
		case <-ready.Done():
			return ready.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	b.stream, err = contract.NewPluginClient(b.conn).Session(ctx, grpc.WaitForReady(true))
	return err
}

func (b *bareGRPC) submit(n int) error {
	return b.stream.Send(&contract.HostFrame{Events: b.ops(n)})
}

func (b *bareGRPC) ended(context.Context) (arrived, error) {
	frame, err := b.stream.Recv()
	if err != nil {
		return arrived{}, err
	}
	return ends(frame)
}

func (b *bareGRPC) stop() {
	if b.conn != nil {
		b.conn.Close()
	}
	b.stdin.Close()
	_ = b.cmd.Wait() // killed by the end of ctx at the latest, or by the end of its stdin
}
