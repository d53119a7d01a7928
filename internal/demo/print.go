package demo

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

const (
	barWidth  = 32
	lineEvery = 2 * time.Second // where there is no terminal
	drawEvery = 100 * time.Millisecond
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
	case b.terminal && now.Sub(b.last) < drawEvery:
	case b.terminal:
		b.last = now
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
	fates       []struckBy
}

// struckBy is a fault and what became of the rooms that it struck.
type struckBy struct {
	*fault
	fate fate
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
	if len(f.fates) > 0 && r.Failed > 0 {
		row("  Failed, other", "%d (a fault struck every one of their attempts)", r.Failed)
	} else {
		row("  Failed, other", "%d", r.Failed)
	}
	row("  not terminal", "%d", r.Nonterminal)
	row("reasons", "%s", countsText(r.Reasons))
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
	printFaults(w, r, f.fates)
	for i, why := range f.why {
		if i == 0 {
			fmt.Fprintf(w, "\nengine rooms why %d   (aborted by a worker)\n", f.whyRoom)
		}
		fmt.Fprintf(w, "  %s\n", why)
	}
}

// printFaults shows what each fault did to the rooms that were open and not terminal when it struck.
func printFaults(w io.Writer, r Result, fates []struckBy) {
	if len(fates) == 0 {
		return
	}
	fmt.Fprintln(w, "\nFaults: how long the rooms that were live took to a terminal status, and what became of them")
	for _, s := range fates {
		whole := "nothing succeeded after it"
		if s.over > 0 {
			whole = fmt.Sprintf("new rooms succeed %.1f s later", float64(s.over-s.struck)/1e9)
		}
		fmt.Fprintf(w, "  %5.1f s  %s; %s\n", s.second, s.what, whole)
		fmt.Fprintf(w, "           %d rooms: p50 %s, p99 %s, max %s: %s\n", len(s.fate.times),
			msText(s.fate.at(50)), msText(s.fate.at(99)), msText(s.fate.at(100)), s.fate)
	}
	if r.Retried == 0 {
		fmt.Fprintln(w, "  no room had to be tried again")
		return
	}
	fmt.Fprintf(w, "  tried again, as a router does: %d rooms (%s); %d succeeded, %d were aborted by a worker, %d failed\n", r.Retried, countsText(r.LostAttempts),
		r.RetriedSuccess, r.RetriedAborted, r.Retried-r.RetriedSuccess-r.RetriedAborted)
}

// String says how many ended for which reason, and after how long the last of them.
func (t fate) String() string {
	names := slices.Sorted(maps.Keys(t.reasons))
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d (within %.0f ms)", name, t.reasons[name], float64(t.longest[name].Microseconds())/1000)
	}
	return strings.Join(names, ", ")
}

// countsText is counts by name for people.
func countsText(counts map[string]int) string {
	names := slices.Sorted(maps.Keys(counts))
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, counts[name])
	}
	return strings.Join(names, ", ")
}

func msText(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Microseconds())/1000) }
