package main

import (
	"debug/elf"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/internal/pluginhost"
)

func newVerify(a *app) *cobra.Command {
	var ref pluginRef
	var pin string
	c := &cobra.Command{
		Use:   "verify PLUGIN [-- ARGS...]",
		Short: "Check a plugin before it is trusted: checksum, handshake, features, schema, options, and what a pin does not cover",
		Long: `Check a plugin before it is trusted: the checksum of what would be executed, its handshake, features, the schema of
its options, the options themselves, and say what a pinned checksum does not cover. PLUGIN is
` + pluginhost.RefUsage + `.
A plugin with another checksum is not started. Exit code 1 when a check fails, 3 when the plugin never becomes ready`,
		Example: `  engine plugins verify tcp
  engine plugins verify exec:./engine-plugin-mine --sha256 $(sha256sum engine-plugin-mine | cut -c-64)
  engine plugins verify nixl -c engine.yaml`,
		Args:        onePlugin,
		Annotations: effect(starts),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := ref.spec(a, cmd, args)
			if err != nil {
				return err
			}
			if pin != "" {
				if sum, err := hex.DecodeString(pin); err != nil || len(sum) != 32 {
					return &usageError{fmt.Errorf("--sha256 %q: want the 64 hexadecimal digits that sha256sum prints", pin), cmd}
				}
				spec.SHA256 = pin
			}
			v, err := a.verify(cmd, spec, &ref)
			if len(v.Checks) > 0 {
				if perr := a.print(v, v.table); perr != nil {
					return perr
				}
			}
			if err != nil {
				return a.notReady(err)
			}
			if n := v.failed(); n > 0 {
				fmt.Fprintf(a.stderr, "%s failed\n", count(n, "check"))
				return &reported{exitFailed}
			}
			return nil
		},
	}
	ref.flags(c)
	c.Flags().StringVar(&pin, "sha256", "", "checksum that it has to have, in place of the configuration's")
	a.outputFlag(c)
	return c
}

// verification is the result of verify.
type verification struct {
	Plugin     string      `json:"plugin"`
	File       string      `json:"file"`
	SHA256     string      `json:"sha256"`
	Checks     []checkJSON `json:"checks"`
	NotCovered []string    `json:"not_covered"`
}

type checkJSON struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

func (v *verification) add(name string, ok bool, format string, args ...any) {
	v.Checks = append(v.Checks, checkJSON{name, ok, fmt.Sprintf(format, args...)})
}

func (v *verification) failed() (n int) {
	for _, c := range v.Checks {
		if !c.OK {
			n++
		}
	}
	return n
}

func (v *verification) table(t *table) {
	for _, c := range v.Checks {
		mark := cell{"ok", green}
		if !c.OK {
			mark = cell{"FAILED", red}
		}
		t.row(c.Name, mark, c.Detail)
	}
	for _, n := range v.NotCovered {
		t.row("not covered", "", n)
	}
}

// verify runs the checks in order. The error means that the plugin never became ready.
func (a *app) verify(cmd *cobra.Command, spec pluginhost.Spec, ref *pluginRef) (verification, error) {
	v := verification{Plugin: spec.Name, NotCovered: notCovered(spec)}
	var err error
	if v.File, v.SHA256, err = spec.Digest(); err != nil {
		return verification{}, err
	}
	switch {
	case spec.SHA256 == "":
		v.add("checksum", true, "%s of %s; not pinned, so that any file in its place would be started", v.SHA256, v.File)
	case strings.EqualFold(spec.SHA256, v.SHA256):
		v.add("checksum", true, "%s of %s, as pinned", v.SHA256, v.File)
	default:
		v.add("checksum", false, "%s of %s, but %s is pinned; it was not started", v.SHA256, v.File, strings.ToLower(spec.SHA256))
		return v, nil
	}
	found, err := probe(cmd.Context(), spec, ref.wait)
	h := found.Handshake
	if h == nil || h.Name == "" { // it never said what it is
		v.add("handshake", false, "none: %s", withoutName(spec, err))
		return v, err
	}
	if err == nil {
		v.add("handshake", true, "%s %s, contract version %d, after %s", h.Name, h.PluginVersion, h.Version, age(int64(found.Took)))
	} else {
		v.add("handshake", false, "%s %s: %s", h.Name, h.PluginVersion, withoutName(spec, err))
	}
	v.features(h.Features, h.RequiredFeatures)
	problems, serr := pluginhost.CheckOptions(h.ConfigSchema, spec.Options)
	switch {
	case serr != nil:
		v.add("schema", false, "%v", serr)
	case h.ConfigSchema == "":
		v.add("schema", false, "none: nobody can check the options before the plugin does")
	default:
		v.add("schema", true, "%s", count(len(optionsOf([]byte(h.ConfigSchema))), "option"))
	}
	for _, p := range problems {
		v.add("options", false, "%s: %s", strings.Join(p.Path, "."), p.Msg)
	}
	if len(problems) == 0 && err == nil {
		v.add("options", true, "accepted")
	}
	return v, err
}

func withoutName(spec pluginhost.Spec, err error) string {
	return strings.TrimPrefix(err.Error(), "plugin "+spec.Name+": ")
}

func (v *verification) features(has, needs []string) {
	known := node.HostFeatures()
	var strange []string
	for _, f := range has {
		if !slices.Contains(known, f) {
			strange = append(strange, f)
		}
	}
	detail := strings.Join(has, ", ")
	if len(strange) > 0 {
		detail += "; not used by this engine: " + strings.Join(strange, ", ")
	}
	if detail == "" {
		detail = "none"
	}
	ok := true
	for _, f := range needs {
		if !slices.Contains(known, f) {
			ok, detail = false, detail+"; it needs "+f+", which this engine does not have"
		}
	}
	v.add("features", ok, "%s", detail)
}

// notCovered says what a pinned checksum leaves open.
func notCovered(s pluginhost.Spec) []string {
	var all []string
	switch {
	case s.Wasm != "":
		return []string{"the engine's own program, which runs the module, and its cache of compiled modules"}
	case s.Script != "":
		all = append(all, "the interpreter "+s.Exec, "whatever "+filepath.Base(s.Script)+" imports",
			"the moment between hash and start: the interpreter opens the script once more by its path")
	case s.Exec == "":
		all = append(all, "nothing is pinned separately: it is the engine's own program")
	}
	for _, arg := range s.Args {
		if info, err := os.Stat(arg); err == nil && info.Mode().IsRegular() {
			all = append(all, arg+" among its arguments: to pin it, name it as script in a configuration")
		}
	}
	if libraries := linked(s); len(libraries) > 0 {
		all = append(all, "the shared libraries "+strings.Join(libraries, ", ")+", and what they load")
	}
	return append(all, "libraries that it loads later by name (dlopen)", "programs that it starts", "its arguments, environment and options")
}

// linked are the shared libraries that the program is linked with.
func linked(s pluginhost.Spec) []string {
	s.Script, s.Wasm = "", ""
	file, _, err := s.Digest()
	if err != nil {
		return nil
	}
	f, err := elf.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	libraries, _ := f.ImportedLibraries()
	return libraries
}
