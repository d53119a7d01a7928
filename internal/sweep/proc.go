package sweep

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// holdings is what a process holds that could be left behind: its descriptors and mappings by kind.
type holdings map[string]int

// holdingsOf looks at a process; nothing when it is gone.
func holdingsOf(pid int) holdings {
	h := holdings{}
	dir := fmt.Sprintf("/proc/%d/", pid)
	fds, _ := os.ReadDir(dir + "fd")
	for _, fd := range fds {
		if to, err := os.Readlink(dir + "fd/" + fd.Name()); err == nil {
			h[kindOf(to)]++
		}
	}
	maps, _ := os.ReadFile(dir + "maps")
	for line := range bytes.Lines(maps) {
		if bytes.Contains(line, []byte("/memfd:")) {
			h["mapped memory"]++
		}
	}
	return h
}

func kindOf(target string) string {
	switch {
	case strings.HasPrefix(target, "/memfd:"):
		return "memory"
	case strings.HasPrefix(target, "socket:"):
		return "socket"
	case strings.HasPrefix(target, "pipe:"):
		return "pipe"
	case strings.HasPrefix(target, "anon_inode:"):
		return strings.Trim(strings.TrimPrefix(target, "anon_inode:"), "[]")
	}
	return "file"
}

// more says what h has more of than base, beyond a tolerance for what comes and goes by itself.
func (h holdings) more(base holdings) (out []string) {
	for kind, n := range h {
		slack := 0
		if kind == "socket" || kind == "file" {
			slack = 2 // connections are made again, and both sides may have dialled
		}
		if n > base[kind]+slack {
			out = append(out, fmt.Sprintf("%d of kind %s instead of %d", n, kind, base[kind]))
		}
	}
	slices.Sort(out)
	return out
}

// processesIn returns the processes whose working directory is dir, as all of a cluster have that. Zombies have none.
func processesIn(dir string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if cwd, err := os.Readlink("/proc/" + e.Name() + "/cwd"); err == nil && cwd == dir {
			pids = append(pids, pid)
		}
	}
	return pids
}

// zombiesOf returns the children of a process that have ended and that it does not reap.
func zombiesOf(pid int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for field := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(field); err == nil && stateOf(child) == "Z" {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// entriesOf is what is below a directory. The flight recorder of an engine's last predecessor is kept on purpose.
func entriesOf(dir string) (names []string) {
	_ = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Name() != "flight.previous" {
			names = append(names, strings.TrimPrefix(path, dir))
		}
		return nil
	})
	return names
}

// stateOf is the letter of a process's state: R, S, T and so on; nothing when it is gone.
func stateOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	rest := b[bytes.LastIndexByte(b, ')')+1:]
	if len(rest) < 2 {
		return ""
	}
	return string(rest[1:2])
}

// describe says what a process is, for a reader who cannot look any more.
func describe(pid int) string {
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	said := strings.TrimSpace(string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
	for line := range strings.Lines(string(status)) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), ":"); name == "State" || name == "PPid" || name == "TracerPid" {
			said += fmt.Sprintf(", %s %s", name, strings.TrimSpace(value))
		}
	}
	return said
}

func killPid(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) }
