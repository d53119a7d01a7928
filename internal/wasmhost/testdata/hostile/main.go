// Command hostile is a guest that does what its options say, during its first op or in answer to an event.
package main

import (
	"encoding/hex"
	"errors"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"github.com/terminus-kv/terminus/plugins/sdk/guest"
)

//go:wasmimport engine_v1 emit
func emit(ptr unsafe.Pointer, n uint32) int32

//go:wasmimport engine_v1 region_copy
func regionCopy(peer uint32, dst, dstOff, src, srcOff, n uint64) int32

//go:wasmimport engine_v1 region_read
func regionRead(src, off uint64, ptr uint32, n uint32) int32

//go:wasmimport engine_v1 region_write
func regionWrite(peer uint32, dst, off uint64, ptr uint32, n uint32) int32

//go:wasmimport engine_v1 log
func hostLog(level uint32, ptr uint32, n uint32)

// options are text without quotes, so that no JSON package is needed.
type options struct {
	do     string
	frames [][]byte // in hexadecimal, apart by spaces
	calls  []call   // name and numbers, apart by spaces, each with a semicolon
}

type call struct {
	name string
	args []uint64
}

// option reads "key":"value".
func option(config []byte, key string) string {
	_, rest, _ := strings.Cut(string(config), `"`+key+`":"`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

type hostile struct{ options }

func (h *hostile) Info() guest.Info {
	return guest.Info{Name: "hostile", Version: "1", ConfigSchema: `{"type":"object"}`, Features: []string{guest.FeatureByteProgress}}
}

func (h *hostile) Start(s guest.Start) error {
	h.do = option(s.Config, "do")
	for _, f := range strings.Fields(option(s.Config, "frames")) {
		frame, err := hex.DecodeString(strings.TrimPrefix(f, "-"))
		if err != nil {
			return err
		}
		h.frames = append(h.frames, frame)
	}
	for _, text := range strings.Split(option(s.Config, "calls"), ";") {
		words := strings.Fields(text)
		if len(words) == 0 {
			continue
		}
		c := call{name: words[0]}
		for _, w := range words[1:] {
			n, err := strconv.ParseUint(w, 0, 64)
			if err != nil {
				return err
			}
			c.args = append(c.args, n)
		}
		h.calls = append(h.calls, c)
	}
	if h.do == "refuse" {
		return errors.New("option do: refuse is refused; write another")
	}
	return nil
}

func (h *hostile) AddPeer(guest.Peer) error {
	if h.do == "panic in AddPeer" {
		panic("no peers, please")
	}
	return nil
}

// RemovePeer comes when no op is open any more.
func (h *hostile) RemovePeer(uint32) {
	if h.do == "calls late" {
		h.call()
	}
}

var sink [][]byte

func (h *hostile) Transfer(op *guest.Op) {
	switch h.do {
	case "loop":
		for i := 0; ; i++ {
			sink = nil
		}
	case "panic":
		panic("boom")
	case "exit":
		os.Exit(3)
	case "recurse":
		recurse(0)
	case "bomb":
		for {
			sink = append(sink, make([]byte, 1<<20))
			sink[len(sink)-1][0] = 1
		}
	case "emit":
		for _, frame := range h.frames {
			emit(unsafe.Pointer(unsafe.SliceData(frame)), uint32(len(frame)))
		}
	case "flood":
		frame := make([]byte, 1)
		for {
			emit(unsafe.Pointer(&frame[0]), 0)
		}
	case "emit large":
		frame := make([]byte, 1<<20+1)
		emit(unsafe.Pointer(&frame[0]), uint32(len(frame)))
	case "emit outside":
		emit(unsafe.Pointer(uintptr(0xFFFFFF00)), 0x80)
	case "log outside":
		hostLog(1, 0xFFFFFF00, 0x80)
	case "log level":
		hostLog(9, 0, 0)
	case "calls":
		h.call()
	case "deaf":
		for {
			op.Yield()
		}
	case "end twice":
		op.Done()
		op.Done()
	case "silent":
		return
	}
	op.Done()
}

func recurse(n int) int { return recurse(n+1) + n }

// call logs the codes, in order.
func (h *hostile) call() {
	codes := "codes"
	for _, c := range h.calls {
		a := c.args
		var code int32
		switch c.name {
		case "copy":
			code = regionCopy(uint32(a[0]), a[1], a[2], a[3], a[4], a[5])
		case "read":
			code = regionRead(a[0], a[1], uint32(a[2]), uint32(a[3]))
		case "write":
			code = regionWrite(uint32(a[0]), a[1], a[2], uint32(a[3]), uint32(a[4]))
		}
		codes += " " + strconv.Itoa(int(code))
	}
	guest.Log(guest.LevelInfo, codes)
}

func init() { guest.Serve(&hostile{}) }

func main() {}
