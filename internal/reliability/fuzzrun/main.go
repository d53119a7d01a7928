// Command fuzzrun runs every fuzzer of the module, one after the other, and writes what they did as JSON.
// It is `make fuzz`.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/internal/reliability"
)

const module = "github.com/terminus-kv/terminus/"

func main() {
	each := flag.Duration("time", 30*time.Second, "how long each fuzzer runs")
	version := flag.String("version", "unknown", "of the program, for the record")
	only := flag.String("run", "", "regular expression: run only the fuzzers, as PACKAGE NAME, that match")
	flag.Parse()
	failed, err := run(*each, *version, *only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzzrun:", err)
	}
	if err != nil || failed {
		os.Exit(1)
	}
}

func run(each time.Duration, version, only string) (failed bool, err error) {
	match, err := regexp.Compile(only)
	if err != nil {
		return false, fmt.Errorf("-run: %w", err)
	}
	pkgs, err := output("list", "./...")
	if err != nil {
		return false, err
	}
	res := reliability.Fuzz{Version: version, Command: fmt.Sprintf("make fuzz FUZZTIME=%s", each), Began: time.Now().UTC().Truncate(time.Second)}
	for _, pkg := range strings.Fields(pkgs) {
		listed, err := output("test", "-list", "^Fuzz", pkg)
		if err != nil {
			return false, err
		}
		for _, name := range strings.Fields(listed) {
			t := reliability.Target{Package: strings.TrimPrefix(pkg, module), Name: name}
			if !strings.HasPrefix(name, "Fuzz") || !match.MatchString(t.Package+" "+name) {
				continue
			}
			// On a busy machine the time may go to what was kept before; then it says nothing.
			for within := each; t.Execs == 0 && !t.Failed && within <= 8*each; within *= 2 {
				if err := fuzz(pkg, within, &t); err != nil {
					return true, err
				}
			}
			if t.Execs == 0 && !t.Failed {
				return true, fmt.Errorf("%s %s tried nothing new in %s; give it more time", t.Package, name, 8*each)
			}
			failed = failed || t.Failed
			res.Targets = append(res.Targets, t)
		}
	}
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", "  ")
	return failed, e.Encode(&res)
}

// fuzz runs one fuzzer.
func fuzz(pkg string, within time.Duration, t *reliability.Target) error {
	fmt.Fprintf(os.Stderr, "== %s %s\n", t.Package, t.Name)
	var out bytes.Buffer
	c := exec.Command("go", "test", "-run", "^$", "-fuzz", "^"+t.Name+"$", "-fuzzminimizetime", "0s", "-fuzztime", within.String(), pkg)
	c.Stdout = io.MultiWriter(&out, os.Stderr)
	c.Stderr = os.Stderr
	ok := c.Run() == nil
	return reliability.ReadFuzz(out.String(), ok, t)
}

func output(args ...string) (string, error) {
	c := exec.Command("go", args...)
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}
