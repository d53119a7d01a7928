package client

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
)

// canary is what AddRegion writes into a region's last aligned eight bytes, for a backend to answer with
// its complement, and the worker's own bytes below it. Those are kept for as long as a backend may still
// write there, and put back each time that one may have.
type canary struct {
	offset int // in the region

	mu    sync.Mutex // its own: a late answer comes while AddRegion holds the region
	at    []byte     // the eight bytes; nil after close
	value uint64     // the last one that was painted
	under [8]byte    // the worker's bytes
	kept  bool       // under is valid: somebody may still write the complement
}

// paint covers the eight bytes with a new value and returns it. The caller has the proof that nobody else
// writes to the region, with which uncover was called: the bytes are the worker's own.
func (k *canary) paint() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	var b [8]byte
	rand.Read(b[:])
	k.value, k.kept = binary.LittleEndian.Uint64(b[:]), true
	copy(k.under[:], k.at)
	copy(k.at, b[:])
	return k.value
}

// answered is called with the engine's answer to a value, however late, and puts the worker's bytes back.
// It reports whether the complement was there. After a refusal a backend may still write it, so the bytes
// are kept until the proof.
func (k *canary) answered(value uint64, ready bool) (seen bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.at == nil || !k.kept || k.value != value { // closed, or with another session by now
		return false
	}
	seen = binary.LittleEndian.Uint64(k.at) == ^value
	k.putBack(ready && seen)
	return seen
}

// uncover is called when nobody else can write to the region any more: it puts the worker's bytes back for
// good, where an answer has not.
func (k *canary) uncover() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.putBack(true)
}

// putBack leaves alone what the worker wrote there since; last says that no backend will write there any
// more. It is called with mu.
func (k *canary) putBack(last bool) {
	if k.at == nil || !k.kept {
		return
	}
	if v := binary.LittleEndian.Uint64(k.at); v == k.value || v == ^k.value {
		copy(k.at, k.under[:])
	}
	k.kept = !last
}

// close is called before the memory is unmapped.
func (k *canary) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at = nil
}
