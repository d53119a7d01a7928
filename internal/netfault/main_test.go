// Package netfault is tests: two engines with their plugins in network namespaces of their own, as on two hosts,
// workers that hand over rooms all the time, and between the hosts a wire that loses, delays, reorders and resets
// what goes over it.
//
//	go test ./internal/netfault                                      once each, with short clocks
//	go test ./internal/netfault -long -runs 20 -timeout 3h -out FILE with the clocks that an engine has by default
//
// It needs root, or a user namespace that this user may make.
package netfault

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

var (
	long    = flag.Bool("long", false, "the default clocks of an engine instead of short ones")
	runs    = flag.Int("runs", 1, "how often each fault is made")
	seed    = flag.Uint64("seed", 1, "of rooms, losses and delays")
	verbose = flag.Bool("rooms", false, "tell every room that a fault touched")
	out     = flag.String("out", "", "file for the result as JSON")
	version = flag.String("version", "", "of this product, for the result")
	again   = flag.String("again", "", "the command that does this, for the result")
	only    = flag.String("only", "", "make only faults whose name contains this")
	pairs   = flag.Int("pairs", 6, "pairs of engines that run at once: they wait more than they work")
)

// unavailable says why this process cannot make network namespaces, if so.
var unavailable error

// inside marks a process that is root of a user namespace of its own.
const inside = "TERMINUS_NETFAULT_INSIDE"

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "tcp" {
		os.Args = append(os.Args[:1], os.Args[3:]...)
		sdk.Main(tcp.New())
	}
	if len(os.Args) > 2 && os.Args[1] == "engine" {
		os.Exit(engineMain(os.Args[2]))
	}
	// Under the race detector a process sleeps a second before it exits; engines and plugins inherit this.
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	if os.Geteuid() != 0 && os.Getenv(inside) == "" {
		code, err := asRoot()
		if err == nil {
			os.Exit(code)
		}
		unavailable = fmt.Errorf("neither root nor a user namespace: %w", err)
	}
	flag.Parse()
	flag.Set("test.parallel", strconv.Itoa(*pairs+2))
	goleak.VerifyTestMain(m)
}

// asRoot runs these tests as root of a user namespace.
func asRoot() (code int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	var ended *exec.ExitError
	if err := cmd.Run(); errors.As(err, &ended) {
		return ended.ExitCode(), nil
	} else if err != nil {
		return 0, err
	}
	return 0, nil
}

// engineMain is `engine run -c FILE`.
func engineMain(file string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg, err := config.Load(config.LoadOptions{Files: []string{file}})
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		err = node.Run(ctx, cfg, node.Options{Log: log.With("node", cfg.Node), Version: "test"})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
