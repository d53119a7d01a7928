// Command badplugin is the tcp backend with one fault, for the test that proves the demo's teeth. The name
// under which it is started says which: engine-plugin-late writes pages of a room after it said that no
// write can land any more; engine-plugin-skip says Done for every tenth operation without moving a byte.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "engine-plugin-late":
		sdk.Main(&late{Backend: tcp.New(), gone: map[*sdk.Region]bool{}})
	case "engine-plugin-skip":
		sdk.Main(&skip{Backend: tcp.New()})
	default:
		fmt.Fprintf(os.Stderr, "%s is neither engine-plugin-late nor engine-plugin-skip\n", name)
		os.Exit(2)
	}
}

// late breaks rule R4.
type late struct {
	*tcp.Backend
	mu   sync.Mutex
	gone map[*sdk.Region]bool
}

// Revoke says quiet, truthfully for the backend that it wraps, and then writes all the same.
func (b *late) Revoke(g *sdk.Grant) bool {
	quiet := b.Backend.Revoke(g)
	for _, wait := range []time.Duration{50 * time.Millisecond, 400 * time.Millisecond, time.Second} {
		time.AfterFunc(wait, func() { b.write(g) })
	}
	return quiet
}

func (b *late) write(g *sdk.Grant) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, part := range g.Parts {
		t := &part.Pool.Tensors[0]
		if t.Region == nil || b.gone[t.Region] {
			continue
		}
		for page := range part.Pool.Pages {
			if part.Pages.Contains(page) {
				copy(t.Region.Bytes[t.Offset+uint64(page)*t.PageStride:], "late")
				break
			}
		}
	}
}

// RemoveRegion ends the late writes: the mapping goes away.
func (b *late) RemoveRegion(r *sdk.Region) {
	b.mu.Lock()
	b.gone[r] = true
	b.mu.Unlock()
	b.Backend.RemoveRegion(r)
}

// skip breaks rule R1.
type skip struct {
	*tcp.Backend
	ops atomic.Int64
}

func (b *skip) Transfer(op *sdk.Op) {
	if b.ops.Add(1)%10 == 0 {
		op.Done(contract.Lane_LANE_SHM)
		return
	}
	b.Backend.Transfer(op)
}
