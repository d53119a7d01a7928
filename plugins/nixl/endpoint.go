package nixl

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// endpoint is what a peer needs to reach this process. The host carries it unread.
type endpoint struct {
	Version  int      `json:"v"`
	Instance string   `json:"instance"`
	Host     string   `json:"host"` // host id: the lock needs an equal one
	Addrs    []string `json:"addrs"`
	Lock     string   `json:"lock,omitempty"` // file that is locked as long as the process lives
	LockDev  uint64   `json:"lock_dev,omitempty"`
	LockIno  uint64   `json:"lock_ino,omitempty"`
	NIXL     string   `json:"nixl,omitempty"` // version of the library, for people
}

const maxEndpoint = 8 << 10

func decodeEndpoint(b []byte) (endpoint, error) {
	var e endpoint
	if len(b) > maxEndpoint {
		return e, fmt.Errorf("endpoint: %d bytes, at most %d are allowed", len(b), maxEndpoint)
	}
	if err := json.Unmarshal(b, &e); err != nil {
		return e, fmt.Errorf("endpoint: %w", err)
	}
	if e.Version != wireVersion {
		return e, fmt.Errorf("endpoint: version %d, this plugin speaks %d; run the same release on both hosts", e.Version, wireVersion)
	}
	if len(e.Addrs) == 0 || len(e.Addrs) > maxAddrs || len(e.Instance) > 64 {
		return e, fmt.Errorf("endpoint: %d addresses", len(e.Addrs))
	}
	for _, a := range e.Addrs {
		if _, _, err := net.SplitHostPort(a); err != nil {
			return e, fmt.Errorf("endpoint: address %q is not host:port", a)
		}
	}
	return e, nil
}

// lockFile is a file of the runtime directory that this process keeps locked until it ends. The kernel lets go of it
// only after the address space and every socket of the process are gone, so whoever gets the lock knows that nothing
// is written into its memory any more.
type lockFile struct {
	f        *os.File
	dev, ino uint64
}

func takeLock(dir string) (*lockFile, error) {
	path := filepath.Join(dir, "nixl.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("runtime directory: %w", err)
	}
	var st unix.Stat_t
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = unix.Fstat(int(f.Fd()), &st)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: another process of this epoch holds the lock: %w", path, err)
	}
	return &lockFile{f: f, dev: uint64(st.Dev), ino: st.Ino}, nil
}

// watchLock opens the lock of a peer on this host. It is kept open, because the path may mean another file later. The
// result is nil when the file is not the peer's: then there is no proof of death.
func watchLock(e endpoint) *lockFile {
	if e.Lock == "" {
		return nil
	}
	f, err := os.OpenFile(e.Lock, os.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || uint64(st.Dev) != e.LockDev || st.Ino != e.LockIno {
		f.Close()
		return nil
	}
	return &lockFile{f: f, dev: uint64(st.Dev), ino: st.Ino}
}

// dead reports whether the process that held the lock is gone for good.
func (l *lockFile) dead() bool {
	if l == nil || unix.Flock(int(l.f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil {
		return false
	}
	_ = unix.Flock(int(l.f.Fd()), unix.LOCK_UN)
	return true
}

func (l *lockFile) Close() error {
	if l == nil {
		return nil
	}
	return l.f.Close()
}
