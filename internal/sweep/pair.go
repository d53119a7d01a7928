package sweep

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Kind is a process of a cluster.
type Kind string

// The kinds.
const (
	EnginePrefill Kind = "engine-prefill"
	EngineDecode  Kind = "engine-decode"
	PluginPrefill Kind = "plugin-prefill"
	PluginDecode  Kind = "plugin-decode"
	WorkerPrefill Kind = "worker-prefill"
	WorkerDecode  Kind = "worker-decode"
)

var kinds = []Kind{EnginePrefill, EngineDecode, PluginPrefill, PluginDecode, WorkerPrefill, WorkerDecode}

// By side.
var (
	engineKinds = [2]Kind{EnginePrefill, EngineDecode}
	workerKinds = [2]Kind{WorkerPrefill, WorkerDecode}
)

// side is that of the cluster on which the process is.
func (k Kind) side() int {
	if strings.HasSuffix(string(k), sides[decode]) {
		return decode
	}
	return prefill
}

// of is engine, plugin or worker.
func (k Kind) of() string {
	of, _, _ := strings.Cut(string(k), "-")
	return of
}

// Mode is what is done to a process.
type Mode string

// The modes.
const (
	Kill   Mode = "kill"   // SIGKILL
	Stop   Mode = "stop"   // SIGSTOP, and SIGCONT after stopTime
	Freeze Mode = "freeze" // SIGSTOP, until all rooms have ended by their clocks
)

// Pair is a moment of a process: a thread of it begins its nth call of a syscall, counted from when the play began.
type Pair struct {
	Lane    string `json:"lane"` // how bytes travel: shm or tcp
	Kind    Kind   `json:"kind"`
	Syscall string `json:"syscall"`
	Nth     int    `json:"n"`
}

func (p Pair) String() string {
	return fmt.Sprintf("%s, %s(%s #%d)", p.Lane, p.Kind, p.Syscall, p.Nth)
}

// pairsOf turns what was counted in clean runs into pairs, in a fixed order.
func pairsOf(lane string, counts map[Kind]map[string]int) (pairs []Pair) {
	for kind, calls := range counts {
		for name, most := range calls {
			for n := 1; n <= most; n++ {
				pairs = append(pairs, Pair{lane, kind, name, n})
			}
		}
	}
	slices.SortFunc(pairs, func(a, b Pair) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Syscall, b.Syscall), cmp.Compare(a.Nth, b.Nth))
	})
	return pairs
}
