package wasmhost

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// private makes dir, or makes sure that nobody else can put anything into it: a directory, not a link, of
// our user, mode 0700.
func private(dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return fmt.Errorf("cache of compiled modules: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return fmt.Errorf("cache of compiled modules: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("cache of compiled modules: %w", err)
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return fmt.Errorf("cache of compiled modules: %s is not a directory", dir)
	case !ok || int(owner.Uid) != os.Getuid():
		return fmt.Errorf("cache of compiled modules: %s belongs to another user; name another directory, or remove it", dir)
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("cache of compiled modules: %s is open to others (mode %04o); it holds machine code: chmod 0700 it", dir, info.Mode().Perm())
	}
	return nil
}
