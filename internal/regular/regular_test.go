package regular

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	pipe, file, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("seven B"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		most int64
		want string // the content, or what the error says
	}{
		{file, 7, "seven B"},
		{link, 7, "seven B"},
		{file, 6, "read " + file + ": it has more than 6 bytes"},
		{pipe, 7, "open " + pipe + ": it is no regular file"},
		{"/dev/zero", 7, "open /dev/zero: it is no regular file"},
		{dir, 7, "open " + dir + ": it is a directory"},
		{file + "x", 7, "no such file"},
	} {
		got := make(chan string, 1)
		go func() {
			b, err := Read(c.path, c.most)
			if err != nil {
				b = []byte(err.Error())
			}
			got <- string(b)
		}()
		select {
		case s := <-got:
			if !strings.Contains(s, c.want) {
				t.Errorf("%s: %s", c.path, s)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s is waited for", c.path)
		}
	}
}
