package node

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A candidate that answers for a region now and then may take long; one that is stopped is given up after 30 s.
func TestCandidateAnswersForNoRegion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{quit: make(chan struct{})}
		b := &backend{name: "tcp"}
		n.handover = &handover{backend: b, ready: make(chan struct{}), answered: make(chan struct{}, 1)}
		began := time.Now()
		go func() {
			for range 3 {
				time.Sleep(20 * time.Second)
				n.candidateAnswered(&epoch{backend: b, candidate: true})
			}
			time.Sleep(20 * time.Second)
			n.candidateAnswered(&epoch{backend: b}) // the one that serves
		}()
		err := n.awaitReady(context.Background(), n.handover)
		if err == nil || !strings.Contains(err.Error(), "it answered for no region in 30s") || time.Since(began) != 90*time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}
