package conformance

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTCPInMemory(t *testing.T) {
	Test(t, Config{Carrier: Memory(func() sdk.Backend { return tcp.New() }), Seed: 1})
}
