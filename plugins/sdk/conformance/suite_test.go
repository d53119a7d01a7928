package conformance

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// The test binary is also the mutants that are processes (arguments "plugin MODE").
func TestMain(m *testing.M) {
	// Under the race detector a process sleeps a second before it exits; plugins inherit this.
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	if len(os.Args) > 2 && os.Args[1] == "plugin" {
		pluginMain(os.Args[2])
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func TestTCPInMemory(t *testing.T) {
	Test(t, Config{Carrier: Memory(func() sdk.Backend { return tcp.New() }), Seed: 1})
}
