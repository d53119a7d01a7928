package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/admin"
)

var sha256RE = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)

func newPluginsUpgrade(a *app) *cobra.Command {
	var u admin.Upgrade
	c := &cobra.Command{
		Use:   "upgrade NAME",
		Short: "Replace a plugin's program while rooms go on: no room fails by it",
		Long: `Replace a plugin's program while rooms go on. The next process starts beside the present one, with all workers' memory
(what a plugin keeps for itself exists twice meanwhile). It is judged first: handshake, contract version, the same name, no
feature less, every region taken, each within 30 s. If anything is wrong it is ended, and nothing has changed. Then it takes
every new room and operation; the present one finishes what it has, at most for clocks.retire or its longest transfer clock,
and is ended.

For 60 s the new program is on probation: if it dies, the one before it is started again, and stays. The rooms of the process
that died fail as plugin_lost. A script plugin is upgraded in place only (without --exec); it and a module cannot go
back to a file that was replaced. A plugin that sha256 pins needs --sha256 with --exec and --wasm.

Progress goes to stderr. Exit code 0 when the old process is provably gone and had nothing left, else 1; also 1 when the new
one dies while the command waits. Interrupted before the hand-over nothing changes; after it, it goes on. The configuration
is not written: change it too, or the next start of the engine runs the old program`,
		Example: `  engine plugins upgrade tcp                                       the file was replaced (by a rename): run the new one
  engine plugins upgrade nixl --exec /opt/nixl-1.4/engine-plugin-nixl
  engine plugins upgrade mine --wasm ./mine.wasm --sha256 "$(sha256sum mine.wasm | cut -c-64)"`,
		Args:        arguments(1, 1, "one NAME"),
		Annotations: effect(mutating),
		RunE: func(cmd *cobra.Command, args []string) error {
			if u.Exec != "" && u.Wasm != "" {
				return &usageError{errors.New("--exec and --wasm: a plugin has one program"), cmd}
			}
			if u.SHA256 != "" && !sha256RE.MatchString(u.SHA256) {
				return &usageError{fmt.Errorf("--sha256 %q: want 64 hexadecimal digits", u.SHA256), cmd}
			}
			for _, path := range []*string{&u.Exec, &u.Wasm} { // the engine has another directory
				if *path != "" {
					abs, err := filepath.Abs(*path)
					if err != nil {
						return err
					}
					*path = abs
				}
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			defer client.Close()
			err = client.UpgradePlugin(cmd.Context(), args[0], u, func(s admin.UpgradeStep) { fmt.Fprintln(a.stderr, s.What) })
			if err != nil {
				return err
			}
			fmt.Fprintf(a.stdout, "%s is upgraded\n", args[0])
			return nil
		},
	}
	a.engineFlags(c)
	c.Flags().Lookup("timeout").Hidden = true // the engine bounds an upgrade
	c.Flags().StringVar(&u.Exec, "exec", "", "program of the next process, no script (default: the present one's, read anew)")
	c.Flags().StringVar(&u.Wasm, "wasm", "", "module of the next process")
	c.Flags().StringVar(&u.SHA256, "sha256", "", "checksum that the program or module has to have; required if the present one is pinned")
	_ = c.MarkFlagFilename("exec")
	_ = c.MarkFlagFilename("wasm", "wasm")
	return c
}
