package bench

import "testing"

func TestMillion(t *testing.T) {
	measure(t, million, "bytes_per_room", "sweep", "idle_step", "next")
}

// TestRoomSize: the live objects of many rooms, whatever the process around them takes.
func TestRoomSize(t *testing.T) {
	const rooms = 40_000
	r, err := holdRooms(t.Context(), rooms)
	if err != nil {
		t.Fatal(err)
	}
	if size := r.Heap / rooms; size < 300 || size > 600 {
		t.Errorf("%d bytes a room", size)
	}
}
