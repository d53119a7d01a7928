package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

type junitSuites struct {
	XMLName  xml.Name     `xml:"testsuites"`
	Name     string       `xml:"name,attr"`
	Tests    int          `xml:"tests,attr"`
	Failures int          `xml:"failures,attr"`
	Errors   int          `xml:"errors,attr"`
	Skipped  int          `xml:"skipped,attr"`
	Time     string       `xml:"time,attr"`
	Suites   []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name       string          `xml:"name,attr"`
	Tests      int             `xml:"tests,attr"`
	Failures   int             `xml:"failures,attr"`
	Errors     int             `xml:"errors,attr"`
	Skipped    int             `xml:"skipped,attr"`
	Time       string          `xml:"time,attr"`
	Timestamp  string          `xml:"timestamp,attr"`
	Properties []junitProperty `xml:"properties>property"`
	Cases      []junitCase     `xml:"testcase"`
}

type junitProperty struct {
	Name  string `xml:"name,attr"`
	Value string `xml:"value,attr"`
}

type junitCase struct {
	Class   string      `xml:"classname,attr"`
	Name    string      `xml:"name,attr"`
	Time    string      `xml:"time,attr"`
	Failure *junitWrong `xml:"failure"`
	Error   *junitWrong `xml:"error"`
	Skipped *junitWrong `xml:"skipped"`
	Err     *junitText  `xml:"system-err"`
}

type junitWrong struct {
	Message string `xml:"message,attr"`
	Type    string `xml:"type,attr,omitempty"`
	Text    string `xml:",cdata"`
}

type junitText struct {
	Text string `xml:",cdata"`
}

// JUnit writes the run as CI systems read it: a test suite for each profile. Unsupported, skipped and
// known-failing cases are <skipped>, the suite's own faults <error>. Where there were several runs, the suites
// of each are named with its seed.
func (r *Report) JUnit(w io.Writer) error {
	doc := junitSuites{Name: "conformance of " + clean(r.Hello.GetName())}
	var took time.Duration
	for _, run := range append(slices.Clip(r.Before), r) {
		suffix := ""
		if len(r.Before) > 0 {
			suffix = fmt.Sprintf(", seed %d", run.Seed)
		}
		doc.Suites = append(doc.Suites, run.junitSuites(suffix)...)
		took += run.Took
	}
	doc.Time = seconds(took)
	for i := range doc.Suites {
		doc.count(&doc.Suites[i])
	}
	enc := xml.NewEncoder(w)
	enc.Indent("", "  ")
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return fmt.Errorf("write the JUnit report: %w", err)
	}
	if err := enc.Encode(doc); err != nil {
		return fmt.Errorf("write the JUnit report: %w", err)
	}
	if _, err := io.WriteString(w, "\n"); err != nil {
		return fmt.Errorf("write the JUnit report: %w", err)
	}
	return nil
}

// junitSuites are the test suites of one run.
func (r *Report) junitSuites(suffix string) (suites []junitSuite) {
	s := r.Summary()
	properties := []junitProperty{
		{"plugin", s.Plugin.Run}, {"version", s.Plugin.Version}, {"sha256", s.Plugin.SHA256},
		{"contract", strconv.Itoa(int(s.Contract))}, {"engine", s.Engine}, {"seed", strconv.FormatUint(s.Seed, 10)},
		{"features", strings.Join(s.Plugin.Features, " ")}, {"verdict", string(s.Verdict)},
	}
	for _, p := range r.profiles() {
		suite := junitSuite{Name: string(p.name) + suffix, Timestamp: s.Date, Properties: properties}
		var took time.Duration
		for _, c := range p.cases {
			took += c.Took
			suite.Cases = append(suite.Cases, r.junitCase(c))
		}
		suite.Time = seconds(took)
		suites = append(suites, suite)
	}
	if len(r.Problems) > 0 {
		suite := junitSuite{Name: "run" + suffix, Timestamp: s.Date, Time: "0.000", Properties: properties}
		for i, p := range r.Problems {
			suite.Cases = append(suite.Cases, junitCase{Class: "run", Name: fmt.Sprintf("problem %d", i+1), Time: "0.000",
				Failure: &junitWrong{Message: p, Type: "problem"}})
		}
		suites = append(suites, suite)
	}
	return suites
}

func (d *junitSuites) count(s *junitSuite) {
	for _, c := range s.Cases {
		s.Tests++
		switch {
		case c.Failure != nil:
			s.Failures++
		case c.Error != nil:
			s.Errors++
		case c.Skipped != nil:
			s.Skipped++
		}
	}
	d.Tests += s.Tests
	d.Failures += s.Failures
	d.Errors += s.Errors
	d.Skipped += s.Skipped
}

func (r *Report) junitCase(c *conformance.Result) junitCase {
	group, _, _ := strings.Cut(c.Case.ID, "/")
	j := junitCase{Class: string(c.Case.Profile) + "." + group, Name: c.Case.ID, Time: seconds(c.Took)}
	switch {
	case c.Outcome == conformance.Errored:
		j.Error = &junitWrong{c.Why(), "suite", xmlText(c.Text(r.Reproduce(c)))}
	case !c.Good():
		kind := c.Case.Rule
		if len(c.Failures) > 0 {
			kind = c.Failures[0].Rule
		}
		j.Failure = &junitWrong{c.Why(), kind, xmlText(c.Text(r.Reproduce(c)))}
	case c.Outcome != conformance.Passed:
		j.Skipped = &junitWrong{Message: c.Label() + ": " + c.Why()}
	}
	if !c.Good() {
		var nodes []string
		for node, text := range c.Stderr {
			if text != "" {
				nodes = append(nodes, node+": "+text)
			}
		}
		if len(nodes) > 0 {
			slices.Sort(nodes)
			j.Err = &junitText{xmlText(strings.Join(nodes, "\n"))}
		}
	}
	return j
}

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 3, 64) }

// xmlText keeps what XML 1.0 can say, which the encoder does for all but CDATA, and no control characters.
func xmlText(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || !unicode.IsControl(r) && r != 0xFFFE && r != 0xFFFF {
			return r
		}
		return '\uFFFD'
	}, s)
}
