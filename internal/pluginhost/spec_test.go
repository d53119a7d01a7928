package pluginhost

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func fileSum(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func TestSpecRefused(t *testing.T) {
	h, _ := newTestHost(t, nil)
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	script := write("plugin.sh", "#!/bin/sh\nexit 0\n", 0o755)
	for _, c := range []struct {
		name string
		spec Spec
		says []string
	}{
		{"name", Spec{Name: "Tcp"}, []string{`"Tcp"`, "[a-z]"}},
		{"no file", Spec{Name: "a", Exec: "/nowhere/plugin"}, []string{"plugin a", "/nowhere/plugin", "no such file"}},
		{"not in PATH", Spec{Name: "a", Exec: "engine-plugin-nowhere"}, []string{"engine-plugin-nowhere", "PATH", "full path"}},
		{"not executable", Spec{Name: "a", Exec: write("data", "data", 0o644)}, []string{"not an executable file"}},
		{"directory", Spec{Name: "a", Exec: dir}, []string{"not an executable file"}},
		{"script", Spec{Name: "a", Exec: script}, []string{"is a script", "interpreter"}},
		{"script without interpreter", Spec{Name: "a", Script: script}, []string{"no interpreter"}},
		{"no script", Spec{Name: "a", Exec: "/bin/sh", Script: "/nowhere.sh"}, []string{"/nowhere.sh", "no such file"}},
		{"short pin", Spec{Name: "a", SHA256: "abc"}, []string{"64 hex digits"}},
		{"wrong pin", Spec{Name: "a", SHA256: strings.Repeat("0", 64)}, []string{"the configuration pins 0000", "has sha256 " + fileSum(t, "/proc/self/exe")}},
		{"wrong pin of a script", Spec{Name: "a", Exec: "/bin/sh", Script: script, SHA256: strings.Repeat("0", 64)},
			[]string{script, fileSum(t, script)}},
		{"no module", Spec{Name: "a", Wasm: "/nowhere.wasm"}, []string{"module", "/nowhere.wasm", "no such file"}},
		{"module and script", Spec{Name: "a", Wasm: script, Script: script}, []string{"takes no script and no args"}},
		{"wrong pin of a module", Spec{Name: "a", Wasm: script, SHA256: strings.Repeat("0", 64)}, []string{script, fileSum(t, script)}},
		{"options", Spec{Name: "a", Options: []byte("[1]")}, []string{"not a JSON object"}},
		{"null options", Spec{Name: "a", Options: []byte("null")}, []string{"not a JSON object"}},
		{"env name", Spec{Name: "a", Env: map[string]string{"A=B": "1"}}, []string{`"A=B"`}},
		{"env of ours", Spec{Name: "a", Env: map[string]string{"ENGINE_CTRL_FD": "1"}}, []string{"ENGINE_CTRL_FD", "set by the engine"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := h.Start(c.spec)
			wantText(t, err, c.says...)
		})
	}
	if len(h.Plugins()) != 0 {
		t.Errorf("plugins %v", h.Plugins())
	}
}

func TestSocketPathTooLong(t *testing.T) {
	h, _ := newTestHost(t, func(cfg *Config) {
		cfg.RuntimeDir = filepath.Join(t.TempDir(), strings.Repeat("d", 90))
	})
	_, err := h.Start(mode("echo"))
	wantText(t, err, "socket", "107", "shorter")
}

func TestPinned(t *testing.T) {
	h, rec := newTestHost(t, nil)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	spec := mode("echo")
	spec.Exec, spec.SHA256 = self, strings.ToUpper(fileSum(t, self))
	p := start(t, h, spec)
	rec.waitKind(t, Up, 1)
	if exe, err := os.Readlink("/proc/" + h.Plugins()[0].epoch.proc.ID() + "/exe"); err != nil || exe != self {
		t.Errorf("runs %s, %v", exe, err)
	}
	// A pin that no longer fits ends the restarts.
	p.spec.SHA256 = strings.Repeat("0", 64)
	p.epoch.proc.kill()
	if err := rec.waitKind(t, Down, 0).Err; !errors.Is(err, ErrRefused) {
		t.Error(err)
	}
}

// TestScript: an interpreter with its file; and a plugin that is no go-plugin at all.
func TestScript(t *testing.T) {
	h, rec := newTestHost(t, func(cfg *Config) { cfg.RestartBudget = 1 })
	script := filepath.Join(t.TempDir(), "plugin.sh")
	if err := os.WriteFile(script, []byte("echo \"$0 got $1\" >&2; exit 5\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := start(t, h, Spec{Name: "sh", Exec: "sh", Script: script, Args: []string{"one"}, SHA256: fileSum(t, script)})
	wantText(t, rec.waitKind(t, Down, 0).Err, script+" got one", "exit status 5")
	if err := p.Stop(context.Background()); err != nil {
		t.Error(err)
	}
}
