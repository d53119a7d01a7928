package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// handover is a plugin whose next epoch is started beside the present one to take over from it: because an
// operator upgrades the plugin, or because the core wants pages fenced that rest with the present one. There
// is one at a time. From the take-over on the core leads (docs/protocol.md, "Retire"): it lets the old epoch
// finish and asks for its end.
type handover struct {
	backend *backend
	spec    pluginhost.Spec
	from    uint32 // the epoch that is taken over from
	say     func(admin.UpgradeStep)

	answered chan struct{} // of room for one: the candidate took, or refused, a region

	// Of the owner goroutine, until ready is closed.
	ready  chan struct{} // the candidate has every region, or cannot take over
	settle bool          // ready is closed
	err    error         // why it cannot
	cut    int           // rooms and operations that the old epoch still had when it ended
}

func (h *handover) done(err error) {
	if !h.settle {
		h.settle, h.err = true, err
		close(h.ready)
	}
}

// beginHandover refuses while another handover is not over. Owner goroutine.
func (n *Node) beginHandover(b *backend, spec pluginhost.Spec, say func(admin.UpgradeStep)) (*handover, error) {
	if h := n.handover; h != nil {
		return nil, fmt.Errorf("%w: plugin %s is being handed over to its next process; one at a time", admin.ErrRefused, h.backend.name)
	}
	for _, v := range n.m.Epochs() {
		if v.State == core.EpochRetires || v.State == core.EpochEnds {
			return nil, fmt.Errorf("%w: epoch %d of plugin %s still has %d rooms and %d operations and ends in %s at the latest; one at a time",
				admin.ErrRefused, v.Epoch, v.Backend, v.Rooms, v.Ops, v.EndsIn.Round(time.Second))
		}
	}
	if n.draining {
		return nil, fmt.Errorf("%w: the engine is draining", admin.ErrRefused)
	}
	h := &handover{backend: b, spec: spec, say: say, ready: make(chan struct{}), answered: make(chan struct{}, 1)}
	if e := b.current(); e != nil {
		h.from = e.epoch
	} else {
		h.from = b.p.Status().Epoch // it is down, or about to be restarted
	}
	n.handover = h
	return h, nil
}

// carryOut starts the next epoch, hands over and waits for the end of the old one. Until the take-over an
// error means that nothing has changed. It runs on its own goroutine.
func (n *Node) carryOut(ctx context.Context, h *handover) error {
	b := h.backend
	release := func() {
		n.do(func() {
			if n.handover == h {
				n.handover = nil
			}
		})
	}
	defer release()
	h.say(admin.UpgradeStep{What: fmt.Sprintf("starting the next process of %s beside epoch %d", b.name, h.from)})
	epoch, err := b.p.Beside(ctx, h.spec, func(hello *contract.HandshakeResponse) error { return n.judge(ctx, h, hello) })
	if err != nil {
		return err
	}
	h.say(admin.UpgradeStep{Epoch: epoch, What: fmt.Sprintf("epoch %d answers, it takes the workers' regions", epoch)})
	if err = n.awaitReady(ctx, h); err == nil {
		err = b.p.Adopt(ctx, h.from, epoch)
	}
	if err != nil {
		// The next upgrade is not let in before this process is gone: there would be a third one.
		select {
		case <-b.p.Discard(epoch):
		case <-n.quit:
		}
		return fmt.Errorf("epoch %d of plugin %s does not take over: %w", epoch, b.name, err)
	}
	// From here on the context of whoever asked ends nothing any more.
	if err := n.ask(n.ctx, func() {
		if e := b.of(epoch); e != nil { // it may have died at once
			b.spec = h.spec
			e.candidate = false
			n.maybeServe(e)
		}
	}); err != nil {
		return err
	}
	h.say(admin.UpgradeStep{Epoch: epoch, What: fmt.Sprintf("epoch %d takes what is new; epoch %d finishes what it has", epoch, h.from)})
	return n.awaitRetired(h, epoch, time.Now())
}

// regionPatience is how long a candidate may take for one region, until an upgrade is given up. A process that
// declared a long call and is stopped would be noticed after 120 s only.
const regionPatience = 30 * time.Second

// awaitReady waits until the candidate has every region.
func (n *Node) awaitReady(ctx context.Context, h *handover) error {
	late := time.NewTimer(regionPatience)
	defer late.Stop()
	for {
		select {
		case <-h.ready:
			return h.err
		case <-h.answered:
			late.Reset(regionPatience)
		case <-late.C:
			return fmt.Errorf("it answered for no region in %v", regionPatience)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-n.quit:
			return errStopped
		}
	}
}

// awaitRetired reports how the old epoch empties, until it is provably gone.
func (n *Node) awaitRetired(h *handover, epoch uint32, took time.Time) error {
	last := ""
	for {
		var old *core.EpochView
		cut, died := 0, false
		if err := n.ask(n.ctx, func() {
			died = h.backend.of(epoch) == nil
			cut = h.cut
			for _, v := range n.m.Epochs() {
				if v.Backend == h.backend.name && v.Epoch == h.from {
					old = &v
				}
			}
			if old != nil && old.State == core.EpochLost && n.handover == h {
				n.handover = nil // the proof may never come, another plugin can be upgraded all the same
			}
		}); err != nil {
			return err
		}
		if died {
			why := ""
			if err := h.backend.p.Status().LastError; err != nil {
				why = ": " + err.Error()
			}
			if time.Since(took) < pluginhost.Probation {
				return fmt.Errorf("epoch %d died after it had taken over, %s went back to the previous program; rooms that it had failed as plugin_lost%s", epoch, h.backend.name, why)
			}
			return fmt.Errorf("epoch %d died after it had taken over; rooms that it had failed as plugin_lost%s", epoch, why)
		}
		s := admin.UpgradeStep{Epoch: h.from}
		switch {
		case old == nil && cut > 0:
			return fmt.Errorf("epoch %d has taken over, but epoch %d still had %d rooms and operations when it ended: they failed as plugin_lost", epoch, h.from, cut)
		case old == nil:
			h.say(admin.UpgradeStep{Epoch: h.from, What: fmt.Sprintf("epoch %d is gone, no process of it is left", h.from)})
			return nil
		case old.State == core.EpochLost:
			s.What = fmt.Sprintf("epoch %d has ended, waiting for the proof that no process of it is left", h.from)
		case old.State == core.EpochEnds:
			s.What = fmt.Sprintf("epoch %d is being ended", h.from)
		case old.State == core.EpochServes:
			s.What = fmt.Sprintf("epoch %d takes a region that was added meanwhile", epoch)
		default:
			s.Rooms, s.Ops, s.EndsInNS = old.Rooms, old.Ops, int64(old.EndsIn)
			s.What = fmt.Sprintf("epoch %d has %d rooms and %d operations left, and at most %s", h.from, old.Rooms, old.Ops, old.EndsIn.Round(time.Second))
		}
		if key := fmt.Sprint(old.State, s.Rooms, s.Ops); key != last {
			last = key
			h.say(s)
		}
		select {
		case <-time.After(tick):
		case <-n.quit:
			return errStopped
		}
	}
}

// candidateAnswered notes that an epoch answered for a region.
func (n *Node) candidateAnswered(e *epoch) {
	if h := n.handover; h != nil && h.backend == e.backend && e.candidate {
		select {
		case h.answered <- struct{}{}:
		default:
		}
	}
}

// candidateReady is called when a candidate has been offered every region and has answered for each.
func (n *Node) candidateReady(e *epoch) {
	h := n.handover
	if h == nil || h.backend != e.backend {
		return
	}
	cur := e.backend.current()
	for id, state := range e.regions {
		if state == regionBad && (cur == nil || cur.regions[id] == regionReady) {
			h.done(fmt.Errorf("it does not take region %d: %s", id, e.refused))
			return
		}
	}
	h.done(nil)
}

// handoverLost notes that an epoch ended which takes part in a handover. It is called before the core knows.
func (n *Node) handoverLost(e *epoch, detail string) {
	h := n.handover
	switch {
	case h == nil || h.backend != e.backend:
	case e.candidate:
		h.done(fmt.Errorf("it ended: %s", detail))
	case e.epoch == h.from:
		for _, v := range n.m.Epochs() {
			if v.Backend == e.name && v.Epoch == e.epoch && v.State != core.EpochServes {
				h.cut = v.Rooms + v.Ops
			}
		}
	}
}

// judge compares a candidate with what it is to take over from. Beside calls it.
func (n *Node) judge(ctx context.Context, h *handover, hello *contract.HandshakeResponse) error {
	var old *contract.HandshakeResponse
	if err := n.ask(ctx, func() { old = h.backend.shake }); err != nil {
		return err
	}
	if !servesTransfer(hello) {
		return errors.New("it is not a transfer backend")
	}
	if err := n.cfg.CheckBackend(h.backend.name, config.Duration(hello.GetLimits().GetProgressTimeoutNs())); err != nil {
		return err
	}
	if old == nil {
		return nil
	}
	if hello.Name != old.Name {
		return fmt.Errorf("it is %q, the present one is %q: a peer's plugin would not understand it", hello.Name, old.Name)
	}
	var missing []string
	for _, f := range old.Features {
		if !slices.Contains(hello.Features, f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("it lacks %s, which the present one has", strings.Join(missing, ", "))
	}
	for _, c := range changes(old, hello) {
		h.say(admin.UpgradeStep{What: c})
	}
	return nil
}

// changes says what an operator wants to know of two releases of a plugin.
func changes(old, hello *contract.HandshakeResponse) []string {
	out := []string{fmt.Sprintf("version %s, the present one is %s", orNone(hello.PluginVersion), orNone(old.PluginVersion))}
	if hello.Version != old.Version {
		out = append(out, fmt.Sprintf("contract version %d, the present one speaks %d", hello.Version, old.Version))
	}
	for _, f := range hello.Features {
		if !slices.Contains(old.Features, f) {
			out = append(out, "new feature "+f)
		}
	}
	a, b := old.GetLimits(), hello.GetLimits()
	for _, l := range []struct {
		name string
		a, b uint64
	}{
		{"max_ops", uint64(a.GetMaxOps()), uint64(b.GetMaxOps())}, {"max_ops_per_peer", uint64(a.GetMaxOpsPerPeer()), uint64(b.GetMaxOpsPerPeer())},
		{"max_op_bytes", a.GetMaxOpBytes(), b.GetMaxOpBytes()}, {"max_bytes_per_peer", a.GetMaxBytesPerPeer(), b.GetMaxBytesPerPeer()},
		{"max_runs", uint64(a.GetMaxRuns()), uint64(b.GetMaxRuns())}, {"max_regions", uint64(a.GetMaxRegions()), uint64(b.GetMaxRegions())},
	} {
		if l.a != l.b {
			out = append(out, fmt.Sprintf("limit %s %d, the present one has %d (0: none)", l.name, l.b, l.a))
		}
	}
	return out
}

func orNone(s string) string {
	if s == "" {
		return "(none)"
	}
	return s
}

// replace carries out PluginReplace of the core.
func (n *Node) replace(e *epoch) {
	kept := func(err error) {
		n.log.Error("the plugin cannot be replaced, it serves on", "plugin", e.name, "epoch", e.epoch, "err", err)
		n.post(core.Event{Kind: core.PluginKept, Backend: e.name, Epoch: e.epoch, Detail: err.Error()})
	}
	h, err := n.beginHandover(e.backend, e.spec, func(s admin.UpgradeStep) {
		n.log.Info("plugin is replaced", "plugin", e.name, "step", s.What)
	})
	if err != nil {
		kept(err)
		return
	}
	go func() {
		if err := n.carryOut(n.ctx, h); err != nil {
			kept(err) // dropped by the core, if the next epoch has taken over
		}
	}()
}

// UpgradePlugin implements admin.Engine.
func (n *Node) UpgradePlugin(ctx context.Context, name string, u admin.Upgrade) (<-chan admin.UpgradeStep, error) {
	steps := make(chan admin.UpgradeStep, 256) // a reader that is slower loses what lies between
	var h *handover
	var refused error
	err := n.ask(ctx, func() {
		b := n.backendOf(name)
		if b == nil {
			refused = fmt.Errorf("plugin %q: %w: transfer.backend names %s", name, admin.ErrNotFound, n.cfg.Transfer.Backend)
			return
		}
		spec, err := upgraded(b.spec, n.cfg, u)
		if err != nil {
			refused = err
			return
		}
		h, refused = n.beginHandover(b, spec, func(s admin.UpgradeStep) {
			n.log.Info("plugin upgrade", "plugin", name, "step", s.What)
			select {
			case steps <- s:
			default:
			}
		})
	})
	if err = errors.Join(err, refused); err != nil {
		return nil, err
	}
	go func() {
		defer close(steps)
		last := admin.UpgradeStep{Done: true}
		if err := n.carryOut(ctx, h); err != nil {
			n.log.Error("plugin upgrade", "plugin", name, "err", err)
			last.Error = err.Error()
		}
		select {
		case steps <- last:
		case <-n.quit:
		case <-time.After(time.Second): // its reader went away
		}
	}()
	return steps, nil
}

// upgraded is the spec of the next epoch of a plugin: the present one, with another program.
func upgraded(s pluginhost.Spec, cfg *config.Config, u admin.Upgrade) (pluginhost.Spec, error) {
	s = s.Fresh()
	if u.Exec != "" && u.Wasm != "" {
		return s, fmt.Errorf("%w: exec and wasm: a plugin has one program", admin.ErrRefused)
	}
	for _, f := range []struct{ name, path string }{{"exec", u.Exec}, {"wasm", u.Wasm}} {
		if f.path != "" && !filepath.IsAbs(f.path) {
			return s, fmt.Errorf("%w: %s %q: give the full path", admin.ErrRefused, f.name, f.path)
		}
	}
	if s.SHA256 != "" && u.SHA256 == "" && (u.Exec != "" || u.Wasm != "") {
		return s, fmt.Errorf("%w: plugin %s is pinned by sha256; give --sha256 of the new program, too", admin.ErrRefused, s.Name)
	}
	switch {
	case u.Exec != "":
		if s.Exec == "" { // built in: its arguments are for the engine's own binary
			s.Args = nil
		}
		s.Exec, s.Script, s.Wasm, s.WasmCache, s.SHA256 = u.Exec, "", "", "", ""
	case u.Wasm != "":
		s.Exec, s.Script, s.Args, s.SHA256 = "", "", nil, ""
		s.Wasm, s.WasmCache = u.Wasm, filepath.Join(cfg.StateDir, "wasm")
	}
	if u.SHA256 != "" {
		s.SHA256 = u.SHA256
	}
	return s, nil
}
