package demo

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

const (
	barWidth  = 32
	lineEvery = 2 * time.Second // where there is no terminal
	eraseLine = "\r\x1b[K"
)

// progressBar shows how far a run is: in place on a terminal, as a line now and then elsewhere.
type progressBar struct {
	w        io.Writer
	terminal bool
	total    int
	start    time.Time
	last     time.Time
	drawn    bool
}

func (b *progressBar) show(ended, bytes int64) {
	now := time.Now()
	text := fmt.Sprintf("%d of %d rooms, %s, %.0f s", ended, b.total, sizeText(bytes), now.Sub(b.start).Seconds())
	switch {
	case b.terminal:
		full := min(int(ended)*barWidth/max(b.total, 1), barWidth)
		fmt.Fprintf(b.w, "%s  [%s%s] %s", eraseLine, strings.Repeat("=", full), strings.Repeat(" ", barWidth-full), text)
		b.drawn = true
	case now.Sub(b.last) >= lineEvery:
		fmt.Fprintf(b.w, "  %s\n", text)
		b.last = now
	}
}

func (b *progressBar) clear() {
	if b.drawn {
		fmt.Fprint(b.w, eraseLine)
		b.drawn = false
	}
}

// sizeText is a number of bytes for people.
func sizeText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}

// figures is what the table shows beside the result.
type figures struct {
	workers     string
	wall        time.Duration // from the first room until both workers are done
	cpu         time.Duration // of both engines and their plugins
	copied      time.Duration // a plain copy of the same bytes
	p50, p99    time.Duration // open to verdict at the decode worker, rooms that succeeded
	pages, runs int64         // of the decode worker's page lists: pages, and runs of consecutive ones
	aborts      int           // rooms that a worker was to abort
	why         []string      // of one of them
	failures    []string      // the first rooms that failed for another reason than an abort
	whyRoom     int64
}

// printTable shows the result.
func printTable(w io.Writer, r Result, f figures) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "  %s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintln(t, "Result, by the decode side's verdicts")
	row("rooms", "%d", r.Rooms)
	row("  Success", "%d", r.Success)
	row("  Failed, aborted", "%d (%d were to be aborted by a worker; some had ended by then)", r.Aborted, f.aborts)
	row("  Failed, other", "%d", r.Failed)
	row("  not terminal", "%d", r.Nonterminal)
	reasons := make([]string, 0, len(r.Reasons))
	for reason := range r.Reasons {
		reasons = append(reasons, reason)
	}
	slices.Sort(reasons)
	for i, reason := range reasons {
		reasons[i] = fmt.Sprintf("%s %d", reason, r.Reasons[reason])
	}
	row("reasons", "%s", strings.Join(reasons, ", "))
	row("sides disagree", "%d (and %d where the source could not know that the destination succeeded)", r.Disagreed, r.Unknown)
	seconds := f.wall.Seconds()
	if seconds > 0 {
		row("bytes verified", "%s in %.1f s, %.2f GB/s at the trace's pace", sizeText(r.Bytes), seconds, float64(r.Bytes)/1e9/seconds)
	}
	if f.runs > 0 {
		row("page lists", "%d pages in %d runs, %.1f pages a run", f.pages, f.runs, float64(f.pages)/float64(f.runs))
	}
	row("open to verdict", "p50 %s, p99 %s, computation included", msText(f.p50), msText(f.p99))
	if r.Nonterminal == 0 && f.copied > 0 {
		n := time.Duration(r.Rooms)
		row("cost a room", "%s of processor in both engines and plugins; a plain copy of the same bytes takes %s (x%.1f)", msText(f.cpu/n), msText(f.copied/n), float64(f.cpu)/float64(f.copied))
	}
	row("pages leaked", "%d", r.LeakedPages)
	row("pages written after release", "%d", r.WrittenAfterRelease)
	row("mismatched pages", "%d", r.MismatchedPages)
	t.Flush()
	for i, why := range f.why {
		if i == 0 {
			fmt.Fprintf(w, "\nengine rooms why %d   (aborted by a worker)\n", f.whyRoom)
		}
		fmt.Fprintf(w, "  %s\n", why)
	}
}

func msText(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Microseconds())/1000) }
