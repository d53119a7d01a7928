package statemachine

// Step is the transition function: total over (record, pairs, which pair, event). It changes the record and
// its pairs in place and adds to o, which the caller has emptied, what it asks the caller to do. at is the
// pair that the event is about, for the events that are about one. An absent record stays absent unless
// the event is OnOpen; of a frame for one, the caller gives a single empty pair that says whose it is.
func (r *Record) Step(pairs []*Pair, at int, e *Event, o *Out) {
	lost := e.Kind == OnPeerDead || e.Kind == OnHelloNewer
	t := turn{r, pairs, at, lost, o}
	inside := at >= 0 && at < len(pairs)
	switch e.Kind {
	case OnOpen:
		if r.State != Absent { // a record is opened once
			o.Do |= DoDrop
			return
		}
		*r = Record{Role: e.Role, Own: e.Own, Att: e.Att, Admitted: e.Admitted}
		switch {
		case e.Marked:
			t.openEnded()
		case r.Role == Destination:
			r.State = Opened
		default:
			r.State = Unbound
			if inside {
				t.offer(e.D)
			}
		}
	case OnAdmit:
		if !r.State.Live() || r.Admitted {
			o.Do |= DoDrop
			return
		}
		r.Admitted = true
		switch r.State {
		case Unbound:
			if inside {
				t.offer(e.D)
			}
		case Opened:
			if r.Armed { // the pages were registered while it waited
				t.register()
			}
		}
	case OnHeld, OnSubmit, OnOpFailed, OnPeerDead, OnHelloNewer, OnFenced, OnFrame:
		if !inside {
			o.Do |= DoDrop
			return
		}
		t.role(e)
	default:
		t.role(e)
	}
}

// turn is one call of Step.
type turn struct {
	*Record
	pairs []*Pair
	at    int
	lost  bool // the engine of the pair, or its older incarnation, is: it hears nothing
	o     *Out
}

// here is the cause of an end that lies on this side.
const here = -1

func (t *turn) role(e *Event) {
	if t.Role == Source {
		t.source(e)
	} else {
		t.destination(e)
	}
}

func (t *turn) drop() { t.o.Do |= DoDrop }

// send asks for a frame to the engine of a pair.
func (t *turn) send(at int, s Send) {
	s.At = at
	t.o.Sends = append(t.o.Sends, s)
}

// Column is the state of a pair: its column in the tables of docs/protocol.md. Once no pair is behind, all
// are in that of the record.
func (r *Record) Column(p *Pair) State {
	switch r.State {
	case Unbound, Offered:
		switch {
		case p.Confirmed:
			return Confirmed
		case p.Other.IsZero():
			return Unbound
		}
		return Offered
	case Registered:
		if p.Other.IsZero() {
			return Registered
		}
		return Bound
	}
	return r.State
}

func (t *turn) column(at int) State { return t.Column(t.pairs[at]) }

// behind makes the state of the record that of its pair that is behind.
func (t *turn) behind() {
	least := Confirmed
	if t.Role == Destination {
		least = Bound
	}
	for i, p := range t.pairs {
		if !p.Sibling {
			least = min(least, t.column(i))
		}
	}
	t.State = least
}

// openEnded is the open of an attempt that another engine has ended already. Those that have not been told
// by it are told.
func (t *turn) openEnded() {
	t.Admitted = true
	t.State, t.Reason, t.ByPeer = Ended, PeerAborted, true
	for i, p := range t.pairs {
		switch {
		case i == t.at || p.Told:
		case p.Sibling:
			t.send(i, Send{Kind: FrameGroupAbort, Att: t.Att, Reason: PeerAborted})
		case t.Role == Source:
			t.send(i, Send{Kind: FrameAbort, S: t.Own, Att: t.Att, Reason: PeerAborted})
		default:
			t.send(i, Send{Kind: FrameAbort, D: t.Own, Att: t.Att, Reason: PeerAborted})
		}
	}
}

// offer binds a pair of an admitted source to the destination d of its attempt.
func (t *turn) offer(d Opener) {
	if d.IsZero() || !t.Admitted {
		return
	}
	t.pairs[t.at].Other = d
	t.behind()
	t.o.Do |= DoDropPlaceholder
	t.send(t.at, Send{Kind: FrameBound, S: t.Own, D: d, Att: t.Att})
}

// register announces a destination's pages to every source engine.
func (t *turn) register() {
	t.State, t.Pages = Registered, Armed
	for i, p := range t.pairs {
		if !p.Sibling {
			t.send(i, Send{Kind: FrameRegister, D: t.Own, Att: t.Att})
		}
	}
}

// drained reports whether nothing of an ended source can land at the destination of a pair.
func (t *turn) drained(p *Pair) bool { return t.State == Ended && p.Ops.QuietRemote() }

// endSource is endS of docs/protocol.md. cause is the pair whose engine is the cause, or here. The cause is
// only answered, all others are told.
func (t *turn) endSource(why Reason, cause int) {
	t.State, t.Reason, t.ByPeer = Ended, why, cause != here && !t.lost
	t.o.Do |= DoCancel
	for i, p := range t.pairs {
		if i == cause && t.lost {
			continue // one that comes back the same asks by Resync
		}
		if i != cause {
			t.send(i, Send{Kind: FrameAbort, S: t.Own, D: p.Other, Att: t.Att, Reason: why})
		}
		t.answerEnd(i, i == cause)
	}
}

// answerEnd tells a destination what it waits for: Drained once it is true, else that s has ended.
func (t *turn) answerEnd(at int, abort bool) {
	p := t.pairs[at]
	switch {
	case p.Other.IsZero():
	case t.drained(p):
		p.DrainedSent = true
		t.send(at, Send{Kind: FrameDrained, S: t.Own, D: p.Other})
	case abort:
		t.abort(at)
	}
}

// abort tells a destination that s has ended.
func (t *turn) abort(at int) {
	t.send(at, Send{Kind: FrameAbort, S: t.Own, D: t.pairs[at].Other, Att: t.Att, Reason: t.Reason})
}

// cause is the reason under which another engine's end is recorded here: its own, except that its
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
func (t *turn) source(e *Event) {
	switch e.Kind {
	case OnHeld:
		switch {
		case e.D.IsZero() || !t.pairs[t.at].Other.IsZero():
			t.drop()
		case t.column(t.at) == Unbound && t.Admitted:
			t.offer(e.D)
		case t.State == Ended:
			t.pairs[t.at].Other = e.D
			t.abort(t.at)
		default:
			t.drop()
		}
	case OnSend:
		if t.State.Live() && t.State != Committed {
			t.Armed = true
		}
	case OnSubmit:
		if t.column(t.at) == Confirmed {
			t.Started = true
		}
	case OnOps:
		t.opsMoved()
	case OnComplete:
		if t.State == Confirmed {
			t.State, t.Started = Committed, true
			for i, p := range t.pairs {
				p.RankQuiet = p.Ops.QuietRemote()
				t.send(i, Send{Kind: FrameRankEnd, S: t.Own, D: p.Other, Quiet: p.RankQuiet})
			}
		}
	case OnOpFailed:
		if t.column(t.at) == Confirmed {
			t.endSource(e.Reason, here)
		} else {
			t.opsMoved()
		}
	case OnPluginLost:
		// A Done with quiet=no whose writer died is never drained; RankEnd says quiet=no.
		if t.at >= 0 && t.at < len(t.pairs) && t.column(t.at) == Confirmed && e.Reason != None {
			t.endSource(e.Reason, here)
		} else {
			t.opsMoved()
		}
	case OnAbort:
		switch t.State {
		case Unbound, Offered, Confirmed:
			t.endSource(Aborted, here)
		case Committed: // past the point of no return
			t.request(Aborted)
		default:
			t.drop()
		}
	case OnClock:
		switch t.State {
		case Unbound, Offered, Confirmed:
			t.endSource(e.Reason, here)
		case Committed:
			if e.Reason == Deadline { // as an abort
				t.request(Deadline)
			} else {
				t.unknown()
			}
		default:
			t.drop()
		}
	case OnWorkerLost:
		switch t.State {
		case Unbound, Offered, Confirmed:
			t.endSource(WorkerLost, here)
		}
	case OnPeerDead, OnHelloNewer:
		switch t.column(t.at) {
		case Offered, Confirmed:
			t.endSource(PeerLost, t.at)
		case Committed: // of another destination than the judge's it decides nothing
			if t.pairs[t.at].Judge {
				t.unknown()
			}
		}
	case OnFrame:
		t.sourceFrame(e)
	default:
		t.drop()
	}
}

// request asks the judge to end a room that this side cannot end any more.
func (t *turn) request(why Reason) {
	for i, p := range t.pairs {
		if p.Judge {
			t.send(i, Send{Kind: FrameAbort, S: t.Own, D: p.Other, Att: t.Att, Reason: why})
		}
	}
}

// unknown ends a committed source whose verdict cannot be had.
func (t *turn) unknown() { t.endCommitted(OutcomeUnknown) }

// endCommitted ends a committed source in a way that does not deny success. RankEnd has said already
// which pairs are drained.
func (t *turn) endCommitted(why Reason) {
	t.State, t.Reason = Ended, why
	for i, p := range t.pairs {
		if !p.RankQuiet {
			t.answerEnd(i, false)
		}
	}
}

// opsMoved announces where an ended source is drained, once.
func (t *turn) opsMoved() {
	for i, p := range t.pairs {
		if p.DrainedSent {
			continue
		}
		if (t.Reason == Success || t.Reason == OutcomeUnknown) && p.RankQuiet {
			continue // RankEnd already said so
		}
		t.answerEnd(i, false)
	}
}

func (t *turn) sourceFrame(e *Event) {
	p := t.pairs[t.at]
	column := t.column(t.at)
	own := e.D == p.Other
	switch e.Frame {
	case FrameQueued:
		if column != Unbound && column != Offered {
			t.drop()
		}
	case FrameRegister:
		t.registered(e, p, column)
	case FrameConfirm:
		switch {
		case column == Absent:
			t.send(t.at, Send{Kind: FrameAbort, S: e.S, D: e.D, Reason: StaleRoom})
			if e.OwnInc && !e.Unproven {
				t.send(t.at, Send{Kind: FrameDrained, S: e.S, D: e.D})
			}
		case !own:
			t.drop()
		case column == Offered:
			p.Confirmed = true
			t.behind()
			t.o.Do |= DoSubmit
		case column == Confirmed, column == Committed: // repeated by Resync
		case column == Ended:
			t.abort(t.at)
			t.answerEnd(t.at, false)
		default:
			t.drop()
		}
	case FrameVerdict:
		t.o.Do |= DoDropPlaceholder
		t.verdict(e, p, column)
	case FrameAbort: // Abort(d), D unbound
		t.o.Do |= DoDropPlaceholder
		switch {
		case column == Ended && own:
			t.drop()
		case column == Ended && p.Other.IsZero() && e.Att == t.Att:
			p.Other = e.D
		case column == Absent, column == Ended, e.Att != t.Att: // of an attempt that is not open here
			t.o.Do |= DoMark
		case column == Unbound:
			p.Other = e.D
			t.endSource(cause(e.Reason), t.at)
		case column == Offered && own:
			t.endSource(cause(e.Reason), t.at)
		default:
			t.drop()
		}
	default:
		t.drop()
	}
}

// registered is the three Register rows at P.
func (t *turn) registered(e *Event, p *Pair, column State) {
	if e.D.IsZero() {
		t.drop()
		return
	}
	own := e.D == p.Other
	switch {
	case column == Unbound && e.Att == t.Att && t.Admitted:
		t.offer(e.D)
	case own && (column == Offered || column == Confirmed || column == Committed):
		t.send(t.at, Send{Kind: FrameBound, S: t.Own, D: p.Other, Att: t.Att})
	case own:
		t.abort(t.at)
		t.answerEnd(t.at, false)
	case column == Ended && p.Other.IsZero() && e.Att == t.Att:
		p.Other = e.D
		t.abort(t.at)
	case column == Offered || column == Confirmed:
		t.endSource(PeerSuperseded, t.at)
		t.o.Do |= DoPlaceholder
	default:
		t.o.Do |= DoPlaceholder
	}
}

// verdict is the three Verdict rows at P. Only the judge can say Success, or that nobody knows; Failed
// counts from every destination engine, because one that has not voted makes success impossible, and one
// that has repeats the judge.
func (t *turn) verdict(e *Event, p *Pair, column State) {
	if column == Absent {
		// A record is evicted only when no op of it is unquiet, so an absent one is drained, if it was
		// of this incarnation. An older incarnation is never answered: its orphans may still write.
		switch {
		case !e.OwnInc:
			t.drop()
		case e.Unproven:
			t.send(t.at, Send{Kind: FrameAbort, S: e.S, D: e.D, Reason: StaleRoom})
		default:
			t.send(t.at, Send{Kind: FrameDrained, S: e.S, D: e.D})
		}
		return
	}
	live := column == Offered || column == Confirmed
	switch {
	case e.D != p.Other:
		t.drop()
	case column == Ended: // Resync repeats the verdict, Success too, while d waits for Drained
		t.answerEnd(t.at, true)
	case column == Committed && e.Outcome == JudgeSuccess && p.Judge:
		t.endCommitted(Success)
	case column == Committed && e.Outcome == JudgeUnknown && p.Judge:
		t.unknown()
	case live && e.Outcome == JudgeUnknown:
		t.endSource(PeerLost, t.at)
	case (live || column == Committed) && e.Outcome == JudgeFailed:
		t.endSource(cause(e.Reason), t.at)
	default:
		t.drop()
	}
}

// endDestination is endD of docs/protocol.md. cause is the pair whose engine is the cause, or here. All
// others are told; the cause only if it waits for a verdict, because its RankEnd was a word of no return.
func (t *turn) endDestination(why Reason, cause int) {
	t.State, t.Reason, t.ByPeer = Ended, why, cause != here && !t.lost
	t.restPages()
	for i, p := range t.pairs {
		switch {
		case i == cause && t.lost:
		case p.Sibling && !p.Other.IsZero(): // it voted
			t.send(i, Send{Kind: FrameGroupVerdict, Outcome: JudgeFailed, Reason: why, D: p.Other, Att: t.Att})
		case i == cause && !p.RankEnded:
		case p.Sibling:
			t.send(i, Send{Kind: FrameGroupAbort, Att: t.Att, Reason: why})
		case p.Other.IsZero():
			t.send(i, Send{Kind: FrameAbort, D: t.Own, Att: t.Att, Reason: why})
		default:
			t.send(i, Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: why, S: p.Other, D: t.Own})
		}
	}
}

// restPages is where the pages of a destination that ends come to rest: on the ladder until every source
// is quiet.
func (t *turn) restPages() {
	if !t.Armed {
		return
	}
	t.o.Do |= DoRevoke
	t.Pages, t.Rung = Quiescing, Drain
	for _, p := range t.pairs {
		if !p.Sibling && p.Other.IsZero() { // no Confirm was sent
			p.Quiet = true
		}
	}
	t.quietIfAll()
}

// quietIfAll takes the pages off the ladder when no source can write to them any more.
func (t *turn) quietIfAll() {
	for _, p := range t.pairs {
		if !p.Sibling && !p.Quiet {
			return
		}
	}
	t.rest(Quiet)
}

// rest takes the pages off the ladder.
func (r *Record) rest(to Residency) { r.Pages, r.Rung = to, NoRung }

// judged is the verdict of an ended destination.
func (r *Record) judged() Outcome {
	switch r.Reason {
	case Success:
		return JudgeSuccess
	case OutcomeUnknown:
		return JudgeUnknown
	}
	return JudgeFailed
}

// answer repeats the verdict of an ended destination to s: its own for its pair, else Failed. A vote without
// an answer knows nothing to say; the judge answers.
func (t *turn) answer(s Opener) {
	p := t.pairs[t.at]
	switch {
	case s != p.Other:
		t.send(t.at, Send{Kind: FrameVerdict, Outcome: JudgeFailed, Reason: StaleRoom, S: s, D: t.Own})
	case t.Reason == OutcomeUnknown:
		t.drop()
	default:
		t.send(t.at, t.Repeat(p))
	}
}

// Repeat is the verdict that Resync re-sends to the source of a pair that is not quiet.
func (r *Record) Repeat(p *Pair) Send {
	return Send{Kind: FrameVerdict, Outcome: r.judged(), Reason: r.Reason, S: p.Other, D: r.Own}
}

// complete: a RankEnd or a vote has come. With the last one the judge succeeds, the others vote.
func (t *turn) complete() {
	voter := false
	for _, p := range t.pairs {
		switch {
		case p.Judge: // only a sibling is, at a destination
			voter = true
		case p.Sibling && p.Other.IsZero(), !p.Sibling && !p.RankEnded:
			return
		}
	}
	if voter {
		t.State = Voted
		t.Vote(t.pairs, t.o)
		return
	}
	t.State, t.Reason = Ended, Success
	t.restPages()
	for i, p := range t.pairs {
		if p.Sibling {
			t.send(i, t.groupVerdict(p.Other))
		} else {
			t.send(i, t.Repeat(p))
		}
	}
}

// Vote asks for Ready to the judge: by the transition, and by Resync of a record that has voted.
func (r *Record) Vote(pairs []*Pair, o *Out) {
	for i, p := range pairs {
		if p.Judge {
			o.Sends = append(o.Sends, Send{Kind: FrameReady, At: i, D: r.Own, Att: r.Att})
		}
	}
}

// groupVerdict is the judge's word to a sibling that voted.
func (t *turn) groupVerdict(d Opener) Send {
	return Send{Kind: FrameGroupVerdict, Outcome: t.judged(), Reason: t.Reason, D: d, Att: t.Att}
}

// endVote ends a destination that has voted. Nobody is told: the judge knows, or nobody does.
func (t *turn) endVote(why Reason) {
	t.State, t.Reason = Ended, why
	t.restPages()
}

// destination is every row of docs/protocol.md at D.
func (t *turn) destination(e *Event) {
	// A vote cannot be taken back: an end is asked for, or nobody knows.
	end := func(why Reason) {
		switch {
		case !t.State.Live():
			t.drop()
		case t.State != Voted:
			t.endDestination(why, here)
		case why == Aborted || why == Deadline:
			for i, p := range t.pairs {
				if p.Sibling {
					t.send(i, Send{Kind: FrameGroupAbort, Att: t.Att, Reason: why})
				}
			}
		default:
			t.endVote(OutcomeUnknown)
		}
	}
	switch e.Kind {
	case OnPages:
		if t.State == Opened && !t.Armed {
			t.Armed = true
			if e.Admitted && t.Admitted {
				t.register()
			} else {
				t.Admitted = false
			}
		} else {
			t.drop()
		}
	case OnAbort:
		end(Aborted)
	case OnClock:
		end(e.Reason)
	case OnPluginLost:
		if t.State != Voted { // every byte is there already
			end(e.Reason)
		}
	case OnWorkerLost:
		if t.State.Live() && t.State != Voted {
			end(WorkerLost)
		}
	case OnPeerDead, OnHelloNewer:
		if t.pairs[t.at].Sibling {
			t.siblingLost(e)
		} else {
			t.sourceLost(e)
		}
	case OnDrainClock:
		if t.State != Ended {
			break
		}
		switch t.Rung {
		case Drain:
			t.Rung = Fence
			for i := range t.pairs {
				t.askFence(i)
			}
		case Fence:
			t.Rung, t.Pages = Quarantine, Quarantined
		}
	case OnFenced:
		p := t.pairs[t.at]
		switch {
		case t.State != Ended || t.Rung == NoRung:
		case e.Quiet && p.SourceEnded:
			p.Quiet = true
			t.quietIfAll()
		case t.Rung == Fence:
			t.Rung, t.Pages = Quarantine, Quarantined
		}
	case OnRevoked:
		if t.State == Ended && t.Rung != NoRung && e.Quiet {
			t.rest(Quiet)
		}
	case OnPluginFenced:
		switch {
		case t.State == Ended && t.Rung != NoRung:
			t.rest(Fenced)
		case t.State == Voted:
			for _, p := range t.pairs {
				if !p.Sibling {
					p.Quiet = true
				}
			}
		}
	case OnFrame:
		if t.pairs[t.at].Sibling {
			t.siblingFrame(e)
		} else {
			t.destinationFrame(e)
		}
	default:
		t.drop()
	}
}

// sourceLost: the engine of a source is dead, or came back as a newer incarnation, which submits nothing
// for the older one.
func (t *turn) sourceLost(e *Event) {
	newer := e.Kind == OnHelloNewer
	switch t.column(t.at) {
	case Bound:
		t.endDestination(PeerLost, t.at)
		t.pairs[t.at].SourceEnded = newer
	case Voted:
		if newer {
			t.pairs[t.at].SourceEnded = true
		}
	case Ended:
		if newer {
			t.sourceEnded(t.at)
		} else {
			t.askFence(t.at)
		}
	}
}

// siblingLost: the engine of a sibling is dead, or came back as a newer incarnation. Its part of the pages
// is lost, or its word is.
func (t *turn) siblingLost(e *Event) {
	if e.Kind == OnHelloNewer {
		t.pairs[t.at].Other = Opener{} // its vote
	}
	switch {
	case t.State == Voted:
		t.endVote(OutcomeUnknown)
	case t.State == Registered, t.State == Bound:
		for _, p := range t.pairs {
			if !p.Sibling && !p.Other.IsZero() {
				t.endDestination(PeerLost, t.at)
				return
			}
		}
	}
}

// askFence asks for rung 3 once it can be a proof: the source engine said "ended".
func (t *turn) askFence(at int) {
	if p := t.pairs[at]; t.Rung == Fence && p.SourceEnded && !p.Quiet {
		t.fence(at)
	}
}

func (t *turn) fence(at int) {
	t.o.Do |= DoFence
	t.o.Fence = append(t.o.Fence, at)
}

// sourceEnded notes that s submits nothing any more. Pages that came to rest in quarantine because nobody could
// say so have their fence asked now, once.
func (t *turn) sourceEnded(at int) {
	p := t.pairs[at]
	if t.Rung == Quarantine && !p.SourceEnded && !p.Quiet {
		t.fence(at)
	}
	p.SourceEnded = true
	t.askFence(at)
}

func (t *turn) destinationFrame(e *Event) {
	if e.S.IsZero() && e.Frame != FrameAbort {
		t.drop()
		return
	}
	p := t.pairs[t.at]
	column := t.column(t.at)
	own := e.S == p.Other
	refuse := func(outcome Outcome, why Reason) {
		d := t.Own
		if column == Absent {
			d = e.D
		}
		t.send(t.at, Send{Kind: FrameVerdict, Outcome: outcome, Reason: why, S: e.S, D: d})
	}
	switch e.Frame {
	case FrameBound:
		switch column {
		case Registered:
			p.Other = e.S
			t.behind()
			t.send(t.at, Send{Kind: FrameConfirm, S: e.S, D: t.Own})
		case Bound:
			if own {
				t.send(t.at, Send{Kind: FrameConfirm, S: e.S, D: t.Own})
			} else {
				t.endDestination(PeerSuperseded, t.at)
				refuse(JudgeFailed, PeerSuperseded)
			}
		case Voted:
			if own {
				t.drop()
			} else {
				refuse(JudgeFailed, StaleRoom)
			}
		case Ended:
			t.answer(e.S)
		case Absent:
			refuse(JudgeFailed, StaleRoom)
		default:
			t.drop()
		}
	case FrameProgress:
		if column == Bound && own {
			t.Started = true
		} else {
			t.drop()
		}
	case FrameRankEnd:
		switch column {
		case Registered:
			refuse(JudgeFailed, StaleRoom)
		case Bound, Voted:
			switch {
			case !own:
				refuse(JudgeFailed, StaleRoom)
			case p.RankEnded: // repeated by Resync
			case !e.Complete:
				t.endDestination(LengthMismatch, here)
			default:
				p.RankEnded, p.Quiet, t.Started = true, e.Quiet, true
				t.complete()
			}
		case Ended:
			t.answer(e.S)
		case Absent:
			refuse(JudgeUnknown, None)
		default:
			t.drop()
		}
	case FrameAbort:
		t.aborted(e, p, column)
	case FrameDrained:
		switch {
		case !own:
			t.drop()
		case column == Bound:
			p.Quiet = true
			t.endDestination(PeerAborted, t.at)
			p.SourceEnded = true
		case column == Voted:
			p.Quiet, p.SourceEnded = true, true
		case column == Ended && t.Rung != NoRung:
			p.Quiet, p.SourceEnded = true, true
			t.quietIfAll()
		default:
			t.drop()
		}
	default:
		t.drop()
	}
}

// aborted is the three Abort rows at D: (s,d), (s,0) and (0,d).
func (t *turn) aborted(e *Event, p *Pair, column State) {
	own := e.S == p.Other
	switch {
	case !e.S.IsZero() && !e.D.IsZero():
		switch {
		case column == Registered:
			t.endDestination(cause(e.Reason), t.at)
		case column == Bound && own:
			t.endDestination(cause(e.Reason), t.at)
			p.SourceEnded = true
		case column == Voted && own:
			p.SourceEnded = true
		case column == Ended && own:
			t.sourceEnded(t.at)
		default:
			t.drop()
		}
	case !e.S.IsZero():
		switch {
		case column == Absent, e.Att != t.Att:
			t.o.Do |= DoMark
		case column == Opened, column == Registered:
			t.endDestination(cause(e.Reason), t.at)
		default:
			t.drop()
		}
	default:
		if column == Registered {
			t.endDestination(StaleRoom, t.at)
		} else {
			t.drop()
		}
	}
}

// siblingFrame is every row of docs/protocol.md between the engines of a destination group.
func (t *turn) siblingFrame(e *Event) {
	p := t.pairs[t.at]
	switch {
	case e.Frame == FrameReady && !p.Judge:
		switch {
		case t.State == Absent || !e.Complete: // it knows what this engine does not
			t.send(t.at, Send{Kind: FrameGroupVerdict, Outcome: JudgeUnknown, D: e.D, Att: e.Att})
		case t.State == Ended:
			t.send(t.at, t.groupVerdict(e.D))
		case t.State == Bound && !e.D.IsZero():
			p.Other = e.D
			t.complete()
		default:
			t.drop()
		}
	case e.Frame == FrameGroupVerdict && p.Judge && t.State == Voted && e.D == t.Own:
		switch e.Outcome {
		case JudgeSuccess:
			t.endVote(Success)
		case JudgeFailed:
			t.endVote(cause(e.Reason))
			t.ByPeer = true
		case JudgeUnknown:
			t.endVote(OutcomeUnknown)
		default:
			t.drop()
		}
	case e.Frame == FrameGroupAbort:
		switch {
		case t.State == Absent || e.Att != t.Att:
			t.o.Do |= DoMark
		case t.State == Opened, t.State == Registered, t.State == Bound:
			t.endDestination(cause(e.Reason), t.at)
		default:
			t.drop()
		}
	default:
		t.drop()
	}
}
