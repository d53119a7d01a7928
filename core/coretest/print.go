package coretest

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Opener prints an opener as its engine's letter, incarnation and sequence.
func (e *Env) Opener(o statemachine.Opener) string {
	if o.IsZero() {
		return "0"
	}
	l := "s"
	if o.Inc >= 20 {
		l = "d"
	}
	return fmt.Sprintf("%s%d.%d", l, o.Inc, o.Seq)
}

// Frame prints a frame as the protocol writes it.
func (e *Env) Frame(f *core.Frame) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s(room %d, s=%s, d=%s", f.Kind, f.Room, e.Opener(f.S), e.Opener(f.D))
	switch f.Kind {
	case core.FrameVerdict:
		fmt.Fprintf(&b, ", %s", [...]string{"", "success", "failed", "unknown"}[f.Outcome])
		if f.Outcome == core.OutcomeFailed {
			fmt.Fprintf(&b, " %s", f.Reason)
		}
	case core.FrameAbort:
		fmt.Fprintf(&b, ", %s", f.Reason)
	case core.FrameRankEnd:
		fmt.Fprintf(&b, ", quiet=%v", f.Quiet)
		for _, s := range f.Sent {
			if len(f.Sent) > 1 {
				fmt.Fprintf(&b, ", rank %d", s.Rank)
			}
			for _, p := range s.Parts {
				fmt.Fprintf(&b, ", %d pages", p.Pages)
			}
		}
	case core.FrameProgress:
		fmt.Fprintf(&b, ", %d bytes, outstanding=%v", f.Bytes, f.Outstanding)
	case core.FrameBound:
		if f.NeedPages {
			b.WriteString(", need pages")
		}
	case core.FrameRegister, core.FrameConfirm:
		for _, r := range f.Ranks {
			if len(f.Ranks) > 1 {
				fmt.Fprintf(&b, ", rank %d", r.Rank)
			}
			for _, p := range r.Parts {
				fmt.Fprintf(&b, ", pages %v", pages(p.Runs))
				if p.Prefix > 0 {
					fmt.Fprintf(&b, " of which %d are here already", p.Prefix)
				}
			}
		}
	}
	b.WriteString(")")
	return b.String()
}

// Held prints what an engine's core holds, by the fields of core.Counts that are not zero.
func (g *Engine) Held() string { return held(g.Name, g.M) }

// Held prints what an engine's core holds.
func (g *Member) Held() string { return held(g.Name, g.M) }

func held(name string, m *core.Machine) string {
	v := reflect.ValueOf(m.Counts())
	var b strings.Builder
	for i := range v.NumField() {
		if n := v.Field(i).Int(); n != 0 {
			fmt.Fprintf(&b, " %s=%d", v.Type().Field(i).Name, n)
		}
	}
	if b.Len() == 0 {
		return name + " holds nothing"
	}
	return name + " holds" + b.String()
}

func pages(runs []layout.Run) string {
	var b strings.Builder
	for i, r := range runs {
		if i > 0 {
			b.WriteByte(',')
		}
		switch {
		case r.Count == 1:
			fmt.Fprintf(&b, "%d", r.Start)
		case r.Stride == 1:
			fmt.Fprintf(&b, "%d-%d", r.Start, r.Start+r.Count-1)
		default:
			fmt.Fprintf(&b, "%d-%d/%d", r.Start, r.Start+(r.Count-1)*r.Stride, r.Stride)
		}
	}
	return b.String()
}

func code(c core.ReplyCode) string {
	return [...]string{"", "ok", "ended", "refused", "freed"}[c]
}

func reasonOf(r statemachine.Reason) string {
	if r == statemachine.None {
		return ""
	}
	return r.String() + " "
}
