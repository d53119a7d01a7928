package main

import (
	"errors"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/demo"
)

func newDemo(a *app) *cobra.Command {
	o := demo.Defaults()
	size := config.Bytes(o.Bytes)
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show the incident that this engine ends, then move real KV cache between two engines and verify every page",
		Example: `  engine demo
  engine demo -o json
  engine demo --faults engine,link --seed 7
  engine demo --peers etcd
  engine demo --ranks 2:4 --upgrade
  engine demo --trace conversation.jsonl --rooms 5000 --bytes 8GiB`,
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(starts),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Bytes = int64(size)
			o.Stdout, o.Stderr, o.Terminal = a.stdout, a.stderr, a.terminal
			_, err := demo.Run(cmd.Context(), o)
			return demoError(cmd, err)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Trace, "trace", "", "Mooncake-format trace; default: a generated sample")
	f.IntVar(&o.Rooms, "rooms", o.Rooms, "requests that are replayed")
	f.Var(&bytesFlag{&size}, "bytes", "about how much KV is moved in all; a page of one tensor has 512 B to 256 KiB")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of everything that is random")
	f.Float64Var(&o.AbortFraction, "abort-fraction", o.AbortFraction, "share of the rooms that a worker aborts")
	f.StringVar(&o.Arrival, "arrival", o.Arrival, "burst or spread")
	f.StringVar(&o.Plugin, "plugin", "", "another backend: exec:PATH or wasm:FILE")
	f.StringVar(&o.Ranks, "ranks", o.Ranks, "worker processes that share the model's heads, PREFILL:DECODE; more than one: all in Go")
	f.BoolVar(&o.NoPython, "no-python", false, "both workers in Go")
	f.BoolVar(&o.NoIncident, "no-incident", false, "leave the first part out")
	f.StringVar(&o.Faults, "faults", o.Faults, "what is done to engines, plugins and workers meanwhile: all, none, or some of "+strings.Join(demo.FaultNames(), ","))
	f.BoolVar(&o.Upgrade, "upgrade", false, "upgrade the plugin of one side meanwhile, as engine plugins upgrade does: no room may fail by that")
	f.Var(&choice{&o.Peers, []string{demo.PeersLocal, demo.PeersEtcd}}, "peers", "local, or etcd: by a store that the demo starts, and kills in between")
	f.DurationVar(&o.Deadline, "deadline", o.Deadline, "longest run")
	f.VarP(&choice{&o.Output, []string{"table", "json"}}, "output", "o", "table or json")
	c.AddCommand(newDemoWorker(a))
	return c
}

func newDemoWorker(a *app) *cobra.Command {
	o := demo.WorkerDefaults()
	size := config.Bytes(o.Bytes)
	c := &cobra.Command{
		Use:   "worker",
		Short: "Run one demo worker against a running engine; start one of each role with the same options",
		Example: `  engine demo worker --role prefill --socket /run/terminus/prefill-0/worker.sock
  engine demo worker --role decode --socket /run/terminus/decode-0/worker.sock`,
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect("opens rooms at a running engine"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Role == "" || o.Socket == "" {
				return &usageError{errors.New("want --role and --socket"), cmd}
			}
			o.Bytes = int64(size)
			o.Stdin, o.Stdout, o.Stderr = os.Stdin, a.stdout, a.stderr
			return demoError(cmd, demo.Worker(cmd.Context(), o))
		},
	}
	f := c.Flags()
	f.Var(&choice{&o.Role, []string{demo.RolePrefill, demo.RoleDecode}}, "role", "prefill or decode")
	f.StringVar(&o.Socket, "socket", "", "worker socket of the engine")
	f.StringVar(&o.Group, "group", "", "own group; default: the role")
	f.StringVar(&o.PeerGroup, "peer-group", "", "group of the counterpart; default: the other role")
	f.IntVar(&o.Rank, "rank", 0, "this worker's of --size")
	f.IntVar(&o.Size, "size", o.Size, "workers that share the model; with --schedule")
	f.StringVar(&o.Schedule, "schedule", "", "schedule file that the demo wrote")
	f.BoolVar(&o.Orders, "orders", false, "play what standard input orders, a JSON object a line, as the demo does")
	f.StringVar(&o.Trace, "trace", "", "Mooncake-format trace; default: a generated sample")
	f.IntVar(&o.Rooms, "rooms", o.Rooms, "requests that are replayed")
	f.Var(&bytesFlag{&size}, "bytes", "about how much KV is moved in all; a page of one tensor has 512 B to 256 KiB")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "of everything that is random; a second run against the same engines needs another one")
	f.Float64Var(&o.AbortFraction, "abort-fraction", o.AbortFraction, "share of the rooms that a worker aborts")
	f.StringVar(&o.Arrival, "arrival", o.Arrival, "burst or spread")
	f.BoolVar(&o.Python, "python", false, "the decode worker in Python")
	f.DurationVar(&o.Quiet, "quiet", o.Quiet, "give up when nothing happens for this long")
	return c
}

// demoError tells wrong options from a demo that did not come out as it has to.
func demoError(cmd *cobra.Command, err error) error {
	if errors.Is(err, demo.ErrOptions) {
		return &usageError{err, cmd}
	}
	return err
}

// bytesFlag is a size with a unit.
type bytesFlag struct{ value *config.Bytes }

func (b *bytesFlag) String() string {
	if b.value == nil {
		return ""
	}
	return b.value.String()
}
func (b *bytesFlag) Type() string       { return "SIZE" }
func (b *bytesFlag) Set(s string) error { return b.value.UnmarshalText([]byte(s)) }
