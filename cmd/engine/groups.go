package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/admin"
)

func newGroups(a *app) *cobra.Command {
	c := group(&cobra.Command{
		Use:   "groups",
		Short: "Look at groups, here and at peers: the ranks of a model instance with one role",
		Example: `  engine groups list
  engine groups why llama-decode`,
	})
	c.AddCommand(newGroupsList(a), newGroupsWhy(a))
	return c
}

func newGroupsList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List the groups with their ranks, and what they work with: one line an engine that hosts ranks, one a pair",
		Example: `  engine groups list
  engine groups list -o json`,
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			gs, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]admin.GroupInfo, error) { return c.Groups(ctx) })
			if err != nil {
				return err
			}
			return list(a, gs, func(t *table) {
				t.row("GROUP", "ROLE", "NODE", "SIZE", "RANKS", "ELSEWHERE", "MISSING", "POOLS", "WITH", "AT", "BY", "ROOMS", "DETAIL")
				for _, g := range gs {
					groupRows(t, g)
				}
			})
		},
	}
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

// groupRows writes one row, and for each pair beyond the first one that has only the pair. Rooms are those of the
// pair.
func groupRows(t *table, g admin.GroupInfo) {
	node := g.Node
	if g.Here {
		node += " (here)"
	}
	missing := cell{text: ranks(g.Missing)}
	if len(g.Missing) > 0 {
		missing.tint = yellow
	}
	own := []any{g.Name, g.Role, node, g.Size, ranks(g.Ranks), ranks(g.Elsewhere), missing, g.Pools}
	if len(g.Pairs) == 0 {
		t.row(append(own, "", "", "", g.Rooms, g.Detail)...)
	}
	for _, p := range g.Pairs {
		by, detail := cell{strings.Join(p.Backends, ","), green}, ""
		switch p.Verdict {
		case admin.PairRefused:
			by, detail = cell{p.Verdict, red}, p.Reason+": "+p.Detail
		case admin.PairWaits:
			by, detail = cell{p.Verdict, yellow}, p.Detail
		}
		t.row(append(own, p.Group, p.Node, by, p.Rooms, detail)...)
		own = slices.Repeat([]any{""}, len(own))
	}
}

// ranks lists ranks in short, such as 0-3,6.
func ranks(of []int32) string {
	var out []string
	for i := 0; i < len(of); {
		j := i
		for j+1 < len(of) && of[j+1] == of[j]+1 {
			j++
		}
		run := fmt.Sprint(of[i])
		if j > i {
			run = fmt.Sprintf("%d-%d", of[i], of[j])
		}
		out = append(out, run)
		i = j + 1
	}
	return strings.Join(out, ",")
}

func newGroupsWhy(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:               "why GROUP",
		Short:             "Say in one sentence what a group waits for, and in one a pair whether it works",
		Example:           "  engine groups why llama-decode",
		Args:              arguments(1, 1, "the name of one group"),
		Annotations:       effect(readOnly),
		ValidArgsFunction: completeGroups(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			why, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]string, error) { return c.GroupWhy(ctx, args[0]) })
			if errors.Is(err, admin.ErrNotFound) {
				return fmt.Errorf("no engine that this one knows hosts a rank of group %q; see engine groups list", args[0])
			}
			if err != nil {
				return err
			}
			return list(a, why, func(t *table) {
				for _, s := range why {
					t.row(s)
				}
			})
		},
	}
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

// completeGroups offers the names of the groups that the engine knows.
func completeGroups(a *app) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		gs, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]admin.GroupInfo, error) { return c.Groups(ctx) })
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var names []string
		for _, g := range gs {
			if len(names) == 0 || names[len(names)-1] != g.Name { // sorted by name
				names = append(names, g.Name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
