package report

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// caseJSON is a line of JSONLines.
type caseJSON struct {
	Type      string                `json:"type"` // "case"
	ID        string                `json:"id"`
	Profile   conformance.Profile   `json:"profile"`
	Rule      string                `json:"rule"`
	Title     string                `json:"title"`
	Outcome   conformance.Outcome   `json:"outcome"`
	Expected  bool                  `json:"known_failing,omitempty"`
	Good      bool                  `json:"good"`
	Ms        float64               `json:"ms"`
	Reason    string                `json:"reason,omitempty"`
	Failures  []conformance.Failure `json:"failures,omitempty"`
	Notes     []string              `json:"notes,omitempty"`
	Reproduce string                `json:"reproduce,omitempty"` // of what is not good
}

// JSONLines writes an object a line: {"type":"run"} with what was run, {"type":"case"} for each case in
// the order in which they ran, {"type":"summary"} with the verdict and the lists; the same again for each run.
func (r *Report) JSONLines(w io.Writer) error {
	for _, b := range r.Before {
		if err := b.jsonLines(w); err != nil {
			return err
		}
	}
	return r.jsonLines(w)
}

// jsonLines writes one run.
func (r *Report) jsonLines(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	s := r.Summary()
	lines := []any{struct {
		Type     string `json:"type"`
		Plugin   Plugin `json:"plugin"`
		Contract uint32 `json:"contract"`
		Engine   string `json:"engine,omitempty"`
		Seed     uint64 `json:"seed"`
		Date     string `json:"date"`
	}{"run", s.Plugin, s.Contract, s.Engine, s.Seed, s.Date}}
	for _, c := range r.Cases {
		j := caseJSON{"case", c.Case.ID, c.Case.Profile, c.Case.Rule, c.Case.Title, c.Outcome, c.Expected, c.Good(),
			ms(c.Took.Microseconds()), c.Reason, c.Failures, c.Notes, ""}
		if !c.Good() {
			j.Reproduce = r.Reproduce(c)
		}
		lines = append(lines, j)
	}
	lines = append(lines, struct {
		Type     string              `json:"type"`
		Verdict  conformance.Verdict `json:"verdict"`
		Took     string              `json:"took"`
		Counts   Counts              `json:"counts"`
		Profiles []Profile           `json:"profiles"`
		Cases    Cases               `json:"cases"`
		Problems []string            `json:"problems,omitempty"`
		Notes    []string            `json:"notes,omitempty"`
	}{"summary", s.Verdict, s.Took, s.Cases.counts(), s.Profiles, s.Cases, s.Problems, s.Notes})
	for _, l := range lines {
		if err := enc.Encode(l); err != nil {
			return fmt.Errorf("write the JSON report: %w", err)
		}
	}
	return nil
}

func ms(us int64) float64 { return float64(us) / 1000 }
