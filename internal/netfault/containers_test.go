package netfault

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestContainersOfOneMachine: two engines in containers have one boot id and take each other to be on one host, but
// neither sees the other's files. What has the name of the other's lock is nobody's, and free: it proves no death.
// Bytes take the network, and nothing of a process id, a lock or shared memory is believed.
func TestContainersOfOneMachine(t *testing.T) {
	t.Parallel()
	k := theClocks()
	hosts, between := newHosts(t)
	for _, h := range hosts {
		h.shared = true
	}
	f := newFieldOn(t, hosts, between, k, *seed)
	for i, e := range f.engines {
		other := hosts[1-i]
		locks, err := filepath.Glob(filepath.Join(other.dir, "r", other.name, "*", "*", "tcp.lock"))
		if err != nil || len(locks) == 0 {
			t.Fatalf("no lock of the plugin of %s: %v", other.name, err)
		}
		for _, lock := range locks {
			decoy := filepath.Join(fmt.Sprintf("/proc/%d/root", e.cmd.Process.Pid), lock)
			must(t, os.MkdirAll(filepath.Dir(decoy), 0o700))
			must(t, os.WriteFile(decoy, nil, 0o600))
		}
	}
	f.play(t, fault{name: "data-only-lost", make: dropped(bothEnds, []lane{data}, beyondStall), reasons: ofNoBytes})
	f.play(t, fault{name: "black-hole", make: dropped(bothEnds, bothLanes, beyondDead), reasons: slices.Concat(ofSilence, ofNoBytes)})
	f.end(t)
}
