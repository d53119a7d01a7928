package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// probeBound is how long `validate --probe` waits for one plugin's handshake: as long as an engine does.
const probeBound = 15 * time.Second

// probePlugins starts every plugin that the configuration names, one after the other, and returns what an
// engine would refuse, at the places that cause it.
func probePlugins(ctx context.Context, cfg *config.Config) (all config.Problems) {
	names := slices.Sorted(maps.Keys(cfg.Plugins))
	for _, b := range cfg.Transfer.Backend {
		if !slices.Contains(names, b) {
			names = append(names, b)
		}
	}
	for _, name := range names {
		all = append(all, probePlugin(ctx, cfg, name)...)
	}
	return all
}

func probePlugin(ctx context.Context, cfg *config.Config, name string) (all config.Problems) {
	key := "plugins." + name
	add := func(key, msg, fix string) { all = append(all, cfg.ProblemAt(key, msg, fix)) }
	spec, err := node.PluginSpec(name, cfg)
	if err != nil {
		add(key, err.Error(), "report this")
		return all
	}
	found, err := probe(ctx, spec, probeBound)
	h := found.Handshake
	if h == nil || h.Name == "" { // it never said what it is
		add(programKey(cfg, name), err.Error(), "mend that; to try it alone: engine plugins inspect "+name+" -c FILE")
		return all
	}
	problems, serr := pluginhost.CheckOptions(h.ConfigSchema, spec.Options)
	if serr != nil {
		add(key, "the plugin's schema is unusable: "+serr.Error(), "tell the author of the plugin")
	}
	for _, p := range problems {
		add(optionKey(key, p.Path), "plugin "+name+": "+p.Msg, optionFix(name, p))
	}
	if err != nil && len(problems) == 0 {
		add(key, err.Error(), "see what it accepts: engine plugins inspect "+name+" -c FILE")
	}
	if slices.Contains(cfg.Transfer.Backend, name) && !slices.Contains(h.Kinds, contract.Kind_KIND_TRANSFER) && len(h.Kinds) > 0 {
		add("transfer.backend", fmt.Sprintf("plugin %s does not transfer; it serves %v", name, h.Kinds), "name a transfer backend")
	}
	var slow config.Problems
	if err := cfg.CheckBackend(name, config.Duration(h.Limits.GetProgressTimeoutNs())); errors.As(err, &slow) {
		all = append(all, slow...)
	}
	return all
}

// programKey is the key that names the program.
func programKey(cfg *config.Config, name string) string {
	key := "plugins." + name
	switch p := cfg.Plugins[name]; {
	case p.Script != "":
		return key + ".script"
	case p.Wasm != "":
		return key + ".wasm"
	case p.Exec != "":
		return key + ".exec"
	}
	return key
}

func optionKey(plugin string, path []string) string {
	key := plugin + ".options"
	for _, p := range path {
		if _, err := strconv.Atoi(p); err == nil {
			key += "[" + p + "]"
		} else {
			key += "." + p
		}
	}
	return key
}

func optionFix(name string, p pluginhost.OptionProblem) string {
	if len(p.Known) == 0 {
		return "see what it accepts: engine plugins inspect " + name + " -c FILE"
	}
	if near := config.Suggest(p.Path[len(p.Path)-1], p.Known); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	return "use one of: " + strings.Join(p.Known, ", ")
}
