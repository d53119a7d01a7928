package conformance

import "fmt"

// Outcome is how a case ended. Outcomes are ordered and only ever raised.
type Outcome uint8

// The lattice, lowest first.
const (
	Unknown     Outcome = iota // not run yet
	Unsupported                // needs a feature that the plugin does not declare, or that this machine lacks
	Skipped                    // left out by whoever started the run
	Passed
	Failed  // the plugin broke the contract
	Errored // the suite itself broke; says nothing about the plugin
)

var outcomeNames = [...]string{"unknown", "unsupported", "skipped", "passed", "failed", "errored"}

func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Raise returns the higher of the two.
func (o Outcome) Raise(to Outcome) Outcome { return max(o, to) }

// MarshalText makes outcomes readable in every report format.
func (o Outcome) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (o *Outcome) UnmarshalText(b []byte) error {
	for i, name := range outcomeNames {
		if name == string(b) {
			*o = Outcome(i)
			return nil
		}
	}
	return fmt.Errorf("unknown outcome %q", b)
}
