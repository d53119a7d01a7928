// Package membership tells an engine who its peers are and gives it its incarnation. A driver is the
// only thing that knows where the records are kept: a directory on one host (Local), the
// configuration (Static), or a store (Etcd). The store is never on a room's path: when it cannot be
// reached, membership is frozen and nothing fails.
package membership

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// Record is what an engine publishes about itself.
type Record struct {
	// Node is the engine's name: unique, [A-Za-z0-9._-], at most 63 bytes. See CheckNode.
	Node string `json:"node"`
	// Address is where the peer stream is served: "unix:/path" or "host:port".
	Address string `json:"address"`
	// HostID is the identity of the machine (see HostID): engines with equal ones can share memory.
	HostID string `json:"host_id"`
	// PID is the engine's process, for messages.
	PID int `json:"pid"`
}

// Peer is another engine as membership sees it. Incarnation and HostID are zero where the driver does
// not know them (Static); the peer's Hello tells them.
type Peer struct {
	Record
	Incarnation uint64 `json:"incarnation"`
}

// Gone is proof that one incarnation of a node is dead: none of its threads runs any more.
type Gone struct {
	Node        string
	Incarnation uint64
}

// Update is the whole membership at one moment, and the proofs of death that are new since the
// update before.
type Update struct {
	// Peers are the engines that are not known to be dead, without this one, sorted by node. A peer
	// that is missing here is merely no longer named: that proves nothing.
	Peers []Peer
	// Gone are new proofs of death. None is lost, none is repeated within one watch.
	Gone []Gone
	// Err says why the records cannot be read at present; Peers then repeats the last known ones.
	Err error
}

// Lease is this engine's registration.
type Lease interface {
	// Incarnation is larger than that of every earlier registration of this node, also across kill
	// and reboot. It is never 0.
	Incarnation() uint64
	// Lost is closed when it is certain that another engine may now act under this node's name; the
	// engine must admit nothing more. An unreachable store is not that.
	Lost() <-chan struct{}
	// Err says why the lease is lost; nil before.
	Err() error
	// Close withdraws the registration. From then on others may hold a proof that this incarnation
	// is dead, so the caller does it last, when neither it nor its plugins touch a page any more.
	Close() error
}

// Group is the ranks of one model instance at this engine.
type Group struct {
	Name  string  `json:"name"`
	Role  string  `json:"role"` // source, destination
	Size  int32   `json:"size"` // ranks in all
	Ranks []int32 `json:"ranks"`
}

// GroupPublisher is a Lease whose driver publishes the groups of the engine, for routers. Engines do not
// read them: what a group is at a peer comes on that peer's stream.
type GroupPublisher interface {
	// SetGroups replaces what is published. It does not wait for the store.
	SetGroups([]Group)
}

// Driver is where the records are kept. Methods are safe for concurrent use.
type Driver interface {
	// Register publishes rec and mints the incarnation. It fails with ErrNodeTaken when an engine of
	// that name is alive. One driver registers once.
	Register(ctx context.Context, rec Record) (Lease, error)
	// Watch sends the membership: the first update at once, then one for each change, until ctx ends
	// or the driver is closed; then the channel is closed. A slow reader gets fewer, later updates,
	// never a lost proof.
	Watch(ctx context.Context) <-chan Update
	// Close ends all watches. It does not withdraw the registration.
	Close() error
}

// Looker is a Driver whose watches look every so often, and can be told that something happened that a death would
// explain.
type Looker interface {
	// Look has all watches look at once, and often for a tenth of a second: a process that dies gives up its
	// connections and its lock one after the other. It does not wait.
	Look()
}

// ErrNodeTaken is returned by Register when a living engine has the same node name.
var ErrNodeTaken = errors.New("node name is taken")

// ErrRegistered is returned by a second Register on one driver.
var ErrRegistered = errors.New("driver has registered already")

// CheckNode reports whether name can be a node name: 1 to 63 of [A-Za-z0-9._-], starting with a
// letter or digit, so that it can stand in a file name and in a certificate's DNS name.
func CheckNode(name string) error {
	ok := len(name) >= 1 && len(name) <= 63 && name[0] != '.' && name[0] != '-' && name[0] != '_'
	for _, c := range []byte(name) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-')
	}
	if !ok {
		return fmt.Errorf("node name %q: want 1 to 63 of A-Z a-z 0-9 . _ -, starting with a letter or digit", name)
	}
	return nil
}

// CheckAddress reports whether address is "unix:/absolute/path" (at most 107 bytes of path) or
// "host:port".
func CheckAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		if !strings.HasPrefix(path, "/") || len(path) > maxUnixPath {
			return fmt.Errorf("address %q: want unix:/absolute/path of at most %d bytes; choose a shorter runtime directory", address, maxUnixPath)
		}
		return nil
	}
	return checkHostPort(address)
}

// HostID returns the identity of this machine since its boot.
func HostID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id of this machine: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
