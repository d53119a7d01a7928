package membership

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// nextIncarnation counts up the number in file and makes it durable before it returns, so that no
// incarnation is ever used twice, whenever the process or the machine dies. The caller holds the
// node's lock. The number is at least the Unix time in milliseconds: engines start less often than that, so
// a file that was lost, or restored from a backup, does not bring old numbers back, which peers refuse.
func nextIncarnation(file string) (uint64, error) {
	var last uint64
	b, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return 0, fmt.Errorf("incarnation counter: %w", err)
	default:
		// The second word is the boot id of the machine, for the reader of the file only.
		word, _, _ := strings.Cut(string(b), " ")
		if last, err = strconv.ParseUint(word, 10, 63); err != nil {
			return 0, fmt.Errorf("incarnation counter %s is damaged (%w): remove it, the count then starts from the clock", file, err)
		}
	}
	next := max(last+1, uint64(time.Now().UnixMilli()))
	host, err := HostID()
	if err != nil {
		return 0, err
	}
	if err := writeFile(file, fmt.Appendf(nil, "%d %s\n", next, host), true); err != nil {
		return 0, fmt.Errorf("incarnation counter: %w", err)
	}
	return next, nil
}

// writeFile replaces file in one step. durable makes it survive a power cut.
func writeFile(file string, b []byte, durable bool) (err error) {
	dir := filepath.Dir(file)
	f, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if err == nil && durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return err
	}
	if !durable {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// MakeDir creates dir with mode 0700, or checks that nobody but this user and root can write to it: whoever
// can, could put sockets and locks of their own in the place of an engine's.
func MakeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Uid != uint32(os.Geteuid()) && st.Uid != 0 || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s belongs to user %d with mode %04o: want user %d and no write access for others (chmod 0700)", dir, st.Uid, st.Mode&0o7777, os.Geteuid())
	}
	return nil
}
