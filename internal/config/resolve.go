package config

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// resolve fills in what depends on the machine and what depends on other keys.
func (c *Config) resolve(environ []string) {
	if c.Node == "" {
		if host, err := os.Hostname(); err == nil {
			c.Node, _, _ = strings.Cut(host, ".")
		}
	}
	if c.RuntimeDir == "" {
		c.RuntimeDir = DefaultRuntimeDir(environ)
	}
	if c.StateDir == "" {
		c.StateDir = defaultStateDir(environ)
	}
	if c.Worker.Socket == "" {
		c.Worker.Socket = filepath.Join(c.NodeDir(), "worker.sock")
	}
	if c.Admin.Socket == "" {
		c.Admin.Socket = filepath.Join(c.NodeDir(), "admin.sock")
	}
	if c.Peers.Advertise == "" {
		c.Peers.Advertise = c.Peers.Listen
	}
	for name, p := range c.Plugins {
		if p.Exec == "" && p.Wasm == "" && name != BuiltinBackend {
			p.Exec = "engine-plugin-" + name
			c.Plugins[name] = p
		}
	}
}

// NodeDir is the engine's own folder in RuntimeDir: its sockets and those of its plugins.
func (c *Config) NodeDir() string { return filepath.Join(c.RuntimeDir, c.Node) }

// DefaultRuntimeDir is runtime_dir where no source sets it. Commands look for admin sockets there.
func DefaultRuntimeDir(environ []string) string {
	if v := getenv(environ, "XDG_RUNTIME_DIR"); filepath.IsAbs(v) {
		return filepath.Join(v, "terminus")
	}
	if os.Getuid() == 0 {
		return "/run/terminus"
	}
	return filepath.Join(os.TempDir(), "terminus-"+strconv.Itoa(os.Getuid()))
}

func defaultStateDir(environ []string) string {
	if os.Getuid() == 0 {
		return "/var/lib/terminus"
	}
	if v := getenv(environ, "XDG_STATE_HOME"); filepath.IsAbs(v) {
		return filepath.Join(v, "terminus")
	}
	if v := getenv(environ, "HOME"); filepath.IsAbs(v) {
		return filepath.Join(v, ".local", "state", "terminus")
	}
	return filepath.Join(DefaultRuntimeDir(environ), "state")
}

func getenv(environ []string, name string) string {
	value := ""
	for _, kv := range environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			value = v
		}
	}
	return value
}
