package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// ProbeConfig is what Probe tells the plugin of its engine.
type ProbeConfig struct {
	Node          string
	EngineVersion string
	Features      []string
	HostID        string
	Timeout       time.Duration // from spawn to the handshake's answer [15 s]
}

// Probed is what a plugin said of itself.
type Probed struct {
	// Handshake is its answer; it may be there although the plugin refused (Handshake.Error, or another
	// reason in the error of Probe). nil: it never answered.
	Handshake *contract.HandshakeResponse
	Took      time.Duration // from spawn to answer
}

// Probe starts the plugin once, as far as its handshake and the opening of its streams, and ends it again.
// Nothing of it is left when it returns. The error says why it did not become ready.
func Probe(ctx context.Context, cfg ProbeConfig, spec Spec) (Probed, error) {
	dir, err := os.MkdirTemp("", "probe") // short: the path of a unix socket ends at 108 bytes
	if err != nil {
		return Probed{}, err
	}
	defer os.RemoveAll(dir)
	h, err := New(Config{
		Node: cfg.Node, Incarnation: 1, HostID: cfg.HostID, EngineVersion: cfg.EngineVersion, Features: cfg.Features,
		RuntimeDir: dir, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Sink: func(Event) {},
		HandshakeTimeout: cfg.Timeout, BackoffMin: time.Hour, BackoffMax: time.Hour,
	})
	if err != nil {
		return Probed{}, err
	}
	began := time.Now()
	p, err := h.Start(spec)
	if err == nil {
		err = p.ReadyOnce(ctx)
	}
	result := Probed{Took: time.Since(began)}
	if p != nil {
		result.Handshake = p.Status().Handshake
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), reapTimeout)
	defer cancel()
	if cerr := h.Close(closing); cerr != nil {
		err = errors.Join(err, cerr)
	}
	return result, err
}

// ReadyOnce waits as Ready does, but for one spawn only: one that fails is an error at once, and is not
// tried again before the back-off. For those who ask whether a plugin works rather than use it.
func (p *Plugin) ReadyOnce(ctx context.Context) error {
	for {
		p.mu.Lock()
		state, changed, last := p.state, p.changed, p.lastErr
		p.mu.Unlock()
		switch state {
		case StateUp:
			return nil
		case StateBackoff, StateDown:
			return fmt.Errorf("plugin %s: %w", p.name, last)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("plugin %s is not up: %w", p.name, errors.Join(ctx.Err(), last))
		}
	}
}
