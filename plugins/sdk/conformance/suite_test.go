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

// A run of which no case met the plugin was a passed test: all of its cases were skipped.
func TestNothingRanIsNoPass(t *testing.T) {
	lacks := &Result{Outcome: Unsupported, Reason: "needs CUDA"}
	for _, c := range []struct {
		name  string
		cases []*Result
		want  int
	}{
		{"nothing ran", []*Result{lacks, lacks}, 1},
		{"one passed", []*Result{lacks, {Outcome: Passed}}, 0},
		{"go test chose one", []*Result{lacks, {Outcome: Skipped, Reason: notChosen}}, 0},
	} {
		r := &Results{Cases: c.cases}
		if got := r.complaints(); len(got) != c.want {
			t.Errorf("%s: %q, want %d complaints", c.name, got, c.want)
		}
	}
}
