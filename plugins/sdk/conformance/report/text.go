package report

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// Text writes the run for people: a line for each case, failures in full, the verdict last.
func (r *Report) Text(w io.Writer) error {
	var b strings.Builder
	s := r.Summary()
	fmt.Fprintf(&b, "%s\nfeatures: %s\n", r.Title(), strings.Join(s.Plugin.Features, " "))
	for _, p := range r.profiles() {
		var lines strings.Builder
		skipped := map[string]int{} // by reason
		for _, c := range p.cases {
			if c.Outcome == conformance.Skipped {
				skipped[c.Why()]++
				continue
			}
			lines.WriteString(Line(c))
		}
		reasons := slices.Sorted(maps.Keys(skipped))
		if lines.Len() == 0 && len(reasons) == 1 {
			fmt.Fprintf(&b, "\n%s: all %d skipped, %s\n", p.name, len(p.cases), reasons[0])
			continue
		}
		fmt.Fprintf(&b, "\n%s\n%s", p.name, lines.String())
		for _, why := range reasons {
			fmt.Fprintf(&b, "  %-*s  %d of %d: %s\n", outcomeWidth, conformance.Skipped, skipped[why], len(p.cases), why)
		}
	}
	for _, c := range r.Cases {
		if !c.Good() {
			fmt.Fprintf(&b, "\n%s", c.Text(r.Reproduce(c)))
		}
	}
	fmt.Fprintf(&b, "\n%s", r.Conclusion())
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// Title names the plugin and what it was run with.
func (r *Report) Title() string {
	s := r.Summary()
	title := fmt.Sprintf("%s %s (%s), contract %d", s.Plugin.Name, s.Plugin.Version, s.Plugin.Run, s.Contract)
	if s.Plugin.SDK != "" {
		title += ", sdk " + s.Plugin.SDK
	}
	return title
}

const (
	outcomeWidth = 15
	idWidth      = 36
)

// Line is one case in one line: outcome, id, time, and why it was not a pass.
func Line(c *conformance.Result) string {
	label := c.Label()
	if !c.Good() {
		label = strings.ToUpper(label)
	}
	line := fmt.Sprintf("  %-*s  %-*s", outcomeWidth, label, idWidth, c.Case.ID)
	if c.Outcome >= conformance.Passed {
		line += fmt.Sprintf("  %7s", conformance.Took(c.Took))
	}
	if why := c.Why(); why != "" {
		const width = 160
		if r := []rune(why); len(r) > width {
			why = string(r[:width]) + "…"
		}
		line += "  " + why
	}
	return strings.TrimRight(line, " ") + "\n"
}

// Conclusion is the last lines of a report: problems, notes, counts and the verdict.
func (r *Report) Conclusion() string {
	var b strings.Builder
	s := r.Summary()
	for _, p := range s.Problems {
		fmt.Fprintf(&b, "problem: %s\n", p)
	}
	for _, n := range s.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	fmt.Fprintf(&b, "%s in %s, seed %d: %s\n", s.Cases.counts(), s.Took, s.Seed, s.Verdict)
	switch {
	case r.Interrupted:
		b.WriteString("The run was interrupted: it decides nothing.\n")
	case s.Verdict == conformance.Partial:
		fmt.Fprintf(&b, "PARTIAL: %d of %d cases were left out, so this says nothing about whether %s is conformant.\n",
			len(s.Cases.Skipped), len(r.Cases), s.Plugin.Name)
	case s.Verdict == conformance.Broken:
		b.WriteString("The suite itself broke; this says nothing about the plugin. Please report it, with the text above.\n")
	}
	return b.String()
}

// clean keeps what a plugin says of itself on one line.
func clean(s string) string { return visible(strings.ReplaceAll(s, "\n", "\uFFFD")) }

// visible keeps what a plugin wrote from driving whoever looks at it: of the control characters only the end of a
// line is left.
func visible(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case r != '\n' && unicode.IsControl(r):
			return '\uFFFD'
		}
		return r
	}, s)
}
