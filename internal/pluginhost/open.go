package pluginhost

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenRegular opens a file that somebody has named, to be read or hashed. What is no file (a pipe, which would
// be waited for, or a device, which has no end) is an error. The error names the file, as those of os.Open do.
func OpenRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case info.IsDir():
		err = errors.New("it is a directory; name the file in it")
	case !info.Mode().IsRegular():
		err = fmt.Errorf("it is no regular file (mode %s); name the file itself", info.Mode())
	}
	if err != nil {
		f.Close()
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return f, nil
}
