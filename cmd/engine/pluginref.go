package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/internal/pluginhost"
)

// exitNotReady: the plugin that a command is about never became ready.
const exitNotReady = 3

// pluginRef is the PLUGIN argument of a command, with the flags that belong to it.
type pluginRef struct {
	configs []string
	options string
	wait    time.Duration
}

func (r *pluginRef) flags(c *cobra.Command) {
	c.Flags().StringSliceVarP(&r.configs, "config", "c", nil, "configuration in which PLUGIN is a name; may be given several times")
	c.Flags().StringVar(&r.options, "options", "", "options of the plugin as a JSON object, in place of the configuration's")
	c.Flags().DurationVar(&r.wait, "wait", 15*time.Second, "bound from spawn to the answer of the handshake")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
}

// onePlugin accepts PLUGIN, and arguments of its program after --.
func onePlugin(cmd *cobra.Command, args []string) error {
	before := cmd.ArgsLenAtDash()
	if before < 0 {
		before = len(args)
	}
	if before == 1 {
		return nil
	}
	return &usageError{fmt.Errorf("want one PLUGIN, got %d; it is %s", before, pluginhost.RefUsage), cmd}
}

// spec resolves PLUGIN: args are the command's arguments, as onePlugin accepted them.
func (r *pluginRef) spec(a *app, cmd *cobra.Command, args []string) (pluginhost.Spec, error) {
	ref := args[0]
	var s pluginhost.Spec
	var err error
	switch isName := !strings.ContainsAny(ref, ":/"); {
	case len(r.configs) > 0 && isName && len(args) == 1:
		s, err = r.configured(a, cmd, ref)
	case len(r.configs) > 0 && isName:
		err = &usageError{fmt.Errorf("plugin %s of -c has its arguments from there; leave out what is behind --, or -c", ref), cmd}
	case len(r.configs) > 0:
		err = &usageError{fmt.Errorf("-c is for a PLUGIN that is a name under plugins, and nothing of it would be used for %s; leave out -c, or name the plugin", ref), cmd}
	default:
		if s, err = pluginhost.ParseRef(ref, args[1:]); err != nil {
			err = &usageError{err, cmd}
		}
	}
	if err != nil {
		return s, err
	}
	if r.options != "" {
		var object map[string]any
		if err := json.Unmarshal([]byte(r.options), &object); err != nil || object == nil {
			return s, &usageError{errors.New("--options is no JSON object"), cmd}
		}
		s.Options = []byte(r.options)
	}
	return s, nil
}

// configured finds the plugin of that name in the configuration.
func (r *pluginRef) configured(a *app, cmd *cobra.Command, name string) (pluginhost.Spec, error) {
	cfg, err := config.Load(config.LoadOptions{Files: r.configs, Env: a.environ})
	if err != nil {
		return pluginhost.Spec{}, err
	}
	if _, ok := cfg.Plugins[name]; !ok && name != pluginhost.BuiltIn {
		names := slices.Sorted(maps.Keys(cfg.Plugins))
		msg := fmt.Sprintf("no plugin %q in %s", name, strings.Join(r.configs, ", "))
		if near := config.Suggest(name, names); near != "" {
			msg += fmt.Sprintf("; did you mean %q?", near)
		} else if len(names) > 0 {
			msg += "; there are " + strings.Join(names, ", ")
		}
		return pluginhost.Spec{}, &usageError{errors.New(msg), cmd}
	}
	return node.PluginSpec(name, cfg)
}

// probe starts the plugin as an engine would, up to its handshake.
func probe(ctx context.Context, spec pluginhost.Spec, bound time.Duration) (pluginhost.Probed, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "probe"
	}
	return pluginhost.Probe(ctx, pluginhost.ProbeConfig{
		Node: host, EngineVersion: thisBuild().Version, HostID: host, Features: node.HostFeatures(), Timeout: bound,
	}, spec)
}

// notReady says why, and gives the exit code.
func (a *app) notReady(err error) error {
	fmt.Fprintf(a.stderr, "engine: %s\n", printable(err.Error(), ""))
	return &reported{exitNotReady}
}

// programPath is what the spec executes, for people.
func programPath(s pluginhost.Spec) string {
	switch {
	case s.Wasm != "":
		return s.Wasm
	case s.Script != "":
		return s.Script
	case s.Exec == "":
		return "built in"
	}
	return filepath.Clean(s.Exec)
}
