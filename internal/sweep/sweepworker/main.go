// Command sweepworker is an inference process of the kill sweep (internal/sweep): one rank that plays the rooms that
// it is told on its standard input.
package main

import (
	"fmt"
	"os"

	"github.com/terminus-kv/terminus/internal/sweep"
)

func main() {
	if err := sweep.Worker(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
