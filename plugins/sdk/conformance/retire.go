package conformance

import (
	"fmt"
	"slices"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// retire takes back a plan, its pools, their regions and the grant, all ops of them being quiet.
func (p *Path) retire(grant uint64, plan *Plan) {
	t := p.From.case_()
	if grant != 0 {
		t.Check(p.Revoke(grant), "R4", "Revoked with quiet=true, all ops being quiet", "quiet=false")
	}
	p.dropPlan(plan)
	delete(p.remotePools, plan.Dst.ID)
	p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemotePoolRemove{RemotePoolRemove: &contract.RemotePoolRemove{Peer: p.Handle, Pool: plan.Dst.ID}}})
	plan.Dst.remove()
	for _, pool := range []*Pool{plan.Dst, plan.Src} {
		var regions []*Region
		for _, tensor := range pool.Tensors {
			if r := tensor.Region; r.added {
				p.forget(r)
				r.node.RemoveRegion(r)
				regions = append(regions, r)
			}
		}
		t.free(regions)
	}
}

// dropPlan takes back a plan and its source pool.
func (p *Path) dropPlan(plan *Plan) {
	delete(p.plans, plan.ID)
	p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_PlanRemove{PlanRemove: &contract.PlanRemove{Plan: plan.ID}}})
	plan.Src.remove()
}

// remove takes the pool back before the end of the case.
func (p *Pool) remove() {
	p.node.mu.Lock()
	p.node.pools = slices.DeleteFunc(p.node.pools, func(id uint64) bool { return id == p.ID })
	p.node.mu.Unlock()
	p.node.Send(&contract.HostEvent{Event: &contract.HostEvent_PoolRemove{PoolRemove: &contract.PoolRemove{Pool: p.ID}}})
}

// forget tells From that a region of To is gone, if it was told of it.
func (p *Path) forget(r *Region) {
	if p.remoteRegions[r.ID] != r {
		return
	}
	delete(p.remoteRegions, r.ID)
	p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionRemove{RemoteRegionRemove: &contract.RemoteRegionRemove{Peer: p.Handle, Region: r.ID}}})
	p.From.Until("R12", fmt.Sprintf("RemoteRegionRemoved of region %d", r.ID), func(e *contract.PluginEvent) bool {
		m := e.GetRemoteRegionRemoved()
		return m != nil && m.Peer == p.Handle && m.Region == r.ID
	})
}

// free checks of regions that were removed what is checked of the others at the end of the case, and is
// done with them.
func (t *T) free(regions []*Region) {
	pids := t.processes() // of these alone: a case may do this a thousand times
	t.eventually("R4", "nobody to hold the lease of a region that was removed, to have it open or to map it", func() string {
		for _, r := range regions {
			if !r.LeaseEnded() {
				return fmt.Sprintf("the lease of region %d of %s is held", r.ID, r.node.Name)
			}
		}
		return heldBy(pids, regions)
	})
	for _, r := range regions {
		if bad := r.check(); bad != "" {
			t.Fail("R4", "memory to be as the ops left it", "%s", bad)
		}
	}
	t.run.mu.Lock()
	t.run.regions = slices.DeleteFunc(t.run.regions, func(r *Region) bool { return slices.Contains(regions, r) })
	t.run.mu.Unlock()
	for _, r := range regions {
		t.run.past.keep(r, t.result)
	}
}
