package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/config"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2 // usage or configuration
)

// app is what every command shares.
type app struct {
	stdout, stderr io.Writer
	environ        []string
	terminal       bool // stdout is one
	colour         bool

	output  string // -o
	socket  string // --socket
	node    string // --node
	configs []string
	timeout time.Duration
}

func newApp(stdout, stderr io.Writer, environ []string) *app {
	a := &app{stdout: stdout, stderr: stderr, environ: environ}
	a.terminal = isTerminal(stdout)
	a.colour = a.terminal && a.getenv("NO_COLOR") == "" && a.getenv("TERM") != "dumb"
	return a
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func (a *app) getenv(name string) string {
	value := ""
	for _, kv := range a.environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			value = v
		}
	}
	return value
}

// usageError is an error of whoever typed the command: exit code 2 and a hint at --help.
type usageError struct {
	err error
	cmd *cobra.Command
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// reported is a failure of which everything has been said: only the exit code is left.
type reported struct{ code int }

func (e *reported) Error() string { return fmt.Sprintf("exit %d", e.code) }

// execute runs one command line and returns the exit code.
func execute(ctx context.Context, a *app, args []string) int {
	root := newRoot(a)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var done *reported
	var usage *usageError
	var problems config.Problems
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &done):
		return done.code
	case errors.As(err, &problems):
		fmt.Fprintln(a.stderr, problems.Error())
		return exitUsage
	case errors.As(err, &usage):
		fmt.Fprintf(a.stderr, "engine: %v\nsee: %s --help\n", err, usage.cmd.CommandPath())
		return exitUsage
	}
	fmt.Fprintf(a.stderr, "engine: %s\n", printable(err.Error(), "\n\t"))
	return exitFailed
}

// newRoot builds the command tree.
func newRoot(a *app) *cobra.Command {
	root := group(&cobra.Command{
		Use:   "engine",
		Short: "Terminus moves KV cache from prefill to decode workers and tells you how every request ended",
		Example: `  engine demo                          see it work on this machine, no GPU needed
  engine run -c configs/prefill.yaml   start an engine
  engine rooms list --live             what is under way
  engine rooms why 8131776411          why a request has not ended`,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	})
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.PersistentPreRunE = noEmptyFlags
	root.SetHelpCommand(&cobra.Command{Hidden: true, Use: "no-help"})
	root.SetHelpTemplate(helpTemplate)
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(
		newRun(a), newValidate(a), newDemo(a), newRooms(a), newPlugins(a), newPeers(a), newGroups(a),
		newStatus(a), newDrain(a), newBench(a), newConformance(a), newSim(a), newVersion(a), newCompletions(a), newPlugin(),
	)
	return root
}

// noEmptyFlags refuses a flag that is given and says nothing, as of a variable that is not set: taken for one that was left
// out it would start an engine with another configuration, or upgrade a plugin without its checksum.
func noEmptyFlags(c *cobra.Command, _ []string) (err error) {
	c.Flags().Visit(func(f *pflag.Flag) {
		list, isList := f.Value.(pflag.SliceValue)
		if err == nil && (f.Value.String() == "" || isList && len(list.GetSlice()) == 0) {
			err = &usageError{fmt.Errorf("--%s is empty: give it a value, or leave it out", f.Name), c}
		}
	})
	return err
}

const helpTemplate = `{{with .Example}}Examples:
{{.}}

{{end}}{{with (or .Long .Short)}}{{. | trimTrailingWhitespaces}}.

{{end}}{{with .Annotations.effect}}Effect: {{.}}.
{{end}}Usage: {{if .Annotations.effect}}{{.UseLine}}{{else}}{{.CommandPath}} COMMAND{{end}}
{{if .HasAvailableSubCommands}}
Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}
{{end}}{{if .HasAvailableLocalFlags}}
Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}
{{end}}`

// What a command does to the engine; --help shows it.
const (
	readOnly = "read-only"
	mutating = "mutating: it needs admin.enable_mutations in the engine's configuration"
	starts   = "starts processes; changes nothing of a running engine"
)

func effect(e string) map[string]string { return map[string]string{"effect": e} }

// group makes a command that only has subcommands: alone it shows its help, an unknown one is an error with
// suggestions.
func group(c *cobra.Command) *cobra.Command {
	c.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		msg := fmt.Sprintf("unknown command %q", args[0])
		var names []string
		for _, sub := range cmd.Commands() {
			if !sub.Hidden {
				names = append(names, sub.Name())
			}
		}
		if near := config.Suggest(args[0], names); near != "" {
			msg += fmt.Sprintf("; did you mean %q?", near)
		}
		return &usageError{errors.New(msg), cmd}
	}
	c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	return c
}

// arguments checks the number of arguments; what names them, as in Use.
func arguments(least, most int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= least && (most < 0 || len(args) <= most) {
			return nil
		}
		return &usageError{fmt.Errorf("want %s, got %d arguments", what, len(args)), cmd}
	}
}

// flagError adds the nearest flag to an unknown one.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := config.Suggest(unknown.GetSpecifiedName(), names); near != "" {
			err = fmt.Errorf("%w; did you mean --%s?", err, near)
		}
	}
	return &usageError{err, cmd}
}

// outputFlag adds -o.
func (a *app) outputFlag(c *cobra.Command) {
	a.output = "table"
	c.Flags().VarP(&choice{&a.output, []string{"table", "json", "yaml"}}, "output", "o", "table, json or yaml")
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
}

// choice is a flag with a closed set of values.
type choice struct {
	value   *string
	allowed []string
}

func (c *choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

func (c *choice) Type() string { return "NAME" }

func (c *choice) Set(s string) error {
	for _, a := range c.allowed {
		if s == a {
			*c.value = s
			return nil
		}
	}
	msg := "want " + strings.Join(c.allowed, ", ")
	if near := config.Suggest(s, c.allowed); near != "" {
		msg += fmt.Sprintf("; did you mean %s?", near)
	}
	return errors.New(msg)
}
