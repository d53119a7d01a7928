package membership

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockPatience is how long a lock may be held against us before we believe that an engine holds it:
// watchers hold it for microseconds when they probe.
const lockPatience = time.Second

// A lock is a flock held for the life of the engine. The kernel gives it back when the process is
// gone, however it went; a thread stuck in the kernel keeps it, as it should. The file is never
// removed, and its inode is part of the proof: a lock file that somebody replaced proves nothing.
type lock struct {
	f     *os.File
	inode uint64
}

// acquire takes the lock on path, or fails with errLocked after lockPatience.
func acquire(ctx context.Context, path string) (*lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	give := time.Now().Add(lockPatience)
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(give) {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = errLocked
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
	inode, err := inodeOf(path)
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(int(f.Fd()), &st)
	}
	if err == nil && st.Ino != inode {
		err = errors.New("the file was replaced meanwhile, start again")
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &lock{f: f, inode: inode}, nil
}

var errLocked = errors.New("another process holds it")

// intact reports whether path still is the file that l locked.
func (l *lock) intact(path string) bool {
	inode, err := inodeOf(path)
	return err == nil && inode == l.inode
}

// id tells the locked file from every other file of this host.
func (l *lock) id() (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(l.f.Fd()), &st); err != nil {
		return "", &os.PathError{Op: "stat", Path: l.f.Name(), Err: err}
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), nil
}

func (l *lock) release() error { return l.f.Close() }

// free reports whether it is certain that nobody holds the lock with that inode on path.
func free(path string, inode uint64) bool {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Ino != inode {
		return false
	}
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil
}

func inodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}
