// Package config reads the engine's configuration: defaults, then YAML files, then TERMINUS_ variables,
// then flags, each over the one before. Every problem of every source is found in one run and carries
// its place and its fix. A loaded Config is never changed.
package config

import (
	"time"
)

// Config is the engine's whole configuration. The json tags are the YAML names; the doc comments and the
// jsonschema tags make configs/engine.schema.json. A Config that Load returned is complete: every
// path, name and socket is filled in, every check of this package has passed. Treat it as read-only.
type Config struct {
	// Name of this node, unique among its peers. Default: the host name.
	Node string `json:"node,omitempty"`
	// Directory for sockets and other things that end with the process; engines of one machine that
	// shall find each other (peers.driver local) share it. Default: $XDG_RUNTIME_DIR/terminus,
	// /run/terminus for root, else /tmp/terminus-UID. The engine's own files are in a folder of it
	// that is named like the node.
	RuntimeDir string `json:"runtime_dir,omitempty"`
	// Directory for what outlives the process: the incarnation counter. Default: /var/lib/terminus for
	// root, else $XDG_STATE_HOME/terminus or ~/.local/state/terminus.
	StateDir string `json:"state_dir,omitempty"`

	Worker     Worker            `json:"worker,omitempty"`
	Admin      Admin             `json:"admin,omitempty"`
	Metrics    Metrics           `json:"metrics,omitempty"`
	Log        Log               `json:"log,omitempty"`
	Transfer   Transfer          `json:"transfer,omitempty"`
	Plugins    map[string]Plugin `json:"plugins,omitempty"`
	Collective Collective        `json:"collective,omitempty"`
	Peers      Peers             `json:"peers,omitempty"`
	Limits     Limits            `json:"limits,omitempty"`
	Clocks     Clocks            `json:"clocks,omitempty"`
	Drain      Drain             `json:"drain,omitempty"`
	Scheduler  Scheduler         `json:"scheduler,omitempty"`

	origin map[string]Source // leaf → where its value came from; defaults are left out
	above  map[string]Source // mapping or list → where it stands
}

// Worker is the socket that inference processes connect to.
type Worker struct {
	// Unix socket, shorter than 108 bytes. Default: RUNTIME_DIR/NODE/worker.sock.
	Socket string `json:"socket,omitempty"`
	// Group (name or number) that owns the socket; needs mode 0660. Default: the engine's.
	Group string `json:"group,omitempty"`
	// Permission bits of the socket: who may be a worker.
	Mode string `json:"mode,omitempty" jsonschema:"enum=0600,enum=0660"`
	// Workers connected at once.
	MaxSessions int `json:"max_sessions,omitempty" jsonschema:"minimum=1,maximum=4096"`
	// Open rooms that one worker may ask for at Hello.
	SlotsMax int `json:"slots_max,omitempty" jsonschema:"minimum=1,maximum=65536"`
	// Refuses rooms of sources that do not name the group of their destination, and so take the first that registers
	// their id.
	RequirePeerGroup bool `json:"require_peer_group,omitempty"`
}

// Admin is the socket of the commands and of monitoring.
type Admin struct {
	// Unix socket (mode 0600), shorter than 108 bytes. Default: RUNTIME_DIR/NODE/admin.sock.
	Socket string `json:"socket,omitempty"`
	// Allows `engine rooms abort`, `engine drain` and `engine plugins upgrade`, which runs any program
	// that it is given as the engine's user; without it the admin API is read-only.
	EnableMutations bool `json:"enable_mutations,omitempty"`
}

// Metrics is the Prometheus listener. The metrics are at /metrics of the admin socket in any case.
type Metrics struct {
	// Address for Prometheus, such as 127.0.0.1:9464. Empty: none.
	Listen string `json:"listen,omitempty"`
}

// Log says what is logged, always to stderr.
type Log struct {
	// Least level that is written.
	Level string `json:"level,omitempty" jsonschema:"enum=debug,enum=info,enum=warn,enum=error"`
	// One line of text or of JSON per record.
	Format string `json:"format,omitempty" jsonschema:"enum=text,enum=json"`
}

// Transfer chooses what moves the bytes.
type Transfer struct {
	// Backend, or a list in order of preference; the destination's order decides, per group pair. Each
	// is `tcp` (built in) or a name under plugins.
	Backend Names `json:"backend,omitempty"`
	// Slowest lane that bytes may take, fastest first: rdma, nvlink, shm, cma, tcp. A peer that can only be
	// reached by a slower one is refused. Empty: any.
	RequireLane string `json:"require_lane,omitempty" jsonschema:"enum=,enum=rdma,enum=nvlink,enum=shm,enum=cma,enum=tcp"`
}

// Lanes are the values of transfer.require_lane, fastest first.
var Lanes = []string{"rdma", "nvlink", "shm", "cma", "tcp"}

// Plugin is one plugin process.
type Plugin struct {
	// Program: a path, or a name that is looked up next to the engine's binary and then in PATH. Default:
	// engine-plugin-NAME; the plugin `tcp` needs none, it is built in.
	Exec string `json:"exec,omitempty"`
	// WebAssembly module, in place of a program; sha256 then pins this file. The engine hosts it in a process of its
	// own, without files, sockets, arguments or environment.
	Wasm string `json:"wasm,omitempty"`
	// File that exec runs when exec is an interpreter, such as python3; sha256 then pins this file.
	Script string `json:"script,omitempty"`
	// Arguments of the program.
	Args []string `json:"args,omitempty"`
	// Environment of the program, besides the few variables that every plugin gets. Nothing is inherited.
	Env map[string]string `json:"env,omitempty"`
	// SHA-256 of the program, 64 hexadecimal digits; another file is refused.
	SHA256 string `json:"sha256,omitempty" jsonschema:"pattern=^([0-9a-fA-F]{64})?$"`
	// Mutual TLS between engine and plugin, by one-time certificates. Go plugins only: Python's gRPC refuses them.
	MTLS bool `json:"mtls,omitempty"`
	// Options of the backend, checked by the schema that the plugin sends at handshake.
	Options map[string]any `json:"options,omitempty"`
}

// Collective chooses what runs the GPU collectives.
type Collective struct {
	// Backend. Not served yet: refused when set.
	Backend string `json:"backend,omitempty"`
}

// Peers says how engines find each other.
type Peers struct {
	// local: the engines of this machine that share runtime_dir. static: the list below. etcd: those that
	// register in the same store under the same prefix.
	Driver string `json:"driver,omitempty" jsonschema:"enum=local,enum=static,enum=etcd"`
	// Address for other engines, host:port. Needed for static and etcd; local uses a unix socket when it is empty.
	Listen string `json:"listen,omitempty"`
	// Address that is told to other engines. Default: listen.
	Advertise string `json:"advertise,omitempty"`
	// The other engines, for driver static.
	Static []StaticPeer `json:"static,omitempty"`
	// The store, for driver etcd.
	Etcd Etcd `json:"etcd,omitempty"`
	// Mutual TLS between engines; the files are read again when they change.
	TLS TLS `json:"tls,omitempty"`
	// Words that allow a listener that is neither loopback nor TLS.
	InsecureListen string `json:"insecure_listen,omitempty"`
}

// StaticPeer is another engine.
type StaticPeer struct {
	// Its node name.
	Node string `json:"node" jsonschema:"minLength=1"`
	// Its peers.advertise, host:port.
	Address string `json:"address" jsonschema:"minLength=1"`
}

// Etcd is the store that engines register in. It is not on the way of any room: while it cannot be reached the
// known peers stay.
type Etcd struct {
	// URL of a member for clients, or a list: http://host:port or https://host:port, all alike.
	Endpoints Names `json:"endpoints,omitempty"`
	// Start of all keys; engines with the same prefix are peers of each other.
	Prefix string `json:"prefix,omitempty" jsonschema:"pattern=^/.*[^/]$"`
	// How long the record of an engine outlives it, in whole seconds; it is renewed three times as often.
	Lease Duration `json:"lease,omitempty"`
	// Longest time for one request, connecting included.
	DialTimeout Duration `json:"dial_timeout,omitempty"`
	// User of the store; needs password_file.
	Username string `json:"username,omitempty"`
	// File that holds the user's password and nothing else.
	PasswordFile string `json:"password_file,omitempty"`
	// TLS towards the store, for https endpoints.
	TLS EtcdTLS `json:"tls,omitempty"`
}

// EtcdTLS names PEM files.
type EtcdTLS struct {
	// Authorities that may sign the certificates of members. Empty: those of the machine.
	CA string `json:"ca,omitempty"`
	// Certificate chain of this engine, for a store that asks for one; needs key. Both are read again for
	// each connection.
	Cert string `json:"cert,omitempty"`
	// Private key of this engine.
	Key string `json:"key,omitempty"`
	// Name that the certificates of members must carry. Empty: the host of the endpoint.
	ServerName string `json:"server_name,omitempty"`
}

// TLS names PEM files. All three or none.
type TLS struct {
	// Certificate chain of this engine.
	Cert string `json:"cert,omitempty"`
	// Private key of this engine.
	Key string `json:"key,omitempty"`
	// Authorities that may sign the certificates of peers.
	CA string `json:"ca,omitempty"`
}

// Enabled reports whether TLS is configured.
func (t TLS) Enabled() bool { return t.Cert != "" || t.Key != "" || t.CA != "" }

// Limits bound what the engine holds. What does not fit waits; what can never fit is refused.
type Limits struct {
	// Rooms admitted at once, in all.
	InflightRooms int `json:"inflight_rooms,omitempty" jsonschema:"minimum=1,maximum=10000000"`
	// Rooms admitted at once of one worker.
	RoomsPerWorker int `json:"rooms_per_worker,omitempty" jsonschema:"minimum=1,maximum=65536"`
	// Bytes of the pages of admitted rooms, in all.
	InflightBytes Bytes `json:"inflight_bytes,omitempty"`
	// And their number.
	InflightPages int `json:"inflight_pages,omitempty" jsonschema:"minimum=1,maximum=1000000000"`
	// Bytes of the pages of admitted rooms of one worker.
	WorkerBytes Bytes `json:"worker_bytes,omitempty"`
	// And their number.
	WorkerPages int `json:"worker_pages,omitempty" jsonschema:"minimum=1,maximum=1000000000"`
	// Largest operation that is given to a backend, at most 64MiB.
	OpBytes Bytes `json:"op_bytes,omitempty"`
	// Operations outstanding towards one peer.
	PeerOps int `json:"peer_ops,omitempty" jsonschema:"minimum=1,maximum=65536"`
	// Bytes outstanding towards one peer.
	PeerBytes Bytes `json:"peer_bytes,omitempty"`
	// Ended rooms of one peer that are remembered for the tombstone clock.
	TombstonesPerPeer int `json:"tombstones_per_peer,omitempty" jsonschema:"minimum=1,maximum=1000000"`
	// Share of the bytes in a worker's pools that may rest in quarantine. Beyond it the worker's destinations
	// wait, the engine is not ready, and the plugin that the pages are registered with is replaced by a new
	// process of it.
	Quarantine Percent `json:"quarantine,omitempty"`
	// Time that pages may rest in quarantine, however few, before the plugin is replaced.
	QuarantineAge Duration `json:"quarantine_age,omitempty"`
}

// Clocks bound every wait; none can be switched off. A room whose clock runs out ends as Failed with the
// reason that is named like the clock (stall: stalled; verdict: outcome_unknown; peer_dead: peer_lost).
type Clocks struct {
	// Accepted here, not admitted.
	Queue Duration `json:"queue,omitempty"`
	// From open until bound to the counterpart.
	Bootstrap Duration `json:"bootstrap,omitempty"`
	// In place of bootstrap while the counterpart says that it waits for memory.
	PeerQueued Duration `json:"peer_queued,omitempty"`
	// Destination open without pages.
	Register Duration `json:"register,omitempty"`
	// Bound, and nothing submitted.
	Input Duration `json:"input,omitempty"`
	// Operations outstanding and no byte moved; longer than the backend's own progress timeout.
	Stall Duration `json:"stall,omitempty"`
	// Least length of the transfer clock.
	TransferMin Duration `json:"transfer_min,omitempty"`
	// Rate that gives the length of the transfer clock of large rooms: 4 × bytes / rate.
	TransferFloorRate Rate `json:"transfer_floor_rate,omitempty"`
	// Source waits for the judge; longer than peer_dead.
	Verdict Duration `json:"verdict,omitempty"`
	// Per rung of the proofs that pages are quiet after a room ended.
	Drain Duration `json:"drain,omitempty"`
	// A silent peer gets no new rooms.
	PeerSuspect Duration `json:"peer_suspect,omitempty"`
	// A silent peer is dead: its rooms end.
	PeerDead Duration `json:"peer_dead,omitempty"`
	// An ended room is remembered.
	Tombstone Duration `json:"tombstone,omitempty"`
	// What a plugin process still has when the next one takes over has so long to end, or as long as the
	// longest transfer clock in it.
	Retire Duration `json:"retire,omitempty"`
}

// Drain says how the engine stops.
type Drain struct {
	// Time that rooms have to end after SIGTERM or `engine drain`; what is left is ended.
	Budget Duration `json:"budget,omitempty"`
}

// Scheduler orders the operations of rooms towards one peer.
type Scheduler struct {
	// srf: shortest remaining bytes first, with the age bound. fifo: first come, first served.
	Policy string `json:"policy,omitempty" jsonschema:"enum=srf,enum=fifo"`
	// Under srf the rooms that waited this long get a third of the bytes of their peer, the oldest first.
	AgeBound Duration `json:"age_bound,omitempty"`
	// Bytes that a peer may be given per turn of the round-robin over peers.
	Quantum Bytes `json:"quantum,omitempty"`
}

// Default returns the configuration without any source. Node, the directories and the sockets depend on
// the machine: they are empty here and filled in by Load.
func Default() Config {
	return Config{
		Worker:   Worker{Mode: "0600", MaxSessions: 256, SlotsMax: 65536},
		Log:      Log{Level: "info", Format: "text"},
		Transfer: Transfer{Backend: Names{BuiltinBackend}},
		Peers:    Peers{Driver: "local", Etcd: Etcd{Prefix: "/terminus", Lease: Duration(10 * time.Second), DialTimeout: Duration(5 * time.Second)}},
		Limits: Limits{
			InflightRooms:     100_000,
			RoomsPerWorker:    65536,
			InflightBytes:     256 << 30,
			InflightPages:     100_000_000,
			WorkerBytes:       256 << 30,
			WorkerPages:       100_000_000,
			OpBytes:           64 << 20,
			PeerOps:           64,
			PeerBytes:         1 << 30,
			TombstonesPerPeer: 65536,
			Quarantine:        10,
			QuarantineAge:     Duration(time.Hour),
		},
		Clocks: Clocks{
			Queue:             Duration(300 * time.Second),
			Bootstrap:         Duration(300 * time.Second),
			PeerQueued:        Duration(300 * time.Second),
			Register:          Duration(300 * time.Second),
			Input:             Duration(300 * time.Second),
			Stall:             Duration(15 * time.Second),
			TransferMin:       Duration(120 * time.Second),
			TransferFloorRate: 50_000_000,
			Verdict:           Duration(15 * time.Second),
			Drain:             Duration(5 * time.Second),
			PeerSuspect:       Duration(2 * time.Second),
			PeerDead:          Duration(10 * time.Second),
			Tombstone:         Duration(600 * time.Second),
			Retire:            Duration(300 * time.Second),
		},
		Drain:     Drain{Budget: Duration(30 * time.Second)},
		Scheduler: Scheduler{Policy: "srf", AgeBound: Duration(2 * time.Second), Quantum: 4 << 20},
	}
}

// BuiltinBackend is the transfer backend that needs no entry under plugins.
const BuiltinBackend = "tcp"

//go:generate go run ./schemagen ../../configs/engine.schema.json
