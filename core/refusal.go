package core

// Refusal says why the core refused a worker's request, for counters; a reply's Detail says it to people. The set is
// closed.
type Refusal uint8

// The causes.
const (
	RefusedRequest       Refusal = iota // it makes no sense: a field is wrong, or it comes at the wrong moment or from the wrong role
	RefusedSession                      // the session is over
	RefusedDraining                     // the engine takes no new rooms
	RefusedPeerGroup                    // the other group is not named, is none that these could work with, or is one name too many
	RefusedRoomOpen                     // the room is open, by another attempt or group or by this rank (R3)
	RefusedInflightRooms                // more than limits.inflight_rooms, and the admission queue is full
	RefusedInflightBytes                // the room alone is more than the limit of this name; likewise the next three
	RefusedInflightPages
	RefusedWorkerBytes
	RefusedWorkerPages
	RefusedArmed       // a page is armed by another room (R4)
	RefusedNotEnded    // release of a room that lives
	RefusedNotReusable // release of pages that somebody may still touch (R4)
	NumRefusals
)

var refusalNames = [NumRefusals]string{
	"request", "session", "draining", "peer_group", "room_open", "inflight_rooms", "inflight_bytes", "inflight_pages", "worker_bytes", "worker_pages", "armed", "not_ended", "not_reusable",
}

// String returns the cause's name, e.g. "draining"; a limit has that of its key in the configuration.
func (r Refusal) String() string {
	if r < NumRefusals {
		return refusalNames[r]
	}
	return "invalid"
}
