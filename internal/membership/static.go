package membership

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// StaticConfig configures the driver that takes its peers from the configuration.
type StaticConfig struct {
	// StateDir keeps the incarnation counter. Created with mode 0700.
	StateDir string
	// Peers are node names and addresses. An empty address means that this peer dials us. Naming
	// oneself is allowed, so that all engines can share one list.
	Peers []StaticPeer
}

// StaticPeer is one line of the configuration.
type StaticPeer struct {
	Node    string
	Address string
}

// static never proves anything: its peers are those of the configuration, dead or alive.
type static struct {
	cfg StaticConfig
	ctx context.Context
	end context.CancelFunc

	mu         sync.Mutex
	registered bool
	node       string
}

// NewStatic checks cfg.Peers and returns the driver.
func NewStatic(cfg StaticConfig) (Driver, error) {
	if cfg.StateDir == "" {
		return nil, errors.New("static membership: no state directory for the incarnation counter")
	}
	var errs []error
	seen := make(map[string]bool)
	for i, p := range cfg.Peers {
		err := CheckNode(p.Node)
		if err == nil && p.Address != "" {
			err = CheckAddress(p.Address)
		}
		if err == nil && seen[p.Node] {
			err = fmt.Errorf("node %q stands twice", p.Node)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("static membership: peer %d: %w", i, err))
		}
		seen[p.Node] = true
	}
	if len(cfg.Peers) > maxRecords {
		errs = append(errs, fmt.Errorf("static membership: %d peers, at most %d", len(cfg.Peers), maxRecords))
	}
	if err := MakeDir(cfg.StateDir); err != nil {
		errs = append(errs, fmt.Errorf("static membership: %w", err))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	cfg.Peers = slices.Clone(cfg.Peers)
	slices.SortFunc(cfg.Peers, func(a, b StaticPeer) int { return strings.Compare(a.Node, b.Node) })
	d := &static{cfg: cfg}
	d.ctx, d.end = context.WithCancel(context.Background())
	return d, nil
}

// Register implements Driver. ErrNodeTaken is noticed on this host only.
func (d *static) Register(ctx context.Context, rec Record) (Lease, error) {
	if err := checkRecord(rec); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.registered {
		return nil, ErrRegistered
	}
	path := filepath.Join(d.cfg.StateDir, rec.Node+lockSuffix)
	lk, err := acquire(ctx, path)
	if errors.Is(err, errLocked) {
		return nil, fmt.Errorf("register %q with state in %s: %w: stop that engine or choose another node name", rec.Node, d.cfg.StateDir, ErrNodeTaken)
	}
	if err != nil {
		return nil, fmt.Errorf("register %q: %w", rec.Node, err)
	}
	inc, err := nextIncarnation(filepath.Join(d.cfg.StateDir, rec.Node+counterSuffix))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("register %q: %w", rec.Node, err), lk.release())
	}
	d.registered, d.node = true, rec.Node
	return newLease(inc, lk, time.Second, func() bool { return lk.intact(path) }), nil
}

// Watch implements Driver: one update.
func (d *static) Watch(ctx context.Context) <-chan Update {
	out := make(chan Update)
	go func() {
		defer close(out)
		d.mu.Lock()
		self := d.node
		d.mu.Unlock()
		var u Update
		for _, p := range d.cfg.Peers {
			if p.Node != self {
				u.Peers = append(u.Peers, Peer{Record: Record{Node: p.Node, Address: p.Address}})
			}
		}
		select {
		case out <- u:
			select {
			case <-ctx.Done():
			case <-d.ctx.Done():
			}
		case <-ctx.Done():
		case <-d.ctx.Done():
		}
	}()
	return out
}

// Close implements Driver.
func (d *static) Close() error {
	d.end()
	return nil
}
