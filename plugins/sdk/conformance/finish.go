package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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
		if n.Lost() != nil {
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
		if n.Lost() != nil {
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

// pathsGone takes down what the case set up.
func (t *T) pathsGone() {
	for _, p := range slices.Clone(t.paths) {
		p.teardown()
	}
	for _, n := range t.nodes {
		n.removePools()
	}
}

// regionsGone: every region can be removed, and then nobody holds its lease or maps it.
func (t *T) regionsGone() {
	t.run.mu.Lock()
	regions := slices.Clone(t.run.regions)
	t.run.mu.Unlock()
	for _, r := range regions {
		if r.node.Lost() == nil && r.node.case_() == t {
			r.node.RemoveRegion(r)
		}
	}
	t.eventually("R4", "nobody to hold the lease of a region that was removed, or to map it", func() string {
		for _, r := range regions {
			if r.lease[1] < 0 && !r.LeaseEnded() {
				return fmt.Sprintf("the lease of region %d of %s is held", r.ID, r.node.Name)
			}
		}
		return t.mapped(regions)
	})
}

// mapped names a process of a plugin that maps one of the regions.
func (t *T) mapped(regions []*Region) string {
	for _, n := range t.nodes {
		p := n.Process()
		if p == nil {
			continue
		}
		for _, pid := range group(p.PID()) {
			for _, inode := range mappedInodes(pid) {
				for _, r := range regions {
					if r.inode == inode {
						return fmt.Sprintf("process %d of %s maps region %d of %s", pid, n.Name, r.ID, r.node.Name)
					}
				}
			}
		}
	}
	return ""
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
		time.Sleep(pause)
	}
}

// footprint is what a process holds.
type footprint struct {
	fds       int
	processes int
	files     int
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
	for _, pid := range group(p.PID()) {
		f.processes++
		f.fds += len(entriesOf(fmt.Sprintf("/proc/%d/fd", pid)))
	}
	_ = filepath.WalkDir(p.RuntimeDir(), func(string, os.DirEntry, error) error {
		f.files++
		return nil
	})
	return f
}

// slack is what a runtime may open once and keep (an event queue, a random source).
const slack = 4

func (f footprint) exceededBy(now footprint) string {
	switch {
	case now.fds > f.fds+slack:
		return fmt.Sprintf("%d open descriptors, %d before the first case", now.fds, f.fds)
	case now.processes > f.processes:
		return fmt.Sprintf("%d processes, %d before", now.processes, f.processes)
	case now.files > f.files+slack:
		return fmt.Sprintf("%d files in the runtime directory, %d before", now.files, f.files)
	}
	return ""
}

func entriesOf(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	return names
}

// group returns the live processes of a process group.
func group(pgid int) (pids []int) {
	for _, name := range entriesOf("/proc") {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		// pid (comm) state ppid pgrp …; comm may hold anything, so look behind the last ")".
		_, rest, ok := strings.Cut(string(stat[max(0, strings.LastIndexByte(string(stat), ')')):]), ") ")
		fields := strings.Fields(rest)
		if !ok || len(fields) < 3 || fields[0] == "Z" || fields[2] != strconv.Itoa(pgid) {
			continue
		}
		pids = append(pids, pid)
	}
	return pids
}

// mappedInodes returns the inodes that a process maps.
func mappedInodes(pid int) (inodes []uint64) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(maps)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || !strings.HasPrefix(fields[5], "/memfd:") {
			continue
		}
		if inode, err := strconv.ParseUint(fields[4], 10, 64); err == nil {
			inodes = append(inodes, inode)
		}
	}
	return inodes
}
