package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/admin"
)

func newPlugins(a *app) *cobra.Command {
	c := group(&cobra.Command{
		Use:   "plugins",
		Short: "Look at plugins, the processes that move bytes, upgrade one, make one",
		Example: `  engine plugins list                                what the engine runs
  engine plugins inspect exec:./engine-plugin-mine   what a plugin says of itself
  engine plugins upgrade tcp                         run the new file, no room fails
  engine plugins new mine --lang go                  begin one of your own`,
	})
	l := &cobra.Command{
		Use:         "list",
		Short:       "List the plugins with the state of their processes",
		Example:     "  engine plugins list\n  engine plugins list -o json",
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ps, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]admin.PluginInfo, error) { return c.Plugins(ctx) })
			if err != nil {
				return err
			}
			return list(a, ps, func(t *table) {
				t.row("PLUGIN", "KIND", "VERSION", "STATE", "EPOCH", "PID", "UP", "BEAT", "BUSY", "ROOMS", "OPS", "RESTARTS", "DETAIL")
				for _, p := range ps {
					if len(p.Epochs) == 0 {
						t.row(p.Name, p.Kind, p.Version, stateCell(p.State), "", "", "", "", "", "", "", p.Restarts, p.Detail)
					}
					for _, e := range p.Epochs {
						pid, up := "", "" // of a process that is gone
						if e.PID != 0 {
							pid = strconv.Itoa(e.PID)
						}
						if e.UptimeNS != 0 {
							up = age(e.UptimeNS)
						}
						detail := p.Detail
						if e.EndsInNS != 0 {
							detail = "ends in " + age(e.EndsInNS) + " at the latest"
						}
						t.row(p.Name, p.Kind, p.Version, stateCell(p.State), fmt.Sprintf("%d %s", e.Epoch, e.State), pid, up, ago(e.BeatAgeNS, ""), e.Busy, e.Rooms, e.Ops, p.Restarts, detail)
					}
				}
			})
		},
	}
	a.engineFlags(l)
	a.outputFlag(l)
	c.AddCommand(l, newInspect(a), newVerify(a), newPluginsNew(a), newPluginsUpgrade(a))
	return c
}

func newPeers(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:         "peers",
		Short:       "List the other engines that this one knows",
		Example:     "  engine peers\n  engine peers -o yaml",
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ps, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]admin.PeerInfo, error) { return c.Peers(ctx) })
			if err != nil {
				return err
			}
			return list(a, ps, func(t *table) {
				t.row("NODE", "STATE", "FOR", "HEARD", "INCARNATION", "ADDRESS", "LINK", "BACKENDS", "ROOMS", "OPS", "DETAIL")
				for _, p := range ps {
					t.row(p.Node, stateCell(p.State), age(p.SinceNS), ago(p.HeardNS, "never"), p.Incarnation, p.Address, link(p), strings.Join(p.Backends, ","), p.Rooms, p.OpsOut, p.Detail)
				}
			})
		},
	}
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

// link describes the connection to a peer; "-" for one that is gone.
func link(p admin.PeerInfo) string {
	if p.State == "dead" && p.Address == "" {
		return "-"
	}
	kind := "plain"
	if p.TLS {
		kind = "tls"
	}
	if p.SameHost {
		kind += ", same host"
	}
	return kind
}

func newStatus(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:         "status",
		Short:       "Tell who the engine is and whether it is ready; exit code 1 when it is not",
		Example:     "  engine status\n  engine status --node prefill-0 -o json",
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) (admin.Status, error) { return c.Status(ctx) })
			if err != nil {
				return err
			}
			if err := a.print(st, func(t *table) {
				t.row("node", st.Node)
				ready := cell{"yes", green}
				if !st.Ready {
					ready = cell{"no: " + strings.Join(st.NotReady, "; "), red}
				}
				t.row("ready", ready)
				t.row("version", st.Version)
				t.row("incarnation", st.Incarnation)
				t.row("pid", st.PID)
				t.row("up", age(st.UptimeNS))
				if st.Frozen != "" {
					t.row("membership", cell{"frozen, rooms go on: " + st.Frozen, yellow})
				}
				t.row("workers", st.Sessions)
				t.row("rooms", fmt.Sprintf("%d not ended, %d ended with pages not free", st.Rooms, st.Held))
			}); err != nil {
				return err
			}
			if !st.Ready {
				return &reported{exitFailed}
			}
			return nil
		},
	}
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}
