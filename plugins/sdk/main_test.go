package sdk

import "testing"

// FuzzRights: control data of the control socketpair.
func FuzzRights(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{17, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 7})
	f.Fuzz(func(t *testing.T, control []byte) {
		if n := len(rights(control)); n*4 > len(control) {
			t.Errorf("%d descriptors in %d bytes", n, len(control))
		}
	})
}
