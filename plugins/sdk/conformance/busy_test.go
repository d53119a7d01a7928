package conformance

import (
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// slowToRegister takes longer for a region than for any other answer; the SDK declares it in its beats.
type slowToRegister struct{ *tcp.Backend }

func (b slowToRegister) AddRegion(r *sdk.Region) error {
	time.Sleep(3 * time.Second)
	return b.Backend.AddRegion(r)
}

// TestBusyPluginIsWaitedFor: a plugin that took longer than one answer may to register memory failed every
// case, although the contract gives a long call that its beats declare two minutes.
func TestBusyPluginIsWaitedFor(t *testing.T) {
	res, err := Run(t.Context(), Config{
		Carrier: Memory(func() sdk.Backend { return slowToRegister{tcp.New()} }), Run: []string{"transfer/one-page"}, Seed: 1, Scale: 0.25,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res.Cases {
		if r.Case.ID == "transfer/one-page" && r.Outcome != Passed {
			t.Error(r.Text("slow"))
		}
	}
}
