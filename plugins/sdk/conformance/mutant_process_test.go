package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// processMutants run as processes: the test binary is started again with the arguments "plugin MODE".
var processMutants = []mutant{
	{name: "floods-stdout", process: "floods-stdout", killer: "stdio/stdout-is-the-handshakes",
		fault: "a library prints to standard output"},
	{name: "floods-stderr", process: "floods-stderr", killer: "stdio/no-flood",
		fault: "each op is logged at length on standard error"},
	{name: "outlives-its-host", process: "outlives-its-host", killer: "lease/host-gone-idle",
		fault: "the end of the control socket is not noticed"},
	{name: "exits-0-with-open-ops", process: "exits-0-with-open-ops", also: []string{"loss/*"}, killer: "loss/stream-eof",
		fault: "an op of 4 MiB ends the process, with status 0"},
	{name: "leaves-a-child", process: "leaves-a-child", killer: "leftover/nothing-after-close",
		fault: "a helper process goes on when the plugin has ended"},
	{name: "never-exits", process: "never-exits", killer: "shutdown/clean",
		fault: "Close of the backend does not return"},
	{name: "exits-1", process: "exits-1", killer: "shutdown/clean",
		fault: "a good end has status 1"},
	{name: "ignores-sigterm", process: "ignores-sigterm", killer: "shutdown/sigterm",
		fault: "SIGTERM is ignored"},
	{name: "dies-of-sigint", process: "dies-of-sigint", killer: "shutdown/sigint-ignored",
		fault: "a ^C at the engine's terminal ends the plugin"},
	{name: "one-lock", process: "one-lock", also: []string{"loss/frozen-receiver"}, killer: "loss/frozen-receiver",
		fault: "one lock is held while an op waits for its receiver, and Stats needs it"},
	{name: "one-life-a-node", process: "one-life-a-node", also: []string{"loss/peer-reborn"}, killer: "loss/peer-reborn",
		fault: "a node that was started again is refused as a duplicate"},
	{name: "info-differs", process: "info-differs", killer: "cli/info",
		fault: "info knows fewer features than the handshake"},
	{name: "waits-by-hand", process: "waits-by-hand", killer: "cli/by-hand",
		fault: "started by hand it waits for a host that never comes"},
	{name: "leaves-files", process: "leaves-files", also: []string{"loss/frozen-writer"}, killer: "loss/frozen-writer",
		fault: "each op leaves a file in the runtime directory"},
}

// processMutant is the carrier of this binary as a plugin.
func processMutant(t *testing.T, mode string) Carrier {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return FromSpec("mutant:"+mode, pluginhost.Spec{Name: "plugin", Exec: exe, Args: []string{"plugin", mode}})
}

// pluginMain is the plugin, the tcp backend with a fault. It returns when the mode is no plugin's.
func pluginMain(mode string) {
	os.Args = append(os.Args[:1], os.Args[3:]...) // what is left is the SDK's
	b := &faulty{Backend: tcp.New(), mode: mode, stdout: os.Stdout, stderr: os.Stderr}
	switch mode {
	case "sleep": // a helper that somebody left behind
		time.Sleep(5 * time.Second)
		return
	case "outlives-its-host":
		keepControlOpen()
	case "waits-by-hand":
		if os.Getenv(sdk.HandshakeConfig.MagicCookieKey) == "" && len(os.Args) == 1 {
			time.Sleep(20 * time.Second)
		}
	}
	sdk.Main(b)
}

// faulty is the tcp backend with a fault.
type faulty struct {
	*tcp.Backend
	mode           string
	stdout, stderr *os.File // before go-plugin puts pipes in their place

	dir string // of the epoch

	lock  sync.Mutex
	nodes map[string]uint64
}

func (b *faulty) Info() sdk.Info {
	info := b.Backend.Info()
	if b.mode == "info-differs" && len(os.Args) > 1 {
		info.Features = info.Features[:len(info.Features)-1]
	}
	return info
}

func (b *faulty) Start(ctx context.Context, s sdk.Start) ([]byte, error) {
	switch b.mode {
	case "ignores-sigterm":
		signal.Ignore(unix.SIGTERM)
	case "dies-of-sigint":
		interrupted := make(chan os.Signal, 1)
		signal.Notify(interrupted, os.Interrupt)
		go func() {
			<-interrupted
			os.Exit(130)
		}()
	case "leaves-a-child":
		helper := exec.Command("/proc/self/exe", "plugin", "sleep")
		if err := helper.Start(); err != nil {
			return nil, err
		}
	}
	b.dir = s.RuntimeDir
	return b.Backend.Start(ctx, s)
}

func (b *faulty) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	if b.mode == "one-life-a-node" {
		b.lock.Lock()
		defer b.lock.Unlock()
		if was, ok := b.nodes[p.Node]; ok && was != p.Incarnation {
			return 0, fmt.Errorf("node %s is there already, as incarnation %d", p.Node, was)
		}
		if b.nodes == nil {
			b.nodes = map[string]uint64{}
		}
		b.nodes[p.Node] = p.Incarnation
	}
	return b.Backend.AddPeer(p)
}

func (b *faulty) Transfer(op *sdk.Op) {
	switch b.mode {
	case "floods-stdout":
		fmt.Fprintln(b.stdout, "ucx: op", op.ID())
	case "floods-stderr":
		fmt.Fprintln(b.stderr, strings.Repeat("op is being posted; ", 200))
	case "exits-0-with-open-ops":
		if op.Bytes() >= 4<<20 {
			os.Exit(0)
		}
	case "leaves-files":
		_ = os.WriteFile(filepath.Join(b.dir, fmt.Sprint("op-", op.ID())), nil, 0o600)
	case "one-lock":
		b.lock.Lock()
		defer b.lock.Unlock()
		b.Backend.Transfer(op)
		<-op.Context().Done() // it has ended
		return
	}
	b.Backend.Transfer(op)
}

func (b *faulty) Counters() map[string]uint64 {
	if b.mode == "one-lock" {
		b.lock.Lock()
		defer b.lock.Unlock()
	}
	return b.Backend.Counters()
}

func (b *faulty) Close() error {
	err := b.Backend.Close()
	switch b.mode {
	case "never-exits":
		select {}
	case "exits-1":
		return errors.New("the library could not be finalized")
	}
	return err
}

// keepControlOpen puts a socket of our own in the place of the control socket and passes on what comes,
// except its end.
func keepControlOpen() {
	host, err := strconv.Atoi(os.Getenv(sdk.ControlFDEnv))
	if err != nil {
		return
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	os.Setenv(sdk.ControlFDEnv, strconv.Itoa(pair[1]))
	go func() {
		data, control := make([]byte, 64), make([]byte, 256)
		for {
			n, cn, _, _, err := unix.Recvmsg(host, data, control, unix.MSG_CMSG_CLOEXEC)
			if err != nil || n == 0 {
				return
			}
			if err := unix.Sendmsg(pair[0], data[:n], control[:cn], nil, 0); err != nil {
				return
			}
			messages, _ := unix.ParseSocketControlMessage(control[:cn])
			for i := range messages {
				fds, _ := unix.ParseUnixRights(&messages[i])
				for _, fd := range fds {
					unix.Close(fd)
				}
			}
		}
	}()
}
