package wasmhost

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Main serves a module as a plugin process and does not return: an engine's binary that was executed with the
// arguments "plugin wasm [-cache DIR] [-sha256 HEX] FILE" calls it with those after "wasm". The argument "info" after
// FILE prints what the guest is.
func Main(args []string) {
	flags := flag.NewFlagSet(os.Args[0]+" plugin wasm", flag.ContinueOnError)
	var cfg Config
	flags.StringVar(&cfg.CacheDir, "cache", "", "directory of compiled modules")
	flags.StringVar(&cfg.SHA256, "sha256", "", "digest that the module must have")
	if err := flags.Parse(args); err != nil {
		os.Exit(2) // flags has said why
	}
	if flags.NArg() == 0 {
		fmt.Fprintf(os.Stderr, "usage: %s [-cache DIR] [-sha256 HEX] FILE [info]\n", flags.Name())
		os.Exit(2)
	}
	cfg.File = flags.Arg(0)
	os.Args = append([]string{flags.Name() + " " + cfg.File}, flags.Args()[1:]...)

	b, err := New(context.Background(), cfg)
	if err == nil {
		sdk.Main(b)
	}
	if len(os.Args) > 1 {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	sdk.Main(broken{err})
}

// broken says at the handshake, where the operator reads it and nothing is restarted, why there is no guest.
type broken struct{ why error }

// Unusable keeps the description of the host, which would be taken for the module's, out of the handshake.
func (b broken) Unusable() error { return fmt.Errorf("the module cannot be loaded: %w", b.why) }

func (b broken) Info() sdk.Info                                   { return sdk.Info{Name: "wasm", Version: sdk.Version} }
func (b broken) Start(context.Context, sdk.Start) ([]byte, error) { return nil, b.why }
func (b broken) AddRegion(*sdk.Region) error                      { return b.why }
func (b broken) RemoveRegion(*sdk.Region)                         {}
func (b broken) AddPeer(*sdk.Peer) (contract.Lane, error)         { return 0, b.why }
func (b broken) RemovePeer(*sdk.Peer)                             {}
func (b broken) Transfer(op *sdk.Op)                              { op.Fail(contract.Cause_CAUSE_INTERNAL, true, "%v", b.why) }
func (b broken) Close() error                                     { return nil }
