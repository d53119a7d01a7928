package explore

import "github.com/terminus-kv/terminus/core/statemachine"

// state is one state of the whole: the engines, the links, the plugins, the workers, and the truth about
// every write, which no engine sees. It is comparable and holds no pointer.
type state struct {
	engine [maxSources + 1]uint32 // numbers of nodes; the destination is last
	toD    [maxSources]uint32     // queue from each source engine
	toP    [maxSources]uint32     // queue to it
	s      [maxSources][maxOpeners]opener
	d      [maxOpeners]opener
	ops    [maxSources][maxOpeners][maxChunks]op
	plugin [maxSources + 1]plugin
	link   [maxSources]linkState
	faults uint8
}

type linkState uint8

const (
	linkDown linkState = iota // redialled at any time
	linkUp
	linkGone // down for ever
)

// opener is what is known outside the engines of one open.
type opener struct {
	seq     uint8 // of its incarnation; 0: not opened yet
	inc     uint8 // restarts of its engine
	attempt uint8
	sent    uint8 // chunks sent; of a destination, 1 once registered
	epoch   uint8 // of the plugin that the pages are registered with
	end     end   // seen so far
	pair    uint8 // of one that has ended: the opener at the other side, from 1; 0 none
	at      uint8 // of an ended destination: the engine of that source
	asked   asked // of a destination
	flags   openerFlags
}

type end uint8

const (
	notEnded end = iota
	endSuccess
	endFailed  // for a reason that denies success
	endUnknown // the verdict cannot be had, or the engine is gone
)

type openerFlags uint8

const (
	workerGone openerFlags = 1 << iota // its worker died: nobody uses the pages again
	sealed                             // of a destination: no write can land in its pages any more
)

// asked is what the destination's plugin has not answered yet.
type asked uint8

const (
	askedGrant asked = 1 << iota
	askedRevoke
	askedFence
)

// op is the truth about one chunk of one source opener.
type op struct {
	state opState
	d     uint8 // destination, 1 up
	epoch uint8
	done  bool // every byte is where it belongs
	cut   bool // nothing of it can land any more, whatever its state
}

type opState uint8

const (
	opNone    opState = iota
	opOpen            // the plugin has it
	opLinger          // ended with quiet=no
	opQuiet           // nothing of it lands or is read any more
	opDead            // its writer died first: what is in kernel buffers may land, or be read
	opUnread          // as opDead, and the writer's mappings are gone: it may only land
	opSkipped         // ended without a byte
)

// mayLand reports whether a byte of the op may still be written at the destination.
func (o *op) mayLand() bool {
	return !o.cut && (o.state == opOpen || o.state == opLinger || o.state == opDead || o.state == opUnread)
}

// mayRead reports whether the op may still read the source's pages.
func (o *op) mayRead() bool {
	return o.state == opOpen || o.state == opLinger || o.state == opDead
}

// plugin is the plugin processes of one engine.
type plugin struct {
	inc     uint8 // restarts of the engine
	epoch   uint8 // current one
	down    bool  // it ended, the next has not started
	gone    uint8 // epochs of this incarnation that ended and are not proven gone, by bit
	orphans uint8 // older incarnations whose plugins have not exited, by bit
}

// index is the place, from 1, of the opener with that sequence in that incarnation; 0 when none has it.
func (st *state) index(side []opener, inc, seq uint8) uint8 {
	for i := range side {
		if o := &side[i]; o.seq != 0 && o.inc == inc && o.seq == seq {
			return uint8(i) + 1
		}
	}
	return 0
}

// resolve finds the opener that an engine knows by name.
func (x *explorer) resolve(st *state, o statemachine.Opener) (side, k uint8) {
	if o.IsZero() {
		return 0, 0
	}
	e := int(o.Inc/16) - 1
	if e == x.Sources {
		return uint8(e), st.index(st.d[:], uint8(o.Inc%16), uint8(o.Seq))
	}
	return uint8(e), st.index(st.s[e][:], uint8(o.Inc%16), uint8(o.Seq))
}
