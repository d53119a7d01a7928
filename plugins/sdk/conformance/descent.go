package conformance

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Every descendant of a plugin is found again, wherever it goes: it carries the plugin's mark. The mark is
// the soft limit of file locks, which the kernel has not enforced since Linux 2.4.25, but which fork, exec
// and setsid hand on, and which a clean environment does not take away. Everybody may read it in /proc.
//
// The mark of a plugin is this number, drawn for this process, with the plugin's process id below.
var markBase = func() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:]) >> 2 &^ (1<<pidBits - 1)
}()

const pidBits = 22 // of the largest process id that Linux gives

// setMark marks a process that has just been started, and takes from it the means to lift the mark: the hard limit
// is the same, so that no larger one can be set (without privilege). Where the machine limits file locks it cannot, and
// only the process group of the plugin is looked at.
func setMark(pid int) {
	var limit unix.Rlimit
	if unix.Prlimit(pid, unix.RLIMIT_LOCKS, nil, &limit) != nil {
		return
	}
	mark := markBase | uint64(pid)
	if limit.Max < mark {
		return
	}
	limit.Cur, limit.Max = mark, mark
	_ = unix.Prlimit(pid, unix.RLIMIT_LOCKS, &limit, nil)
}

// marked tells whether a process carries the mark of the plugin with process id leader.
func marked(pid, leader int) bool {
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max file locks"); ok {
			fields := strings.Fields(rest)
			return len(fields) > 0 && fields[0] == strconv.FormatUint(markBase|uint64(leader), 10)
		}
	}
	return false
}

// processes returns the ids of all processes of the machine.
func processes() (pids []int) {
	for _, name := range entriesOf("/proc") {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// statOf returns what /proc says of a process: its state, parent, process group …; nothing if it is dead.
func statOf(pid int) []string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	// pid (comm) state ppid pgrp …; comm may hold anything, so look behind the last ")".
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 3 || fields[0] == "Z" {
		return nil
	}
	return fields
}

// group returns the live processes of a plugin: those of the process group that it leads, and its descendants that
// have left it.
func group(leader int) []int {
	return slices.DeleteFunc(processes(), func(pid int) bool {
		stat := statOf(pid)
		return stat == nil || stat[2] != strconv.Itoa(leader) && !marked(pid, leader)
	})
}

// descendants returns the live processes that carry the mark of a plugin, itself among them.
func descendants(leader int) []int {
	return slices.DeleteFunc(processes(), func(pid int) bool { return !marked(pid, leader) || statOf(pid) == nil })
}

// killStrays ends the descendants of a plugin that is gone, those that its host cannot know of among them. A process
// is named by a descriptor before it is judged, so that the one judged is the one killed.
func killStrays(leader int) {
	for _, pid := range descendants(leader) {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if marked(pid, leader) {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		unix.Close(fd)
	}
}

// mapping is a file that a process maps.
type mapping struct {
	inode uint64
	path  string
}

func mappingsOf(pid int) (list []mapping) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		// address perms offset dev inode path
		if _, path, ok := strings.Cut(line, "/"); ok {
			if inode, err := strconv.ParseUint(strings.Fields(line)[4], 10, 64); err == nil {
				list = append(list, mapping{inode, "/" + strings.TrimSuffix(path, "\n")})
			}
		}
	}
	return list
}

// memfd is how names of memory files begin, in /proc.
const memfd = "/memfd:"

// holders tells which of the regions processes have open or map, and who does; this process does not count.
func holders(pids []int, regions []*Region) map[*Region]string {
	held, byInode := map[*Region]string{}, map[uint64]*Region{}
	for _, r := range regions {
		if r.gpu == nil {
			byInode[r.inode] = r
		}
	}
	for _, pid := range pids {
		if pid == os.Getpid() {
			continue
		}
		found := func(does string, r *Region) {
			if held[r] == "" {
				held[r] = fmt.Sprintf("process %s %s region %d of %s", procNames([]int{pid}), does, r.ID, r.node.Name)
			}
		}
		for _, m := range mappingsOf(pid) {
			if r := byInode[m.inode]; r != nil && strings.HasPrefix(m.path, memfd) {
				found("maps", r)
			}
		}
		dir := fmt.Sprintf("/proc/%d/fd/", pid)
		for _, fd := range entriesOf(dir) {
			var st unix.Stat_t
			if path, err := os.Readlink(dir + fd); err != nil || !strings.HasPrefix(path, memfd) || unix.Stat(dir+fd, &st) != nil {
				continue
			}
			if r := byInode[st.Ino]; r != nil && r.dev == st.Dev {
				found("has open", r)
			}
		}
	}
	return held
}

// sharedDir holds what programs share as POSIX shared memory.
const sharedDir = "/dev/shm/"

// sharedOf returns the names in /dev/shm that the processes have open or map, sorted.
func sharedOf(pids []int) []string {
	names := map[string]bool{}
	add := func(path string) {
		if name, ok := strings.CutPrefix(path, sharedDir); ok && !strings.HasSuffix(name, " (deleted)") {
			names[name] = true
		}
	}
	for _, pid := range pids {
		for _, m := range mappingsOf(pid) {
			add(m.path)
		}
		dir := fmt.Sprintf("/proc/%d/fd/", pid)
		for _, fd := range entriesOf(dir) {
			if path, err := os.Readlink(dir + fd); err == nil {
				add(path)
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
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
