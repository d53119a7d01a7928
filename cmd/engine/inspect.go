package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func newInspect(a *app) *cobra.Command {
	var ref pluginRef
	c := &cobra.Command{
		Use:   "inspect PLUGIN [-- ARGS...]",
		Short: "Start a plugin up to its handshake and show what it says of itself; exit code 3 when it never becomes ready",
		Long: `Start a plugin up to its handshake and show what it says of itself: version, kinds, features, limits, options.
PLUGIN is ` + pluginhost.RefUsage + `. Exit code 3 when it never becomes ready`,
		Example: `  engine plugins inspect tcp
  engine plugins inspect exec:./engine-plugin-mine
  engine plugins inspect exec:python3 -- backend.py
  engine plugins inspect nixl -c engine.yaml -o json`,
		Args:        onePlugin,
		Annotations: effect(starts),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := ref.spec(a, cmd, args)
			if err != nil {
				return err
			}
			found, err := probe(cmd.Context(), spec, ref.wait)
			if h := found.Handshake; h != nil && h.Name != "" {
				d := describePlugin(spec, found)
				if perr := a.print(d, d.table); perr != nil {
					return perr
				}
			}
			if err != nil {
				return a.notReady(err)
			}
			return nil
		},
	}
	ref.flags(c)
	a.outputFlag(c)
	return c
}

// pluginDescription is what a plugin says of itself.
type pluginDescription struct {
	Name             string          `json:"name"`
	Version          string          `json:"version"`
	Program          string          `json:"program"`
	Contract         uint32          `json:"contract_version"`
	SDK              string          `json:"sdk,omitempty"`
	Kinds            []string        `json:"kinds"`
	Memory           []string        `json:"memory_kinds"`
	Features         []string        `json:"features"`
	RequiredFeatures []string        `json:"required_features,omitempty"`
	Limits           []limitJSON     `json:"limits,omitempty"`
	EndpointBytes    int             `json:"endpoint_bytes"`
	ReadyNS          int64           `json:"ready_ns"`
	Schema           json.RawMessage `json:"config_schema,omitempty"`
	Refused          string          `json:"refused,omitempty"`
}

type limitJSON struct {
	Name  string `json:"name"`
	Value uint64 `json:"value"`
}

func describePlugin(spec pluginhost.Spec, found pluginhost.Probed) pluginDescription {
	h := found.Handshake
	d := pluginDescription{
		Name: h.Name, Version: h.PluginVersion, Program: programPath(spec), Contract: h.Version,
		Features: append([]string{}, h.Features...), RequiredFeatures: h.RequiredFeatures,
		EndpointBytes: len(h.Endpoint), ReadyNS: int64(found.Took), Limits: limitsOf(h.Limits), Refused: h.Error,
	}
	if json.Valid([]byte(h.ConfigSchema)) {
		d.Schema = json.RawMessage(h.ConfigSchema)
	}
	if s := h.Sdk; s != nil {
		d.SDK = strings.TrimSpace(s.Language + " " + s.Version)
	}
	for _, k := range h.Kinds {
		d.Kinds = append(d.Kinds, short(k.String(), "KIND_"))
	}
	for _, k := range h.MemoryKinds {
		d.Memory = append(d.Memory, short(k.String(), "MEMORY_KIND_"))
	}
	return d
}

// short makes host-shm of MEMORY_KIND_HOST_SHM.
func short(name, prefix string) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, prefix)), "_", "-")
}

// limitsOf lists the limits that are set.
func limitsOf(l *contract.Limits) []limitJSON {
	all := []limitJSON{
		{"max_ops", uint64(l.GetMaxOps())}, {"max_ops_per_peer", uint64(l.GetMaxOpsPerPeer())}, {"max_op_bytes", l.GetMaxOpBytes()},
		{"max_bytes_per_peer", l.GetMaxBytesPerPeer()}, {"max_runs", uint64(l.GetMaxRuns())}, {"max_regions", uint64(l.GetMaxRegions())},
		{"progress_timeout_ns", l.GetProgressTimeoutNs()},
	}
	return slices.DeleteFunc(all, func(l limitJSON) bool { return l.Value == 0 })
}

func (d *pluginDescription) table(t *table) {
	t.row("name", d.Name)
	t.row("version", d.Version)
	t.row("program", d.Program)
	t.row("sdk", d.SDK)
	t.row("contract", d.Contract)
	t.row("kinds", strings.Join(d.Kinds, ", "))
	t.row("memory", strings.Join(d.Memory, ", "))
	t.row("features", strings.Join(d.Features, ", "))
	if len(d.RequiredFeatures) > 0 {
		t.row("needs", strings.Join(d.RequiredFeatures, ", "))
	}
	for _, l := range d.Limits {
		t.row("limit", fmt.Sprintf("%s %d", l.Name, l.Value))
	}
	t.row("endpoint", count(d.EndpointBytes, "byte"))
	t.row("ready in", age(d.ReadyNS))
	for _, o := range optionsOf(d.Schema) {
		t.row("option", o)
	}
}

// optionsOf lists the options of a schema for people: name, type, default, description.
func optionsOf(schema json.RawMessage) []string {
	var s struct {
		Properties map[string]struct {
			Type        any             `json:"type"`
			Default     json.RawMessage `json:"default"`
			Description string          `json:"description"`
		} `json:"properties"`
	}
	if json.Unmarshal(schema, &s) != nil {
		return nil
	}
	var lines []string
	for name, p := range s.Properties {
		line := name
		if p.Type != nil {
			line += fmt.Sprintf(" (%v", p.Type)
			if p.Default != nil {
				line += ", default " + string(p.Default)
			}
			line += ")"
		}
		if p.Description != "" {
			line += ": " + p.Description
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}
