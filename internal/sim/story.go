package sim

import (
	"fmt"
	"strings"

	"github.com/terminus-kv/terminus/core"
)

// openerText is an opener as its engine's letter, incarnation and sequence.
func (w *world) openerText(o opener) string {
	if o.IsZero() {
		return "nobody"
	}
	return fmt.Sprintf("%s%d.%d", strings.ToLower(engineName(w.byInc[o.Inc])), o.Inc, o.Seq)
}

func frameText(f *core.Frame) string {
	return fmt.Sprintf("%s of room %d, s=%d.%d, d=%d.%d, %s", f.Kind, f.Room, f.S.Inc, f.S.Seq, f.D.Inc, f.D.Seq, f.Reason)
}
