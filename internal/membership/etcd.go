package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// EtcdConfig configures the driver that keeps the records in etcd.
type EtcdConfig struct {
	// Endpoints are the members' client URLs: http://host:port or https://host:port.
	Endpoints []string
	// Prefix of all keys; "/terminus" for example. Engines with equal prefixes are each other's peers.
	Prefix string
	// Lease is how long a record outlives its engine, in whole seconds.
	Lease time.Duration
	// Timeout bounds every request, connecting included.
	Timeout time.Duration
	// Username, and the file that holds its password. Both or none.
	Username, PasswordFile string
	// TLS names PEM files. Without CA the machine's authorities count.
	TLS EtcdTLS
	// StateDir keeps the lock that proves a predecessor dead, and the last incarnation.
	StateDir string
}

// EtcdTLS is how an https endpoint is met. Cert and Key go together; they are read again for each connection.
type EtcdTLS struct {
	CA, Cert, Key, ServerName string
}

// Keys are PREFIX/peers/NODE and PREFIX/groups/NODE/GROUP. All keys of an engine hang on its one lease, and
// the create revision of the first is its incarnation: the store gives each revision once and in order.
const (
	peersDir  = "/peers/"
	groupsDir = "/groups/"
)

const lastSuffix = ".etcd-incarnation"

// etcd never proves a death: a record vanishes also when its engine is cut off from the store and goes on.
// Nor does silence of the store say anything. Only its positive word that the record is gone or another
// engine's ends a lease.
type etcd struct {
	cfg    EtcdConfig
	client *clientv3.Client
	ctx    context.Context // ends with Close
	end    context.CancelFunc

	mu         sync.Mutex
	registered bool
	node       string
	revision   int64         // highest that a linearizable read has shown
	outage     error         // why the store cannot be used at present
	changed    chan struct{} // closed when outage changes
}

// etcdRecord is the value of a peer's key. Its incarnation is the create revision of the key.
type etcdRecord struct {
	Record
	// Lock identifies the lock file on that host. Whoever holds it knows that the engine is dead.
	Lock string `json:"lock"`
}

// NewEtcd checks cfg, reads the files that it names and returns the driver. It connects only when there
// is a user to authenticate, for Timeout at most.
func NewEtcd(cfg EtcdConfig) (Driver, error) {
	fail := func(err error) (Driver, error) { return nil, fmt.Errorf("etcd membership: %w", err) }
	switch {
	case len(cfg.Endpoints) == 0:
		return fail(errors.New("no endpoint"))
	case cfg.StateDir == "":
		return fail(errors.New("no state directory"))
	case cfg.Prefix == "" || cfg.Prefix[0] != '/' || strings.HasSuffix(cfg.Prefix, "/"):
		return fail(fmt.Errorf("prefix %q: want one that starts with a slash and does not end with one", cfg.Prefix))
	case cfg.Lease < 2*time.Second || cfg.Lease%time.Second != 0:
		return fail(fmt.Errorf("lease of %v: want whole seconds, at least 2", cfg.Lease))
	case cfg.Timeout <= 0:
		return fail(fmt.Errorf("timeout of %v: want more than 0", cfg.Timeout))
	}
	if err := MakeDir(cfg.StateDir); err != nil {
		return fail(err)
	}
	tlsConfig, err := cfg.TLS.load()
	if err != nil {
		return fail(err)
	}
	password, err := readPassword(cfg.PasswordFile)
	if err != nil {
		return fail(err)
	}
	d := &etcd{cfg: cfg, changed: make(chan struct{})}
	d.ctx, d.end = context.WithCancel(context.Background())
	d.client, err = clientv3.New(clientv3.Config{
		Context: d.ctx, Endpoints: cfg.Endpoints, DialTimeout: cfg.Timeout, TLS: tlsConfig, Username: cfg.Username, Password: password,
		// Of a dead connection the watch would else hear nothing. A member allows a ping each 5 s.
		DialKeepAliveTime: max(cfg.Lease, 6*time.Second), DialKeepAliveTimeout: cfg.Timeout,
		MaxUnaryRetries: 2,                                                 // whoever calls tries again
		DialOptions:     dialOptions(cfg, tlsConfig), Logger: zap.NewNop(), // what matters is in errors
	})
	if err != nil {
		d.end()
		return fail(d.explain(err))
	}
	return d, nil
}

func (d *etcd) peerKey(node string) string { return d.cfg.Prefix + peersDir + node }

// ask bounds one request.
func (d *etcd) ask(ctx context.Context, bound time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, min(bound, d.cfg.Timeout))
}

// Register implements Driver. A record that is there already belongs to a living engine, to one whose
// lease has yet to run out, or to a predecessor on this host, whose lock proves it dead.
func (d *etcd) Register(ctx context.Context, rec Record) (_ Lease, err error) {
	if err := checkRecord(rec); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.registered {
		return nil, ErrRegistered
	}
	fail := func(err error) error { return fmt.Errorf("register %q: %w", rec.Node, err) }
	lk, err := acquire(ctx, filepath.Join(d.cfg.StateDir, rec.Node+lockSuffix))
	if errors.Is(err, errLocked) {
		return nil, fail(fmt.Errorf("with state in %s: %w: stop that engine or choose another node name", d.cfg.StateDir, ErrNodeTaken))
	}
	if err != nil {
		return nil, fail(err)
	}
	l := &etcdLease{d: d, node: rec.Node, lock: lk, kick: make(chan struct{}, 1), lost: make(chan struct{}), ended: make(chan struct{})}
	l.ctx, l.end = context.WithCancel(d.ctx)
	defer func() {
		if err != nil {
			l.end()
			l.revoke()
			lk.release()
			err = fail(err)
		}
	}()
	last := filepath.Join(d.cfg.StateDir, rec.Node+lastSuffix)
	before, err := readLast(last)
	if err != nil {
		return nil, err
	}
	if l.inc, err = d.create(ctx, rec, l); err != nil {
		return nil, err
	}
	if l.inc <= before {
		return nil, fmt.Errorf("incarnation %d is not above %d, that of the start before: the store was emptied, or restored from a backup without --bump-revision; restore it so, or stop all engines and remove %s from each", l.inc, before, last)
	}
	if err := writeFile(last, fmt.Appendf(nil, "%d\n", l.inc), true); err != nil {
		return nil, fmt.Errorf("incarnation %d: %w", l.inc, err)
	}
	d.registered, d.node, d.revision = true, rec.Node, int64(l.inc)
	go l.tend()
	return l, nil
}

// create puts the record where there is none, and returns its create revision.
func (d *etcd) create(ctx context.Context, rec Record, l *etcdLease) (uint64, error) {
	lockID, err := l.lock.id()
	if err != nil {
		return 0, err
	}
	own := etcdRecord{Record: rec, Lock: lockID}
	value, err := json.Marshal(own)
	if err != nil {
		return 0, err
	}
	key := d.peerKey(rec.Node)
	waited := int64(0) // for the record of this create revision
	for {
		if err := d.grant(ctx, l); err != nil {
			return 0, err
		}
		c, cancel := d.ask(ctx, d.cfg.Timeout)
		resp, err := d.client.Txn(c).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, string(value), clientv3.WithLease(l.id))).Else(clientv3.OpGet(key)).Commit()
		cancel()
		if err != nil {
			return 0, d.explain(err)
		}
		if resp.Succeeded {
			return uint64(resp.Header.Revision), nil
		}
		kvs := resp.Responses[0].GetResponseRange().Kvs
		if len(kvs) == 0 {
			return 0, errors.New("etcd answers a failed comparison without the record")
		}
		old := kvs[0]
		r, bad := readRecord(rec.Node, old.Value)
		if bad == nil && r.HostID == own.HostID && r.Lock == own.Lock {
			// We hold its lock: it is dead. Its lease takes its other records along.
			if err := d.bury(ctx, old); err != nil {
				return 0, err
			}
			continue
		}
		if waited == old.CreateRevision && bad != nil {
			return 0, fmt.Errorf("%w: key %s holds what is no record of an engine (%w): remove it", ErrNodeTaken, key, bad)
		}
		if waited == old.CreateRevision {
			return 0, fmt.Errorf("%w by process %d of host %s at %s, incarnation %d: stop that engine or choose another node name", ErrNodeTaken, r.PID, r.HostID, r.Address, old.CreateRevision)
		}
		waited = old.CreateRevision
		l.revoke() // it would run out meanwhile
		l.id = 0
		if err := d.outlive(ctx, old); err != nil {
			return 0, err
		}
	}
}

// grant gets a lease unless there is one.
func (d *etcd) grant(ctx context.Context, l *etcdLease) error {
	if l.id != 0 {
		return nil
	}
	c, cancel := d.ask(ctx, d.cfg.Timeout)
	defer cancel()
	g, err := d.client.Grant(c, int64(d.cfg.Lease/time.Second))
	if err != nil {
		return d.explain(err)
	}
	l.id, l.ttl, l.cluster = g.ID, time.Duration(g.TTL)*time.Second, g.ClusterId
	return nil
}

// bury removes what a dead predecessor has left.
func (d *etcd) bury(ctx context.Context, kv *mvccpb.KeyValue) error {
	c, cancel := d.ask(ctx, d.cfg.Timeout)
	defer cancel()
	if _, err := d.client.Revoke(c, clientv3.LeaseID(kv.Lease)); err != nil && !leaseNotFound(err) {
		return d.explain(err)
	}
	key := string(kv.Key)
	_, err := d.client.Txn(c).If(clientv3.Compare(clientv3.CreateRevision(key), "=", kv.CreateRevision)).Then(clientv3.OpDelete(key)).Commit()
	return d.explain(err)
}

// outlive waits until the record is gone, or until it must have been renewed to be there still.
func (d *etcd) outlive(ctx context.Context, kv *mvccpb.KeyValue) error {
	c, cancel := d.ask(ctx, d.cfg.Timeout)
	left, err := d.client.TimeToLive(c, clientv3.LeaseID(kv.Lease))
	cancel()
	if err != nil {
		return d.explain(err)
	}
	// The store looks for expired leases every 500 ms.
	ctx, cancel = context.WithTimeout(ctx, time.Duration(max(left.TTL, 0)+2)*time.Second)
	defer cancel()
	for resp := range d.client.Watch(ctx, string(kv.Key), clientv3.WithRev(kv.ModRevision+1)) {
		if len(resp.Events) > 0 || resp.Err() != nil {
			return nil
		}
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	return nil
}

// readLast reads the incarnation of the start before; 0: there was none.
func readLast(file string) (uint64, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("last incarnation: %w", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63)
	if err != nil {
		return 0, fmt.Errorf("last incarnation: %s is damaged (%w): remove it", file, err)
	}
	return n, nil
}

// report takes what the last use of the store came to.
func (d *etcd) report(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if (err == nil) == (d.outage == nil) && (err == nil || err.Error() == d.outage.Error()) {
		return
	}
	d.outage = err
	close(d.changed)
	d.changed = make(chan struct{})
}

// state returns why the store cannot be used at present, and what is closed when that changes.
func (d *etcd) state() (changed <-chan struct{}, outage error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed, d.outage
}

// Close implements Driver.
func (d *etcd) Close() error {
	d.end()
	d.client.Close()
	return nil
}

// jitter spreads what many engines do after the same event.
func jitter(t time.Duration) time.Duration { return t*3/4 + rand.N(t/2) }
