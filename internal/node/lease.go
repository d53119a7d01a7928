package node

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/core"
)

// epochLease is a socketpair between the engine and one plugin epoch. The far end goes to the plugin with
// every region, and the contract asks every process that maps one to hold it: when ours reads EOF, none
// of them is left, however it left the plugin's process group.
type epochLease struct {
	near *os.File
	far  int // to hand out; -1 once the epoch is lost
}

func newEpochLease() (*epochLease, error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("epoch lease: %w", err)
	}
	return &epochLease{near: os.NewFile(uintptr(p[0]), "epoch-lease"), far: p[1]}, nil
}

// end gives our copy of the far end back: from now on only processes of the epoch hold it.
func (l *epochLease) end() {
	if l != nil && l.far >= 0 {
		unix.Close(l.far)
		l.far = -1
	}
}

// wait returns at EOF, or when the lease is closed; then it is false.
func (l *epochLease) wait() bool {
	b := make([]byte, 64)
	for {
		n, err := l.near.Read(b)
		if n == 0 {
			return errors.Is(err, io.EOF)
		}
	}
}

func (l *epochLease) close() {
	if l != nil {
		l.end()
		l.near.Close()
	}
}

// leaseKey names a plugin epoch.
type leaseKey struct {
	backend string
	epoch   uint32
}

// reaped says that an epoch is fenced when nothing of it can write any more (docs/protocol.md, rung 5):
// the host has seen all its processes gone and its control socket closed, and the lease is at EOF.
// Nobody writes through it either: cma is not served (cmaRefused).
func (n *Node) reaped(key leaseKey) {
	fenced := core.Event{Kind: core.PluginFenced, Backend: key.backend, Epoch: key.epoch}
	l := n.leases[key]
	if l == nil {
		n.events = append(n.events, fenced)
		n.askAnew(key)
		return
	}
	l.end()
	go func() {
		if !l.wait() {
			return // the engine is stopping
		}
		n.do(func() {
			l.close()
			delete(n.leases, key)
			n.events = append(n.events, fenced)
			n.askAnew(key)
		})
	}()
}

// closeLeases ends what waits for a lease. The owner goroutine has ended.
func (n *Node) closeLeases() {
	for _, l := range n.leases {
		l.close()
	}
}
