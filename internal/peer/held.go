package peer

import (
	"cmp"
	"fmt"
	"slices"
)

// maxAllTensors bounds the tensors of all pools of one engine: the receiver keeps each.
const maxAllTensors = 1 << 16

// held is what an engine has announced and not withdrawn.
type held struct {
	groups    map[groupKey]struct{}
	pools     map[uint64]heldPool
	endpoints map[epochKey]struct{}
	tensors   int // of all pools
}

type heldPool struct {
	pages   int32
	tensors int
}

func newHeld() held {
	return held{groups: make(map[groupKey]struct{}), pools: make(map[uint64]heldPool), endpoints: make(map[epochKey]struct{})}
}

// note takes an event of a stream into account; grew says that it may have added something.
func (h *held) note(ev *Event) (grew bool) {
	switch ev.Kind {
	case GroupUp:
		h.groups[groupKey{ev.Group.Name, ev.Group.Role}] = struct{}{}
	case GroupGone:
		delete(h.groups, groupKey{ev.Group.Name, ev.Group.Role})
	case PoolUp, PoolGone:
		h.tensors -= h.pools[ev.Pool.ID].tensors
		delete(h.pools, ev.Pool.ID)
		if ev.Kind == PoolUp {
			h.pools[ev.Pool.ID] = heldPool{ev.Pool.Pages, len(ev.Pool.Tensors)}
			h.tensors += len(ev.Pool.Tensors)
		}
	case EndpointUp:
		h.endpoints[epochKey{ev.Endpoint.Backend, ev.Endpoint.Epoch}] = struct{}{}
	case Lost:
		delete(h.endpoints, epochKey{ev.Endpoint.Backend, ev.Endpoint.Epoch})
	}
	return ev.Kind == GroupUp || ev.Kind == PoolUp || ev.Kind == EndpointUp
}

// take is note, with an error when the engine now holds more than times what one may announce.
func (h *held) take(ev *Event, times int) error {
	if !h.note(ev) {
		return nil
	}
	for _, b := range []struct {
		n, most int
		what    string
	}{{len(h.groups), maxGroups, "groups"}, {len(h.pools), maxPools, "pools"}, {h.tensors, maxAllTensors, "tensors"}, {len(h.endpoints), maxEndpoints, "endpoints"}} {
		if b.n > times*b.most {
			return fmt.Errorf("the peer announced more than %d %s", times*b.most, b.what)
		}
	}
	return nil
}

// missing lists, as events, what h has and now has not: endpoints first, then pools, then groups.
func (h *held) missing(now *held) (gone []Event) {
	for e := range h.endpoints {
		if _, ok := now.endpoints[e]; !ok {
			gone = append(gone, Event{Kind: Lost, Endpoint: Endpoint{Backend: e.backend, Epoch: e.epoch}})
		}
	}
	for id := range h.pools {
		if _, ok := now.pools[id]; !ok {
			gone = append(gone, Event{Kind: PoolGone, Pool: Pool{ID: id}})
		}
	}
	for g := range h.groups {
		if _, ok := now.groups[g]; !ok {
			gone = append(gone, Event{Kind: GroupGone, Group: Group{Name: g.name, Role: g.role}})
		}
	}
	slices.SortFunc(gone, func(a, b Event) int {
		return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Endpoint.Backend, b.Endpoint.Backend), cmp.Compare(a.Endpoint.Epoch, b.Endpoint.Epoch),
			cmp.Compare(a.Pool.ID, b.Pool.ID), cmp.Compare(a.Group.Name, b.Group.Name), cmp.Compare(a.Group.Role, b.Group.Role))
	})
	return gone
}
