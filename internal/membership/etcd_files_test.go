package membership

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A pipe that peers.etcd named was waited for, for ever.
func TestFilesThatAreNone(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, read := range map[string]func() error{
		"ca":            func() error { _, err := EtcdTLS{CA: pipe}.load(); return err },
		"cert":          func() error { _, err := EtcdTLS{Cert: pipe, Key: pipe}.load(); return err },
		"password_file": func() error { _, err := readPassword(pipe); return err },
	} {
		got := make(chan error, 1)
		go func() { got <- read() }()
		select {
		case err := <-got:
			if err == nil || !strings.Contains(err.Error(), pipe+": it is no regular file") {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s is waited for", name)
		}
	}
}
