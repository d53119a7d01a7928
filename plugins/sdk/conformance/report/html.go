package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

//go:embed report.html.tmpl
var pageText string

var page = template.Must(template.New("report").Parse(pageText))

// htmlPage is what the template sees.
type htmlPage struct {
	Summary
	Title      string
	Counts     Counts
	Conclusion string
	Tint       string
	Profiles   []htmlProfile
}

type htmlProfile struct {
	Profile
	Open  bool // a case of it is not good
	Cases []htmlCase
}

type htmlCase struct {
	*conformance.Result
	Rule      string
	Tint      string
	Took      string
	Steps     []htmlStep
	Frames    []htmlFrame
	LeftOut   int // frames of the trace that are not shown
	Stderr    []htmlStderr
	Reproduce string
}

type htmlStep struct{ Class, Text string }

type htmlFrame struct {
	Ms, Node, Dir, Text, Mark string
	Gap                       int // frames that are left out before it
}

type htmlStderr struct{ Node, Text string }

// HTML writes one page without anything from elsewhere: each case opens to its rule, script, what was
// expected and came, the trace and what the plugin wrote to standard error.
func (r *Report) HTML(w io.Writer) error {
	s := r.Summary()
	p := htmlPage{Summary: s, Title: r.Title(), Counts: s.Cases.counts(), Conclusion: r.Conclusion(), Tint: "bad"}
	switch s.Verdict {
	case conformance.Conformant:
		p.Tint = "good"
	case conformance.Partial:
		p.Tint = "none"
	}
	for i, of := range r.profiles() {
		h := htmlProfile{Profile: s.Profiles[i]}
		for _, c := range of.cases {
			h.Open = h.Open || !c.Good()
			h.Cases = append(h.Cases, r.htmlCase(c))
		}
		p.Profiles = append(p.Profiles, h)
	}
	var b strings.Builder
	err := page.Execute(&b, p)
	if err == nil {
		_, err = io.WriteString(w, visible(b.String()))
	}
	if err != nil {
		return fmt.Errorf("write the HTML report: %w", err)
	}
	return nil
}

func (r *Report) htmlCase(c *conformance.Result) htmlCase {
	h := htmlCase{Result: c, Rule: conformance.Rule(c.Case.Rule), Tint: "none", Took: conformance.Took(c.Took), Reproduce: r.Reproduce(c)}
	switch {
	case !c.Good():
		h.Tint = "bad"
	case c.Outcome == conformance.Passed:
		h.Tint = "good"
	}
	for line := range strings.Lines(c.Case.Script) {
		line = strings.TrimRight(line, "\n")
		class := "check"
		if strings.HasPrefix(line, ">") {
			class = "host"
		} else if strings.HasPrefix(line, "<") {
			class = "plugin"
		}
		h.Steps = append(h.Steps, htmlStep{class, line})
	}
	h.Frames, h.LeftOut = framesOf(c)
	for node, text := range c.Stderr {
		if text = strings.TrimSpace(text); text != "" {
			h.Stderr = append(h.Stderr, htmlStderr{node, text})
		}
	}
	slices.SortFunc(h.Stderr, func(a, b htmlStderr) int { return strings.Compare(a.Node, b.Node) })
	return h
}

// shownOfGood bounds the frames that the page shows of a case in which nothing is wrong: the first and the
// last half of it. Of the others it shows all that was kept.
const shownOfGood = 200

func framesOf(c *conformance.Result) (frames []htmlFrame, leftOut int) {
	trace, gapAt := c.Trace, -1
	if c.Good() && len(trace) > shownOfGood {
		leftOut = len(trace) - shownOfGood
		gapAt = shownOfGood / 2
		trace = slices.Concat(trace[:gapAt], trace[gapAt+leftOut:])
	}
	for i, e := range trace {
		f := htmlFrame{Ms: fmt.Sprintf("%.3f", ms(e.At.Microseconds())), Node: e.Node, Dir: ">", Text: e.Text, Mark: e.Mark}
		if e.ToHost {
			f.Dir = "<"
		}
		if e.Control {
			f.Dir += " control"
		}
		if i == gapAt {
			f.Gap = leftOut
		}
		frames = append(frames, f)
	}
	return frames, leftOut
}
