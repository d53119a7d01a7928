package core

import (
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// Stage is what a record spends its time in, for metrics. A record passes the stages in their order; those that
// it passes within one step it was not in.
type Stage uint8

// Stages of a record.
const (
	NoStage        Stage = iota // ended, and its pages are reusable
	StageQueued                 // accepted, not admitted
	StageBootstrap              // admitted, not bound: the destination until its worker registered and a source was found
	StageInput                  // bound, nothing submitted (source) or reported (destination)
	StageTransfer               // until everything is sent (source) or ended (destination)
	StageVerdict                // everything is sent, and the judge has not answered
	StageDrain                  // ended, and its pages may still be touched
	NumStages
)

var stageNames = [NumStages]string{"none", "queued", "bootstrap", "input", "transfer", "verdict", "drain"}

func (s Stage) String() string {
	if s < NumStages {
		return stageNames[s]
	}
	return "invalid"
}

// StageEffect is a stage that a record has left.
type StageEffect struct {
	Role  statemachine.Role
	Stage Stage
	Took  time.Duration
}

func (m *Machine) stageOf(r *room) Stage {
	switch s := &r.sm; s.State {
	case statemachine.Ended:
		if s.Role == statemachine.Source && m.opsOf(r).QuietLocal() || s.Role == statemachine.Destination && s.Pages.Reusable() {
			return NoStage
		}
		return StageDrain
	case statemachine.Unbound, statemachine.Offered, statemachine.Opened, statemachine.Registered:
		if !s.Admitted {
			return StageQueued
		}
		return StageBootstrap
	case statemachine.Confirmed, statemachine.Bound:
		if !s.Started {
			return StageInput
		}
		return StageTransfer
	}
	return StageVerdict
}

// stage notes the stage of a record after a change, and tells of the one that it left.
func (m *Machine) stage(r *room) {
	now := m.stageOf(r)
	if now == r.stage {
		return
	}
	if r.stage != NoStage {
		m.out.Stages = append(m.out.Stages, StageEffect{r.sm.Role, r.stage, time.Duration(m.now - r.staged)})
	}
	r.stage, r.staged = now, m.now
}
