package sdk

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Version is the version of this SDK.
const Version = "1.0.0"

// Exit codes of a plugin process.
const (
	exitOK       = 0
	exitFault    = 1 // the backend or the session failed; the reason is on stderr
	exitUsage    = 2
	exitHostGone = 3 // the control socketpair reported end of file
)

// Main runs the backend as a plugin process and does not return. Call it from main, first thing.
//
// Started by an engine it serves until the engine ends the session, shuts it down or dies. With the
// argument "info" it prints a description as JSON. Started by hand it says what it is.
func Main(b Backend) {
	session := NewSession(b)
	if len(os.Args) > 1 && os.Args[1] == "info" {
		os.Exit(printInfo(session, os.Stdout, os.Stderr))
	}
	if os.Getenv(HandshakeConfig.MagicCookieKey) != HandshakeConfig.MagicCookieValue {
		fmt.Fprintf(os.Stderr, "%s %s is a Terminus transfer plugin: an engine starts it (plugins.%s.exec in engine.yaml).\nTo see what it offers run: %s info\n",
			session.info.Name, session.info.Version, session.info.Name, os.Args[0])
		os.Exit(exitUsage)
	}
	os.Exit(serve(session))
}

// description is what "info" prints.
type description struct {
	Name             string          `json:"name"`
	Version          string          `json:"version"`
	Kinds            []string        `json:"kinds"`
	MemoryKinds      []string        `json:"memory_kinds"`
	Features         []string        `json:"features"`
	Limits           limits          `json:"limits"`
	ContractVersions []uint32        `json:"contract_versions"`
	SDK              sdkInfo         `json:"sdk"`
	ConfigSchema     json.RawMessage `json:"config_schema"`
}

type limits struct {
	MaxOps            uint32 `json:"max_ops"`
	MaxOpsPerPeer     uint32 `json:"max_ops_per_peer"`
	MaxOpBytes        uint64 `json:"max_op_bytes"`
	MaxBytesPerPeer   uint64 `json:"max_bytes_per_peer"`
	MaxRuns           uint32 `json:"max_runs"`
	MaxRegions        uint32 `json:"max_regions"`
	ProgressTimeoutNs uint64 `json:"progress_timeout_ns"`
}

type sdkInfo struct {
	Language string `json:"language"`
	Version  string `json:"version"`
}

func printInfo(s *Session, out, problems io.Writer) int {
	resp, err := s.describe()
	if err != nil {
		fmt.Fprintln(problems, err)
		return exitFault
	}
	d := description{
		Name: resp.Name, Version: resp.PluginVersion, Features: append([]string{}, resp.Features...),
		ContractVersions: []uint32{ContractVersion}, SDK: sdkInfo{resp.Sdk.Language, resp.Sdk.Version},
		ConfigSchema: json.RawMessage(resp.ConfigSchema),
		Limits: limits{
			resp.Limits.MaxOps, resp.Limits.MaxOpsPerPeer, resp.Limits.MaxOpBytes, resp.Limits.MaxBytesPerPeer,
			resp.Limits.MaxRuns, resp.Limits.MaxRegions, resp.Limits.ProgressTimeoutNs,
		},
	}
	for _, k := range resp.Kinds {
		d.Kinds = append(d.Kinds, k.String())
	}
	for _, k := range resp.MemoryKinds {
		d.MemoryKinds = append(d.MemoryKinds, k.String())
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	if err := e.Encode(d); err != nil {
		fmt.Fprintln(problems, err)
		return exitFault
	}
	return exitOK
}

// hostGoneWait is how long the end of a session waits for the host's death that may explain it.
const hostGoneWait = 100 * time.Millisecond

// heapFloor is memory that is never touched, hence never backed by pages. It makes the garbage collector
// let that much gather before it runs: the heap of most plugins is so small that it would otherwise run
// every 4 MiB, which under load costs as much as the ops themselves.
const heapFloor = 32 << 20

// serve runs the plugin process and returns its exit code.
func serve(s *Session) int {
	floor := make([]byte, heapFloor)
	defer runtime.KeepAlive(floor)
	signal.Ignore(os.Interrupt) // ^C at the engine's terminal is the engine's to handle
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, unix.SIGTERM)
	// A line on stderr that the dead engine no longer reads must not kill us before our children.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)

	stderr := os.Stderr // go-plugin replaces the variable by a pipe of its own
	sock, err := controlSocket()
	if err != nil {
		fmt.Fprintln(stderr, err)
		return exitUsage
	}
	hostGone := make(chan error, 1)
	go func() { hostGone <- receiveDescriptors(s, sock) }()

	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		goplugin.Serve(&goplugin.ServeConfig{
			HandshakeConfig: HandshakeConfig,
			Plugins:         goplugin.PluginSet{PluginName: &GRPCPlugin{Service: &grpcServer{session: s}}},
			Logger:          hclog.NewNullLogger(),
			GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
				return grpc.NewServer(append(opts, grpc.ForceServerCodecV2(newFrameCodec()),
					grpc.MaxRecvMsgSize(MaxMessage), grpc.MaxSendMsgSize(MaxMessage),
					grpc.InitialWindowSize(Window), grpc.InitialConnWindowSize(Window))...)
			},
		})
	}()

	gone := func(err error) int {
		// Nothing may touch worker memory from here on, so there is nothing to close in good order.
		killGroup()
		fmt.Fprintf(stderr, "%s: the engine is gone (%v)\n", s.info.Name, err)
		return exitHostGone
	}
	select {
	case err := <-hostGone:
		return gone(err)
	case <-terminated:
	case <-stopped: // GRPCController.Shutdown
	case <-s.Over():
		select { // the end of a stream may be the first that is seen of the death of the host
		case err := <-hostGone:
			return gone(err)
		case <-stopped:
		case <-time.After(hostGoneWait):
		}
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err = <-closed:
	case err := <-hostGone:
		return gone(err)
	}
	if hungUp(sock) { // though nobody has told yet: a dead host ends no children of ours
		return gone(io.EOF)
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", s.info.Name, err)
		return exitFault
	}
	if s.overErr != nil {
		fmt.Fprintf(stderr, "%s: %v\n", s.info.Name, s.overErr)
		return exitFault
	}
	return exitOK
}

// killGroup takes the plugin's children along, which no engine is left to end. The host makes every
// plugin the leader of a process group; one that is not was started by somebody else and is left alone.
func killGroup() {
	if pid := os.Getpid(); unix.Getpgrp() == pid {
		_ = unix.Kill(-pid, unix.SIGKILL)
	}
}

// controlSocket finds the plugin's end of the control socketpair.
func controlSocket() (int, error) {
	text := os.Getenv(ControlFDEnv)
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return -1, fmt.Errorf("%s is %q; the engine sets it to the number of a descriptor", ControlFDEnv, text)
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		return -1, fmt.Errorf("%s=%d is no SOCK_SEQPACKET socket (type %d, %v)", ControlFDEnv, fd, kind, err)
	}
	unix.CloseOnExec(fd)
	return fd, nil
}

// hungUp tells whether the other end of a socketpair is closed.
func hungUp(sock int) bool {
	p := []unix.PollFd{{Fd: int32(sock)}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLHUP != 0
}

// receiveDescriptors reads the control socketpair until the host is gone. A message that is not 8
// bytes and two descriptors is dropped, its descriptors closed.
func receiveDescriptors(s *Session, sock int) error {
	data := make([]byte, 64)
	control := make([]byte, unix.CmsgSpace(16*4))
	for {
		n, cn, _, _, err := unix.Recvmsg(sock, data, control, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.EOF
		}
		fds := rights(control[:cn])
		if n != 8 || len(fds) != 2 {
			for _, fd := range fds {
				unix.Close(fd)
			}
			s.count("bad_descriptor_messages", 1)
			s.logf(contract.Log_LEVEL_WARN, "the engine broke the contract: a control message of %d bytes with %d descriptors; 8 and 2 are expected", n, len(fds))
			continue
		}
		s.Descriptors(binary.LittleEndian.Uint64(data), fds[0], fds[1])
	}
}

// rights returns all descriptors of the control data.
func rights(control []byte) []int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	var all []int
	for i := range messages {
		if len(messages[i].Data)%4 != 0 {
			continue // the kernel never makes it; ParseUnixRights would panic
		}
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
			all = append(all, fds...)
		}
	}
	return all
}

// grpcServer is the gRPC carrier.
type grpcServer struct {
	contract.UnimplementedPluginServer
	session *Session
}

func (g *grpcServer) Handshake(ctx context.Context, req *contract.HandshakeRequest) (*contract.HandshakeResponse, error) {
	resp, err := g.session.Handshake(ctx, req)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return resp, nil
}

func (g *grpcServer) Session(stream grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	return g.session.ServeSession(stream)
}

func (g *grpcServer) Control(stream grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	return g.session.ServeControl(stream)
}
