package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/admin"
)

func newRooms(a *app) *cobra.Command {
	c := group(&cobra.Command{
		Use:   "rooms",
		Short: "Look at rooms: one room is one request's hand-over of KV cache",
		Example: `  engine rooms list --live --older 10s
  engine rooms why 8131776411
  engine rooms get 8131776411 -o json`,
	})
	c.AddCommand(newRoomsList(a), newRoomsGet(a), newRoomsWhy(a), newRoomsWatch(a), newRoomsAbort(a))
	return c
}

func newRoomsList(a *app) *cobra.Command {
	var f admin.RoomFilter
	var older time.Duration
	c := &cobra.Command{
		Use:   "list",
		Short: "List the engine's records of rooms, oldest first",
		Example: `  engine rooms list --live --older 10s
  engine rooms list --status Failed --reason stalled
  engine rooms list --residency quarantined -o json`,
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.OlderNS = int64(older)
			if f.Limit < 1 || f.Limit > admin.MaxRooms {
				return &usageError{fmt.Errorf("--limit %d: want 1 to %d", f.Limit, admin.MaxRooms), cmd}
			}
			rooms, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]admin.RoomInfo, error) { return c.Rooms(ctx, f) })
			if err != nil {
				return err
			}
			if len(rooms) == f.Limit {
				fmt.Fprintf(a.stderr, "showing %d; there may be more: narrow the filter or raise --limit\n", len(rooms))
			}
			return list(a, rooms, func(t *table) {
				t.row(roomColumns...)
				for _, r := range rooms {
					t.row(roomCells(r)...)
				}
			})
		},
	}
	fl := c.Flags()
	fl.Var(&choice{&f.Role, []string{"source", "destination"}}, "role", "source or destination")
	fl.Var(&choice{&f.Status, []string{"Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"}}, "status", "what the worker polls, such as Transferring")
	fl.StringVar(&f.State, "state", "", "state of the protocol, such as confirmed")
	fl.Var(&choice{&f.Residency, []string{"none", "armed", "quiescing", "quarantined", "quiet", "fenced", "released"}}, "residency", "of the pages, such as quarantined")
	fl.StringVar(&f.Reason, "reason", "", "why they ended, such as stalled")
	fl.StringVar(&f.Peer, "peer", "", "node of the counterpart")
	fl.StringVar(&f.Group, "group", "", "own or peer group")
	fl.BoolVar(&f.Live, "live", false, "only rooms that have not ended")
	fl.DurationVar(&older, "older", 0, "only rooms that are in their state for at least this long")
	fl.IntVar(&f.Limit, "limit", 1000, "at most this many")
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

// roomColumns are the header of roomCells.
var roomColumns = []any{"ROOM", "ROLE", "ATTEMPT", "STATUS", "REASON", "STATE", "FOR", "PAGES", "PEER", "DONE", "OPS", "NEXT CLOCK"}

func roomCells(r admin.RoomInfo) []any {
	return []any{r.Room, r.Role, r.Attempt, statusCell(r.Status), r.Reason, r.State, age(r.SinceNS), residencyCell(r.Residency), r.Peer, done(r), ops(r), clock(r.Clock)}
}

func newRoomsGet(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:         "get ROOM",
		Short:       "Show the records of one room with their history",
		Example:     "  engine rooms get 8131776411\n  engine rooms get 8131776411 -o json",
		Args:        arguments(1, 1, "one room id"),
		Annotations: effect(readOnly),
		RunE: withRoom(func(cmd *cobra.Command, room int64) error {
			rooms, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]admin.RoomInfo, error) { return c.Room(ctx, room) })
			if err != nil {
				if rooms, err = a.remembered(err, room); err != nil {
					return err
				}
			}
			return list(a, rooms, func(t *table) {
				for i, r := range rooms {
					if i > 0 {
						t.rows = append(t.rows, nil)
					}
					describe(t, r)
				}
			})
		}),
	}
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

// describe writes one record, a line per field, then its history.
func describe(t *table, r admin.RoomInfo) {
	t.row("room", r.Room)
	t.row("role", fmt.Sprintf("%s, attempt %d", r.Role, r.Attempt))
	status := statusCell(r.Status)
	if r.Reason != "" && r.Reason != "success" {
		status.text += " (" + r.Reason + ")"
	}
	t.row("status", status)
	t.row("state", fmt.Sprintf("%s for %s, open for %s", r.State, age(r.SinceNS), age(r.AgeNS)))
	t.row("pages", residencyCell(r.Residency))
	t.row("opener", opener(r.Own))
	t.row("pair", opener(r.Pair))
	t.row("peer", r.Peer)
	if r.Group != "" { // the flight recorder of a dead engine has none
		t.row("groups", r.Group+" with "+dash(r.PeerGroup))
	}
	t.row("ranks", strings.Trim(fmt.Sprint(r.Ranks), "[]"))
	t.row("bytes", done(r))
	t.row("ops", fmt.Sprintf("%d outstanding, %d held", r.OpsOut, r.OpsHeld))
	t.row("clock", clock(r.Clock))
	t.row("backend", strings.TrimSuffix(r.Backend+" by "+r.Lane, " by "))
	t.row("detail", r.Detail)
	for i, h := range r.History {
		name := ""
		if i == 0 {
			name = "history"
		}
		t.rows = append(t.rows, []cell{{text: name}, {text: fmt.Sprintf("%8s ago  %s", age(h.AgeNS), h.What)}})
	}
}

func newRoomsWhy(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:         "why ROOM",
		Short:       "Say in one sentence a record what a room waits for, and what happens when",
		Example:     "  engine rooms why 8131776411",
		Args:        arguments(1, 1, "one room id"),
		Annotations: effect(readOnly),
		RunE: withRoom(func(cmd *cobra.Command, room int64) error {
			why, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) ([]string, error) { return c.Why(ctx, room) })
			if err != nil {
				past, err := a.remembered(err, room)
				if err != nil {
					return err
				}
				for _, r := range past {
					why = append(why, whyPast(r))
				}
			}
			return list(a, why, func(t *table) {
				for _, s := range why {
					t.row(s)
				}
			})
		}),
	}
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

func newRoomsWatch(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "watch [ROOM]",
		Short: "Print the changes of one room, or of all, until interrupted",
		Example: `  engine rooms watch
  engine rooms watch 8131776411 -o json    one JSON object a line`,
		Args:        arguments(0, 1, "at most one room id"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, args []string) error {
			room := int64(-1)
			if len(args) == 1 {
				var err error
				if room, err = parseRoom(cmd, args[0]); err != nil {
					return err
				}
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			defer client.Close()
			w := watch{app: a, table: table{colour: a.colour, widths: slices.Clone(watchWidths)}}
			return client.WatchRooms(cmd.Context(), room, w.change)
		},
	}
	a.engineFlags(c)
	a.outputFlag(c)
	_ = c.Flags().MarkHidden("timeout")
	return c
}

// watchWidths are those of usual cells in roomColumns: a watch prints its rows one by one.
var watchWidths = []int{19, 11, 7, 15, 13, 9, 6, 11, 10, 15, 4, 18}

// watch prints changes. Its table grows wider where it has to, and has a header before the first row.
type watch struct {
	*app
	table  table
	headed bool
}

// change prints one line of a watch.
func (w *watch) change(ch admin.RoomChange) error {
	if w.output != "table" {
		b, err := w.encode(ch, false)
		if err != nil {
			return err
		}
		if w.output == "yaml" {
			b = append([]byte("---\n"), b...)
		}
		_, err = w.stdout.Write(b)
		return err
	}
	if ch.Missed > 0 {
		fmt.Fprintf(w.stderr, "%s missed: this reader is too slow\n", count(ch.Missed, "change"))
	}
	what := ch.What
	if what == "" {
		what = "is " + ch.State
	}
	t := &w.table
	t.rows = nil
	if !w.headed {
		w.headed = true
		t.row(append(slices.Clone(roomColumns), "WHAT")...)
	}
	t.row(append(roomCells(ch.RoomInfo), what)...)
	return t.write(w.stdout)
}

func newRoomsAbort(a *app) *cobra.Command {
	role := ""
	c := &cobra.Command{
		Use:   "abort ROOM",
		Short: "End a room as its worker would; the counterpart is told",
		Example: `  engine rooms abort 8131776411
  engine rooms abort 8131776411 --role source`,
		Args:        arguments(1, 1, "one room id"),
		Annotations: effect(mutating),
		RunE: withRoom(func(cmd *cobra.Command, room int64) error {
			res, err := ask(cmd, a, func(ctx context.Context, c *admin.Client) (admin.AbortResult, error) {
				return c.AbortRoom(ctx, room, role)
			})
			if err != nil {
				return notKnown(err, room)
			}
			return a.print(res, func(t *table) {
				t.row(count(res.Ended, "record") + " ended by this")
				if res.Requested > 0 {
					t.row(count(res.Requested, "record") + " had sent everything: the judge was asked and decides")
				}
				if len(res.Already) > 0 {
					t.row("ended before: " + strings.Join(res.Already, ", "))
				}
			})
		}),
	}
	c.Flags().Var(&choice{&role, []string{"source", "destination"}}, "role", "source or destination; default both")
	a.engineFlags(c)
	a.outputFlag(c)
	return c
}

// withRoom parses the one argument.
func withRoom(run func(cmd *cobra.Command, room int64) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		room, err := parseRoom(cmd, args[0])
		if err != nil {
			return err
		}
		return run(cmd, room)
	}
}

func parseRoom(cmd *cobra.Command, s string) (int64, error) {
	room, err := strconv.ParseInt(s, 10, 64)
	if err != nil || room < 0 {
		return 0, &usageError{fmt.Errorf("%q is not a room id: want a number from 0 to 2^63-1", s), cmd}
	}
	return room, nil
}

// notKnown adds what an operator should know about a room that is not there.
func notKnown(err error, room int64) error {
	if errors.Is(err, admin.ErrNotFound) {
		return fmt.Errorf("the engine has no record of room %d: it was never opened here, or it ended longer ago than the tombstone clock", room)
	}
	return err
}

func residencyCell(r string) cell {
	if r == "quarantined" || r == "quiescing" {
		return cell{r, yellow}
	}
	return cell{text: r}
}

func done(r admin.RoomInfo) string {
	if r.BytesTotal == 0 && r.BytesDone == 0 {
		return ""
	}
	return size(r.BytesDone) + "/" + size(r.BytesTotal)
}

func ops(r admin.RoomInfo) string {
	if r.OpsOut == 0 && r.OpsHeld == 0 {
		return ""
	}
	return fmt.Sprintf("%d+%d", r.OpsOut, r.OpsHeld)
}

func clock(c *admin.Clock) string {
	if c == nil {
		return ""
	}
	return c.Name + " in " + age(c.RemainingNS)
}

func opener(o admin.Opener) string {
	if o == (admin.Opener{}) {
		return "none"
	}
	return fmt.Sprintf("incarnation %d, sequence %d", o.Incarnation, o.Sequence)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
