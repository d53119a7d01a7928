// Command engine is the Terminus engine and everything that an operator does with it.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/terminus-kv/terminus/internal/bench"
	"github.com/terminus-kv/terminus/internal/wasmhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

func main() {
	// The built-in backend is this binary, executed again by the plugin host.
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "tcp" {
		os.Args = append([]string{os.Args[0] + " plugin tcp"}, os.Args[3:]...)
		sdk.Main(tcp.New())
	}
	// So is the host of a WASM guest.
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "wasm" {
		wasmhost.Main(os.Args[3:])
	}
	// A process of a benchmark is this binary as well.
	if len(os.Args) > 1 && os.Args[1] == bench.ChildCommand {
		os.Exit(benchChild(os.Args[2:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once; newRun says so
	code := execute(ctx, newApp(os.Stdout, os.Stderr, os.Environ()), os.Args[1:])
	stop()
	os.Exit(code)
}
