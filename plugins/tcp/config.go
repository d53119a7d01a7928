package tcp

import (
	"errors"
	"fmt"
	"net"
	"time"
)

// Bounds that are not configurable: they protect the other end or belong to the protocol.
const (
	sliceBytes    = 64 << 10 // most bytes between two checks of the opener
	maxOpBytes    = 64 << 20
	maxOpsPerPeer = 1024
	maxDesc       = 256  // descriptors in one frame
	maxSources    = 1024 // regions that one writer may hand over
	maxHandshakes = 64   // handshakes going on at one listener
	maxPerWriter  = 32   // connections of one writer epoch
	maxFenced     = 4096 // nodes with a fence
	maxPastOpener = 1 << 16
)

// Config is what `plugins.tcp.options` may hold. The SDK decodes the options over DefaultConfig.
type Config struct {
	Listen           string   `json:"listen,omitempty" jsonschema:"default=127.0.0.1:0" jsonschema_description:"TCP address for data of other hosts, as host:port. Port 0 takes a free one."`
	Advertise        []string `json:"advertise,omitempty" jsonschema:"maxItems=8" jsonschema_description:"Addresses (host:port) under which peers reach listen, in order of preference; needed when listen is a wildcard. Port 0 stands for the port that was taken."`
	Connections      int      `json:"connections,omitempty" jsonschema:"minimum=1,maximum=16,default=2" jsonschema_description:"Data connections to one peer."`
	Shm              bool     `json:"shm,omitempty" jsonschema:"default=true" jsonschema_description:"Allow one-copy transfers by shared memory between two engines of one host."`
	Slice            int      `json:"slice,omitempty" jsonschema:"minimum=4096,maximum=65536,default=65536" jsonschema_description:"Most bytes in one TCP data frame."`
	Window           int      `json:"window,omitempty" jsonschema:"minimum=65536,maximum=268435456,default=8388608" jsonschema_description:"Most bytes that may be sent and not yet confirmed on one connection."`
	MaxConnections   int      `json:"max_connections,omitempty" jsonschema:"minimum=1,maximum=65536,default=1024" jsonschema_description:"Most connections of all writers together."`
	HandshakeTimeout int      `json:"handshake_timeout_ms,omitempty" jsonschema:"minimum=100,maximum=60000,default=5000" jsonschema_description:"Bound of one handshake, milliseconds."`
	ConnectTimeout   int      `json:"connect_timeout_ms,omitempty" jsonschema:"minimum=100,maximum=120000,default=10000" jsonschema_description:"How long an op waits for a connection before it fails, milliseconds."`
	AbortTimeout     int      `json:"abort_timeout_ms,omitempty" jsonschema:"minimum=10,maximum=60000,default=2000" jsonschema_description:"How long an abort waits for the receiver's answer before the op ends as not quiet, milliseconds."`
	SilenceTimeout   int      `json:"silence_timeout_ms,omitempty" jsonschema:"minimum=1000,maximum=600000,default=30000" jsonschema_description:"How long the host at the other end of a TCP connection may acknowledge nothing before the connection is over, milliseconds."`
	SettleTimeout    int      `json:"settle_timeout_ms,omitempty" jsonschema:"minimum=1,maximum=3600000,default=120000" jsonschema_description:"How long a lost connection is redialled every second to learn that its ops are gone, milliseconds; then twice a minute until the peer is removed."`
}

// DefaultConfig returns the values of options that are not given.
func DefaultConfig() Config {
	return Config{
		Listen:           "127.0.0.1:0",
		Connections:      2,
		Shm:              true,
		Slice:            sliceBytes,
		Window:           8 << 20,
		MaxConnections:   1024,
		HandshakeTimeout: 5000,
		ConnectTimeout:   10000,
		AbortTimeout:     2000,
		SilenceTimeout:   30000,
		SettleTimeout:    120000,
	}
}

// check reports every problem at once.
func (c *Config) check() error {
	var errs []error
	limit := func(name string, v, lo, hi int) {
		if v < lo || v > hi {
			errs = append(errs, fmt.Errorf("option %s: %d is outside %d to %d", name, v, lo, hi))
		}
	}
	limit("connections", c.Connections, 1, 16)
	limit("slice", c.Slice, 4096, sliceBytes)
	limit("window", c.Window, 64<<10, 256<<20)
	limit("max_connections", c.MaxConnections, 1, 1<<16)
	limit("handshake_timeout_ms", c.HandshakeTimeout, 100, 60000)
	limit("connect_timeout_ms", c.ConnectTimeout, 100, 120000)
	limit("abort_timeout_ms", c.AbortTimeout, 10, 60000)
	limit("silence_timeout_ms", c.SilenceTimeout, 1000, 600000)
	limit("settle_timeout_ms", c.SettleTimeout, 1, 3600000)

	host, _, err := net.SplitHostPort(c.Listen)
	switch ip := net.ParseIP(host); {
	case err != nil:
		errs = append(errs, fmt.Errorf("option listen: %q is not host:port: %w", c.Listen, err))
	case (host == "" || ip != nil && ip.IsUnspecified()) && len(c.Advertise) == 0:
		errs = append(errs, fmt.Errorf("option listen: %q is a wildcard; set advertise to the address that peers use", c.Listen))
	}
	if len(c.Advertise) > maxAddrs {
		errs = append(errs, fmt.Errorf("option advertise: %d addresses, at most %d are allowed", len(c.Advertise), maxAddrs))
	}
	for _, a := range c.Advertise {
		if h, _, err := net.SplitHostPort(a); err != nil || h == "" {
			errs = append(errs, fmt.Errorf("option advertise: %q is not host:port", a))
		}
	}
	return errors.Join(errs...)
}

func milliseconds(n int) time.Duration { return time.Duration(n) * time.Millisecond }
