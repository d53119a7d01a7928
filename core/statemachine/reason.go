package statemachine

// Reason says why a room ended. The set is closed: names, numbers and sentences are public (errors,
// metrics, JSON); new ones are appended, none is renumbered.
type Reason uint8

// The reasons. None belongs to a room that has not ended.
const (
	None Reason = iota
	Success
	Aborted
	PeerAborted
	QueueTimeout
	BootstrapTimeout
	PeerQueueTimeout
	RegisterTimeout
	InputTimeout
	Stalled
	TransferTimeout
	Deadline
	OutcomeUnknown
	PeerLost
	PeerSuperseded
	WorkerLost
	PluginLost
	EngineLost
	StaleRoom
	LengthMismatch
	Skipped
	TransferFailed
	LostByPlugin
	NoTerminal
	Protocol
	LayoutMismatch
	BackendDown
	LimitExceeded
	Draining
	NumReasons // not a reason
)

var reasons = [NumReasons]struct{ name, doc string }{
	None:             {"none", "The room has not ended."},
	Success:          {"success", "Every byte of this generation is in the destination's pages and the judge said so."},
	Aborted:          {"aborted", "The worker on this side aborted the room."},
	PeerAborted:      {"peer_aborted", "The other side ended the room first; its own reason is in its engine's record."},
	QueueTimeout:     {"queue_timeout", "The room waited for admission at this engine longer than the queue clock."},
	BootstrapTimeout: {"bootstrap_timeout", "No counterpart bound to the room within the bootstrap clock."},
	PeerQueueTimeout: {"peer_queue_timeout", "The counterpart said that it was waiting for memory for longer than the peer_queued clock."},
	RegisterTimeout:  {"register_timeout", "The destination worker opened the room but registered no pages within the register clock."},
	InputTimeout:     {"input_timeout", "The room was bound but the source submitted nothing within the input clock."},
	Stalled:          {"stalled", "Operations were outstanding and no byte moved within the stall clock."},
	TransferTimeout:  {"transfer_timeout", "The transfer did not finish within the length that the judge fixed at bind."},
	Deadline:         {"deadline", "The deadline that the worker asked for at open has passed."},
	OutcomeUnknown:   {"outcome_unknown", "This side did all its work and the judge's verdict could not be had; the destination may have succeeded."},
	PeerLost:         {"peer_lost", "The counterpart's engine is gone: dead beyond the peer clock, or restarted with a new incarnation."},
	PeerSuperseded:   {"peer_superseded", "The counterpart opened the room anew while this attempt was bound to its older opener."},
	WorkerLost:       {"worker_lost", "The worker process that opened the room is gone."},
	PluginLost:       {"plugin_lost", "The plugin process that held the room's operations or pages is gone."},
	EngineLost:       {"engine_lost", "The engine is gone; latched by the client library, never by an engine."},
	StaleRoom:        {"stale_room", "The counterpart no longer knows this opener; open the room again with a new attempt."},
	LengthMismatch:   {"length_mismatch", "The pages that the source says it wrote are not the pages that the destination registered."},
	Skipped:          {"skipped", "The plugin skipped an operation of the room; a skip never completes a part."},
	TransferFailed:   {"transfer_failed", "The plugin reported that an operation of the room failed."},
	LostByPlugin:     {"lost_by_plugin", "The plugin does not list an operation that it was given and never ended."},
	NoTerminal:       {"no_terminal", "The plugin's code returned from an operation without ending it."},
	Protocol:         {"protocol", "A message that broke the protocol was traced to this room."},
	LayoutMismatch:   {"layout_mismatch", "The two groups' cache layouts cannot be mapped onto each other."},
	BackendDown:      {"backend_down", "No transfer backend that both engines have is up."},
	LimitExceeded:    {"limit_exceeded", "The room needs more than a configured limit allows at all."},
	Draining:         {"draining", "The engine is draining and ended what was left at the drain deadline."},
}

// String returns the reason's public name, e.g. "peer_lost".
func (r Reason) String() string {
	if r < NumReasons {
		return reasons[r].name
	}
	return "invalid_reason"
}

// Doc returns one sentence that explains the reason to an operator.
func (r Reason) Doc() string {
	if r < NumReasons {
		return reasons[r].doc
	}
	return ""
}

// ParseReason is the inverse of String; ok is false for an unknown name.
func ParseReason(name string) (r Reason, ok bool) {
	for i := range reasons {
		if reasons[i].name == name {
			return Reason(i), true
		}
	}
	return None, false
}
