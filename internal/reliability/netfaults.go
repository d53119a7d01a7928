package reliability

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// NetFaults is the result of the tests of package netfault in their long form.
type NetFaults struct {
	Version string        `json:"version"` // of the program, as git describes it
	Command string        `json:"command"` // that does the same again
	Began   time.Time     `json:"began"`
	Took    time.Duration `json:"took_ns"`
	Seed    uint64        `json:"seed"`
	Default bool          `json:"default_clocks"` // else short ones
	Faults  []NetFault    `json:"faults"`
}

// NetFault is what the rooms of all runs of one fault came to.
type NetFault struct {
	Name     string         `json:"fault"`
	Does     string         `json:"does"`
	Runs     int            `json:"runs"`
	Rooms    int            `json:"rooms"`
	Refused  int            `json:"refused"` // opens: the peer was suspect, dead or not known yet
	Touched  int            `json:"touched"` // rooms that were open during the fault
	Verdicts map[string]int `json:"verdicts"`
	// Unknown counts rooms that succeeded and whose source had lost its judge.
	Unknown int     `json:"outcome_unknown"`
	P99     float64 `json:"verdict_p99_ms"` // of touched rooms: from the fault, or their open, until both sides had ended
	Max     float64 `json:"verdict_max_ms"`
	Recover float64 `json:"recovered_max_ms"` // from the end of the fault until the open of the first room that succeeded
	Bytes   int64   `json:"bytes"`            // verified at the destination
	Wrong   int     `json:"corrupted"`        // pages with other bytes than were sent, or written after their release
}

func (r *NetFaults) render(b *strings.Builder) {
	clocks := "short clocks"
	if r.Default {
		clocks = "the default clocks, but 20 s for those that wait for a counterpart"
	}
	fmt.Fprintf(b, `
## Network faults

Two engines with their plugins in network namespaces of their own, rooms under way all the time, and between the two hosts a
wire that does the fault; %s.
Every room ended, for a reason that fits; where a row has nothing but success, no room may fail. After each fault new
rooms succeed, all pages come back, readiness is green and no connection is left over.

| fault | runs | rooms, of which touched | verdicts of the destination | fault to verdict p99, max | recovered | corrupted pages |
|---|---|---|---|---|---|---|
`, clocks)
	var bytes int64
	for _, f := range r.Faults {
		var verdicts []string
		for _, v := range slices.SortedFunc(maps.Keys(f.Verdicts), func(x, y string) int {
			return cmp.Or(f.Verdicts[y]-f.Verdicts[x], strings.Compare(x, y))
		}) {
			verdicts = append(verdicts, fmt.Sprintf("%s %d", v, f.Verdicts[v]))
		}
		if f.Unknown > 0 {
			verdicts = append(verdicts, fmt.Sprintf("at the source outcome_unknown %d", f.Unknown))
		}
		fmt.Fprintf(b, "| %s | %d | %d, %d | %s | %.1f s, %.1f s | %.1f s | %d |\n", f.Does, f.Runs, f.Rooms-f.Refused, f.Touched, strings.Join(verdicts, ", "),
			f.P99/1000, f.Max/1000, f.Recover/1000, f.Wrong)
		bytes += f.Bytes
	}
	fmt.Fprintf(b, "\n%.1f GB were verified. Version %s, %s; again: `%s`. Seeded bugs are found: `go test ./internal/netfault -run Bugs -v`.\n", float64(bytes)/1e9, r.Version, r.Began.Format(time.DateOnly), r.Command)
}
