package reliability

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/internal/sweep"
)

// sweeps is what `make sweep` writes, one result a mode.
type sweeps []sweep.Result

func (runs sweeps) render(b *strings.Builder) {
	b.WriteString(`
## Killed processes

Two engines as a user starts them, their plugins and two workers, on one machine: each process is struck, by strace's fault injection, where it
begins its nth call of a syscall while rooms are moved (n up to 200; every pair that a clean run has). *kill*: SIGKILL. *stop*: SIGSTOP, and SIGCONT
three seconds later. *freeze*: SIGSTOP for good, with clocks of three seconds (stall: 15); all rooms have to end before the process is killed. Then every room must be terminal
at every worker that is left, every page must hold what it should and come back, nothing may be written that nobody holds, no process, memory, descriptor, file or
room record may be left, and after a restart of what was killed the next rooms must succeed. Time to verdict: from the blow (stop: from SIGCONT) until the worker sees the end of a room that
the blow ended; those of rooms that were not bound yet include the 50 ms after which the test's router aborts them. Promised are 250 ms at p99 for a death that is proven at once. Load is how many threads wanted to run: where they are more than the
cores, strace and the dying process wait, too.

| | pairs | struck | rooms ended | p50 ms | p99 ms | max ms | violations | load | version, date | again |
|---|---|---|---|---|---|---|---|---|---|---|
`)
	for _, r := range runs {
		p99 := fmt.Sprintf("%.1f", r.P99)
		if r.Mode == sweep.Kill && r.P99 > sweep.Target {
			p99 = fmt.Sprintf("**%s, missed**", p99)
		}
		fmt.Fprintf(b, "| %s | %d of %d | %d | %d | %.1f | %s | %.1f | **%d** | %s | %s, %s | `%s` |\n", r.Mode, r.Pairs, r.Known, r.Hit, r.Ended, r.P50, p99, r.Max,
			r.Violations, r.Load, r.Version, r.Began.Format(time.DateOnly), r.Command)
	}
	b.WriteString("\nPairs that were not struck: the process had done its part before it came there, three times.\n")
	for _, r := range runs {
		if r.Mode != sweep.Kill || r.Pairs < r.Known {
			continue
		}
		b.WriteString("\n| killed | syscalls | pairs | struck | rooms ended | p50 ms | p99 ms | max ms |\n|---|---|---|---|---|---|---|---|\n")
		for _, k := range r.ByKind {
			fmt.Fprintf(b, "| %s | %d | %d | %d | %d | %.1f | %.1f | %.1f |\n", k.Kind, k.Syscalls, k.Pairs, k.Hit, k.Ended, k.P50, k.P99, k.Max)
		}
		var reasons []string
		for _, reason := range slices.Sorted(maps.Keys(r.Reasons)) {
			reasons = append(reasons, fmt.Sprintf("%s %d", reason, r.Reasons[reason]))
		}
		fmt.Fprintf(b, "\nReasons of the rooms that a kill ended: %s. %d rooms that were under way were not harmed and succeeded.\n", strings.Join(reasons, ", "), r.Unharmed)
	}
	b.WriteString("\nThe sweep finds each of its seeded bugs: `go test ./internal/sweep -run Mutants -v`.\n")
}
