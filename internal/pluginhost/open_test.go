package pluginhost

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPipeInPlaceOfAFile: opening a named pipe waited for a writer, in every command that was given one as
// program, script or module, and hashing a device had no end.
func TestPipeInPlaceOfAFile(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o755); err != nil {
		t.Fatal(err)
	}
	open := func(s Spec) func() error {
		return func() error {
			p, err := s.open()
			if err == nil {
				p.close()
			}
			return err
		}
	}
	digest := func(s Spec) func() error {
		return func() error { _, _, err := s.Digest(); return err }
	}
	for name, f := range map[string]func() error{
		"program":        open(Spec{Name: "a", Exec: fifo}),
		"script":         open(Spec{Name: "a", Exec: "/bin/sh", Script: fifo}),
		"module":         open(Spec{Name: "a", Wasm: fifo}),
		"digest":         digest(Spec{Name: "a", Exec: fifo}),
		"digest module":  digest(Spec{Name: "a", Wasm: fifo}),
		"digest of zero": digest(Spec{Name: "a", Wasm: "/dev/zero"}),
	} {
		t.Run(name, func(t *testing.T) {
			done := make(chan error, 1)
			go func() { done <- f() }()
			select {
			case err := <-done:
				if err == nil || !strings.Contains(err.Error(), "mode") {
					t.Errorf("got %v", err)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("it waits for a writer")
			}
		})
	}
}
