package client

import "time"

// SetClocks shortens the bounds of a frozen beat.
func (o *Options) SetClocks(unresponsive, lost time.Duration) {
	o.clocks = clocks{unresponsive, lost}
}

// Slot returns the room's place on the status page.
func (r *Room) Slot() int32 { return r.slot }
