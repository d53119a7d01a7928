package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/scaffold"
)

func newPluginsNew(a *app) *cobra.Command {
	o := scaffold.Options{Lang: "go"}
	c := &cobra.Command{
		Use:   "new NAME",
		Short: "Write the beginning of a plugin: a project that builds, works and passes the conformance suite",
		Long: `Write the beginning of a plugin: a project that builds, works and passes the conformance suite, with its test, a
Makefile, an example configuration and a README. Nothing that exists is overwritten. Until the SDK is published the
project refers to a source tree of Terminus`,
		Example: `  engine plugins new mine                     in Go, in ./mine
  engine plugins new mine --lang python --dir /src/mine`,
		Args:        arguments(1, 1, "one NAME"),
		Annotations: effect("writes files; starts nothing"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Name = args[0]
			p, err := scaffold.New(o)
			var path *fs.PathError
			if errors.As(err, &path) && !errors.Is(err, fs.ErrNotExist) {
				return err // the disk's fault, not that of the command line
			}
			if err != nil {
				return &usageError{err, cmd}
			}
			fmt.Fprintf(a.stdout, "%s\n", strings.Join(p.Files, "\n"))
			fmt.Fprintf(a.stderr, "written to %s; next: cd %s && make%s\n", p.Dir, relative(p.Dir), engineVariable())
			return nil
		},
	}
	c.Flags().Var(&choice{&o.Lang, scaffold.Languages()}, "lang", strings.Join(scaffold.Languages(), ", "))
	c.Flags().StringVar(&o.Dir, "dir", "", "directory of the project (default: NAME)")
	c.Flags().StringVar(&o.SDK, "sdk", "", "source tree of Terminus to take the SDK from (default: the one this engine was built from)")
	_ = c.MarkFlagDirname("dir")
	_ = c.MarkFlagDirname("sdk")
	return c
}

// relative is dir as one types it, if that is short.
func relative(dir string) string {
	if wd, err := os.Getwd(); err == nil {
		if r, err := filepath.Rel(wd, dir); err == nil && !strings.HasPrefix(r, "..") {
			return r
		}
	}
	return dir
}

// engineVariable tells make where this engine is, unless PATH does.
func engineVariable() string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	if filepath.Base(self) == "engine" {
		for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
			if filepath.Clean(dir) == filepath.Dir(self) {
				return ""
			}
		}
	}
	return " ENGINE=" + self
}
