package main

import (
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// version is set by the build: -ldflags "-X main.version=v1.2.3".
var version = ""

// build describes this binary.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Date     string `json:"date,omitempty"` // of the commit
	Modified bool   `json:"modified"`       // built from a tree with changes
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func thisBuild() build {
	b := build{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		if b.Version == "" && info.Main.Version != "(devel)" {
			b.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Commit = s.Value
			case "vcs.time":
				b.Date = s.Value
			case "vcs.modified":
				b.Modified = s.Value == "true"
			}
		}
	}
	if b.Version == "" {
		b.Version = "devel"
	}
	return b
}

func newVersion(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:         "version",
		Short:       "Tell which build this is",
		Example:     "  engine version\n  engine version -o json",
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(*cobra.Command, []string) error {
			b := thisBuild()
			return a.print(b, func(t *table) {
				line := []string{"engine", b.Version, b.Platform, b.Go}
				if b.Commit != "" {
					line = append(line, b.Commit, b.Date)
				}
				if b.Modified {
					line = append(line, "(modified)")
				}
				t.row(strings.Join(line, " "))
			})
		},
	}
	a.outputFlag(c)
	return c
}

func newCompletions(a *app) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:     "completions SHELL",
		Aliases: []string{"completion"},
		Short:   "Print the completions for a shell: bash, zsh, fish, powershell",
		Example: `  source <(engine completions bash)
  engine completions zsh >"${fpath[1]}/_engine"`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := arguments(1, 1, "one of "+strings.Join(shells, ", "))(cmd, args); err != nil {
				return err
			}
			s := ""
			if err := (&choice{&s, shells}).Set(args[0]); err != nil {
				return &usageError{err, cmd}
			}
			return nil
		},
		ValidArgs:   shells,
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch root := cmd.Root(); args[0] {
			case "bash":
				return root.GenBashCompletionV2(a.stdout, true)
			case "zsh":
				return root.GenZshCompletion(a.stdout)
			case "fish":
				return root.GenFishCompletion(a.stdout, true)
			default:
				return root.GenPowerShellCompletionWithDesc(a.stdout)
			}
		},
	}
}

// newPlugin describes `engine plugin tcp`, which main takes before any flag is read.
func newPlugin() *cobra.Command {
	c := group(&cobra.Command{Use: "plugin", Short: "Run a built-in plugin; only the engine calls this", Hidden: true,
		Example: "  engine plugin tcp info"})
	c.AddCommand(&cobra.Command{Use: "tcp", Short: "The tcp backend", Run: func(*cobra.Command, []string) {}})
	return c
}
