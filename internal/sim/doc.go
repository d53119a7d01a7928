// Package sim runs whole clusters on virtual time: the shipped core.Machine in two to eight engines, with
// workers, plugins, links and a router around it that are simulated, under a swarm of faults. Everything
// is drawn from one seed: the same seed gives the same history.
//
// Beside what the engines believe the simulator knows the truth: which bytes of which op may still land,
// what each page holds, and whose it is. The promises (Promises) are checked as the schedule runs, against
// that truth.
//
// A link is a stream, as in production: what is sent arrives in order or not at all, except that an Abort
// or a Verdict, also one between the engines of a group, may overtake; when the stream breaks, what is in flight is lost, each side notices in its
// own time, and the next stream begins with a Hello. So nothing is dropped singly: a cut loses all that is
// in flight, and a partition of two engines or of two sets of them, one way or both, what silence ends. What the
// fault "reorder" does is what the link allows: everything overtakes that may, and far. "duplicate" is more than
// TCP does: a frame arrives twice, at once, or, of what may overtake, once before and once after the rest; the
// protocol says that frames are idempotent. Result.Happened counts the frames that were lost, overtook
// or arrived twice, and the pages that landed after the end of their op.
//
// A plugin has epochs as in production: an upgrade, or the core's wish to replace one that pages rest with, brings
// the next up beside it; the older one is ended when the core asks for that, which it may not while anything uses
// it, but for the bound. Any of them may die.
//
// In some schedules the groups of the two roles have one to four ranks and lay out their pages differently: heads are
// shared out to other numbers of ranks, or all ranks have all (MLA), pages have one or two tokens, tokens and heads lie in
// either order. A page is then cells, one for each token of each head of each layer, that say what they mean. The plans of
// core/layout are carried out on them, and what a destination must hold is derived without those. Workers send whole
// pages of one pool each, all layers at once or, where there are several, one after the other.
//
// In one schedule of six the ranks of the groups of one role or both sit on two or three engines each, in equal or unequal
// numbers; one engine may have ranks of both, and a group that sits on one engine may work with the others. A part of a
// group that the core finds dead counts no more where others live, as the node has it. When the judge says Success every
// engine of both groups must have given its word, every op must be done and the pages of all ranks must hold what they
// should, at that moment; whoever is Success must have it from the judge, and nobody to whom the judge said so may end
// Failed but as outcome_unknown.
//
// Policies is another simulation, without faults: a request trace through one engine, to compare the orders
// in which rooms may be served.
package sim

// Promise is one of the promises that the simulator checks.
type Promise string

// The promises.
const (
	Terminal   Promise = "P1"
	Sticky     Promise = "P2"
	Memory     Promise = "P3"
	Stale      Promise = "P4"
	Bounded    Promise = "P5"
	Store      Promise = "P6"
	Blast      Promise = "P7"
	Agreement  Promise = "P8"
	Accounting Promise = "P9"
	Replay     Promise = "P10"
)

// Promises lists them in their order.
func Promises() []Promise {
	return []Promise{Terminal, Sticky, Memory, Stale, Bounded, Store, Blast, Agreement, Accounting, Replay}
}

// Text is the promise in words.
func (p Promise) Text() string { return promiseTexts[p] }

var promiseTexts = map[Promise]string{
	Terminal:   "every room that was taken reaches one terminal verdict in bounded time, whatever dies",
	Sticky:     "a verdict never changes",
	Memory:     "no page is reused while anybody can still touch it, and Success means the right bytes",
	Stale:      "what comes of a plugin epoch that is gone changes nothing",
	Bounded:    "every live record runs a clock",
	Store:      "the loss of the coordination store fails no room",
	Blast:      "the death of a plugin ends only rooms that it held, and its upgrade none before the bound",
	Agreement:  "both sides agree on the verdict, or the one that cannot know says outcome_unknown",
	Accounting: "pages are free, pinned or quarantined, and at idle nothing is held",
	Replay:     "an engine that is told the same again answers the same",
}
