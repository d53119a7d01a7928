package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/flight"
)

// remembered answers for a room when the engine cannot: it is not running, or it runs again and knows
// nothing of what was before. It says so on stderr and returns what the flight recorder has; else it
// returns the error of the call.
func (a *app) remembered(callErr error, room int64) ([]admin.RoomInfo, error) {
	gone := errors.Is(callErr, syscall.ECONNREFUSED) || errors.Is(callErr, fs.ErrNotExist)
	if !gone && !errors.Is(callErr, admin.ErrNotFound) {
		return nil, callErr
	}
	socket, err := a.adminSocket()
	if err != nil {
		return nil, callErr
	}
	log, err := flight.Read(filepath.Dir(socket), !gone)
	if err != nil {
		return nil, notKnown(callErr, room)
	}
	rooms := past(log, room, time.Now())
	if len(rooms) == 0 && !gone {
		return nil, notKnown(callErr, room)
	}
	last := "it is empty"
	if n := len(log.Entries); n > 0 {
		last = "its last record is " + age(int64(time.Since(log.Entries[n-1].At))) + " old"
	}
	if log.Damaged > 0 {
		last += "; left out: " + count(log.Damaged, "damaged record")
	}
	if len(rooms) == 0 {
		return nil, fmt.Errorf("engine %s is not running, and the flight recorder of its incarnation %d has nothing of room %d (%s)", log.Node, log.Incarnation, room, last)
	}
	what := "is not running"
	if !gone {
		what = "was started again"
	}
	fmt.Fprintf(a.stderr, "engine %s %s; this is from the flight recorder of its incarnation %d, %s\n", printable(log.Node, ""), what, log.Incarnation, last)
	return rooms, nil
}

// past builds records from the events of a room, the newest open last. A room that had not ended is what
// its worker sees: failed, engine_lost.
func past(log *flight.Log, room int64, now time.Time) []admin.RoomInfo {
	type key struct {
		role statemachine.Role
		own  statemachine.Opener
	}
	var order []key
	found := map[key]*admin.RoomInfo{}
	for i := range log.Entries {
		e := &log.Entries[i]
		if e.Room != room {
			continue
		}
		k := key{e.Role, e.Own}
		r := found[k]
		ago := int64(now.Sub(e.At))
		if r == nil {
			r = &admin.RoomInfo{
				Room: room, Role: e.Role.String(), Status: "Failed", Reason: "engine_lost", Residency: statemachine.NoPages.String(),
				AgeNS: ago, SinceNS: ago, Own: admin.Opener{Incarnation: e.Own.Inc, Sequence: e.Own.Seq},
			}
			found[k] = r
			order = append(order, k)
		}
		if s := e.State.String(); e.State != statemachine.Absent && s != r.State { // the ring may have lost the change
			r.State, r.SinceNS = s, ago
		}
		switch e.Kind {
		case core.RecResidency:
			r.Residency = e.Residency.String()
		case core.RecReleased:
			r.Residency = statemachine.Released.String()
		case core.RecEnd:
			r.State, r.SinceNS, r.Reason, r.Detail = statemachine.Ended.String(), ago, e.Reason.String(), e.Detail
			if e.Reason == statemachine.Success {
				r.Status = "Success"
			}
		}
		if !e.Pair.IsZero() {
			r.Pair = admin.Opener{Incarnation: e.Pair.Inc, Sequence: e.Pair.Seq}
		}
		if e.Peer != "" {
			r.Peer = e.Peer
		}
		r.History = append(r.History, admin.Change{AgeNS: ago, What: flight.What(&e.Record, e.Peer)})
	}
	var out []admin.RoomInfo
	for _, k := range order {
		out = append(out, *found[k])
	}
	return out
}

// whyPast says in a sentence what a record of a dead engine was.
func whyPast(r admin.RoomInfo) string {
	who := fmt.Sprintf("room %d (%s)", r.Room, r.Role)
	if r.State == statemachine.Ended.String() {
		return fmt.Sprintf("%s ended %s ago: %s (%s); its pages were %s.", who, age(r.SinceNS), r.Status, r.Reason, r.Residency)
	}
	state := r.State
	if state == "" {
		state = "open"
	}
	with := ""
	if r.Peer != "" {
		with = " with " + r.Peer
	}
	return fmt.Sprintf("%s was %s%s since %s ago, its pages %s, when the engine died; its worker reads Failed (engine_lost).", who, state, with, age(r.SinceNS), r.Residency)
}
