package nixl

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
)

// Bounds that are not configurable.
const (
	maxOpBytes    = 64 << 20
	maxOpsPerPeer = 1024

	requestBytes  = 2 << 20 // of one request of the library: the unit in which progress can be seen
	requestPieces = 512
	opBytes       = 8 << 20  // of one op in flight: enough to keep the lane full, and soon over when the op is aborted
	peerBytes     = 32 << 20 // of all ops to one peer in flight

	handshakeBound = 5 * time.Second
	connectBound   = 10 * time.Second
	abortBound     = 2 * time.Second // then an aborted op ends as not quiet
	withdrawBound  = 2 * time.Second // then a writer that keeps a region loses its link
)

// Config is what `plugins.nixl.options` may hold. The SDK decodes the options over DefaultConfig.
type Config struct {
	Library       string   `json:"library,omitempty" jsonschema_description:"Path of libnixl_capi.so. Not given: it is looked for in the Python environments below."`
	Python        string   `json:"python,omitempty" jsonschema_description:"A Python program, or the directory of a Python environment, in which nixl-cu12 or nixl-cu13 is installed. Not given: python3 on PATH, then the environment that make nixl made."`
	Listen        string   `json:"listen,omitempty" jsonschema:"default=127.0.0.1:0" jsonschema_description:"TCP address on which the plugins of peers ask for regions, as host:port. Port 0 takes a free one."`
	Advertise     []string `json:"advertise,omitempty" jsonschema:"maxItems=8" jsonschema_description:"Addresses (host:port) under which peers reach listen, in order of preference. Port 0 stands for the port that was taken."`
	Transports    string   `json:"transports,omitempty" jsonschema:"default=tcp\\,self" jsonschema_description:"Transports that UCX may use (UCX_TLS)."`
	Devices       string   `json:"devices,omitempty" jsonschema:"default=lo" jsonschema_description:"Network devices that UCX may use (UCX_NET_DEVICES). UCX asks nobody who connects to them for a token: name devices of a trusted network only."`
	ProgressDelay uint64   `json:"progress_delay_us,omitempty" jsonschema:"minimum=1000,maximum=1000000,default=1000" jsonschema_description:"How long a progress thread of the library sleeps when no event wakes it, microseconds."`
	Log           string   `json:"log,omitempty" jsonschema:"enum=fatal,enum=error,enum=warn,enum=info,enum=debug,enum=trace" jsonschema_description:"What the library says on standard error; not given: what ends the process."`
}

// DefaultConfig returns the values of options that are not given.
func DefaultConfig() Config {
	return Config{Listen: "127.0.0.1:0", Transports: "tcp,self", Devices: "lo", ProgressDelay: 1000}
}

// check reports every problem at once.
func (c *Config) check() error {
	var errs []error
	for t := range strings.SplitSeq(c.Transports, ",") {
		switch t {
		case "tcp", "self":
		case "cma":
			errs = append(errs, errors.New("option transports: cma is not served: the engine refuses writes through another process's address space, which outlive every proof of the writer's end"))
		default:
			errs = append(errs, fmt.Errorf("option transports: %q is not served by this version; known are tcp, self", t))
		}
	}
	if !slices.Contains(strings.Split(c.Transports, ","), "tcp") {
		errs = append(errs, errors.New("option transports: tcp is missing; UCX needs it to notice the death of a peer"))
	}
	if c.ProgressDelay < 1000 || c.ProgressDelay > 1000000 { // 0 makes the library burn a core
		errs = append(errs, fmt.Errorf("option progress_delay_us: %d is outside 1000 to 1000000", c.ProgressDelay))
	}
	if c.Log != "" && !slices.Contains([]string{"fatal", "error", "warn", "info", "debug", "trace"}, c.Log) {
		errs = append(errs, fmt.Errorf("option log: %q is none of fatal, error, warn, info, debug, trace", c.Log))
	}
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

const maxAddrs = 8
