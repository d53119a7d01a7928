package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// finish checks what must hold after every conversation. It goes on after a failure, so that one fault
// does not leave processes and memory behind.
func (t *T) finish() {
	for _, check := range []func(*T){
		(*T).opsEnded,
		(*T).statsEmpty,
		(*T).pathsGone,
		(*T).regionsGone,
		(*T).memoryIntact,
		(*T).nothingLeft,
	} {
		t.do(check)
	}
}

// opsEnded: every op ended once (the ledger has seen to "once") and is quiet.
func (t *T) opsEnded() {
	for _, n := range t.nodes {
		if !n.answers() {
			continue
		}
		for _, o := range n.openOps() {
			o.Quiet()
		}
	}
}

// statsEmpty: the plugin's own account agrees. Stats is a barrier: nothing that was sent before it is
// still unread when it comes.
func (t *T) statsEmpty() {
	for _, n := range t.nodes {
		if !n.answers() {
			continue
		}
		st := n.Stats()
		t.Check(len(st.OpenOps) == 0, "R1", "Stats without open ops, all having ended and being quiet", "open ops %v at %s", st.OpenOps, n.Name)
		n.mu.Lock()
		sent := n.seq
		n.mu.Unlock()
		t.Check(st.LastSeq == sent, "R1", fmt.Sprintf("Stats.last_seq to be the last Submit, %d", sent), "%d at %s", st.LastSeq, n.Name)
	}
}

// answers tells whether the plugin can be asked for more: it lives, and has not kept silent in this case.
func (n *Node) answers() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost == nil && !n.silent
}

// silent tells whether a plugin of the case has kept silent. What the case set up is not taken down then: its plugins
// are about to be ended, and waiting for each of them again would tell nothing new.
func (t *T) silent() bool {
	return slices.ContainsFunc(t.nodes, func(n *Node) bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.silent
	})
}

// pathsGone takes down what the case set up.
func (t *T) pathsGone() {
	if t.silent() {
		return
	}
	for _, p := range slices.Clone(t.paths) {
		p.teardown()
	}
	for _, n := range t.nodes {
		n.removePools()
	}
}

// regionsGone: every region can be removed, and then nobody holds its lease, has it open or maps it.
func (t *T) regionsGone() {
	if t.silent() {
		return
	}
	t.run.mu.Lock()
	regions := slices.Clone(t.run.regions)
	t.run.mu.Unlock()
	for _, r := range regions {
		if r.node.Lost() == nil && r.node.case_() == t {
			r.node.RemoveRegion(r)
		}
	}
	t.eventually("R4", "nobody to hold the lease of a region that was removed, to have it open or to map it", func() string {
		for _, r := range regions {
			if r.lease[1] < 0 && !r.LeaseEnded() {
				return fmt.Sprintf("the lease of region %d of %s is held", r.ID, r.node.Name)
			}
		}
		return t.held(regions)
	})
}

// held names a process of this machine that has one of the regions open or maps it: who does, and is not this process,
// has it from a plugin.
func (t *T) held(regions []*Region) string {
	if !slices.ContainsFunc(t.nodes, func(n *Node) bool { return n.Process() != nil }) {
		return "" // the plugins are this process, and what it holds is ours
	}
	return heldBy(processes(), regions)
}

// heldBy is held of some processes.
func heldBy(pids []int, regions []*Region) string {
	held := holders(pids, regions)
	for _, r := range regions {
		if held[r] != "" {
			return held[r]
		}
	}
	return ""
}

// processes returns those of all plugins of the case.
func (t *T) processes() (pids []int) {
	for _, n := range t.nodes {
		if p := n.Process(); p != nil {
			pids = append(pids, group(p.PID())...)
		}
	}
	return pids
}

// memoryIntact: guards, neighbours and sources are as they were, and nobody has written to a page since the
// op that wrote it became quiet.
func (t *T) memoryIntact() {
	t.run.mu.Lock()
	regions := slices.Clone(t.run.regions)
	t.run.mu.Unlock()
	for _, r := range regions {
		if bad := r.check(); bad != "" {
			t.violate("R4", "memory to be as the ops left it: guards, neighbours and source pages untouched, nothing written after quiet", bad, nil)
		}
	}
}

// nothingLeft: descriptors, processes and files of the plugin are what they were before the case.
func (t *T) nothingLeft() {
	if t.silent() {
		return
	}
	for _, n := range t.nodes {
		if n.Lost() != nil || !n.hasBase || n.Process() == nil {
			continue
		}
		t.eventually("R12", "no descriptor, process or file left over from the case", func() string {
			return n.base.exceededBy(footprintOf(n.Process()))
		})
	}
}

// eventually polls until look returns "", within the bound of one answer.
func (t *T) eventually(rule, expected string, look func() string) {
	deadline := time.Now().Add(t.Bound())
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		got := look()
		if got == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fail(rule, expected, "%s", got)
		}
		select {
		case <-time.After(pause):
		case <-t.run.ctx.Done():
			t.Fail(rule, expected, "%s", got)
		}
	}
}

// footprint is what a plugin holds.
type footprint struct {
	fds       int
	processes int
	files     int // in its runtime directory and its $TMPDIR
	shared    int // files of /dev/shm
}

// measure takes the footprint before a case.
func (n *Node) measure() {
	p := n.Process()
	if p == nil || n.hasBase {
		return
	}
	n.base, n.hasBase = footprintOf(p), true
}

func footprintOf(p ProcessControl) (f footprint) {
	pids := group(p.PID())
	for _, pid := range pids {
		f.processes++
		f.fds += len(entriesOf(fmt.Sprintf("/proc/%d/fd", pid)))
	}
	for _, dir := range []string{p.RuntimeDir(), p.TempDir()} {
		_ = filepath.WalkDir(dir, func(string, os.DirEntry, error) error {
			f.files++
			return nil
		})
	}
	f.shared = len(sharedOf(pids))
	return f
}

// What may be opened once and kept: files by a runtime (slack), descriptors also by a library, which may open its devices,
// event queues and connections not before the first op that needs them. A leak does not stop there: the cases share
// their plugins, and each of leak/* measures what hundreds of its kind leave behind.
const (
	slack   = 4
	slackFD = 64
)

func (f footprint) exceededBy(now footprint) string {
	switch { // what says most comes first: each of the others takes descriptors, too
	case now.processes > f.processes:
		return fmt.Sprintf("%d processes, %d before", now.processes, f.processes)
	case now.files > f.files+slack:
		return fmt.Sprintf("%d files in the runtime directory and $TMPDIR, %d before", now.files, f.files)
	case now.shared > f.shared+slack:
		return fmt.Sprintf("%d files of /dev/shm open or mapped, %d before", now.shared, f.shared)
	case now.fds > f.fds+slackFD:
		return fmt.Sprintf("%d open descriptors, %d before the first case", now.fds, f.fds)
	}
	return ""
}
