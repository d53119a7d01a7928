package netfault

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Faults that these tests have found, each by the name of what went wrong.

// TestHoleShorterThanPeerDead: everything was lost for three quarters of peer_dead, and rooms ended. The engines waited for
// 5 s of silence before they dialled anew, whatever peer_dead was; and what TCP had to send again, of engines and of
// plugins, waited for twice as long as the hole had been.
func TestHoleShorterThanPeerDead(t *testing.T) {
	t.Parallel()
	k := theClocks()
	k.dead, k.verdict, k.stall, k.connect = 5*time.Second, 7*time.Second, 5*time.Second, 5*time.Second
	if !shortRetries() {
		t.Log("this kernel has no TCP_RTO_MAX_MS: ops go on late")
		k.stall = 10 * time.Second
	}
	f := newField(t, k, *seed)
	f.play(t, fault{name: "hole", make: func(f *field) time.Duration {
		const hole = 3650 * time.Millisecond
		f.set(treatment{drop: true}, bothEnds, bothLanes...)
		defer f.heal()
		time.Sleep(hole)
		return hole
	}})
	f.end(t)
}

// shortRetries reports whether the kernel lets a program bound the time between TCP's retries.
func shortRetries() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, 1000) == nil
}

// TestHalfOpenConnectionsEnd: a connection that a black hole had cut stayed at the engine that had accepted it long
// after the stream on it was given up.
func TestHalfOpenConnectionsEnd(t *testing.T) {
	t.Parallel()
	f := newField(t, theClocks(), *seed)
	f.play(t, fault{name: "half-open", make: func(f *field) time.Duration {
		f.set(treatment{drop: true}, bothEnds, bothLanes...)
		defer f.heal()
		for _, e := range f.engines {
			err := within(f.k.dead+2*f.k.silence, func() error {
				n, err := e.connections()
				if err == nil && n != [lanes]int{} {
					err = fmt.Errorf("%d connections between the engines and %d between the plugins", n[control], n[data])
				}
				return err
			})
			if err != nil {
				f.t.Errorf("host %s in a black hole: %v", e.name, err)
			}
		}
		return 0
	}, reasons: slices.Concat(ofSilence, ofNoBytes)})
	f.end(t)
}
