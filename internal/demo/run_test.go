package demo

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// script writes an executable that stands in for the engine.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "engine")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// smallRun is a run that a test can afford.
func smallRun(t *testing.T, binary string) Options {
	o := Defaults()
	o.Rooms, o.Bytes, o.NoIncident, o.Executable, o.Faults = 60, 32<<20, true, binary, faultsNone
	o.Stdout, o.Stderr = t.Output(), t.Output()
	return o
}

// leftovers are the demo's directories that are there now.
func leftovers(t *testing.T) []string {
	found, err := filepath.Glob(filepath.Join(os.TempDir(), "terminus-demo-*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestRunShowsWhyAnEngineDied(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	o := smallRun(t, script(t, `echo "cannot start: $1 $2 $(basename $3)" >&2; exit 3`))
	var out, log bytes.Buffer
	o.Output, o.Stdout, o.Stderr = "json", &out, &log
	_, err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "engine prefill-0 ended: exit status 3") {
		t.Errorf("got %v", err)
	}
	if want := "cannot start: run -c prefill-0.yaml"; !strings.Contains(log.String(), want) {
		t.Errorf("%q is not in %s", want, &log)
	}
	if want := `"reasons":{},"faults":[],"retried":0,"retried_success":0,"retried_aborted":0,"lost_attempts":{},"errors":["before it was ready: engine prefill-0 ended: exit status 3"]}`; !strings.HasPrefix(out.String(), `{"rooms":0,`) || !strings.Contains(out.String(), want) {
		t.Errorf("printed %s", &out)
	}
	if l := leftovers(t); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
}

func TestRunIsBounded(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	o := smallRun(t, script(t, `exec sleep 1000`))
	o.Deadline = 300 * time.Millisecond
	start := time.Now()
	_, err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "the demo took longer than 300ms") {
		t.Fatalf("got %v", err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
	if l := leftovers(t); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
}
