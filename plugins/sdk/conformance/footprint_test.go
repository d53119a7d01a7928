package conformance

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// openMany opens descriptors and keeps them.
func openMany(n int) {
	for range n {
		if _, err := unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
			panic(err)
		}
	}
}

// TestDescriptors: a plugin whose library opens its queues at the first op and keeps them failed every case with an op.
// One that keeps a descriptor of each op, or of each peer, and with it of each case, is found.
func TestDescriptors(t *testing.T) {
	for _, c := range []struct {
		mode   string
		cases  []string
		failed bool
	}{
		{"opens late", []string{"transfer/*", "storm/slow-host"}, false},
		{"keeps a descriptor an op", []string{"transfer/visible-at-done"}, true},
		{"keeps a descriptor a peer", []string{"layout/*", "proto/*", "peer/*"}, true},
	} {
		t.Run(c.mode, func(t *testing.T) {
			res, err := Run(t.Context(), Config{
				Carrier: falter(c.mode), Run: c.cases, Skip: []string{"layout/64-mib-op", "layout/sizes-by-octave"}, Seed: 1, Scale: 0.5,
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range res.Cases {
				if r.Outcome < Failed {
					continue
				}
				if !c.failed || !strings.Contains(r.Failures[0].Got, "open descriptors") {
					t.Error(r.Text(c.mode))
				}
				t.Logf("%s: %v", r.Case.ID, r.Failures)
			}
			if c.failed && res.Count(Failed) == 0 {
				t.Error("nothing failed")
			}
		})
	}
}
