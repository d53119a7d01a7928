package sim

import (
	"testing"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// TestSpanPlans: about one plan of six spreads groups over engines, with every number of engines a side that span may
// draw, equal and unequal numbers of ranks an engine, engines that have ranks of both roles, and groups that do not
// spread beside those that do. Each engine has a worker, and each rank an engine.
func TestSpanPlans(t *testing.T) {
	const plans = 6000
	var spans, shared, beside, unequal int
	sides := map[[2]int]int{}
	var p plan
	for seed := range uint64(plans) {
		if p.draw(seed); !p.spans {
			continue
		}
		spans++
		var ranks [maxEngines][statemachine.Destination + 1]int
		for i := range p.groups {
			g := &p.groups[i]
			for rank := range p.shape[g.role].Ranks {
				if g.at[rank] < 0 || g.at[rank] >= p.engines {
					t.Fatalf("seed %d: rank %d of %s is at engine %d of %d", seed, rank, g.name, g.at[rank], p.engines)
				}
				ranks[g.at[rank]][g.role]++
			}
		}
		if len(p.groups) > 2 {
			beside++
		}
		var side [2]int
		both, differ := false, false
		for e := range p.engines {
			if n := ranks[e]; n[statemachine.Source]+n[statemachine.Destination] == 0 {
				t.Fatalf("seed %d: %s has no worker", seed, engineName(e))
			} else {
				both = both || n[statemachine.Source] > 0 && n[statemachine.Destination] > 0
			}
			for role := range side {
				if p.hosts(int32(role), e) {
					side[role]++
					differ = differ || ranks[e][role+1] != ranks[p.groups[role].at[0]][role+1]
				}
			}
		}
		sides[side]++
		if both {
			shared++
		}
		if differ {
			unequal++
		}
	}
	if spans < plans/7 || spans > plans/5 || shared < 50 || beside < 100 || unequal < 100 || len(sides) != maxHosts*maxHosts-1 {
		t.Errorf("of %d plans %d span, %d with an engine of both roles, %d with a group beside, %d unequal; engines a side: %v", plans, spans, shared, beside, unequal, sides)
	}
}
