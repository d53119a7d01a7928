package peer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// announcements is what every peer is told, now and after each Hello. Links.mu guards it.
type announcements struct {
	groups    map[groupKey]*wire.Frame
	pools     map[uint64]*wire.Frame
	tensors   int // of all pools
	endpoints map[epochKey]Endpoint
	lost      []epochKey // oldest first
	draining  bool
}

type groupKey struct {
	name string
	role statemachine.Role
}

type epochKey struct {
	backend string
	epoch   uint32
}

func newAnnouncements() announcements {
	return announcements{
		groups: make(map[groupKey]*wire.Frame), pools: make(map[uint64]*wire.Frame), endpoints: make(map[epochKey]Endpoint),
	}
}

// replay lists everything for one peer: groups, pools, endpoints, lost epochs, draining, and the mark
// that this was all.
func (a *announcements) replay(own uint64, node string, incarnation uint64) []*wire.Frame {
	var out []*wire.Frame
	for _, k := range slices.SortedFunc(maps.Keys(a.groups), func(x, y groupKey) int {
		return cmp.Or(cmp.Compare(x.name, y.name), cmp.Compare(x.role, y.role))
	}) {
		out = append(out, a.groups[k])
	}
	for _, id := range slices.Sorted(maps.Keys(a.pools)) {
		out = append(out, a.pools[id])
	}
	for _, k := range slices.SortedFunc(maps.Keys(a.endpoints), func(x, y epochKey) int {
		return cmp.Or(cmp.Compare(x.backend, y.backend), cmp.Compare(x.epoch, y.epoch))
	}) {
		out = append(out, encodeEndpoint(a.endpoints[k], own, node, incarnation))
	}
	for _, k := range a.lost {
		out = append(out, encodeLost(k.backend, k.epoch))
	}
	if a.draining {
		out = append(out, drainingFrame)
	}
	return append(out, announcedFrame)
}

var (
	drainingFrame  = &wire.Frame{Frame: &wire.Frame_Draining{Draining: &wire.Draining{}}}
	announcedFrame = &wire.Frame{Frame: &wire.Frame_Announced{Announced: &wire.Announced{}}}
)

// broadcast queues a frame for every peer with a stream. l.mu is held.
func (l *Links) broadcast(frame func(c *conn) *wire.Frame) {
	for _, k := range l.links {
		if c := k.current(); c != nil {
			c.send(frame(c), false)
		}
	}
}

func same(f *wire.Frame) func(*conn) *wire.Frame { return func(*conn) *wire.Frame { return f } }

// AnnounceGroup tells all peers, now and after each Hello, of a group with ranks here. An announcement
// of the same name and role replaces it; one that changes nothing is not sent.
func (l *Links) AnnounceGroup(g Group) error {
	f, err := encodeGroup(g)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := groupKey{g.Name, g.Role}
	old, ok := l.groups[key]
	if !ok && len(l.groups) >= maxGroups {
		return fmt.Errorf("group %q: %d groups are announced already, at most %d", g.Name, len(l.groups), maxGroups)
	}
	if ok && proto.Equal(old, f) {
		return nil
	}
	l.groups[key] = f
	l.broadcast(same(f))
	return nil
}

// RemoveGroup withdraws a group.
func (l *Links) RemoveGroup(name string, role statemachine.Role) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := groupKey{name, role}
	if _, ok := l.groups[key]; !ok {
		return
	}
	delete(l.groups, key)
	l.broadcast(same(&wire.Frame{Frame: &wire.Frame_GroupGone{GroupGone: &wire.GroupGone{Name: name, Role: wire.Role(role)}}}))
}

// AnnouncePool tells all peers, now and after each Hello, of a pool. Its group goes first.
func (l *Links) AnnouncePool(p Pool) error {
	f, err := encodePool(p)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.pools[p.ID]; ok {
		return fmt.Errorf("pool %d is announced already: pool ids are never reused", p.ID)
	}
	if len(l.pools) >= maxPools {
		return fmt.Errorf("pool %d: %d pools are announced already, at most %d", p.ID, len(l.pools), maxPools)
	}
	if l.tensors+len(p.Tensors) > maxAllTensors {
		return fmt.Errorf("pool %d: %d tensors are announced already, with its %d more than %d", p.ID, l.tensors, len(p.Tensors), maxAllTensors)
	}
	l.pools[p.ID] = f
	l.tensors += len(p.Tensors)
	l.broadcast(same(f))
	return nil
}

// RemovePool withdraws a pool.
func (l *Links) RemovePool(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f, ok := l.pools[id]
	if !ok {
		return
	}
	l.tensors -= len(f.GetPool().GetTensors())
	delete(l.pools, id)
	l.broadcast(same(&wire.Frame{Frame: &wire.Frame_PoolGone{PoolGone: &wire.PoolGone{Pool: id}}}))
}

// AnnounceEndpoint tells all peers, now and after each Hello, how to reach a plugin epoch.
func (l *Links) AnnounceEndpoint(e Endpoint) error {
	if err := checkEndpoint(e); err != nil {
		return err
	}
	e.Blob, e.Secret, e.Token = slices.Clone(e.Blob), slices.Clone(e.Secret), nil
	l.mu.Lock()
	defer l.mu.Unlock()
	key := epochKey{e.Backend, e.Epoch}
	if _, ok := l.endpoints[key]; !ok && len(l.endpoints) >= maxEndpoints {
		return fmt.Errorf("endpoint of %s: %d endpoints are announced already, at most %d", e.Backend, len(l.endpoints), maxEndpoints)
	}
	l.endpoints[key] = e
	l.broadcast(func(c *conn) *wire.Frame {
		return encodeEndpoint(e, l.cfg.Incarnation, c.hello.node, c.hello.incarnation)
	})
	return nil
}

// AnnounceLost withdraws the endpoint of a plugin epoch and tells all peers, now and after each Hello,
// that the epoch is gone.
func (l *Links) AnnounceLost(backend string, epoch uint32) {
	if epoch == 0 || checkName("backend", backend) != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := epochKey{backend, epoch}
	delete(l.endpoints, key)
	if slices.Contains(l.lost, key) {
		return
	}
	l.lost = append(l.lost, key)
	if len(l.lost) > maxLost {
		l.lost = l.lost[1:]
	}
	l.broadcast(same(encodeLost(backend, epoch)))
}

// AnnounceDraining tells all peers, now and after each Hello, that no new room is admitted here.
func (l *Links) AnnounceDraining() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.draining {
		l.draining = true
		l.broadcast(same(drainingFrame))
	}
}

func checkNode(field, node string) error {
	if err := membership.CheckNode(node); err != nil {
		return bad(field, "%v", err)
	}
	return nil
}
