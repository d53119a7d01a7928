package node_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
)

// TestRuntimeDirOfOthers: where somebody else could put a socket in the place of the engine's, so that workers
// would hand their memory to it, no engine starts. The default is a name in /tmp that anybody can take first.
func TestRuntimeDirOfOthers(t *testing.T) {
	for name, take := range map[string]func(t *testing.T, run string){
		"open to all": func(t *testing.T, run string) { must(t, os.Mkdir(run, 0o700)); must(t, os.Chmod(run, 0o777)) },
		"another user's": func(t *testing.T, run string) {
			if os.Getuid() != 0 {
				if os.Getenv("CI") != "" {
					t.Fatal("only root can make a directory of somebody else, and CI tests everything")
				}
				t.Skip("only root can make a directory of somebody else")
			}
			must(t, os.Mkdir(run, 0o755))
			must(t, os.Chown(run, 65534, 65534))
		},
		"the engine's own is open": func(t *testing.T, run string) {
			must(t, os.MkdirAll(filepath.Join(run, "p"), 0o700))
			must(t, os.Chmod(filepath.Join(run, "p"), 0o777))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			take(t, filepath.Join(dir, "r"))
			cfg, err := config.Load(config.LoadOptions{Flags: flagsOf(dir, "p", []string{
				"peers.driver=static", "peers.listen=127.0.0.1:0", `peers.static=[{node: d, address: "127.0.0.1:1"}]`})})
			must(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			err = node.Run(ctx, cfg, node.Options{Log: slog.New(slog.DiscardHandler), Version: "test", Started: func(node.Sockets) { cancel() }})
			if err == nil || !strings.Contains(err.Error(), "runtime_dir: "+dir) {
				t.Errorf("it started, or says %v", err)
			}
		})
	}
}
