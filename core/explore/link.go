package explore

import (
	"fmt"
	"slices"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Frames in flight and the queues that hold them are named by numbers too: queue 0 is empty.

// flying is a frame on a link: a Hello, or a room frame.
type flying struct {
	hello bool
	inc   uint64 // of the engine that says Hello
	f     core.Frame
	text  string
}

// urgent frames may overtake all but a Hello.
func (f *flying) urgent() bool {
	return !f.hello && (f.f.Kind == core.FrameAbort || f.f.Kind == core.FrameVerdict)
}

// repeatable frames say the same however often they are said: a second one that waits adds nothing.
func (f *flying) repeatable() bool {
	return f.urgent() || !f.hello && f.f.Kind == core.FrameDrained
}

func (x *explorer) addFrame(f flying) uint32 {
	if id, ok := x.frameIDs[f.text]; ok {
		return id
	}
	id := uint32(len(x.frames))
	x.frames = append(x.frames, f)
	x.frameIDs[f.text] = id
	return id
}

func (x *explorer) internFrame(f *core.Frame) uint32 {
	c := cloneFrame(f)
	if c.Reason != statemachine.None { // which failure it was decides nothing
		c.Reason = statemachine.Aborted
	}
	return x.addFrame(flying{f: c, text: fmt.Sprintf("%+v", c)})
}

func (x *explorer) hello(inc uint64) uint32 {
	return x.addFrame(flying{hello: true, inc: inc, text: fmt.Sprintf("Hello(%d)", inc)})
}

type pushKey struct{ queue, frame uint32 }

func (x *explorer) queue(frames []uint32) uint32 {
	b := make([]byte, 0, 4*len(frames))
	for _, f := range frames {
		b = append(b, byte(f), byte(f>>8), byte(f>>16), byte(f>>24))
	}
	id, ok := x.queueIDs[string(b)]
	if !ok {
		id = uint32(len(x.queues))
		x.queueIDs[string(b)] = id
		x.queues = append(x.queues, slices.Clone(frames))
	}
	return id
}

// push appends a frame. One that says the same as one that waits is left out.
func (x *explorer) push(q, frame uint32) uint32 {
	k := pushKey{q, frame}
	if id, ok := x.pushed[k]; ok {
		return id
	}
	id := q
	if !x.frames[frame].repeatable() || !slices.Contains(x.queues[q], frame) {
		id = x.queue(append(slices.Clone(x.queues[q]), frame))
	}
	x.pushed[k] = id
	return id
}

// take removes the i-th frame.
func (x *explorer) take(q uint32, i int) (frame, rest uint32) {
	frames := x.queues[q]
	k := pushKey{q, uint32(i)}
	rest, ok := x.taken[k]
	if !ok {
		rest = x.queue(slices.Delete(slices.Clone(frames), i, i+1))
		x.taken[k] = rest
	}
	return frames[i], rest
}

func cloneFrame(f *core.Frame) core.Frame {
	c := *f
	c.Aux = slices.Clone(f.Aux)
	c.Ranks = nil
	for _, r := range f.Ranks {
		rp := core.RankPages{Rank: r.Rank}
		for _, p := range r.Parts {
			p.Runs = append([]layout.Run(nil), p.Runs...)
			rp.Parts = append(rp.Parts, p)
		}
		c.Ranks = append(c.Ranks, rp)
	}
	c.Sent = nil
	for _, s := range f.Sent {
		s.Parts = slices.Clone(s.Parts)
		c.Sent = append(c.Sent, s)
	}
	return c
}

// describe prints a frame with the openers' short names.
func (x *explorer) describe(st *state, id uint32) string {
	f := &x.frames[id]
	if f.hello {
		return fmt.Sprintf("Hello(incarnation %d)", f.inc%16+1)
	}
	out := f.f.Kind.String() + "("
	switch {
	case f.f.S.IsZero():
		out += x.openerName(st, f.f.D)
	case f.f.D.IsZero():
		out += x.openerName(st, f.f.S)
	default:
		out += x.openerName(st, f.f.S) + ", " + x.openerName(st, f.f.D)
	}
	switch f.f.Kind {
	case core.FrameVerdict:
		out += ", " + [...]string{"?", "success", "failed", "unknown"}[f.f.Outcome]
	case core.FrameRankEnd:
		if !f.f.Quiet {
			out += ", not quiet"
		}
	case core.FrameProgress:
		if f.f.Outstanding {
			out += ", ops outstanding"
		}
	}
	return out + ")"
}

// openerName is the opener's place in the order of opens, as in s1 or d2.
func (x *explorer) openerName(st *state, o statemachine.Opener) string {
	e := int(o.Inc/16) - 1
	if e == x.Sources {
		return fmt.Sprintf("d%d", st.index(st.d[:], uint8(o.Inc%16), uint8(o.Seq)))
	}
	name := fmt.Sprintf("s%d", st.index(st.s[e][:], uint8(o.Inc%16), uint8(o.Seq)))
	if x.Sources > 1 {
		name = fmt.Sprintf("P%d.%s", e+1, name)
	}
	return name
}
