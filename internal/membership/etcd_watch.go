package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Watch implements Driver. Gone is never set.
func (d *etcd) Watch(ctx context.Context) <-chan Update {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(d.ctx, cancel)
	w := &etcdWatch{d: d, out: make(chan Update)}
	go func() {
		defer close(w.out)
		defer cancel()
		defer stop()
		w.run(ctx)
	}()
	return w.out
}

// etcdWatch is the state of one Watch.
type etcdWatch struct {
	d     *etcd
	out   chan Update
	peers map[string]Peer  // by node
	bad   map[string]error // records that cannot be read, by node
	sent  *Update          // the last one
}

// run reads all records and follows what happens to them from there; when that breaks off, again.
func (w *etcdWatch) run(ctx context.Context) {
	retry := retryLeast
	for {
		rev, err := w.list(ctx)
		if err == nil {
			retry = retryLeast
			err = w.follow(ctx, rev+1)
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil { // compacted: the next list is as good as the events
			continue
		}
		if !w.send(ctx, err) {
			return
		}
		t := time.NewTimer(jitter(retry))
		retry = min(2*retry, w.d.cfg.Lease/3)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// list reads all records at one revision.
func (w *etcdWatch) list(ctx context.Context) (rev int64, err error) {
	if _, err := w.d.state(); err != nil {
		return 0, err // what is known stays, whatever the store says meanwhile
	}
	c, cancel := w.d.ask(ctx, w.d.cfg.Timeout)
	defer cancel()
	resp, err := w.d.client.Get(c, w.d.cfg.Prefix+peersDir, clientv3.WithPrefix(), clientv3.WithLimit(maxRecords+1))
	if err != nil {
		return 0, w.d.explain(err)
	}
	if len(resp.Kvs) > maxRecords {
		return 0, fmt.Errorf("etcd holds more than %d records below %s: use another prefix for each set of engines", maxRecords, w.d.cfg.Prefix+peersDir)
	}
	w.peers, w.bad = make(map[string]Peer), make(map[string]error)
	for _, kv := range resp.Kvs {
		w.put(kv)
	}
	return resp.Header.Revision, nil
}

// follow takes events from rev on. It returns nil when the store has compacted them away.
func (w *etcdWatch) follow(ctx context.Context, rev int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Without a leader a member would say nothing and not let go.
	events := w.d.client.Watch(clientv3.WithRequireLeader(ctx), w.d.cfg.Prefix+peersDir, clientv3.WithPrefix(), clientv3.WithRev(rev))
	for {
		changed, outage := w.d.state()
		switch {
		case errors.Is(outage, errOtherStore):
			return outage
		case !w.send(ctx, outage):
			return ctx.Err()
		}
		select {
		case <-changed:
		case resp, ok := <-events:
			switch {
			case !ok:
				return errors.New("the watch on etcd ended")
			case resp.CompactRevision != 0:
				return nil
			case resp.Err() != nil:
				return w.d.explain(resp.Err())
			}
			for _, ev := range resp.Events {
				if ev.Type == clientv3.EventTypeDelete {
					node := strings.TrimPrefix(string(ev.Kv.Key), w.d.cfg.Prefix+peersDir)
					delete(w.peers, node)
					delete(w.bad, node)
				} else {
					w.put(ev.Kv)
				}
			}
		}
	}
}

// put takes a record. One that cannot be read leaves what was known of its node.
func (w *etcdWatch) put(kv *mvccpb.KeyValue) {
	node := strings.TrimPrefix(string(kv.Key), w.d.cfg.Prefix+peersDir)
	r, err := readRecord(node, kv.Value)
	if err != nil {
		w.bad[node] = fmt.Errorf("etcd record %s: %w", kv.Key, err)
		return
	}
	delete(w.bad, node)
	w.peers[node] = Peer{Record: r.Record, Incarnation: uint64(kv.CreateRevision)}
}

func readRecord(node string, value []byte) (r etcdRecord, err error) {
	if len(value) > maxRecord {
		return r, fmt.Errorf("has %d bytes, at most %d", len(value), maxRecord)
	}
	if err := json.Unmarshal(value, &r); err != nil {
		return r, err
	}
	if r.Node != node {
		return r, fmt.Errorf("is the record of %q", r.Node)
	}
	return r, checkRecord(r.Record)
}

// send sends what is known if it is not what was sent last; false when ctx has ended.
func (w *etcdWatch) send(ctx context.Context, outage error) bool {
	w.d.mu.Lock()
	self := w.d.node
	w.d.mu.Unlock()
	var u Update
	for _, node := range slices.Sorted(maps.Keys(w.peers)) {
		if node != self {
			u.Peers = append(u.Peers, w.peers[node])
		}
	}
	errs := []error{outage}
	for _, node := range slices.Sorted(maps.Keys(w.bad)) {
		errs = append(errs, w.bad[node])
	}
	u.Err = errors.Join(errs...)
	if w.sent != nil && fmt.Sprint(u.Err) == fmt.Sprint(w.sent.Err) && reflect.DeepEqual(u.Peers, w.sent.Peers) {
		return ctx.Err() == nil
	}
	select {
	case w.out <- u:
		w.sent = &u
		return true
	case <-ctx.Done():
		return false
	}
}
