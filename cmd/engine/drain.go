package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/admin"
)

// Bounds of a drain.
const (
	drainTimeout = 25 * time.Hour // longer than any drain budget
	drainLook    = time.Second    // between looks at an engine that drains
	drainTell    = 15 * time.Second
	drainQuiet   = 300 * time.Millisecond // a drain that is over by then needs no words
)

func newDrain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "drain",
		Short: "Stop admission, let rooms end within the drain budget, then stop the engine",
		Long: `Stop admission, tell the peers, let rooms end within drain.budget, then stop the engine. The same as SIGTERM.
Progress goes to stderr. Exit code 0 when nothing was cut, else 1`,
		Example:     "  engine drain\n  engine drain --node prefill-0",
		Args:        arguments(0, 0, "no argument"),
		Annotations: effect(mutating),
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := ask(cmd, a, answers)
			if err != nil {
				return err
			}
			res, err := a.drain(cmd.Context(), st)
			if err != nil {
				return err
			}
			if err := a.print(res, func(t *table) {
				t.row(drained(res))
			}); err != nil {
				return err
			}
			if !res.Clean {
				return &reported{exitFailed}
			}
			return nil
		},
	}
	a.engineFlags(c)
	a.outputFlag(c)
	c.Flags().Lookup("timeout").Usage = "longest wait for a sign of life of the engine; the drain itself has drain.budget"
	return c
}

// drained says how a drain went.
func drained(res admin.DrainResult) string {
	var left []string
	if res.Cut > 0 {
		left = append(left, count(res.Cut, "room")+" ended as draining")
	}
	if res.Unreleased > 0 {
		left = append(left, count(res.Unreleased, "ended room")+" had not been released by the worker")
	}
	switch {
	case len(left) > 0:
		return "drained: the budget was over, " + strings.Join(left, ", ")
	case !res.Clean:
		return "drained, but not cleanly; see the engine's log"
	}
	return "drained: every room had ended"
}

// answers returns the status of an engine that can do something: status alone is answered even when
// the owner loop is stuck.
func answers(ctx context.Context, c *admin.Client) (admin.Status, error) {
	st, err := c.Status(ctx)
	if err == nil {
		_, err = c.Plugins(ctx)
	}
	return st, err
}

// drain waits for the end of the drain, says so, and gives up when the engine gives no sign of life for
// --timeout.
func (a *app) drain(ctx context.Context, st admin.Status) (admin.DrainResult, error) {
	c, err := a.client()
	if err != nil {
		return admin.DrainResult{}, err
	}
	defer c.Close()
	ctx, stop := context.WithTimeout(ctx, drainTimeout)
	defer stop()
	type outcome struct {
		res admin.DrainResult
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		res, err := c.Drain(ctx)
		done <- outcome{res, err}
	}()

	look := time.NewTimer(drainQuiet)
	defer look.Stop()
	tell := func() {
		fmt.Fprintf(a.stderr, "draining %s: %s to end within drain.budget, %s with pages not free yet\n", st.Node, count(st.Rooms, "room"), count(st.Held, "ended room"))
	}
	heard, told := time.Now(), time.Time{}
	for {
		select {
		case o := <-done:
			return o.res, o.err
		case <-look.C:
		}
		if told.IsZero() || time.Since(told) > drainTell {
			tell()
			told = time.Now()
		}
		now, err := a.look(ctx, c)
		switch {
		case err == nil:
			st, heard = now, time.Now()
		case time.Since(heard) > a.timeout:
			stop()
			if o := <-done; o.err == nil { // it ended just now
				return o.res, nil
			}
			return admin.DrainResult{}, fmt.Errorf("%s gave no sign of life for %s (--timeout); it may still be draining: %w", st.Node, a.timeout, err)
		}
		look.Reset(drainLook)
	}
}

// look is answers within --timeout.
func (a *app) look(ctx context.Context, c *admin.Client) (admin.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	st, err := answers(ctx, c)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("no answer")
	}
	return st, err
}
