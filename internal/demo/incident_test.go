package demo

import (
	"strings"
	"testing"
	"time"
)

func TestIncidentIsPinnedUnderMax(t *testing.T) {
	in := replayMax(10 * time.Millisecond)
	if !in.pinned || in.status[6] != "Failed" || in.status[9] != "Transferring" || in.status[11] != "Transferring" {
		t.Fatalf("%+v", in)
	}
}

func TestIncidentEndsUnderTheCore(t *testing.T) {
	in, err := replayCore()
	if err != nil {
		t.Fatal(err)
	}
	for i := 6; i < 12; i++ {
		if in.status[i] != "Failed" {
			t.Errorf("step %d: %s", i+1, in.status[i])
		}
	}
	if in.pinned || !strings.HasPrefix(in.verdict, "Failed(aborted) on this side and Failed(peer_aborted) on the other") {
		t.Fatalf("%+v", in)
	}
}

func TestPlayIncident(t *testing.T) {
	var b strings.Builder
	if err := playIncident(&b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String())
}
