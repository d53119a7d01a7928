// Package regular reads files that somebody has named: an operator in a configuration or on a command line. What is no
// file is refused at once: a pipe would be waited for, and a device has no end.
package regular

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens a file, to be read or hashed. The error names it, as those of os.Open do.
func Open(path string) (*os.File, error) {
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

// MaxPEM is more than any file of certificates or keys has.
const MaxPEM = 1 << 20

// KeyPair is tls.LoadX509KeyPair.
func KeyPair(cert, key string) (tls.Certificate, error) {
	c, err := Read(cert, MaxPEM)
	if err != nil {
		return tls.Certificate{}, err
	}
	k, err := Read(key, MaxPEM)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(c, k)
}

// Read returns what a file holds, of at most so many bytes.
func Read(path string, most int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = &os.PathError{Op: "read", Path: path, Err: fmt.Errorf("it has more than %d bytes, which is the limit", most)}
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}
