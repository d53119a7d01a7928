package pluginhost

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The runtime directory of the plugins:
//
//	plugins/lock        flock of the living host; whatever else is here when a new host gets it is left over
//	plugins/tcp.3/      private directory of epoch 3 of plugin tcp: its sockets and scratch files
//	plugins/tcp.3.token a random token that stands in the environment of every process of that epoch
//
// A process is killed as left over only if its environment carries a token found here. That is proof
// without regard to reused process ids, and finds descendants that left the process group.

// tokenEnv is the variable that carries the token.
const tokenEnv = "ENGINE_PLUGIN_TOKEN"

// openRoot creates and locks runtimeDir/plugins and cleans it up.
func openRoot(runtimeDir string, log *slog.Logger) (root string, lock *os.File, err error) {
	if root, err = filepath.Abs(filepath.Join(runtimeDir, "plugins")); err != nil {
		return "", nil, fmt.Errorf("runtime directory: %w", err)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", nil, fmt.Errorf("runtime directory: %w", err)
	}
	if err := os.Chmod(root, 0o700); err != nil {
		return "", nil, fmt.Errorf("runtime directory: %w", err)
	}
	lock, err = os.OpenFile(filepath.Join(root, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", nil, fmt.Errorf("runtime directory: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return "", nil, fmt.Errorf("runtime directory %s is used by another engine; give each engine its own: %w", root, err)
	}
	if err := sweep(root, log); err != nil {
		lock.Close()
		return "", nil, err
	}
	return root, lock, nil
}

// sweepWait bounds the wait for processes of a predecessor to die.
const sweepWait = 5 * time.Second

// sweep kills the processes and removes the directories that a dead host left.
func sweep(root string, log *slog.Logger) error {
	entries, err := os.ReadDir(root)
	if err != nil {
		return fmt.Errorf("runtime directory: %w", err)
	}
	tokens := make(map[string]bool)
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".token") {
			if b, err := os.ReadFile(filepath.Join(root, entry.Name())); err == nil && len(b) == tokenLen {
				tokens[string(b)] = true
			}
		}
	}
	for deadline := time.Now().Add(sweepWait); len(tokens) > 0; time.Sleep(10 * time.Millisecond) {
		killed, err := killTokens(tokens)
		if err != nil {
			return fmt.Errorf("look for processes of a dead engine: %w", err)
		}
		if len(killed) == 0 {
			break
		}
		log.Warn("killed plugin processes of a dead engine", "pids", killed)
		if time.Now().After(deadline) {
			return fmt.Errorf("runtime directory %s: processes %v of a dead engine's plugins do not die; see dmesg for hung tasks", root, killed)
		}
	}
	for _, entry := range entries {
		if entry.Name() == "lock" {
			continue
		}
		if err := os.RemoveAll(filepath.Join(root, entry.Name())); err != nil {
			return fmt.Errorf("remove what a dead engine left: %w", err)
		}
		log.Info("removed what a dead engine left", "path", filepath.Join(root, entry.Name()))
	}
	return nil
}

const tokenLen = 32

func newToken() string {
	var b [tokenLen / 2]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// killTokens sends SIGKILL to every living process with one of the tokens in its environment, and
// returns their ids. A process is named by a pidfd before it is judged, so that the one judged is the
// one killed.
func killTokens(tokens map[string]bool) (killed []int, err error) {
	pids, err := processes()
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		if pid == os.Getpid() {
			continue
		}
		if !hasToken(pid, tokens) {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if hasToken(pid, tokens) {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err == nil {
				killed = append(killed, pid)
			}
		}
		unix.Close(fd)
	}
	return killed, nil
}

// processes returns the ids of all processes that we can see.
func processes() (pids []int, err error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// groupRuns reports whether a process of the group is alive: not a zombie, or a zombie whose other
// threads are not. When it cannot know it says yes.
func groupRuns(pgid int) bool {
	pids, err := processes()
	if err != nil {
		return true
	}
	for _, pid := range pids {
		dir := "/proc/" + strconv.Itoa(pid)
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil {
			continue
		}
		// PID (COMMAND) STATE PPID PGRP …; the command may hold anything.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 3 || fields[2] != strconv.Itoa(pgid) {
			continue
		}
		threads, _ := os.ReadDir(dir + "/task")
		if fields[0] != "Z" && fields[0] != "X" || len(threads) > 1 {
			return true
		}
	}
	return false
}

// hasToken is false for zombies, whose environment is empty, and for processes of other users.
func hasToken(pid int, tokens map[string]bool) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	for _, kv := range bytes.Split(env, []byte{0}) {
		if token, ok := bytes.CutPrefix(kv, []byte(tokenEnv+"=")); ok && tokens[string(token)] {
			return true
		}
	}
	return false
}

// tokenRuns reports whether a living process carries the token.
func tokenRuns(token string) bool {
	pids, err := processes()
	return err == nil && slices.ContainsFunc(pids, func(pid int) bool { return hasToken(pid, map[string]bool{token: true}) })
}

// maxSocketPath is sun_path without its trailing NUL.
const maxSocketPath = 107

// checkSocketPath makes sure before the spawn that the sockets of every epoch will fit.
func checkSocketPath(root, name string) error {
	longest := filepath.Join(root, name+".4294967295", "plugin4294967295")
	if len(longest) > maxSocketPath {
		return fmt.Errorf("the plugin's socket would be %s (%d bytes), but unix socket paths end at %d; choose a runtime directory that is %d bytes shorter",
			longest, len(longest), maxSocketPath, len(longest)-maxSocketPath)
	}
	return nil
}

// epochDir is the place of one epoch on disk.
type epochDir struct {
	path, tokenFile string
	token           string
}

func newEpochDir(root, name string, epoch uint32) (*epochDir, error) {
	base := filepath.Join(root, fmt.Sprintf("%s.%d", name, epoch))
	d := &epochDir{path: base, tokenFile: base + ".token", token: newToken()}
	if err := os.WriteFile(d.tokenFile, []byte(d.token), 0o600); err != nil {
		return nil, fmt.Errorf("runtime directory: %w", err)
	}
	if err := os.Mkdir(d.path, 0o700); err != nil {
		os.Remove(d.tokenFile)
		return nil, fmt.Errorf("runtime directory: %w", err)
	}
	return d, nil
}

// leftovers returns the names of the sockets in the directory, sorted.
func (d *epochDir) leftovers() (names []string) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 {
			names = append(names, e.Name())
		}
	}
	return names
}

func (d *epochDir) remove() error {
	return errors.Join(os.RemoveAll(d.path), os.Remove(d.tokenFile))
}

// gone reports whether no process of the epoch is left, wherever it went; it kills those that it finds.
func (d *epochDir) gone() bool {
	killed, err := killTokens(map[string]bool{d.token: true})
	return err == nil && len(killed) == 0
}
