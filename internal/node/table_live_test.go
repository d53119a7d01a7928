package node_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// nodeTable is the room table of a real node: every client is a session of its own, over its socket and
// its status page.
type nodeTable struct {
	t       *testing.T
	engine  *engine
	workers [tableClients]*client.Client
	rooms   [maxAttempts]atomic.Pointer[client.Room]
}

func (n *nodeTable) call(by int, op tableOp) tableResult {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	room := n.rooms[op.att].Load()
	switch op.kind {
	case opOpen:
		room, err := n.workers[by].Open(ctx, client.OpenOptions{Room: op.room, Attempt: int64(op.att)})
		if err != nil {
			return n.refusal(op, err, "is open ")
		}
		n.rooms[op.att].Store(room)
	case opAbort:
		if err := room.Abort(ctx); err != nil {
			n.t.Errorf("abort of room %d: %v", op.room, err)
		}
	case opPoll:
		return tableResult{status: statemachine.KVPoll(room.Poll())}
	case opFailure:
		f, err := room.Failure(ctx)
		if err != nil {
			return n.refusal(op, err)
		}
		why, ok := statemachine.ParseReason(string(f.Reason))
		if !ok {
			n.t.Errorf("failure of room %d: reason %q", op.room, f.Reason)
		}
		return tableResult{reason: why}
	case opRelease:
		if err := room.Release(ctx); err != nil {
			return n.refusal(op, err, "has not ended")
		}
	case opOperatorAbort:
		if _, err := n.engine.admin.AbortRoom(ctx, op.room, "source"); err != nil && !strings.Contains(err.Error(), "not found") {
			n.t.Errorf("operator's abort of room %d: %v", op.room, err)
		}
	default:
		n.t.Errorf("no such call: %s", op.kind)
	}
	return tableResult{}
}

// refusal is a call that was refused as the model says: the room was released, or the engine said one
// of the texts.
func (n *nodeTable) refusal(op tableOp, err error, texts ...string) tableResult {
	var answer *client.Error
	if errors.Is(err, client.ErrReleased) {
		return tableResult{outcome: refused}
	}
	if errors.As(err, &answer) {
		for _, text := range texts {
			if strings.Contains(answer.Message, text) {
				return tableResult{outcome: refused}
			}
		}
	}
	n.t.Errorf("%s of room %d: %v", op.kind, op.room, err)
	return tableResult{outcome: refused}
}

// TestRoomTableOfNode checks concurrent histories of a running node, through its sockets, its status
// pages and its admin API. A worker calls for the rooms that it opened; everybody polls them.
func TestRoomTableOfNode(t *testing.T) {
	e := start(t, tempDir(t), "one")
	n := &nodeTable{t: t, engine: e}
	for i := range n.workers {
		w, err := client.Dial(short(t), client.Options{
			Socket: e.cfg.Worker.Socket, Group: fmt.Sprint("prefill-", i), Role: client.Source, Size: 1, Slots: 64,
			Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
		})
		must(t, err)
		t.Cleanup(func() { w.Close() })
		n.workers[i] = w
	}
	h := historian{clients: tableClients, calls: 6, rooms: 2, own: true, kinds: []tableKind{
		opOpen, opOpen, opAbort, opPoll, opPoll, opPoll, opFailure, opRelease, opRelease, opOperatorAbort,
	}}
	const histories = 150
	overlapped := 0
	for i := range histories {
		for a := range n.rooms {
			n.rooms[a].Store(nil)
		}
		history := h.record(n, uint64(i), int64(i+1)*h.rooms)
		if overlaps(history) {
			overlapped++
		}
		if !porcupine.CheckOperations(tableModel, history) {
			t.Fatalf("history %d is not linearizable:%s", i, printHistory(history))
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	t.Logf("%d histories, %d with calls on one room at the same time", histories, overlapped)
	if overlapped < histories/4 {
		t.Errorf("only %d of %d histories have calls on one room at the same time", overlapped, histories)
	}
}
