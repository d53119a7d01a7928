// Command mutant is the tcp plugin with a fault, which its first argument names: the mutants of the conformance
// suite that must be processes.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: mutant FAULT; the faults are in plugins/sdk/conformance/mutant_process_test.go")
		os.Exit(2)
	}
	mode := os.Args[1]
	os.Args = append(os.Args[:1], os.Args[2:]...) // what is left is the SDK's
	switch mode {
	case "sleep": // a helper that somebody left behind
		time.Sleep(30 * time.Second)
		return
	case "daemon": // nothing shows that it comes from the plugin: no group, environment or limit
		_ = unix.Setrlimit(unix.RLIMIT_LOCKS, &unix.Rlimit{Cur: 1, Max: 1})
		time.Sleep(30 * time.Second)
		return
	case "outlives-its-host":
		keepControlOpen()
	case "waits-by-hand":
		if os.Getenv(sdk.HandshakeConfig.MagicCookieKey) == "" && len(os.Args) == 1 {
			time.Sleep(time.Minute)
		}
	}
	sdk.Main(&faulty{Backend: tcp.New(), mode: mode, stdout: os.Stdout, stderr: os.Stderr})
}

// faulty is the tcp backend with a fault.
type faulty struct {
	*tcp.Backend
	mode           string
	stdout, stderr *os.File // before go-plugin puts pipes in their place

	dir string // of the epoch

	lock    sync.Mutex
	nodes   map[string][]uint64 // incarnations, in the order in which they came
	writers map[string]*sdk.Peer
	kept    [][]byte

	daemons sync.Map // by region
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
		helper := exec.Command("/proc/self/exe", "sleep")
		if err := helper.Start(); err != nil {
			return nil, err
		}
	}
	b.dir = s.RuntimeDir
	return b.Backend.Start(ctx, s)
}

func (b *faulty) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	switch b.mode {
	case "one-life-a-node":
		if lives := b.lives(p); lives > 1 {
			return 0, fmt.Errorf("node %s is there already", p.Node)
		}
	case "two-lives-a-node":
		if lives := b.lives(p); lives > 2 {
			return 0, fmt.Errorf("node %s was there %d times", p.Node, lives)
		}
	case "leaks-peers":
		if _, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return 0, err
		}
	}
	return b.Backend.AddPeer(p)
}

// lives counts the incarnations of a peer's node, up to this one.
func (b *faulty) lives(p *sdk.Peer) int {
	b.lock.Lock()
	defer b.lock.Unlock()
	if b.nodes == nil {
		b.nodes = map[string][]uint64{}
	}
	if !slices.Contains(b.nodes[p.Node], p.Incarnation) {
		b.nodes[p.Node] = append(b.nodes[p.Node], p.Incarnation)
	}
	return len(b.nodes[p.Node])
}

func (b *faulty) Accept(p *sdk.Peer) error {
	if b.mode == "one-epoch-a-node" {
		b.lock.Lock()
		defer b.lock.Unlock()
		if old := b.writers[p.Node]; old != nil && old.Epoch != p.Epoch {
			b.Backend.Unaccept(old)
		}
		if b.writers == nil {
			b.writers = map[string]*sdk.Peer{}
		}
		b.writers[p.Node] = p
	}
	return b.Backend.Accept(p)
}

func (b *faulty) AddRegion(r *sdk.Region) error {
	if b.mode == "daemon-keeps-memory" && r.Size >= 32<<20 {
		lease, err := unix.FcntlInt(uintptr(r.Lease), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(lease), "lease")
		defer file.Close()
		daemon := exec.Command("/proc/self/exe", "daemon")
		daemon.Env, daemon.ExtraFiles, daemon.SysProcAttr = []string{}, []*os.File{file}, &unix.SysProcAttr{Setsid: true}
		if err := daemon.Start(); err != nil {
			return err
		}
		b.daemons.Store(r.ID, daemon)
	}
	return b.Backend.AddRegion(r)
}

func (b *faulty) RemoveRegion(r *sdk.Region) {
	b.letGo(r.ID)
	b.Backend.RemoveRegion(r)
}

// letGo ends the daemon that holds a region, if there is one.
func (b *faulty) letGo(region any) {
	if d, ok := b.daemons.LoadAndDelete(region); ok {
		daemon := d.(*exec.Cmd)
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
	}
}

func (b *faulty) Grant(g *sdk.Grant) error {
	if b.mode == "leaks-grants" {
		b.keep(64 << 10)
	}
	return b.Backend.Grant(g)
}

// Geometry makes the backend an sdk.Planner.
func (b *faulty) Geometry(e *contract.HostEvent) {
	if b.mode == "leaks-plans" && e.GetPlanAdd() != nil {
		b.keep(64 << 10)
	}
}

// keep keeps n bytes of memory.
func (b *faulty) keep(n int) {
	b.lock.Lock()
	defer b.lock.Unlock()
	b.kept = append(b.kept, bytes.Repeat([]byte{1}, n))
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
	b.daemons.Range(func(region, _ any) bool {
		b.letGo(region)
		return true
	})
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
