package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var codeBlock = regexp.MustCompile("(?ms)^```(\\w+)(?: (\\S+))?\n(.*?)^```$")

// TestAuthoring holds docs/authoring.md to its word: a block that names a file is text of that file, which is
// compiled and tested where it is; a block of shell runs, in the order of the page.
func TestAuthoring(t *testing.T) {
	tree, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(tree, "docs/authoring.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	env := authoringTools(t, tree)
	shells, files := 0, 0
	for _, m := range codeBlock.FindAllStringSubmatch(string(page), -1) {
		language, file, text := m[1], m[2], m[3]
		switch {
		case file != "":
			files++
			whole, err := os.ReadFile(filepath.Join(tree, file))
			if err != nil {
				t.Error(err)
			} else if !strings.Contains(string(whole), text) {
				t.Errorf("a block of %s is not in that file:\n%s", file, text)
			}
		case language == "sh":
			shells++
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			began := time.Now()
			sh := exec.CommandContext(ctx, "sh", "-exc", text)
			sh.Dir, sh.Env, sh.WaitDelay = dir, env, 10*time.Second
			if out, err := sh.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s\n%s", err, text, out)
			}
			cancel()
			t.Logf("%s took %s", strings.ReplaceAll(strings.TrimSpace(text), "\n", "; "), time.Since(began).Round(time.Millisecond))
		default:
			t.Errorf("a block of %s that is neither of a file nor run:\n%s", language, text)
		}
	}
	if shells < 6 || files < 5 {
		t.Errorf("only %d blocks of shell and %d of files were found", shells, files)
	}
}

// authoringTools is an environment with an engine of this tree, in which no network is needed: the Python of new
// environments sees the packages of this tree's.
func authoringTools(t *testing.T, tree string) []string {
	t.Helper()
	bin := t.TempDir()
	// Not this test binary: under the race detector it compiles modules too slowly.
	build := exec.Command("go", "build", "-o", bin, "./cmd/engine")
	build.Dir = tree
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	goCache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	venv := filepath.Join(tree, "bin/venv")
	packages, err := filepath.Glob(filepath.Join(venv, "lib/python*/site-packages"))
	if err != nil || len(packages) != 1 {
		t.Fatalf("%s has no packages (%v); make it with: make venv", venv, err)
	}
	python := filepath.Join(bin, "python-of-the-tree")
	text := fmt.Sprintf(`#!/bin/sh -e
'%s/bin/python' "$@"
for packages in .venv/lib/python*/site-packages; do echo '%s' >"$packages/tree.pth"; done
`, venv, packages[0])
	if err := os.WriteFile(python, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "PYTHON="+python, "PIP_NO_INDEX=1",
		"GOPROXY=off", "GOFLAGS=", "GOWORK=off", "GOCACHE="+strings.TrimSpace(string(goCache)), "XDG_CACHE_HOME="+t.TempDir())
}
