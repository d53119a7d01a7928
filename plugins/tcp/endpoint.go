package tcp

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	endpointVersion = 1
	maxAddrs        = 8
	maxAddrBytes    = 280
	maxEndpoint     = 8 << 10
	maxUnixPath     = 107 // sizeof(sockaddr_un.sun_path) less the final zero
)

// endpoint is what a peer needs to reach this process. The host carries it unread.
type endpoint struct {
	Version  int      `json:"v"`
	Instance string   `json:"instance"`       // 16 bytes, hexadecimal
	Host     string   `json:"host"`           // host id: shared memory and the lock need an equal one
	Unix     string   `json:"unix,omitempty"` // socket for the shm lane
	Lock     string   `json:"lock,omitempty"` // file that is locked as long as the process lives
	LockDev  uint64   `json:"lock_dev,omitempty"`
	LockIno  uint64   `json:"lock_ino,omitempty"`
	TCP      []string `json:"tcp"` // in order of preference
}

func (e endpoint) encode() ([]byte, error) {
	b, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	if len(b) > maxEndpoint {
		return nil, fmt.Errorf("endpoint: %d bytes, at most %d are allowed; advertise fewer addresses", len(b), maxEndpoint)
	}
	return b, nil
}

// decodeEndpoint reads a peer's endpoint.
func decodeEndpoint(b []byte) (endpoint, instance, error) {
	var (
		e  endpoint
		id instance
	)
	if len(b) > maxEndpoint {
		return e, id, fmt.Errorf("endpoint: %d bytes, at most %d are allowed", len(b), maxEndpoint)
	}
	if err := json.Unmarshal(b, &e); err != nil {
		return e, id, fmt.Errorf("endpoint: %w", err)
	}
	if e.Version != endpointVersion {
		return e, id, fmt.Errorf("endpoint: version %d, this plugin speaks %d; run the same release on both hosts", e.Version, endpointVersion)
	}
	raw, err := hex.DecodeString(e.Instance)
	if err != nil || len(raw) != len(id) {
		return e, id, fmt.Errorf("endpoint: instance %.40q is not 16 bytes in hexadecimal", e.Instance)
	}
	copy(id[:], raw)
	if len(e.TCP) > maxAddrs {
		return e, id, fmt.Errorf("endpoint: %d addresses, at most %d are allowed", len(e.TCP), maxAddrs)
	}
	for _, a := range e.TCP {
		if len(a) > maxAddrBytes {
			return e, id, fmt.Errorf("endpoint: address of %d bytes", len(a))
		}
		if _, _, err := net.SplitHostPort(a); err != nil {
			return e, id, fmt.Errorf("endpoint: address %q is not host:port", a)
		}
	}
	if len(e.Unix) > maxUnixPath || strings.ContainsRune(e.Unix, 0) || len(e.Lock) > 4096 {
		return e, id, fmt.Errorf("endpoint: socket or lock path is too long")
	}
	return e, id, nil
}

// lockFile is a file of the runtime directory that this process keeps locked until it ends. The kernel
// lets go of it only after the address space is gone, so whoever gets the lock knows that this process
// copies nothing any more.
type lockFile struct {
	f        *os.File
	dev, ino uint64
}

func takeLock(dir string) (*lockFile, error) {
	path := filepath.Join(dir, "tcp.lock")
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

// Close lets go of the lock. Call it last.
func (l *lockFile) Close() error { return l.f.Close() }

// watchLock opens the lock file of a peer on this host. It is kept open, because the path may vanish or
// mean another file later. The result is nil when the file is not the peer's (another mount
// namespace): then there is no proof of death.
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
	if l == nil {
		return false
	}
	if unix.Flock(int(l.f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil {
		return false
	}
	unix.Flock(int(l.f.Fd()), unix.LOCK_UN)
	return true
}
