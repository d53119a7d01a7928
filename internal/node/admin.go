package node

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/internal/telemetry"
)

// Status implements admin.Engine. It answers also when the owner goroutine is stuck.
func (n *Node) Status(ctx context.Context) (admin.Status, error) {
	s := admin.Status{
		Version: n.opts.Version, PID: os.Getpid(), Node: n.cfg.Node, Incarnation: n.incarnation, UptimeNS: int64(time.Since(n.started)),
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	err := n.ask(ctx, func() {
		c := n.m.Counts()
		s.Draining, s.Rooms, s.Sessions, s.Frozen = n.draining, c.Live, len(n.sessions), n.frozen
		n.m.Rooms(func(v *core.View) bool {
			if v.State == statemachine.Ended && !v.Residency.Reusable() {
				s.Held++
			}
			return true
		})
		for _, r := range n.m.Rests() {
			if r.Over && !r.Gone {
				s.NotReady = append(s.NotReady, fmt.Sprintf("%d bytes of rank %d of group %s rest in quarantine, more than limits.quarantine allows (%s: %d): it is given no rooms, and the plugin is being replaced",
					r.Bytes, r.Rank, r.Group, n.cfg.Limits.Quarantine, r.Budget))
			}
		}
		serving := false
		for _, b := range n.backends {
			serving = serving || b.serves()
		}
		if !serving {
			s.NotReady = append(s.NotReady, "no transfer backend is up; see engine plugins list")
		}
		if n.draining {
			s.NotReady = append(s.NotReady, "the engine is draining")
		}
	})
	if err != nil {
		s.NotReady = append(s.NotReady, "the owner loop did not answer within a second: "+err.Error())
	}
	s.Ready = len(s.NotReady) == 0
	return s, nil
}

func (n *Node) roomInfo(v *core.View) admin.RoomInfo {
	i := admin.RoomInfo{
		Room: v.Room, Role: v.Role.String(), Attempt: v.Attempt, State: v.State.String(), Status: v.Status.String(),
		Residency: v.Residency.String(), SinceNS: int64(v.Since), AgeNS: int64(v.Age),
		Own: admin.Opener{Incarnation: v.Own.Inc, Sequence: v.Own.Seq}, Pair: admin.Opener{Incarnation: v.Pair.Inc, Sequence: v.Pair.Seq},
		Peer: v.PeerNode, Group: v.Group, PeerGroup: v.PeerGroup, Ranks: v.Ranks, BytesTotal: v.Total, BytesDone: v.Moved,
		OpsOut: int(v.Ops.Open), Backend: v.Backend, Detail: v.Detail,
	}
	if v.Held > 0 {
		i.OpsHeld = int((v.Held + int64(n.cfg.Limits.OpBytes) - 1) / int64(n.cfg.Limits.OpBytes))
	}
	if v.State == statemachine.Ended {
		i.Reason = v.Reason.String()
	}
	if v.Clock != "" {
		i.Clock = &admin.Clock{Name: v.Clock, RemainingNS: int64(v.Remaining)}
	}
	if left, cuts := n.cutIn(v); cuts {
		i.Clock = &admin.Clock{Name: "drain.budget", RemainingNS: int64(left)}
	}
	if b := n.backendOf(v.Backend); b != nil && b.lane != 0 {
		i.Lane = laneName(b.lane)
	}
	return i
}

// cutIn is when the drain ends a room, if that comes before every clock of the room.
func (n *Node) cutIn(v *core.View) (left time.Duration, cuts bool) {
	if !n.draining || v.State == statemachine.Ended {
		return 0, false
	}
	left = max(time.Until(n.drainBy), 0)
	return left, v.Clock == "" || left < v.Remaining
}

// why is View.Why, with what the core does not know: when the drain ends the room.
func (n *Node) why(v *core.View) string {
	s := v.Why()
	left, cuts := n.cutIn(v)
	if !cuts {
		return s
	}
	s = strings.TrimSuffix(s, ".")
	if i := strings.LastIndex(s, "; it fails in "); i >= 0 && v.Clock != "" {
		s = s[:i] // that clock is not reached
	}
	reason := statemachine.Draining
	if v.State == statemachine.Committed {
		reason = statemachine.OutcomeUnknown // its peer may have judged
	}
	return fmt.Sprintf("%s; it ends Failed (%s) in %s, when the drain's budget is over.", s, reason, left.Round(time.Second))
}

// Rooms implements admin.Engine.
func (n *Node) Rooms(ctx context.Context, f admin.RoomFilter) ([]admin.RoomInfo, error) {
	limit := f.Limit
	if limit <= 0 || limit > admin.MaxRooms {
		limit = admin.MaxRooms
	}
	fits := func(want, have string) bool { return want == "" || want == have }
	var out []admin.RoomInfo
	err := n.ask(ctx, func() {
		n.m.Rooms(func(v *core.View) bool {
			if f.Live && v.State == statemachine.Ended || f.OlderNS > int64(v.Since) {
				return true
			}
			i := n.roomInfo(v)
			if fits(f.Role, i.Role) && fits(f.State, i.State) && fits(f.Status, i.Status) && fits(f.Residency, i.Residency) &&
				fits(f.Reason, i.Reason) && fits(f.Peer, i.Peer) && (f.Group == "" || f.Group == i.Group || f.Group == i.PeerGroup) {
				out = append(out, i)
			}
			return true
		})
	})
	slices.SortStableFunc(out, func(a, b admin.RoomInfo) int { return int(min(max(b.AgeNS-a.AgeNS, -1), 1)) })
	return out[:min(len(out), limit)], err
}

// Room implements admin.Engine.
func (n *Node) Room(ctx context.Context, room int64) ([]admin.RoomInfo, error) {
	var out []admin.RoomInfo
	err := n.ask(ctx, func() {
		vs := n.m.Room(room)
		slices.Reverse(vs)
		for i := range vs {
			info := n.roomInfo(&vs[i])
			info.History = n.recorder.history(time.Since(n.clock.start), &vs[i], n)
			out = append(out, info)
		}
	})
	if err == nil && len(out) == 0 {
		err = admin.ErrNotFound
	}
	return out, err
}

// Why implements admin.Engine.
func (n *Node) Why(ctx context.Context, room int64) ([]string, error) {
	var out []string
	err := n.ask(ctx, func() {
		for _, v := range n.m.Room(room) {
			out = append(out, n.why(&v))
		}
	})
	if err == nil && len(out) == 0 {
		err = admin.ErrNotFound
	}
	return out, err
}

// AbortRoom implements admin.Engine.
func (n *Node) AbortRoom(ctx context.Context, room int64, role string) (admin.AbortResult, error) {
	var res admin.AbortResult
	var r statemachine.Role
	switch role {
	case "source":
		r = statemachine.Source
	case "destination":
		r = statemachine.Destination
	}
	found := false
	err := n.ask(ctx, func() {
		for _, v := range n.m.Room(room) {
			if r != 0 && v.Role != r {
				continue
			}
			found = true
			switch v.State {
			case statemachine.Ended:
				res.Already = append(res.Already, v.Reason.String())
			case statemachine.Committed:
				res.Requested++
			default:
				res.Ended++
			}
		}
		n.events = append(n.events, core.Event{Kind: core.AdminAbort, Room: room, Role: r})
	})
	if err == nil {
		err = n.ask(ctx, func() {}) // behind the step that does it: who is answered sees the room ended
	}
	if err == nil && !found {
		err = admin.ErrNotFound
	}
	return res, err
}

// WatchRooms implements admin.Engine.
func (n *Node) WatchRooms(ctx context.Context, room int64) (<-chan admin.RoomChange, error) {
	w := &watcher{room: room, ch: make(chan admin.RoomChange, 256)}
	err := n.ask(ctx, func() {
		if room >= 0 {
			for _, v := range n.m.Room(room) {
				w.send(admin.RoomChange{RoomInfo: n.roomInfo(&v)})
			}
		}
		if n.recorder.watchers == nil {
			n.recorder.watchers = map[*watcher]struct{}{}
		}
		n.recorder.watchers[w] = struct{}{}
	})
	if err != nil {
		return nil, err
	}
	go func() {
		select {
		case <-ctx.Done():
		case <-n.quit:
		}
		if !n.do(func() { delete(n.recorder.watchers, w); close(w.ch) }) {
			<-n.stopped
			close(w.ch)
		}
	}()
	return w.ch, nil
}

// Plugins implements admin.Engine.
func (n *Node) Plugins(ctx context.Context) ([]admin.PluginInfo, error) {
	var out []admin.PluginInfo
	err := n.ask(ctx, func() {
		for _, b := range n.backends {
			s := b.p.Status()
			i := admin.PluginInfo{Name: b.name, Kind: "transfer", State: s.State.String(), Restarts: int(s.Restarts)}
			i.Exec, i.SHA256 = b.spec.Exec, b.spec.SHA256
			switch {
			case b.spec.Wasm != "":
				i.Exec = "wasm:" + b.spec.Wasm
			case i.Exec == "":
				i.Exec = "built in"
			}
			if b.shake != nil {
				i.Version, i.Features = b.shake.PluginVersion, b.shake.Features
			}
			if s.LastError != nil {
				i.Detail = s.LastError.Error()
			}
			i.Epochs = n.epochInfos(b, &s)
			out = append(out, i)
		}
	})
	slices.SortFunc(out, func(a, b admin.PluginInfo) int { return strings.Compare(a.Name, b.Name) })
	return out, err
}

// epochInfos describes the epochs of a plugin, the newest first; s is the status of its own.
func (n *Node) epochInfos(b *backend, s *pluginhost.Status) (out []admin.PluginEpoch) {
	own := b.of(s.Epoch)
	if own == nil { // it starts, or is gone
		out = append(out, epochInfo(s, false, false, 0))
	}
	for _, e := range slices.Backward(b.epochs) {
		var i admin.PluginEpoch
		if e == own {
			i = epochInfo(s, e.live, e.serving, len(e.ops))
		} else if side, ok := b.p.EpochStatus(e.epoch); ok {
			i = epochInfo(&side, e.live, e.serving, len(e.ops))
		} else {
			i = admin.PluginEpoch{Epoch: e.epoch, State: "gone"}
		}
		for _, v := range n.m.Epochs() {
			if v.Backend == b.name && v.Epoch == e.epoch {
				i.Rooms, i.Ops = v.Rooms, v.Ops
				if v.State == core.EpochRetires {
					i.EndsInNS = int64(v.EndsIn)
				}
			}
		}
		if e.retiring && i.State == "ready" {
			i.State = "retiring"
		}
		out = append(out, i)
	}
	return out
}

// epochInfo describes one epoch of a plugin. live and serving are what has been heard of it. Only a
// process that serves, or starts, has an uptime and beats.
func epochInfo(s *pluginhost.Status, live, serving bool, ops int) admin.PluginEpoch {
	e := admin.PluginEpoch{Epoch: s.Epoch, State: epochState(s.State, live, serving), PID: s.PID, Ops: ops}
	if s.PID != 0 && (s.State == pluginhost.StateStarting || s.State == pluginhost.StateUp) {
		e.UptimeNS, e.BeatAgeNS = int64(time.Since(s.Since)), int64(s.BeatAge)
		if len(s.Busy) > 0 {
			b := s.Busy[0]
			kind := strings.ToLower(strings.TrimPrefix(b.Kind.String(), "BUSY_KIND_"))
			e.Busy = fmt.Sprintf("%s %d for %s", kind, b.Subject, time.Duration(b.SinceNs).Round(time.Millisecond))
		}
	}
	return e
}

// epochState names what the newest epoch of a plugin does.
func epochState(s pluginhost.State, live, serving bool) string {
	switch {
	case s == pluginhost.StateBackoff || s == pluginhost.StateDown:
		return "gone" // also where its last words have not been taken yet
	case serving:
		return "ready"
	case live || s == pluginhost.StateStarting || s == pluginhost.StateUp:
		return "starting"
	}
	return "gone"
}

// Peers implements admin.Engine.
func (n *Node) Peers(ctx context.Context) ([]admin.PeerInfo, error) {
	var out []admin.PeerInfo
	err := n.ask(ctx, func() {
		known := map[string]core.PeerView{}
		for _, p := range n.m.Peers() {
			known[p.Node] = p
		}
		rooms := map[string]int{}
		n.m.Rooms(func(v *core.View) bool {
			if v.State != statemachine.Ended {
				rooms[v.PeerNode]++
			}
			return true
		})
		n.noteVerdicts()
		links := n.links.Status()
		for _, l := range links.Peers {
			i := admin.PeerInfo{
				Node: l.Node, Address: l.Address, Incarnation: l.Incarnation, State: l.State, SinceNS: int64(time.Since(l.Since)),
				HeardNS: int64(l.HeardAgo), SameHost: l.SameHost, TLS: links.TLS && !strings.HasPrefix(l.Address, "unix:"), Rooms: rooms[l.Node], Detail: l.LastError,
			}
			switch l.State {
			case "up":
				i.State = "ready"
			case "waiting":
				i.State = "connecting"
			}
			for _, b := range l.Backends {
				i.Backends = append(i.Backends, b.Name)
			}
			for _, r := range l.Refusals {
				i.Detail = fmt.Sprintf("%s: %s", r.Code, r.Detail)
			}
			// The core knows what the silence of a peer means for rooms, and hears it on whatever stream.
			if p, ok := known[l.Node]; ok {
				v := n.verdicts[l.Node]
				i.OpsOut, i.HeardNS = int(p.Ops), int64(max(p.Silent, 1))
				if v.word != "" {
					i.State, i.SinceNS = v.word, int64(time.Since(v.since))
				} else {
					i.SinceNS = min(i.SinceNS, int64(time.Since(v.since)))
				}
			}
			out = append(out, i)
			delete(known, l.Node)
		}
		// An engine that is gone is dialled no more. It is named for a while yet: rooms ended because of it.
		for _, p := range known {
			if p.Dead && p.Silent < goneListed {
				out = append(out, admin.PeerInfo{
					Node: p.Node, Incarnation: p.Incarnation, State: "dead", SinceNS: int64(time.Since(n.verdicts[p.Node].since)), HeardNS: int64(max(p.Silent, 1)), Rooms: rooms[p.Node],
					Detail: "its process has ended and no other has taken its place",
				})
			}
		}
	})
	slices.SortFunc(out, func(a, b admin.PeerInfo) int { return strings.Compare(a.Node, b.Node) })
	return out, err
}

// verdict is what the core thinks of a peer, and since when.
type verdict struct {
	word  string // dead, draining or suspect; "": nothing against it
	since time.Time
}

func verdictOf(p *core.PeerView) string {
	switch {
	case p.Dead:
		return "dead"
	case p.Draining:
		return "draining"
	case p.Suspect:
		return "suspect"
	}
	return ""
}

// noteVerdicts remembers when the core's verdict on a peer changed. It is called at least once a tick.
func (n *Node) noteVerdicts() {
	died := false
	for _, p := range n.m.Peers() {
		word := verdictOf(&p)
		v, ok := n.verdicts[p.Node]
		if ok && v.word == word {
			continue
		}
		n.verdicts[p.Node] = verdict{word, time.Now()}
		died = died || (word == "dead") != (v.word == "dead")
	}
	if died { // or came back: what it hosts of a group counts no more, or again
		n.pairGroups()
	}
}

// goneListed is how long Peers names an engine whose process has ended.
const goneListed = time.Hour

// Drain implements admin.Engine.
func (n *Node) Drain(ctx context.Context) (admin.DrainResult, error) {
	n.drainOnce.Do(func() { close(n.drainAsked) })
	select {
	case <-n.drainDone:
		return n.drainResult, nil
	case <-ctx.Done():
		return admin.DrainResult{}, context.Cause(ctx)
	}
}

// Snapshot implements telemetry.Source.
func (n *Node) Snapshot(ctx context.Context) (telemetry.Snapshot, error) {
	var s telemetry.Snapshot
	err := n.ask(ctx, func() { s = n.snapshot() })
	return s, err
}

func (n *Node) snapshot() telemetry.Snapshot {
	c, st := n.m.Counts(), n.m.Stats()
	s := telemetry.Snapshot{
		Opened: map[telemetry.RoleBackend]uint64{}, Verdicts: map[telemetry.Verdict]uint64{}, OpsOut: map[string]int{},
		OpsTotal: map[telemetry.OpEnd]uint64{}, MovedBytes: map[telemetry.Moved]uint64{}, Peers: map[string]int{}, Sessions: map[string]int{},
		Stages:    map[telemetry.RoomStage]telemetry.Histogram{},
		BadFrames: map[telemetry.BadFrame]uint64{}, Late: map[string]uint64{"all": st.Dropped}, Refused: map[string]uint64{},
		QueueDepth: c.Waiting, OpsHeld: c.Queued, PinnedBytes: c.Pinned, Draining: n.draining, Frozen: n.frozen != "",
		Lag: n.clock.paused, LagTotal: n.clock.pauses, Steps: n.steps.Load(),
	}
	for cause, count := range st.Refused {
		s.Refused[core.Refusal(cause).String()] = count
	}
	type key struct {
		role  statemachine.Role
		state statemachine.State
	}
	by := map[key]*telemetry.RoomsBy{}
	n.m.Rooms(func(v *core.View) bool {
		k := key{v.Role, v.State}
		r := by[k]
		if r == nil {
			r = &telemetry.RoomsBy{Role: v.Role.String(), State: v.State.String()}
			by[k] = r
		}
		r.Count++
		if v.State != statemachine.Ended {
			r.Oldest = max(r.Oldest, v.Since)
			if v.Clock == "" || v.Remaining < -time.Second {
				s.Overdue++
			}
			return true
		}
		if !v.Released {
			s.Unreleased++
			s.OldestUnreleased = max(s.OldestUnreleased, v.Since)
		}
		switch v.Residency {
		case statemachine.Quarantined:
			s.QuarantinedBytes += v.Total
			s.OldestQuarantine = max(s.OldestQuarantine, v.Since)
			fallthrough
		case statemachine.Quiescing:
			s.OldestPinned = max(s.OldestPinned, v.Since)
		}
		return true
	})
	for _, r := range by {
		s.Rooms = append(s.Rooms, *r)
	}
	slices.SortFunc(s.Rooms, func(a, b telemetry.RoomsBy) int {
		return strings.Compare(a.Role+a.State, b.Role+b.State)
	})
	for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
		first := statemachine.Unbound
		if role == statemachine.Destination {
			first = statemachine.Opened
		}
		s.Opened[telemetry.RoleBackend{Role: role.String()}] = st.Enter[role][first]
		for r := statemachine.Success; r < statemachine.NumReasons; r++ {
			if v := st.Verdicts[role][r]; v > 0 {
				s.Verdicts[telemetry.Verdict{Role: role.String(), Reason: r.String()}] = v
			}
		}
	}
	s.Rungs, s.Replaced, s.Retired, s.RetireCut = map[string]telemetry.Rung{}, st.Replaces, st.Retires, st.RetiresCut
	for i, r := range st.Rungs {
		s.Rungs[strconv.Itoa(i)] = telemetry.Rung{Entered: r.Entered, Left: r.Left, Time: r.Time}
	}
	s.Disagreed = st.Verdicts[statemachine.Source][statemachine.OutcomeUnknown]
	for _, r := range n.regions {
		s.RegisteredBytes += r.size
	}
	for _, b := range n.backends {
		ps := b.p.Status()
		p := telemetry.Plugin{Name: b.name, Up: ps.State == pluginhost.StateUp, Epoch: ps.Epoch, BeatAge: ps.BeatAge, Restarts: ps.Restarts, Epochs: len(b.epochs)}
		if b.shake != nil {
			p.Version = b.shake.PluginVersion
		}
		s.Plugins = append(s.Plugins, p)
		for _, e := range b.epochs {
			s.OpsOut[b.name] += len(e.ops)
		}
	}
	for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
		for stage := core.StageQueued; stage < core.NumStages; stage++ {
			s.Stages[telemetry.RoomStage{Role: role.String(), Stage: stage.String()}] = n.stages[role][stage].Clone()
		}
	}
	maps.Copy(s.OpsTotal, n.opEnds)
	maps.Copy(s.MovedBytes, n.moved)
	for _, p := range n.m.Peers() {
		switch {
		case p.ID == selfPeer:
		case p.Dead:
			s.Peers["dead"]++
		case p.Suspect:
			s.Peers["suspect"]++
		case p.Ready:
			s.Peers["ready"]++
		default:
			s.Peers["connecting"]++
		}
	}
	for _, w := range n.sessions {
		if !w.closed {
			s.Sessions[w.Role.String()]++
		}
	}
	n.bad.mu.Lock()
	maps.Copy(s.BadFrames, n.bad.by)
	n.bad.mu.Unlock()
	s.BadFrames[telemetry.BadFrame{Source: "peer", Code: "rejected"}] = n.links.Status().Rejected
	for code, v := range n.workers.Counters().Errors {
		s.BadFrames[telemetry.BadFrame{Source: "worker", Code: code}] = v
	}
	return s
}
