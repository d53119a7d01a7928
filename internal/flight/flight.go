// Package flight is the engine's flight recorder on disk: a ring of the last events of all rooms in the
// engine's runtime directory, readable after the engine was killed.
//
// The engine writes it through a mapping, without a system call, and never reads it; a reader opens the
// file of an engine that is gone. Records have a fixed size and a number that is written last: a reader
// takes what is whole, in order. The space is taken at the start, so that a full file system is an error
// then and not a fault later; should the mapping fail all the same, that is an error, too.
package flight

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Entry is one event.
type Entry struct {
	At   time.Time
	Peer string // node of Record.Peer; "" for none
	core.Record
}

// Log is what a file holds.
type Log struct {
	Node        string
	Incarnation uint64
	Started     time.Time
	Entries     []Entry // oldest first
	Lost        uint64  // events before those
	Damaged     int     // among those: records that say nothing that can be, left out
}

// The file: a header of one record's size, then the ring.
const (
	magic      = "TERMFLT1"
	recordSize = 256
	fixedSize  = 72 // then the lengths of the peer's name and the detail, a byte each, and these
	name       = "flight"
	previous   = "flight.previous"
)

// DefaultRecords is the length of the ring: 8 MiB.
const DefaultRecords = 1 << 15

// File is the recorder of a running engine. Its methods are the owner goroutine's.
type File struct {
	mem     []byte
	records uint64
	next    uint64 // number of the next record, from 1
}

// Create starts the recorder of an engine in its runtime directory, mode 0600. What the predecessor left
// is kept as the previous one.
func Create(dir, node string, incarnation uint64, records int) (*File, error) {
	path := filepath.Join(dir, name)
	if err := os.Rename(path, filepath.Join(dir, previous)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("flight recorder: keep the previous one: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("flight recorder: %w", err)
	}
	defer f.Close()
	size := recordSize * (1 + records)
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		os.Remove(path)
		return nil, fmt.Errorf("flight recorder: %d bytes in %s: %w", size, dir, err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		os.Remove(path)
		return nil, fmt.Errorf("flight recorder: map %s: %w", path, err)
	}
	h := mem[:recordSize]
	le := binary.LittleEndian
	le.PutUint64(h[8:], uint64(records))
	le.PutUint64(h[16:], incarnation)
	le.PutUint64(h[24:], uint64(time.Now().UnixNano()))
	h[32] = uint8(copy(h[33:], node))
	copy(h, magic)
	return &File{mem: mem, records: uint64(records), next: 1}, nil
}

// Add writes the events of one step; peer names the node of an id. After an error the caller closes the
// recorder: a ring with holes would not say so.
func (r *File) Add(at time.Time, recs []core.Record, peer func(core.PeerID) string) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }: // the file was cut short, or its disk failed
			err = fmt.Errorf("flight recorder: its file cannot be written any more: %v", p)
		default:
			panic(p)
		}
	}()
	for i := range recs {
		at0 := recordSize * (1 + (r.next-1)%r.records)
		r.encode(r.mem[at0:at0+recordSize], at, &recs[i], peer(recs[i].Peer))
	}
	return nil
}

// encode writes the number last: a record that was begun has none.
func (r *File) encode(b []byte, at time.Time, rec *core.Record, peer string) {
	number := (*atomic.Uint64)(unsafe.Pointer(&b[0]))
	number.Store(0)
	le := binary.LittleEndian
	le.PutUint64(b[8:], uint64(at.UnixNano()))
	le.PutUint64(b[16:], uint64(rec.Room))
	le.PutUint64(b[24:], rec.Own.Inc)
	le.PutUint64(b[32:], rec.Own.Seq)
	le.PutUint64(b[40:], rec.Pair.Inc)
	le.PutUint64(b[48:], rec.Pair.Seq)
	le.PutUint64(b[56:], uint64(rec.Bytes))
	b[64], b[65], b[66], b[67] = byte(rec.Kind), byte(rec.Role), byte(rec.State), byte(rec.Residency)
	b[68], b[69], b[70], b[71] = byte(rec.Reason), byte(rec.Frame), byte(rec.End), byte(rec.Rung)
	text := b[fixedSize:]
	text[0] = uint8(copy(text[2:], peer))
	text[1] = uint8(copy(text[2+int(text[0]):], rec.Detail))
	number.Store(r.next)
	r.next++
}

// Close ends the recorder; the file stays.
func (r *File) Close() error { return unix.Munmap(r.mem) }

// Read reads the recorder of the engine whose runtime directory is dir; older: of the one before.
// fs.ErrNotExist when there is none.
func Read(dir string, older bool) (*Log, error) {
	path := filepath.Join(dir, name)
	if older {
		path = filepath.Join(dir, previous)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("flight recorder: %w", err)
	}
	defer f.Close()
	h := make([]byte, recordSize)
	if _, err := io.ReadFull(f, h); err != nil || string(h[:8]) != magic {
		return nil, fmt.Errorf("flight recorder: %s is none (or of another version of the engine)", path)
	}
	le := binary.LittleEndian
	records := le.Uint64(h[8:])
	if records < 1 || records > 1<<24 || int(h[32]) > recordSize-33 {
		return nil, fmt.Errorf("flight recorder: %s has a bad header", path)
	}
	l := &Log{Node: string(h[33 : 33+int(h[32])]), Incarnation: le.Uint64(h[16:]), Started: time.Unix(0, int64(le.Uint64(h[24:])))}
	first, last := uint64(0), uint64(0)
	numbers := map[uint64]Entry{} // a damaged record has no Kind
	b := make([]byte, recordSize)
	for at := uint64(0); at < records; at++ {
		if _, err := io.ReadFull(f, b); err != nil {
			break // the ring was never full, or its last record is cut
		}
		n := le.Uint64(b)
		if n == 0 || (n-1)%records != at {
			continue
		}
		numbers[n] = decode(b)
		last = max(last, n)
	}
	// From the newest back to where the ring ends or a record is missing.
	for first = last; first > 0; first-- {
		e, ok := numbers[first]
		if !ok {
			break
		}
		if e.Kind == 0 {
			l.Damaged++
			continue
		}
		l.Entries = append(l.Entries, e)
	}
	slices.Reverse(l.Entries)
	l.Lost = first
	return l, nil
}

// decode returns the zero Entry for a damaged record.
func decode(b []byte) Entry {
	le := binary.LittleEndian
	e := Entry{At: time.Unix(0, int64(le.Uint64(b[8:])))}
	r := &e.Record
	r.Room = int64(le.Uint64(b[16:]))
	r.Own = statemachine.Opener{Inc: le.Uint64(b[24:]), Seq: le.Uint64(b[32:])}
	r.Pair = statemachine.Opener{Inc: le.Uint64(b[40:]), Seq: le.Uint64(b[48:])}
	r.Bytes = int64(le.Uint64(b[56:]))
	r.Kind, r.Role, r.State = core.RecordKind(b[64]), statemachine.Role(b[65]), statemachine.State(b[66])
	r.Residency, r.Reason = statemachine.Residency(b[67]), statemachine.Reason(b[68])
	r.Frame, r.End, r.Rung = core.FrameKind(b[69]), core.EndKind(b[70]), statemachine.Rung(b[71])
	text := b[fixedSize:]
	p, d := int(text[0]), int(text[1])
	if 2+p+d > len(text) || !sane(r) {
		return Entry{}
	}
	e.Peer = string(text[2 : 2+p])
	r.Detail = strings.ToValidUTF8(string(text[2+p:2+p+d]), "") // it may have been cut
	return e
}

// sane reports whether the names of a record exist.
func sane(r *core.Record) bool {
	switch {
	case r.Kind < core.RecOpen || r.Kind > core.RecRung, r.Role != statemachine.Source && r.Role != statemachine.Destination,
		r.State >= statemachine.NumStates, r.Residency > statemachine.Released, r.Reason >= statemachine.NumReasons,
		r.Frame >= statemachine.NumFrameKinds, r.End > core.EndAborted, r.Rung >= core.NumRungs:
		return false
	case r.Kind == core.RecFrameIn || r.Kind == core.RecFrameOut:
		return r.Frame != 0
	case r.Kind == core.RecOpEnd:
		return r.End != 0
	}
	return true
}
