package conformance

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
)

const (
	shownFrames   = 40 // of a trace, in a failure
	shownFailures = 4  // besides the first
	shownStderr   = 20 // lines
	shownWidth    = 400
)

// Label is the outcome for people: a failure that KnownFailing names is not called one.
func (r *Result) Label() string {
	switch {
	case r.Expected && r.Outcome == Failed:
		return "known failing"
	case r.Expected && r.Outcome == Passed:
		return "unexpected pass"
	}
	return r.Outcome.String()
}

// Good tells whether the result speaks for the plugin or says nothing about it.
func (r *Result) Good() bool {
	return r.Outcome != Errored && (r.Outcome == Failed) == r.Expected || r.Outcome < Passed
}

// Why is the reason of the outcome in one line, "" for a pass.
func (r *Result) Why() string {
	switch {
	case len(r.Failures) > 0:
		why := r.Failures[0].String()
		if rule := r.Failures[0].Rule; Rule(rule) != "" {
			why = rule + ": " + why
		}
		return oneLine(why)
	case r.Expected && r.Outcome == Passed:
		return "it passed but is in the list of known failures; take it out"
	}
	return oneLine(r.Reason)
}

// Text is a failure as people read it: the rule, what was expected and what came, the last frames with
// the offending one marked, what the plugin said, and how to see it again. reproduce is that command line.
func (r *Result) Text(reproduce string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s  (%s)\n  %s\n", strings.ToUpper(r.Label()), r.Case.ID, Took(r.Took), r.Case.Title)
	for i, f := range r.Failures {
		if i > shownFailures {
			fmt.Fprintf(&b, "\n  and %d more\n", len(r.Failures)-i)
			break
		}
		r.failureText(&b, i, f)
	}
	if len(r.Failures) == 0 {
		fmt.Fprintf(&b, "\n  %s\n", r.Why())
	}
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "  note      %s\n", printable(n))
	}
	r.traceText(&b)
	for _, node := range sortedKeys(r.Stderr) {
		stderrText(&b, node, r.Stderr[node])
	}
	fmt.Fprintf(&b, "\n  reproduce  %s\n  explain    engine conformance explain %s\n", reproduce, r.Case.ID)
	return b.String()
}

func (r *Result) failureText(b *strings.Builder, i int, f Failure) {
	b.WriteByte('\n')
	if s := Rule(f.Rule); s != "" && !slices.ContainsFunc(r.Failures[:i], func(o Failure) bool { return o.Rule == f.Rule }) {
		fmt.Fprintf(b, "  rule %s   %s\n", f.Rule, s)
	}
	fmt.Fprintf(b, "  expected  %s\n  got       %s\n", indent(f.Expected, 12), indent(f.Got, 12))
}

// traceText prints the end of the trace; a marked frame before it is shown with what led to it.
func (r *Result) traceText(b *strings.Builder) {
	if len(r.Trace) == 0 {
		return
	}
	const before = 3
	from := max(0, len(r.Trace)-shownFrames)
	marked := slices.IndexFunc(r.Trace, func(e Entry) bool { return e.Mark != "" })
	early := []Entry{}
	if marked >= 0 && marked < from {
		first := max(0, marked-before)
		early = r.Trace[first : marked+1]
		from = min(len(r.Trace), max(marked+1, from+len(early)))
	}
	fmt.Fprintf(b, "\n  %d of %d frames, times from the start of the case, > to the plugin, < from it:\n", len(early)+len(r.Trace)-from, len(r.Trace))
	frames := func(list []Entry) {
		for _, e := range list {
			entryText(b, e)
		}
	}
	gap := func(shownTo, next int) {
		if next > shownTo {
			fmt.Fprintf(b, "      … %d more\n", next-shownTo)
		}
	}
	if len(early) > 0 {
		gap(0, marked+1-len(early))
		frames(early)
		gap(marked+1, from)
	} else {
		gap(0, from)
	}
	frames(r.Trace[from:])
	if marked < 0 {
		b.WriteString("      no frame is marked: what is wrong did not come, or was seen elsewhere (memory, the process)\n")
	}
}

func entryText(b *strings.Builder, e Entry) {
	gutter, mark := "   ", e.Mark
	if mark != "" {
		gutter = "==>"
	}
	e.Mark = ""
	fmt.Fprintf(b, "  %s %s\n", gutter, cut(printable(e.String())))
	if mark != "" {
		fmt.Fprintf(b, "                     ^ %s\n", cut(oneLine(mark)))
	}
}

func stderrText(b *strings.Builder, node, text string) {
	text = strings.TrimSpace(text)
	if text == "" {
		return
	}
	lines := strings.Split(text, "\n")
	if left := len(lines) - shownStderr; left > 0 {
		lines = append([]string{fmt.Sprintf("… %d lines before", left)}, lines[left:]...)
	}
	fmt.Fprintf(b, "\n  stderr of %s:\n", node)
	for _, l := range lines {
		fmt.Fprintf(b, "    %s\n", cut(printable(l)))
	}
}

// Took writes a duration for people.
func Took(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

func indent(s string, by int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	return strings.Join(lines, "\n"+strings.Repeat(" ", by))
}

func oneLine(s string) string { return printable(strings.Join(strings.Fields(s), " ")) }

func cut(s string) string {
	if r := []rune(s); len(r) > shownWidth {
		return string(r[:shownWidth]) + "…"
	}
	return s
}

// printable keeps what a plugin wrote from driving the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case unicode.IsControl(r):
			return '\uFFFD'
		}
		return r
	}, s)
}

func sortedKeys(m map[string]string) (keys []string) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
