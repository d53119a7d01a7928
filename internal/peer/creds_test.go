package peer

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A pipe that peers.tls named was waited for, for ever.
func TestFilesThatAreNone(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	good := newCA(t).issue(t.TempDir(), time.Now().Add(time.Hour), "n")
	for name, read := range map[string]func() error{
		"ca":   func() error { _, err := openTLS(TLS{Cert: good.Cert, Key: good.Key, CA: pipe}, "n"); return err },
		"cert": func() error { _, err := openTLS(TLS{Cert: pipe, Key: pipe, CA: pipe}, "n"); return err },
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
