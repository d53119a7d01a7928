package client

// Slot returns the room's place on the status page.
func (r *Room) Slot() int32 { return r.slot }

// SetLeaseProof replaces the answer of the self-test and returns a function that puts it back.
func SetLeaseProof(err error) (restore func()) {
	old := leaseProof
	leaseProof = func() error { return err }
	return func() { leaseProof = old }
}
