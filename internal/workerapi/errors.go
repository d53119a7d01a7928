package workerapi

import (
	"errors"
	"fmt"
)

// Code classifies an error answer; the set is public and only grows.
type Code string

// The error codes.
const (
	BadFrame    Code = "bad_frame"    // the bytes cannot be parsed; the connection is closed
	BadField    Code = "bad_field"    // a header field or the payload has a wrong value
	BadState    Code = "bad_state"    // right request, wrong moment or wrong role
	BadMemory   Code = "bad_memory"   // a region is not what the rules ask for
	BadFD       Code = "bad_fd"       // wrong number or kind of descriptors
	NotReusable Code = "not_reusable" // release: somebody may still touch the pages
	Refused     Code = "refused"      // the engine said no; the message says why
	Limit       Code = "limit"        // more than a configured limit
	NoBackend   Code = "no_backend"   // no transfer backend is up
	Draining    Code = "draining"     // the engine admits nothing new
)

var codes = [...]Code{BadFrame, BadField, BadState, BadMemory, BadFD, NotReusable, Refused, Limit, NoBackend, Draining}

// Rules of docs/worker-api.md that an error can name. R1 to R12 are those of the contract.
const (
	RuleFrame   = "W1" // framing and JSON
	RuleOrder   = "W2" // hello first and once; seq grows
	RuleFields  = "W3" // required fields, their types and ranges
	RuleFDs     = "W4" // descriptors: number, kind, place
	RuleMemory  = "W5" // sealed, re-opened memfd of the stated size
	RulePools   = "W6" // pools in order, tensors inside regions
	RulePages   = "W7" // page ids inside the pool, as many as the header says
	RuleSlot    = "W8" // a slot is touched only by the session that opened it
	RuleRole    = "W9" // register is for destinations, send for sources
	RuleLimits  = "W10"
	RuleAnswers = "W11" // a worker reads its answers
	RuleAccess  = "W12" // who may connect
)

// Error is an error answer: what was wrong (Code, Field), which rule says so, and a sentence with the
// fix. A Node may return one to choose the code.
type Error struct {
	Code    Code
	Field   string
	Rule    string
	Message string
}

// Error returns "code (field, rule): message".
func (e *Error) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%s (%s): %s", e.Code, e.Rule, e.Message)
	}
	return fmt.Sprintf("%s (%s, %s): %s", e.Code, e.Field, e.Rule, e.Message)
}

// asError makes any error an answer.
func asError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: Refused, Message: err.Error()}
}

func bad(code Code, field, rule, format string, args ...any) *Error {
	return &Error{Code: code, Field: field, Rule: rule, Message: fmt.Sprintf(format, args...)}
}
