// Package statemachine holds the states of the room protocol, the KVPoll word and the residency of
// pages, and one total transition function over (state, event). It imports only the standard library,
// does no I/O and knows no clock.
package statemachine

// KVPoll is the status that a worker polls: the field's values and order (SGLang's
// disaggregation/base/conn.py). Failed is the lowest so that the minimum over ranks is Failed if any
// rank is.
type KVPoll uint8

// The five statuses. Failed and Success are terminal and sticky (R2).
const (
	Failed          KVPoll = 0
	Bootstrapping   KVPoll = 1
	WaitingForInput KVPoll = 2
	Transferring    KVPoll = 3
	Succeeded       KVPoll = 4
)

var pollNames = [...]string{"Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"}

// String returns the field's name of the status.
func (p KVPoll) String() string {
	if int(p) < len(pollNames) {
		return pollNames[p]
	}
	return "invalid"
}

// Terminal reports whether the status can never change again.
func (p KVPoll) Terminal() bool { return p == Failed || p == Succeeded }

// Residency says who may still touch a room's pages. Values are those of the worker's status word.
type Residency uint8

// The residencies. Pages may be reused only at Quiet, Fenced or NoPages (R4).
const (
	NoPages     Residency = 0 // the room holds no pages
	Armed       Residency = 1 // pages may be read or written by the backend
	Quiescing   Residency = 2 // the room ended; proof that nothing can land is awaited (rungs 1 to 3)
	Quarantined Residency = 3 // no proof could be had yet; the pages rest (rung 4)
	Quiet       Residency = 4 // no access can land any more
	Fenced      Residency = 5 // the means of access are provably gone
	Released    Residency = 6 // the worker took the pages back
)

var residencyNames = [...]string{"none", "armed", "quiescing", "quarantined", "quiet", "fenced", "released"}

// String returns the residency's public name.
func (r Residency) String() string {
	if int(r) < len(residencyNames) {
		return residencyNames[r]
	}
	return "invalid"
}

// Reusable reports whether the worker may use the pages for something else.
func (r Residency) Reusable() bool {
	return r == NoPages || r == Quiet || r == Fenced || r == Released
}

// Role is the side of a room.
type Role uint8

// The roles; the zero Role is invalid.
const (
	Source      Role = 1 // prefill
	Destination Role = 2 // decode
)

// String returns "source" or "destination".
func (r Role) String() string {
	switch r {
	case Source:
		return "source"
	case Destination:
		return "destination"
	}
	return "invalid"
}

// Opener names one open of a room at one engine: the engine's incarnation and a sequence number. It
// is never reused. The zero Opener is "none".
type Opener struct {
	Inc, Seq uint64
}

// IsZero reports whether o names nobody.
func (o Opener) IsZero() bool { return o == Opener{} }
