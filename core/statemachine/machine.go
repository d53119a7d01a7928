package statemachine

// Step is the transition function: total over (state, event). It returns the new record; the caller
// carries out what it asks for. An absent record stays absent unless the event is OnOpen.
func Step(r Record, e Event) (Record, Out) {
	var o Out
	r.Step(&e, &o)
	return r, o
}

// Step is the function Step in place. It adds to o, which the caller has emptied.
func (r *Record) Step(e *Event, o *Out) {
	switch e.Kind {
	case OnOpen:
		if r.State != Absent { // a record is opened once
			o.Do |= DoDrop
			break
		}
		*r = Record{Role: e.Role, Own: e.Own, Att: e.Att, Admitted: e.Admitted}
		switch {
		case e.Marked:
			r.Admitted = true
			r.State, r.Reason, r.ByPeer = Ended, PeerAborted, true
		case r.Role == Destination:
			r.State = Opened
		default:
			r.State = Unbound
			r.offer(e.D, o)
		}
	case OnAdmit:
		if r.State.Live() && !r.Admitted {
			r.Admitted = true
			switch r.State {
			case Unbound:
				r.offer(e.D, o)
			case Opened:
				if r.Armed { // the pages were registered while it waited
					r.register(o)
				}
			}
		} else {
			o.Do |= DoDrop
		}
	default:
		if r.Role == Source {
			r.source(e, o)
		} else {
			r.destination(e, o)
		}
	}
}

// offer binds an admitted unbound source to the destination d of its attempt.
func (r *Record) offer(d Opener, o *Out) {
	if d.IsZero() || !r.Admitted {
		return
	}
	r.State, r.Pair = Offered, d
	o.Do |= DoDropPlaceholder
	o.send(Send{Kind: FrameBound, S: r.Own, D: d, Att: r.Att})
}

func (r *Record) register(o *Out) {
	r.State, r.Pages = Registered, Armed
	o.send(Send{Kind: FrameRegister, D: r.Own, Att: r.Att})
}

func (r *Record) drained() bool { return r.State == Ended && r.Ops.QuietRemote() }

// endSource is endS of docs/protocol.md. A local cause is announced; the end caused by the counterpart is
// only answered.
func (r *Record) endSource(why Reason, local bool, o *Out) {
	r.State, r.Reason, r.ByPeer = Ended, why, !local
	o.Do |= DoCancel
	if local {
		o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: why})
	}
	r.answerEnd(!local, o)
}

// answerEnd tells D what it waits for: Drained once it is true, else that s has ended.
func (r *Record) answerEnd(abort bool, o *Out) {
	switch {
	case r.Pair.IsZero():
	case r.drained():
		r.DrainedSent = true
		o.send(Send{Kind: FrameDrained, S: r.Own, D: r.Pair})
	case abort:
		o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: r.Reason})
	}
}

// cause is the reason under which the counterpart's end is recorded here: its own, except that its
// worker's abort is the peer's, and what only its own side can mean, or what this version does not
// know, is not repeated.
func cause(r Reason) Reason {
	switch r {
	case None, Success, Aborted, OutcomeUnknown, EngineLost:
		return PeerAborted
	}
	if r >= NumReasons {
		return PeerAborted
	}
	return r
}

// source is every row of docs/protocol.md at P.
func (r *Record) source(e *Event, o *Out) {
	switch e.Kind {
	case OnSend:
		if r.State.Live() && r.State != Committed {
			r.Armed = true
		}
	case OnSubmit:
		if r.State == Confirmed {
			r.Started = true
		}
	case OnOps:
		r.opsMoved(o)
	case OnComplete:
		if r.State == Confirmed {
			r.State, r.Started, r.RankQuiet = Committed, true, r.Ops.QuietRemote()
			o.send(Send{Kind: FrameRankEnd, S: r.Own, D: r.Pair, Quiet: r.RankQuiet})
		}
	case OnOpFailed:
		if r.State == Confirmed {
			r.endSource(e.Reason, true, o)
		} else {
			r.opsMoved(o)
		}
	case OnPluginLost:
		// A Done with quiet=no whose writer died is never drained; RankEnd says quiet=no.
		if r.State == Confirmed && e.Reason != None {
			r.endSource(e.Reason, true, o)
		} else {
			r.opsMoved(o)
		}
	case OnAbort:
		switch r.State {
		case Unbound, Offered, Confirmed:
			r.endSource(Aborted, true, o)
		case Committed: // past the point of no return: a request to the judge
			o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: Aborted})
		default:
			o.Do |= DoDrop
		}
	case OnClock:
		switch r.State {
		case Unbound, Offered, Confirmed:
			r.endSource(e.Reason, true, o)
		case Committed:
			if e.Reason == Deadline { // as an abort: a request to the judge
				o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: Deadline})
			} else {
				r.unknown(o)
			}
		default:
			o.Do |= DoDrop
		}
	case OnWorkerLost:
		switch r.State {
		case Unbound, Offered, Confirmed:
			r.endSource(WorkerLost, true, o)
		}
	case OnPeerDead, OnHelloNewer:
		switch r.State {
		case Offered, Confirmed:
			// Nothing is announced: the old incarnation cannot hear, and one that comes back the same
			// asks by Resync.
			r.State, r.Reason = Ended, PeerLost
			o.Do |= DoCancel
		case Committed:
			r.unknown(o)
		}
	case OnFrame:
		r.sourceFrame(e, o)
	default:
		o.Do |= DoDrop
	}
}

// unknown ends a committed source whose verdict cannot be had.
func (r *Record) unknown(o *Out) {
	r.State, r.Reason = Ended, OutcomeUnknown
	if !r.RankQuiet {
		r.answerEnd(false, o)
	}
}

// opsMoved announces that an ended source is drained, once.
func (r *Record) opsMoved(o *Out) {
	if !r.drained() || r.DrainedSent || r.Pair.IsZero() {
		return
	}
	if (r.Reason == Success || r.Reason == OutcomeUnknown) && r.RankQuiet {
		return // RankEnd already said so
	}
	r.DrainedSent = true
	o.send(Send{Kind: FrameDrained, S: r.Own, D: r.Pair})
}

func (r *Record) sourceFrame(e *Event, o *Out) {
	placeholder := func() { o.Do |= DoPlaceholder }
	switch e.Frame {
	case FrameQueued:
		if r.State != Unbound && r.State != Offered {
			o.Do |= DoDrop
		}
	case FrameRegister:
		if e.D.IsZero() {
			o.Do |= DoDrop
			return
		}
		switch r.State {
		case Absent:
			placeholder()
		case Unbound:
			if e.Att == r.Att && r.Admitted {
				r.offer(e.D, o)
			} else {
				placeholder()
			}
		case Offered, Confirmed:
			if e.D == r.Pair {
				o.send(Send{Kind: FrameBound, S: r.Own, D: r.Pair, Att: r.Att})
			} else {
				r.endSource(PeerSuperseded, false, o)
				placeholder()
			}
		case Committed:
			if e.D == r.Pair {
				o.send(Send{Kind: FrameBound, S: r.Own, D: r.Pair, Att: r.Att})
			} else {
				placeholder()
			}
		case Ended:
			switch {
			case e.D == r.Pair:
				o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: r.Reason})
				r.answerEnd(false, o)
			case r.Pair.IsZero() && e.Att == r.Att:
				r.Pair = e.D
				o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: r.Reason})
			default:
				placeholder()
			}
		}
	case FrameConfirm:
		switch r.State {
		case Offered:
			if e.D == r.Pair {
				r.State = Confirmed
				o.Do |= DoSubmit
			} else {
				o.Do |= DoDrop
			}
		case Confirmed, Committed: // repeated by Resync
			if e.D != r.Pair {
				o.Do |= DoDrop
			}
		case Ended:
			if e.D != r.Pair {
				o.Do |= DoDrop
				break
			}
			o.send(Send{Kind: FrameAbort, S: r.Own, D: r.Pair, Att: r.Att, Reason: r.Reason})
			r.answerEnd(false, o)
		case Absent:
			o.send(Send{Kind: FrameAbort, S: e.S, D: e.D, Reason: StaleRoom})
			if e.OwnInc && !e.Unproven {
				o.send(Send{Kind: FrameDrained, S: e.S, D: e.D})
			}
		default:
			o.Do |= DoDrop
		}
	case FrameVerdict:
		o.Do |= DoDropPlaceholder
		r.verdict(e, o)
	case FrameAbort: // Abort(d), D unbound
		o.Do |= DoDropPlaceholder
		switch {
		case r.State == Ended && e.D == r.Pair:
			o.Do |= DoDrop
		case r.State == Ended && r.Pair.IsZero() && e.Att == r.Att:
			r.Pair = e.D
		case r.State == Absent, r.State == Ended, e.Att != r.Att: // of an attempt that is not open here
			o.Do |= DoMark
		case r.State == Unbound:
			r.Pair = e.D
			r.endSource(cause(e.Reason), false, o)
		case r.State == Offered && e.D == r.Pair:
			r.endSource(cause(e.Reason), false, o)
		default:
			o.Do |= DoDrop
		}
	default:
		o.Do |= DoDrop
	}
}

// verdict is the three Verdict rows at P.
func (r *Record) verdict(e *Event, o *Out) {
	if r.State == Absent {
		// A record is evicted only when no op of it is unquiet, so an absent one is drained, if it was
		// of this incarnation. An older incarnation is never answered: its orphans may still write.
		switch {
		case !e.OwnInc:
			o.Do |= DoDrop
		case e.Unproven:
			o.send(Send{Kind: FrameAbort, S: e.S, D: e.D, Reason: StaleRoom})
		default:
			o.send(Send{Kind: FrameDrained, S: e.S, D: e.D})
		}
		return
	}
	if e.D != r.Pair {
		o.Do |= DoDrop
		return
	}
	switch {
	case r.State == Ended: // Resync repeats the verdict, Success too, while d waits for Drained
		r.answerEnd(true, o)
	case r.State == Committed && e.Outcome == JudgeSuccess:
		r.State, r.Reason = Ended, Success
		if !r.RankQuiet {
			r.answerEnd(false, o)
		}
	case r.State == Committed && e.Outcome == JudgeUnknown:
		r.unknown(o)
	case (r.State == Offered || r.State == Confirmed) && e.Outcome == JudgeUnknown:
		r.endSource(PeerLost, false, o)
	case (r.State == Offered || r.State == Confirmed || r.State == Committed) && e.Outcome == JudgeFailed:
		r.endSource(cause(e.Reason), false, o)
	default:
		o.Do |= DoDrop
	}
}

// endDestination is endD of docs/protocol.md.
func (r *Record) endDestination(why Reason, local bool, o *Out) {
	bound := r.State == Bound
	r.State, r.Reason, r.ByPeer = Ended, why, !local
	switch {
	case !r.Armed:
	case bound:
		r.Pages, r.Rung = Quiescing, Drain
		o.Do |= DoRevoke
	default: // no Confirm was sent
		r.Pages = Quiet
		o.Do |= DoRevoke
	}
	switch {
	case !local:
	case bound:
		o.send(Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: why, S: r.Pair, D: r.Own})
	default:
		o.send(Send{Kind: FrameAbort, D: r.Own, Att: r.Att, Reason: why})
	}
}

// quiet takes the pages off the ladder.
func (r *Record) quiet(to Residency) {
	r.Pages, r.Rung = to, NoRung
}

// own is the verdict that an ended destination repeats to s: its own for its pair, else Failed.
func (r *Record) own(s Opener) Send {
	v := Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: r.Reason, S: s, D: r.Own}
	if s != r.Pair {
		v.Reason = StaleRoom
	} else if r.Reason == Success {
		v.Outcome = JudgeSuccess
	}
	return v
}

// Repeat is the verdict that Resync re-sends for an ended destination whose pages are not quiet.
func (r *Record) Repeat() Send { return r.own(r.Pair) }

// destination is every row of docs/protocol.md at D.
func (r *Record) destination(e *Event, o *Out) {
	end := func(why Reason) {
		if r.State.Live() {
			r.endDestination(why, true, o)
		} else {
			o.Do |= DoDrop
		}
	}
	switch e.Kind {
	case OnPages:
		if r.State == Opened && !r.Armed {
			r.Armed = true
			if e.Admitted && r.Admitted {
				r.register(o)
			} else {
				r.Admitted = false
			}
		} else {
			o.Do |= DoDrop
		}
	case OnAbort:
		end(Aborted)
	case OnClock, OnPluginLost:
		end(e.Reason)
	case OnWorkerLost:
		if r.State.Live() {
			end(WorkerLost)
		}
	case OnPeerDead, OnHelloNewer:
		switch r.State {
		case Bound:
			r.endDestination(PeerLost, false, o)
			r.ByPeer = false
			r.SourceEnded = e.Kind == OnHelloNewer
		case Ended:
			if e.Kind == OnHelloNewer {
				r.sourceEnded(o)
			} else {
				r.askFence(o)
			}
		}
	case OnDrainClock:
		if r.State != Ended {
			break
		}
		switch r.Rung {
		case Drain:
			r.Rung = Fence
			r.askFence(o)
		case Fence:
			r.Rung, r.Pages = Quarantine, Quarantined
		}
	case OnFenced:
		switch {
		case r.State != Ended || r.Rung == NoRung:
		case e.Quiet && r.SourceEnded:
			r.quiet(Quiet)
		case r.Rung == Fence:
			r.Rung, r.Pages = Quarantine, Quarantined
		}
	case OnRevoked:
		if r.State == Ended && r.Rung != NoRung && e.Quiet {
			r.quiet(Quiet)
		}
	case OnPluginFenced:
		if r.State == Ended && r.Rung != NoRung {
			r.quiet(Fenced)
		}
	case OnFrame:
		r.destinationFrame(e, o)
	default:
		o.Do |= DoDrop
	}
}

// askFence asks for rung 3 once it can be a proof: the source engine said "ended".
func (r *Record) askFence(o *Out) {
	if r.Rung == Fence && r.SourceEnded {
		o.Do |= DoFence
	}
}

// sourceEnded notes that s submits nothing any more. Pages that came to rest in quarantine because nobody could
// say so have their fence asked now, once.
func (r *Record) sourceEnded(o *Out) {
	if r.Rung == Quarantine && !r.SourceEnded {
		o.Do |= DoFence
	}
	r.SourceEnded = true
	r.askFence(o)
}

func (r *Record) destinationFrame(e *Event, o *Out) {
	if e.S.IsZero() && e.Frame != FrameAbort {
		o.Do |= DoDrop
		return
	}
	switch e.Frame {
	case FrameBound:
		switch r.State {
		case Registered:
			r.State, r.Pair = Bound, e.S
			o.send(Send{Kind: FrameConfirm, S: e.S, D: r.Own})
		case Bound:
			if e.S == r.Pair {
				o.send(Send{Kind: FrameConfirm, S: e.S, D: r.Own})
			} else {
				r.endDestination(PeerSuperseded, false, o)
				o.send(Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: PeerSuperseded, S: e.S, D: r.Own})
			}
		case Ended:
			o.send(r.own(e.S))
		case Absent:
			o.send(Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: StaleRoom, S: e.S, D: e.D})
		default:
			o.Do |= DoDrop
		}
	case FrameProgress:
		if r.State == Bound && e.S == r.Pair {
			r.Started = true
		} else {
			o.Do |= DoDrop
		}
	case FrameRankEnd:
		switch r.State {
		case Registered:
			o.send(Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: StaleRoom, S: e.S, D: r.Own})
		case Bound:
			switch {
			case e.S != r.Pair:
				o.send(Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: StaleRoom, S: e.S, D: r.Own})
			case !e.Complete:
				r.endDestination(LengthMismatch, true, o)
			default:
				r.State, r.Reason, r.Started = Ended, Success, true
				if e.Quiet || !r.Armed {
					r.quiet(Quiet)
				} else {
					r.Pages, r.Rung = Quiescing, Drain
				}
				o.Do |= DoRevoke
				o.send(r.own(e.S))
			}
		case Ended:
			o.send(r.own(e.S))
		case Absent:
			o.send(Send{Kind: FrameVerdict, Outcome: JudgeUnknown, S: e.S, D: e.D})
		default:
			o.Do |= DoDrop
		}
	case FrameAbort:
		r.aborted(e, o)
	case FrameDrained:
		switch {
		case r.State == Bound && e.S == r.Pair:
			r.endDestination(PeerAborted, false, o)
			r.SourceEnded = true
			r.quiet(Quiet)
		case r.State == Ended && e.S == r.Pair && r.Rung != NoRung:
			r.SourceEnded = true
			r.quiet(Quiet)
		default:
			o.Do |= DoDrop
		}
	default:
		o.Do |= DoDrop
	}
}

// aborted is the three Abort rows at D: (s,d), (s,0) and (0,d).
func (r *Record) aborted(e *Event, o *Out) {
	switch {
	case !e.S.IsZero() && !e.D.IsZero():
		switch {
		case r.State == Registered:
			r.endDestination(cause(e.Reason), false, o)
		case r.State == Bound && e.S == r.Pair:
			r.endDestination(cause(e.Reason), false, o)
			r.SourceEnded = true
		case r.State == Ended && e.S == r.Pair:
			r.sourceEnded(o)
		default:
			o.Do |= DoDrop
		}
	case !e.S.IsZero():
		switch {
		case (r.State == Opened || r.State == Registered) && e.Att == r.Att:
			r.endDestination(cause(e.Reason), false, o)
		case (r.State == Bound || r.State == Ended) && e.Att == r.Att:
			o.Do |= DoDrop
		default:
			o.Do |= DoMark
		}
	default:
		if r.State == Registered {
			r.endDestination(StaleRoom, false, o)
		} else {
			o.Do |= DoDrop
		}
	}
}
