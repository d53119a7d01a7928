package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Bounds of the renewal.
const (
	retryLeast = 250 * time.Millisecond // after a failure; doubled up to a third of the lease
	closeBound = 2 * time.Second        // for giving the lease back
)

// etcdLease renews the registration and publishes the engine's groups under it.
type etcdLease struct {
	d       *etcd
	node    string
	inc     uint64
	id      clientv3.LeaseID
	ttl     time.Duration
	cluster uint64
	lock    *lock
	kick    chan struct{} // the groups are others
	lost    chan struct{}
	cause   error           // valid once lost is closed
	ctx     context.Context // ends with Close
	end     context.CancelFunc
	ended   chan struct{} // closed by tend
	once    sync.Once
	err     error

	mu     sync.Mutex
	groups map[string]Group // as they should be
	told   map[string]Group // as they are in the store; owned by tend
}

// errOtherStore is what outages are that do not end.
var errOtherStore = errors.New("it was emptied, restored from a backup or replaced since this engine registered; fix: restart the engines one by one")

// errLost wraps what the store says about a lease that is over.
type errLost struct{ error }

// tend renews until Close, or until the store says that the registration is over. The store being out
// of reach is neither.
func (l *etcdLease) tend() {
	defer close(l.ended)
	ctx := l.ctx
	wait, retry := jitter(l.ttl/3), retryLeast
	for {
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-l.kick:
			t.Stop()
		case <-t.C:
		}
		err := l.renew(ctx)
		var over errLost
		switch {
		case ctx.Err() != nil:
			return
		case errors.As(err, &over):
			l.cause = over.error
			close(l.lost)
			return
		case err != nil:
			wait, retry = jitter(retry), min(2*retry, l.ttl/3)
		default:
			wait, retry = jitter(l.ttl/3), retryLeast
		}
		l.d.report(err)
	}
}

// renew looks at the record, renews the lease and brings the groups up to date.
func (l *etcdLease) renew(ctx context.Context) error {
	bound := l.ttl / 3
	c, cancel := l.d.ask(ctx, bound)
	defer cancel()
	key := l.d.peerKey(l.node)
	resp, err := l.d.client.Get(c, key)
	if err != nil {
		return l.d.explain(err)
	}
	if err := l.sameStore(resp.Header.ClusterId, resp.Header.Revision); err != nil {
		return err
	}
	switch {
	case len(resp.Kvs) == 0:
		return errLost{fmt.Errorf("the store has no record %s any more: its lease ran out while this engine was cut off or stopped, or somebody removed it", key)}
	case uint64(resp.Kvs[0].CreateRevision) != l.inc:
		return errLost{fmt.Errorf("record %s belongs to incarnation %d, this engine is %d", key, resp.Kvs[0].CreateRevision, l.inc)}
	}
	c, cancel = l.d.ask(ctx, bound)
	defer cancel()
	if _, err := l.d.client.KeepAliveOnce(c, l.id); leaseNotFound(err) {
		return errLost{fmt.Errorf("the store does not know the lease of record %s any more", key)}
	} else if err != nil {
		return l.d.explain(err)
	}
	return l.publish(ctx, key)
}

// sameStore refuses the word of a store that is not the one this engine registered in, or that has
// forgotten what it said: it knows nothing about us, and nobody else can have acted by it.
func (l *etcdLease) sameStore(cluster uint64, revision int64) error {
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if cluster != l.cluster || revision < d.revision {
		// Its revisions would catch up.
		l.cluster = 0
		return fmt.Errorf("etcd at %s: %w", d.endpoints(), errOtherStore)
	}
	d.revision = revision
	return nil
}

// SetGroups implements GroupPublisher.
func (l *etcdLease) SetGroups(groups []Group) {
	m := make(map[string]Group, len(groups))
	for _, g := range groups {
		g.Ranks = slices.Clone(g.Ranks)
		m[g.Name] = g
	}
	l.mu.Lock()
	l.groups = m
	l.mu.Unlock()
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// publish makes the store's group records those of groups. An engine whose record is gone publishes nothing.
func (l *etcdLease) publish(ctx context.Context, peerKey string) error {
	l.mu.Lock()
	groups := l.groups
	l.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		g := groups[name]
		if reflect.DeepEqual(g, l.told[name]) {
			continue
		}
		b, err := json.Marshal(g)
		if err != nil {
			return err
		}
		if err := l.write(ctx, peerKey, clientv3.OpPut(l.groupKey(name), string(b), clientv3.WithLease(l.id))); err != nil {
			return err
		}
		if l.told == nil {
			l.told = make(map[string]Group)
		}
		l.told[name] = g
	}
	for _, name := range slices.Sorted(maps.Keys(l.told)) {
		if _, ok := groups[name]; ok {
			continue
		}
		if err := l.write(ctx, peerKey, clientv3.OpDelete(l.groupKey(name))); err != nil {
			return err
		}
		delete(l.told, name)
	}
	return nil
}

func (l *etcdLease) groupKey(name string) string {
	return l.d.cfg.Prefix + groupsDir + l.node + "/" + url.PathEscape(name)
}

// write does op if the record still is ours; the next renewal says why it is not.
func (l *etcdLease) write(ctx context.Context, peerKey string, op clientv3.Op) error {
	c, cancel := l.d.ask(ctx, l.ttl/3)
	defer cancel()
	_, err := l.d.client.Txn(c).If(clientv3.Compare(clientv3.CreateRevision(peerKey), "=", int64(l.inc))).Then(op).Commit()
	return l.d.explain(err)
}

// revoke gives the lease back, which removes all records. Where the store cannot be reached they go when
// the lease runs out.
func (l *etcdLease) revoke() {
	if l.id == 0 {
		return
	}
	ctx, cancel := l.d.ask(context.Background(), closeBound)
	defer cancel()
	_, _ = l.d.client.Revoke(ctx, l.id)
}

// Incarnation implements Lease.
func (l *etcdLease) Incarnation() uint64 { return l.inc }

// Lost implements Lease.
func (l *etcdLease) Lost() <-chan struct{} { return l.lost }

// Err implements Lease.
func (l *etcdLease) Err() error {
	select {
	case <-l.lost:
		return l.cause
	default:
		return nil
	}
}

// Close implements Lease.
func (l *etcdLease) Close() error {
	l.once.Do(func() {
		l.end()
		<-l.ended
		if l.Err() == nil {
			l.revoke()
		}
		l.err = l.lock.release()
	})
	return l.err
}

var _ GroupPublisher = (*etcdLease)(nil)
