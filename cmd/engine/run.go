package main

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/internal/telemetry"
)

func newRun(a *app) *cobra.Command {
	var files, sets []string
	c := &cobra.Command{
		Use:   "run",
		Short: "Run an engine until SIGTERM, SIGINT or `engine drain`",
		Long: `Run an engine until SIGTERM, SIGINT or ` + "`engine drain`" + `; then it drains. A second signal ends it at once.
Values come from the defaults, then the files in order, then TERMINUS_ variables (TERMINUS_LIMITS__PEER_OPS=8),
then --set; each wins over the one before. Without any, the defaults serve one machine. The log goes to stderr.
Exit code 0 when nothing was cut, 1 when something failed or was cut, 2 for a wrong configuration`,
		Example: `  engine run -c configs/prefill.yaml
  engine run -c /etc/terminus/engine.yaml --set log.level=debug
  engine run --set node=prefill-0 --set transfer.backend=tcp`,
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(starts),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(config.LoadOptions{Files: files, Env: a.environ, Flags: sets})
			if err != nil {
				return err
			}
			log, limiter, err := telemetry.NewLogger(a.stderr, cfg.Log.Level, cfg.Log.Format)
			if err != nil {
				return err
			}
			defer limiter.Flush()
			defer sayLast(log)()
			floor := make([]byte, heapFloor)
			defer runtime.KeepAlive(floor)
			if err := node.Run(cmd.Context(), cfg, node.Options{Log: log, Limiter: limiter, Version: thisBuild().Version}); err != nil {
				return fmt.Errorf("node %s: %w", cfg.Node, err)
			}
			return nil
		},
	}
	c.Flags().StringSliceVarP(&files, "config", "c", nil, "configuration file; may be given several times")
	c.Flags().StringArrayVar(&sets, "set", nil, "KEY=VALUE, such as limits.peer_ops=8; may be given several times")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	return c
}

// sayLast logs the signal that ends an engine before its drain is over: the second one, which kills the
// process as if it had not been caught. The caller calls stop when the engine has ended.
func sayLast(log *slog.Logger) (stop func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	ended := make(chan struct{})
	go func() {
		var s os.Signal
		for range 2 {
			select {
			case s = <-signals:
			case <-ended:
				return
			}
		}
		log.Error("a second signal ends the engine at once: rooms are cut without a verdict of it", "signal", s.String())
		signal.Reset(os.Interrupt, syscall.SIGTERM)
		_ = syscall.Kill(os.Getpid(), s.(syscall.Signal)) // a process may always signal itself
	}()
	return func() { signal.Stop(signals); close(ended) }
}

// heapFloor is memory that is never touched, hence never backed by pages: the garbage collector lets that
// much gather before it runs, where a small heap would have it run every few milliseconds under load.
const heapFloor = 64 << 20
