package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
)

// The drivers of membership that the demo can have its engines use.
const (
	PeersLocal = "local"
	PeersEtcd  = "etcd"
)

// How long the records of the demo's engines outlive them, and how long the store is away: longer than
// any lease would last, so that it shows if that cost anything.
const (
	storeLease = 5 * time.Second // longer than pauseTime
	storeTime  = 6 * time.Second
)

// storeProgram is the file name of the etcd that the demo starts, beside the engine's binary.
const storeProgram = "etcdtest"

// store is the demo's etcd.
type store struct {
	argv []string
	env  []string
	addr string
	proc *process
}

// newStore starts an etcd of one member with its data below dir.
func newStore(ctx context.Context, binary, dir string, env []string) (*store, error) {
	program := filepath.Join(filepath.Dir(binary), storeProgram)
	if _, err := os.Stat(program); err != nil {
		return nil, fmt.Errorf("--peers etcd: %w; build it with: make demo PEERS=etcd", err)
	}
	s := &store{argv: []string{program, "-dir", filepath.Join(dir, "store")}, env: env}
	if err := s.start(ctx); err != nil {
		return s, err
	}
	s.argv = append(s.argv, "-listen", s.addr) // where the engines look for it
	return s, nil
}

// start starts the store and waits until it serves. It may be called again when the process has ended.
func (s *store) start(ctx context.Context) (err error) {
	addr := make(chan string, 1)
	s.proc, err = startProcess("etcd", s.argv, s.env, func(line []byte) {
		if a, ok := strings.CutPrefix(string(bytes.TrimSpace(line)), "listening "); ok {
			select {
			case addr <- a:
			default:
			}
		}
	})
	if err != nil {
		return err
	}
	select {
	case s.addr = <-addr:
		return nil
	case <-s.proc.done:
		return fmt.Errorf("%w\n%s", s.proc.obituary(), s.proc.lastWords())
	case <-time.After(readyTimeout):
		return fmt.Errorf("etcd does not serve after %v", readyTimeout)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// outage keeps the store, which has been killed, away for storeTime, sees that every engine notices,
// and brings it back with its data.
func (s *store) outage(ctx context.Context, engines []*engine) error {
	back := time.Now().Add(storeTime)
	wait := func(frozen bool, by time.Time) error {
		ctx, cancel := context.WithDeadlineCause(ctx, by, errors.New("too late"))
		defer cancel()
		for _, e := range engines {
			if err := e.waitFrozen(ctx, frozen); err != nil {
				return err
			}
		}
		return nil
	}
	if err := wait(true, back); err != nil {
		return fmt.Errorf("without its store an engine does not say that its membership is frozen: %w", err)
	}
	if err := sleep(ctx, time.Until(back)); err != nil {
		return err
	}
	if err := s.start(ctx); err != nil {
		return err
	}
	if err := wait(false, time.Now().Add(readyTimeout)); err != nil {
		return fmt.Errorf("the store is back, and an engine does not use it: %w", err)
	}
	return nil
}

// waitFrozen waits until the engine says that its membership is frozen, or that it is not.
func (e *engine) waitFrozen(ctx context.Context, frozen bool) error {
	c := admin.NewClient(e.admin)
	defer c.Close()
	for {
		st, err := c.Status(ctx)
		if err == nil && (st.Frozen != "") == frozen {
			return nil
		}
		if e := sleep(ctx, readyPoll); e != nil {
			return errors.Join(e, err)
		}
	}
}

// freePort is an address of the loopback interface that nobody listens on.
func freePort() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return ln.Addr().String(), ln.Close()
}
