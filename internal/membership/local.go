package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/internal/regular"
)

// LocalConfig configures the driver for engines on one host.
type LocalConfig struct {
	// Dir is the runtime directory that all engines of this host share. It is created with mode 0700.
	Dir string
	// StateDir keeps the incarnation counter across reboots. Empty: Dir.
	StateDir string
	// Poll is how often the records are looked at; 0 means 200 ms.
	Poll time.Duration
}

// Bounds of what a watch reads.
const (
	maxRecord  = 8 << 10
	maxRecords = 1024
)

const (
	recordSuffix  = ".engine.json"
	lockSuffix    = ".engine.lock"
	counterSuffix = ".incarnation"
)

// local keeps in Dir, for each node, a lock file that its engine holds for life and a record. A record
// whose lock is free belongs to a dead engine: that is the proof. Files of dead engines stay; they
// are a few hundred bytes a node name.
type local struct {
	cfg LocalConfig
	ctx context.Context // ends with Close
	end context.CancelFunc

	mu         sync.Mutex
	registered bool
	node       string
	looks      map[chan struct{}]bool // of the watches
}

// After Look a watch looks so many times, so often.
const (
	quickLooks = 20
	quickPoll  = 5 * time.Millisecond
)

// Look implements Looker.
func (d *local) Look() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for look := range d.looks {
		select {
		case look <- struct{}{}:
		default: // it was told and has not looked yet
		}
	}
}

// watched makes a watch known to Look until the function that it returns is called.
func (d *local) watched(look chan struct{}) func() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looks[look] = true
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.looks, look)
	}
}

// localRecord is the file.
type localRecord struct {
	Record
	Incarnation uint64 `json:"incarnation"`
	LockInode   uint64 `json:"lock_inode"`
}

// NewLocal creates cfg.Dir when needed and returns the driver.
func NewLocal(cfg LocalConfig) (Driver, error) {
	if cfg.Dir == "" {
		return nil, errors.New("local membership: no runtime directory")
	}
	if cfg.StateDir == "" {
		cfg.StateDir = cfg.Dir
	}
	if cfg.Poll == 0 {
		cfg.Poll = 200 * time.Millisecond
	}
	if cfg.Poll < 0 {
		return nil, fmt.Errorf("local membership: poll interval %v is negative", cfg.Poll)
	}
	if err := errors.Join(MakeDir(cfg.Dir), MakeDir(cfg.StateDir)); err != nil {
		return nil, fmt.Errorf("local membership: %w", err)
	}
	d := &local{cfg: cfg, looks: make(map[chan struct{}]bool)}
	d.ctx, d.end = context.WithCancel(context.Background())
	return d, nil
}

func (d *local) path(node, suffix string) string { return filepath.Join(d.cfg.Dir, node+suffix) }

// Register implements Driver.
func (d *local) Register(ctx context.Context, rec Record) (Lease, error) {
	if err := checkRecord(rec); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.registered {
		return nil, ErrRegistered
	}
	lockPath := d.path(rec.Node, lockSuffix)
	lk, err := acquire(ctx, lockPath)
	if errors.Is(err, errLocked) {
		holder := ""
		if old, rerr := d.read(rec.Node); rerr == nil {
			holder = fmt.Sprintf(" by process %d, incarnation %d", old.PID, old.Incarnation)
		}
		return nil, fmt.Errorf("register %q in %s: %w%s: stop that engine or choose another node name", rec.Node, d.cfg.Dir, ErrNodeTaken, holder)
	}
	if err != nil {
		return nil, fmt.Errorf("register %q: %w", rec.Node, err)
	}
	// The record is durable only as far as the kernel lives: after a power cut no engine of this host
	// is left whose record could be wanted.
	inc, err := nextIncarnation(filepath.Join(d.cfg.StateDir, rec.Node+counterSuffix))
	if err == nil {
		var b []byte
		if b, err = json.Marshal(localRecord{rec, inc, lk.inode}); err == nil {
			err = writeFile(d.path(rec.Node, recordSuffix), append(b, '\n'), false)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("register %q: %w", rec.Node, err), lk.release())
	}
	d.registered, d.node = true, rec.Node
	return newLease(inc, lk, d.cfg.Poll, func() bool {
		r, err := d.read(rec.Node)
		return lk.intact(lockPath) && (err != nil || r.Incarnation <= inc)
	}), nil
}

func checkRecord(rec Record) error {
	if err := CheckNode(rec.Node); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	if err := CheckAddress(rec.Address); err != nil {
		return fmt.Errorf("register %q: %w", rec.Node, err)
	}
	return nil
}

// read reads the record of a node.
func (d *local) read(node string) (localRecord, error) {
	var r localRecord
	f, err := regular.Open(d.path(node, recordSuffix))
	if err != nil {
		return r, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err != nil {
		return r, err
	}
	if len(b) > maxRecord {
		return r, fmt.Errorf("%s is longer than %d bytes", f.Name(), maxRecord)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("%s: %w", f.Name(), err)
	}
	if r.Node != node || r.Incarnation == 0 {
		return r, fmt.Errorf("%s: is the record of %q, incarnation %d", f.Name(), r.Node, r.Incarnation)
	}
	return r, checkRecord(r.Record)
}

// Watch implements Driver.
func (d *local) Watch(ctx context.Context) <-chan Update {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(d.ctx, cancel)
	out := make(chan Update)
	look := make(chan struct{}, 1)
	forget := d.watched(look)
	go func() {
		defer close(out)
		defer cancel()
		defer stop()
		defer forget()
		w := watch{driver: d, known: make(map[string]*knownNode)}
		next, quick := time.NewTimer(d.cfg.Poll), 0
		defer next.Stop()
		for first := true; ; first = false {
			u, changed := w.look()
			if changed || first {
				select {
				case out <- u:
				case <-ctx.Done():
					return
				}
			}
			select {
			case <-next.C:
				quick = max(0, quick-1)
			case <-look:
				quick = quickLooks
			case <-ctx.Done():
				return
			}
			if pause := d.cfg.Poll; quick > 0 {
				next.Reset(min(pause, quickPoll))
			} else {
				next.Reset(pause)
			}
		}
	}()
	return out
}

// watch is the state of one Watch.
type watch struct {
	driver *local
	known  map[string]*knownNode
	peers  []Peer // of the last update
	err    string
}

// knownNode is what a watch saw of a node: the incarnation in its record, whether its death was told.
type knownNode struct {
	record localRecord
	dead   bool
}

// look reads all records and reports what changed since the last look.
func (w *watch) look() (u Update, changed bool) {
	d := w.driver
	d.mu.Lock()
	self := d.node
	d.mu.Unlock()
	nodes, err := d.nodes()
	var errs []error
	if err != nil {
		errs = append(errs, err)
		nodes = slices.Sorted(maps.Keys(w.known))
	}
	// A record that vanished is no proof, but its lock may still be one.
	for node := range w.known {
		if !slices.Contains(nodes, node) {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	for _, node := range nodes {
		if node == self {
			delete(w.known, node)
			continue
		}
		r, rerr := d.read(node)
		k := w.known[node]
		switch {
		case rerr != nil && !errors.Is(rerr, os.ErrNotExist):
			errs = append(errs, rerr)
			fallthrough
		case rerr != nil:
			if k == nil {
				continue
			}
			r = k.record // frozen
		case k == nil:
			k = &knownNode{record: r}
			w.known[node] = k
		case r.Incarnation > k.record.Incarnation:
			// Its successor took the lock, which nobody can while it lives.
			if !k.dead && r.LockInode == k.record.LockInode {
				u.Gone = append(u.Gone, Gone{node, k.record.Incarnation})
			}
			k = &knownNode{record: r}
			w.known[node] = k
		}
		if !k.dead && free(d.path(node, lockSuffix), r.LockInode) {
			k.dead = true
			u.Gone = append(u.Gone, Gone{node, r.Incarnation})
		}
		if !k.dead && (rerr == nil || err != nil || !errors.Is(rerr, os.ErrNotExist)) {
			u.Peers = append(u.Peers, Peer{Record: r.Record, Incarnation: r.Incarnation})
		}
	}
	u.Err = errors.Join(errs...)
	text := ""
	if u.Err != nil {
		text = u.Err.Error()
	}
	changed = len(u.Gone) > 0 || text != w.err || !reflect.DeepEqual(u.Peers, w.peers)
	w.peers, w.err = u.Peers, text
	return u, changed
}

// nodes lists the nodes that have a record.
func (d *local) nodes() ([]string, error) {
	f, err := os.Open(d.cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var nodes []string
	for _, name := range names {
		if node, ok := strings.CutSuffix(name, recordSuffix); ok && CheckNode(node) == nil {
			nodes = append(nodes, node)
		}
	}
	if len(nodes) > maxRecords {
		return nil, fmt.Errorf("%s holds %d records, at most %d: remove those of nodes that are gone", d.cfg.Dir, len(nodes), maxRecords)
	}
	return nodes, nil
}

// Close implements Driver.
func (d *local) Close() error {
	d.end()
	return nil
}
