package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/terminus-kv/terminus/internal/regular"
)

// Worker runs one worker until every room of its schedule has ended and all pages are back.
func Worker(ctx context.Context, o WorkerOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	o.setGroups()
	plan, err := o.loadPlan()
	if err != nil {
		return err
	}
	if plan.Heads%o.Size != 0 {
		return asOptions(fmt.Errorf("--size %d: the schedule has %d heads to share", o.Size, plan.Heads))
	}
	if o.Python {
		return runPythonWorker(ctx, o, plan)
	}
	return runWorker(ctx, o, plan)
}

// setGroups names the groups that were not named.
func (o *WorkerOptions) setGroups() {
	other := map[string]string{RolePrefill: RoleDecode, RoleDecode: RolePrefill}[o.Role]
	if o.Group == "" {
		o.Group = o.Role
	}
	if o.PeerGroup == "" {
		o.PeerGroup = other
	}
}

// argv is the command line of a Go worker with this schedule.
func (o WorkerOptions) argv(binary string) []string {
	argv := []string{
		binary, "demo", "worker", "--role", o.Role, "--socket", o.Socket, "--schedule", o.Schedule,
		"--group", o.Group, "--peer-group", o.PeerGroup, "--quiet", o.Quiet.String(),
		"--rank", strconv.Itoa(o.Rank), "--size", strconv.Itoa(o.Size),
	}
	if o.Orders {
		argv = append(argv, "--orders")
	}
	return argv
}

// pythonArgv unpacks the Python worker below dir and returns its command line.
func (o WorkerOptions) pythonArgv(python, dir string) ([]string, error) {
	script, err := unpackPython(dir)
	if err != nil {
		return nil, err
	}
	argv := []string{
		python, "-B", script, "--socket", o.Socket, "--schedule", o.Schedule, "--group", o.Group,
		"--peer-group", o.PeerGroup, "--quiet", strconv.FormatFloat(o.Quiet.Seconds(), 'f', -1, 64),
	}
	if o.Orders {
		argv = append(argv, "--orders")
	}
	return argv, nil
}

// runPythonWorker runs the Python worker as a child, for those who start workers by hand.
func runPythonWorker(ctx context.Context, o WorkerOptions, plan *Plan) error {
	if o.Role != RoleDecode {
		return errors.New("--python: the Python worker is a decode worker; use --role decode")
	}
	python, err := findPython(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "terminus-worker-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	o.Schedule = filepath.Join(dir, "schedule.jsonl")
	f, err := os.Create(o.Schedule)
	if err != nil {
		return err
	}
	if err := errors.Join(plan.write(f), f.Close()); err != nil {
		return err
	}
	argv, err := o.pythonArgv(python, dir)
	if err != nil {
		return err
	}
	var sum tally
	p, err := startProcess("worker", argv, os.Environ(), func(text []byte) {
		var line report
		if json.Unmarshal(text, &line) == nil {
			sum.add(line)
			if line.note() {
				fmt.Fprintln(o.Stderr, line.Detail)
			}
		}
		o.Stdout.Write(text)
	})
	if err != nil {
		return err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.stop(workerGrace)
	}
	if p.err != nil && sum.fault == "" {
		return fmt.Errorf("%w\n%s", p.obituary(), p.lastWords())
	}
	fmt.Fprintln(o.Stderr, &sum)
	if sum.fault != "" {
		return errors.New(sum.fault)
	}
	return sum.err()
}

// loadPlan returns the worker's schedule: from its file, or made from its options.
func (o WorkerOptions) loadPlan() (*Plan, error) {
	if o.Schedule == "" {
		return newPlan(planOptions{Trace: o.Trace, Rooms: o.Rooms, Bytes: o.Bytes, Seed: o.Seed, AbortFraction: o.AbortFraction, Arrival: o.Arrival})
	}
	f, err := regular.Open(o.Schedule)
	if err != nil {
		return nil, fmt.Errorf("schedule: %w", err)
	}
	defer f.Close()
	return readPlan(f)
}
