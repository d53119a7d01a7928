package pluginhost

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// The test binary is also the plugin (args "plugin MODE") and the host that gets killed ("host MODE DIR").
func TestMain(m *testing.M) {
	// Under the race detector a process sleeps a second before it exits; plugins inherit this.
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case "plugin":
			pluginMain(os.Args[2])
			os.Exit(0)
		case "host":
			hostMain(os.Args[2], os.Args[3])
			os.Exit(0)
		case "wake": // the process of argument 2 after the time of argument 3
			wakeMain(os.Args[2], os.Args[3])
			os.Exit(0)
		}
	}
	goleak.VerifyTestMain(m)
}

// pluginMain is a plugin that behaves, except for what its mode says.
func pluginMain(mode string) {
	switch mode {
	case "crash-at-start":
		fmt.Fprintln(os.Stderr, "cannot find the frobnicator")
		os.Exit(7)
	case "mute":
		time.Sleep(time.Minute)
	case "pollute":
		fmt.Println("Welcome to my plugin!")
		time.Sleep(time.Minute)
	case "pollute-endless":
		for {
			os.Stdout.WriteString(strings.Repeat("x", 1<<16))
		}
	case "stopped-at-start":
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "foreign": // a socket of somebody else, by a name in the right place
		path := os.Getenv("PLUGIN_UNIX_SOCKET_DIR") + "/s"
		if err := os.Symlink(os.Getenv("FOREIGN_SOCKET"), path); err != nil {
			panic(err)
		}
		fmt.Printf("1|1|unix|%s|grpc|\n", path)
		time.Sleep(time.Minute)
	case "tcp":
		fmt.Println("1|1|tcp|127.0.0.1:9|grpc|")
		time.Sleep(time.Minute)
	case "elsewhere":
		fmt.Println("1|1|unix|/tmp/elsewhere.sock|grpc|")
		time.Sleep(time.Minute)
	case "sdk":
		sdk.Main(nullBackend{})
	case "sdk-with-child", "sdk-with-heir", "sdk-with-daemon", "sdk-with-child-and-a-lot-to-say":
		if strings.HasSuffix(mode, "say") {
			stderr := os.Stderr // go-plugin replaces the variable
			go func() {
				for {
					stderr.WriteString("still here\n")
					time.Sleep(10 * time.Microsecond)
				}
			}()
		}
		sdk.Main(nullBackend{child: true, heir: mode == "sdk-with-heir", daemon: mode == "sdk-with-daemon"})
	case "sleep": // a descendant that nobody looks after
		time.Sleep(time.Minute)
	}
	p := &testPlugin{mode: mode, regions: make(chan regionFDs, 16)}
	go p.lease()
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig: sdk.HandshakeConfig,
		Plugins:         goplugin.PluginSet{sdk.PluginName: &sdk.GRPCPlugin{Service: p}},
		Logger:          hclog.NewNullLogger(),
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			return grpc.NewServer(append(opts, grpc.MaxRecvMsgSize(16<<20))...)
		},
	})
	if mode == "slow-exit" {
		time.Sleep(time.Minute)
	}
}

type regionFDs struct {
	id         uint64
	mem, lease int
}

type testPlugin struct {
	contract.UnimplementedPluginServer
	mode    string
	regions chan regionFDs
	busy    atomic.Bool
	givesUp atomic.Bool   // its Control has to end first
	beats   atomic.Uint64 // sent
}

// lease reads the control socket and exits when the host is gone.
func (p *testPlugin) lease() {
	switch p.mode {
	case "closes-control":
		return
	case "ignores-host-death":
		signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)
		return
	}
	unix.CloseOnExec(ctrlFD)
	buf, oob := make([]byte, 8), make([]byte, unix.CmsgSpace(8))
	for {
		n, oobn, _, _, err := unix.Recvmsg(ctrlFD, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			os.Exit(0)
		}
		messages, _ := unix.ParseSocketControlMessage(oob[:oobn])
		fds, _ := unix.ParseUnixRights(&messages[0])
		p.regions <- regionFDs{binary.LittleEndian.Uint64(buf), fds[0], fds[1]}
	}
}

func (p *testPlugin) Handshake(_ context.Context, r *contract.HandshakeRequest) (*contract.HandshakeResponse, error) {
	hello := &contract.HandshakeResponse{Version: 1, Name: "test", PluginVersion: fmt.Sprint(r.Epoch),
		Kinds: []contract.Kind{contract.Kind_KIND_TRANSFER}}
	switch p.mode {
	case "no-answer":
		time.Sleep(time.Minute)
	case "refuses":
		return &contract.HandshakeResponse{Error: "option ucx_tls: unknown transport \"foo\""}, nil
	case "new-version":
		hello.Version = 9
	case "needs-feature":
		hello.RequiredFeatures = []string{"telepathy"}
	case "kind-zero":
		hello.Kinds = append(hello.Kinds, 0)
	case "environment":
		hello.Endpoint = []byte(strings.Join(os.Environ(), "\n") + "\nargs=" + strings.Join(os.Args, " ") + "\nconfig=" + string(r.ConfigJson))
	}
	return hello, nil
}

func (p *testPlugin) Control(s grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	for seq := uint64(1); p.mode != "no-beat"; seq++ {
		beat := &contract.Beat{Seq: seq}
		if p.mode == "busy" || p.busy.Load() {
			beat.Busy = []*contract.Busy{{Kind: contract.BusyKind_BUSY_KIND_REGISTER, SinceNs: 1, Subject: 5}}
		}
		if err := s.Send(frame(&contract.PluginEvent{Event: &contract.PluginEvent_Beat{Beat: beat}})); err != nil {
			return err
		}
		p.beats.Add(1)
		if p.mode == "busy" {
			break
		}
		if p.givesUp.Load() {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	<-s.Context().Done()
	return nil
}

func frame(events ...*contract.PluginEvent) *contract.PluginFrame {
	return &contract.PluginFrame{Events: events}
}

// Session answers Submit by Accepted and Done, RegionAdd by RegionReady, Drain by Drained. A Submit is
// also what triggers the mode's misbehaviour.
func (p *testPlugin) Session(s grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame]) error {
	for {
		f, err := s.Recv()
		if err != nil {
			return err
		}
		if size := proto.Size(f); size > sdk.MaxFrame {
			syscall.Write(2, fmt.Appendf(nil, "the host sent a frame of %d bytes\n", size))
			os.Exit(5)
		}
		var out contract.PluginFrame
		for _, ev := range f.Events {
			switch ev := ev.Event.(type) {
			case *contract.HostEvent_Submit:
				if p.mode == "ends-session" {
					return nil
				}
				p.misbehave(s, ev.Submit.Op)
				out.Events = append(out.Events,
					&contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: ev.Submit.Op}}},
					&contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: ev.Submit.Op, Quiet: true, Lane: contract.Lane_LANE_SHM}}})
			case *contract.HostEvent_RegionAdd:
				out.Events = append(out.Events, p.region(ev.RegionAdd))
			case *contract.HostEvent_Drain:
				if p.mode == "never-drains" {
					continue
				}
				out.Events = append(out.Events, &contract.PluginEvent{Event: &contract.PluginEvent_Drained{Drained: &contract.Drained{}}})
			case *contract.HostEvent_Fault:
				// Not os.Stderr: go-plugin has replaced it by a stream that os.Exit would cut.
				syscall.Write(2, fmt.Appendf(nil, "told: %s %s\n", ev.Fault.Rule, ev.Fault.Field))
				os.Exit(4)
			}
		}
		if len(out.Events) > 0 {
			if err := s.Send(&out); err != nil {
				return err
			}
		}
	}
}

func (p *testPlugin) region(add *contract.RegionAdd) *contract.PluginEvent {
	fds := <-p.regions
	mem, err := unix.Mmap(fds.mem, 0, int(add.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil || fds.id != add.Region || binary.LittleEndian.Uint64(mem[add.CanaryOffset:]) != add.Canary {
		return &contract.PluginEvent{Event: &contract.PluginEvent_RegionFailed{RegionFailed: &contract.RegionFailed{
			Region: add.Region, Cause: contract.Cause_CAUSE_PROTOCOL, Detail: fmt.Sprint(fds, err)}}}
	}
	binary.LittleEndian.PutUint64(mem[add.CanaryOffset:], ^add.Canary)
	return &contract.PluginEvent{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: add.Region}}}
}

func (p *testPlugin) misbehave(s grpc.BidiStreamingServer[contract.HostFrame, contract.PluginFrame], op uint64) {
	send := func(ev *contract.PluginEvent) { _ = s.Send(frame(ev)) }
	failed := func(detail int, cause contract.Cause) *contract.PluginEvent {
		return &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: 1, Cause: cause, Detail: strings.Repeat("x", detail)}}}
	}
	switch p.mode {
	case "crash":
		syscall.Write(2, []byte("segmentation violation in libnothing\n"))
		os.Exit(9)
	case "gives-up":
		send(&contract.PluginEvent{Event: &contract.PluginEvent_Fault{Fault: &contract.Fault{Rule: "frame", Field: "device", Detail: "fell off the bus"}}})
		time.Sleep(time.Minute)
	case "gives-up-last": // the reason comes behind all that is seen of it
		p.givesUp.Store(true)
		time.Sleep(200 * time.Millisecond)
		syscall.Write(2, []byte("test: loading\ntest: the backend gave up: fell off the bus\n"))
		send(&contract.PluginEvent{Event: &contract.PluginEvent_Fault{Fault: &contract.Fault{Rule: "backend", Detail: "fell off the bus"}}})
		time.Sleep(50 * time.Millisecond)
		os.Exit(1)
	case "closes-control":
		unix.Close(ctrlFD)
		time.Sleep(time.Minute)
	case "stopped":
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "endless-lines": // the first op is answered when both have carried a MiB, and they go on
		var written [2]atomic.Int64
		for i, text := range []string{"y", "z"} {
			if op > 1 {
				return
			}
			go func() {
				piece := []byte(strings.Repeat(text, 1<<14))
				for {
					n, _ := syscall.Write(1+i, piece)
					written[i].Add(int64(n))
				}
			}()
		}
		for written[0].Load() < 1<<20 || written[1].Load() < 1<<20 {
			time.Sleep(time.Millisecond)
		}
	case "floods":
		go func() {
			for {
				send(failed(1, contract.Cause_CAUSE_TRANSPORT))
			}
		}()
	case "freezes-registering": // op 1 as a declared long call, a further one without a word
		if op == 1 {
			p.busy.Store(true)
			for sent := p.beats.Load(); p.beats.Load() < sent+2; {
				time.Sleep(time.Millisecond)
			}
			defer p.busy.Store(false)
			cmd := exec.Command("/proc/self/exe", "wake", fmt.Sprint(os.Getpid()), os.Getenv("FREEZE"))
			if err := cmd.Start(); err != nil {
				panic(err)
			}
		}
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		time.Sleep(200 * time.Millisecond) // the stop takes a moment
	case "grandchild-holds-stderr", "grandchild-escapes", "grandchild-escapes-unmarked":
		cmd := exec.Command("/proc/self/exe", "plugin", "sleep")
		fd2, _ := syscall.Dup(2)
		cmd.Stderr = os.NewFile(uintptr(fd2), "stderr")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: p.mode != "grandchild-holds-stderr"}
		if p.mode == "grandchild-escapes-unmarked" {
			cmd.Env = []string{"NOTHING=1"}
		}
		if err := cmd.Start(); err != nil {
			panic(err)
		}
		syscall.Write(2, fmt.Appendf(nil, "grandchild %d\n", cmd.Process.Pid))
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "frame-of-2-mebibytes":
		send(failed(2<<20, contract.Cause_CAUSE_TRANSPORT))
	case "frame-of-17-mebibytes":
		send(failed(17<<20, contract.Cause_CAUSE_TRANSPORT))
	case "enum-zero":
		send(failed(1, contract.Cause_CAUSE_UNSPECIFIED))
	case "enum-unknown":
		send(failed(1, 999))
	}
}

// wakeMain ends a stop from outside: nobody can end their own.
func wakeMain(process, after string) {
	pid, err := strconv.Atoi(process)
	if err != nil {
		panic(err)
	}
	d, err := time.ParseDuration(after)
	if err != nil {
		panic(err)
	}
	time.Sleep(d)
	syscall.Kill(pid, syscall.SIGCONT)
}

// nullBackend is a backend that does nothing, behind the real SDK.
type nullBackend struct{ child, heir, daemon bool }

func (nullBackend) Info() sdk.Info {
	return sdk.Info{Name: "null", Version: "1", Config: &struct {
		Depth int `json:"depth"`
	}{}}
}
func (b nullBackend) Start(_ context.Context, s sdk.Start) ([]byte, error) {
	if b.child {
		cmd := exec.Command("/proc/self/exe", "plugin", "sleep")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: b.daemon}
		if b.heir {
			fd2, _ := syscall.Dup(2) // go-plugin replaces os.Stderr
			cmd.Stderr = os.NewFile(uintptr(fd2), "stderr")
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		return []byte(fmt.Sprint(cmd.Process.Pid)), nil
	}
	return []byte(fmt.Sprint(s.Node, " ", s.Incarnation, " ", s.Epoch, " ", s.RuntimeDir)), nil
}
func (nullBackend) AddRegion(*sdk.Region) error              { return nil }
func (nullBackend) RemoveRegion(*sdk.Region)                 {}
func (nullBackend) AddPeer(*sdk.Peer) (contract.Lane, error) { return contract.Lane_LANE_SHM, nil }
func (nullBackend) RemovePeer(*sdk.Peer)                     {}
func (nullBackend) Transfer(op *sdk.Op)                      {}
func (nullBackend) Close() error                             { return nil }
