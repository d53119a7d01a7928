package node

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/peer"
)

// An engine that was only ever refused takes no number in the core and no memory here: the core forgets no number.
func TestRefusedPeersAreNotRemembered(t *testing.T) {
	n := &Node{peerIDs: map[string]core.PeerID{}, remotes: map[string]*remote{}, log: slog.New(slog.DiscardHandler)}
	for i := range 10_000 {
		n.peerEvent(peer.Event{Kind: peer.Refused, Node: fmt.Sprint("pod-", i), Refusal: peer.Refusal{Code: peer.RefusedUnknown}})
	}
	if len(n.peerNames) != 0 || len(n.remotes) != 0 {
		t.Errorf("%d numbers and %d remotes of engines that were refused", len(n.peerNames), len(n.remotes))
	}
}

// lookedAt counts how often membership was to look at once.
type lookedAt int

func (l *lookedAt) Look() { *l++ }

// A neighbour's death was noticed up to 200 ms late: the stream that broke was no reason to look at its lock.
func TestBrokenStreamIsLookedInto(t *testing.T) {
	var looked lookedAt
	n := &Node{peerIDs: map[string]core.PeerID{"d": 1}, remotes: map[string]*remote{"d": newRemote()}, looker: &looked, log: slog.New(slog.DiscardHandler)}
	n.peerEvent(peer.Event{Kind: peer.Down, Node: "d"})
	if looked != 1 {
		t.Errorf("membership was to look %d times after a stream broke, want 1", looked)
	}
}
