// Command repage is a transfer backend that runs as a WASM guest: it copies pages between caches of one
// machine, also when the page sizes of the two sides differ. How pages become pages stands in the plan of each op
// (src_pages, dst_pages and the slices); the host copies, piece by piece.
//
// Build it with
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o repage.wasm .
package main

import (
	"errors"
	"strconv"

	"github.com/terminus-kv/terminus/plugins/sdk/guest"
)

type repage struct{}

func (repage) Info() guest.Info {
	return guest.Info{Name: "repage", Version: "1.0.0", Features: []string{
		guest.FeatureByteProgress, guest.FeatureStrided, guest.FeatureLayerRange, guest.FeatureRepage,
	}}
}

func (repage) Start(guest.Start) error { return nil }

func (repage) Transfer(op *guest.Op) {
	for c := range op.Copies() {
		switch err := op.Copy(c); {
		case errors.Is(err, guest.ErrAborted):
			op.Aborted()
			return
		case err != nil:
			op.Fail(guest.CauseTransport, "copy to region "+strconv.FormatUint(c.Dst, 10)+": "+err.Error())
			return
		}
	}
	op.Done()
}

func init() { guest.Serve(repage{}) }

func main() {}
