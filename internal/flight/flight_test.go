package flight

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func peerName(id core.PeerID) string {
	if id < 0 {
		return ""
	}
	return fmt.Sprint("node-", id)
}

func record(i int) core.Record {
	return core.Record{
		Kind: core.RecOpEnd, Role: statemachine.Destination, State: statemachine.Bound, Residency: statemachine.Armed, Reason: statemachine.Stalled, Rung: statemachine.Fence,
		Frame: core.FrameRegister, End: core.EndFailed, Peer: core.PeerID(i%3 - 1), Room: 1<<62 + int64(i), Own: statemachine.Opener{Inc: 7, Seq: uint64(i)},
		Pair: statemachine.Opener{Inc: 8, Seq: 9}, Bytes: int64(i), Detail: fmt.Sprint("detail ", i),
	}
}

// What was written is read, oldest first, however the steps cut it and whether or not the ring went
// round; the writer need not have closed the file.
func TestRing(t *testing.T) {
	for _, c := range []struct{ records, steps, each int }{{8, 0, 0}, {8, 1, 3}, {8, 2, 4}, {8, 3, 5}, {8, 1, 100}, {4096, 7, 1500}} {
		t.Run(fmt.Sprintf("%d of %d", c.steps*c.each, c.records), func(t *testing.T) {
			dir := t.TempDir()
			f, err := Create(dir, "node-a", 42, c.records)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			at := time.Now()
			for s := range c.steps {
				var recs []core.Record
				for i := range c.each {
					recs = append(recs, record(s*c.each+i))
				}
				if err := f.Add(at.Add(time.Duration(s)), recs, peerName); err != nil {
					t.Fatal(err)
				}
			}
			l, err := Read(dir, false)
			if err != nil {
				t.Fatal(err)
			}
			total := c.steps * c.each
			kept := min(total, c.records)
			if l.Node != "node-a" || l.Incarnation != 42 || time.Since(l.Started) > time.Minute || len(l.Entries) != kept || l.Lost != uint64(total-kept) {
				t.Fatalf("%q %d %v, %d entries, %d lost", l.Node, l.Incarnation, l.Started, len(l.Entries), l.Lost)
			}
			for i, e := range l.Entries {
				k := total - kept + i
				want := record(k)
				if e.Peer != peerName(want.Peer) || !e.At.Equal(at.Add(time.Duration(k/c.each))) {
					t.Fatalf("entry %d: peer %q at %v", k, e.Peer, e.At)
				}
				want.Peer = 0 // its name stands for it
				if e.Record != want {
					t.Fatalf("entry %d: %+v, want %+v", k, e.Record, want)
				}
			}
		})
	}
}

func TestPrevious(t *testing.T) {
	dir := t.TempDir()
	if _, err := Read(dir, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for inc := uint64(1); inc <= 3; inc++ {
		f, err := Create(dir, "n", inc, 8)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	for older, want := range map[bool]uint64{false: 3, true: 2} {
		if l, err := Read(dir, older); err != nil || l.Incarnation != want {
			t.Errorf("older=%v: %+v, %v", older, l, err)
		}
	}
	st, err := os.Stat(filepath.Join(dir, name))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

// A long text is cut inside its record.
func TestLongText(t *testing.T) {
	dir := t.TempDir()
	f, err := Create(dir, "n", 1, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := record(1)
	r.Detail = strings.Repeat("ä", 1000)
	peer := strings.Repeat("p", 63)
	if err := f.Add(time.Now(), []core.Record{r, record(2)}, func(core.PeerID) string { return peer }); err != nil {
		t.Fatal(err)
	}
	l, err := Read(dir, false)
	if err != nil || len(l.Entries) != 2 {
		t.Fatal(err, l)
	}
	if e := l.Entries[0]; e.Peer != peer || len(e.Detail) < 100 || strings.Trim(e.Detail, "ä") != "" || l.Entries[1].Detail != "detail 2" {
		t.Errorf("%q %q", e.Peer, e.Detail)
	}
}

// A record whose names do not exist was shown as one of an (invalid) role; it is left out and counted, and
// what stands before it is read all the same.
func TestDamagedRecordsAreLeftOut(t *testing.T) {
	frame := record(0)
	frame.Kind = core.RecFrameIn
	for what, damage := range map[string]func(b []byte){
		"kind 0": func(b []byte) { b[64] = 0 }, "kind": func(b []byte) { b[64] = 99 }, "role 0": func(b []byte) { b[65] = 0 }, "role": func(b []byte) { b[65] = 3 },
		"state": func(b []byte) { b[66] = 99 }, "residency": func(b []byte) { b[67] = 7 }, "reason": func(b []byte) { b[68] = 255 },
		"frame": func(b []byte) { b[69] = 99 }, "no frame": func(b []byte) { b[64], b[69] = byte(core.RecFrameIn), 0 },
		"end": func(b []byte) { b[70] = 5 }, "no end": func(b []byte) { b[70] = 0 }, "rung": func(b []byte) { b[71] = 6 }, "lengths": func(b []byte) { b[fixedSize] = 255 },
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			f, err := Create(dir, "n", 1, 8)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := f.Add(time.Now(), []core.Record{record(0), record(1), frame}, peerName); err != nil {
				t.Fatal(err)
			}
			damage(f.mem[2*recordSize : 3*recordSize])
			l, err := Read(dir, false)
			if err != nil || l.Damaged != 1 || l.Lost != 0 || len(l.Entries) != 2 || l.Entries[0].Detail != "detail 0" {
				t.Errorf("%+v, %v", l, err)
			}
		})
	}
}

// A file that somebody cut short is an error, and not the death of the engine.
func TestCutFile(t *testing.T) {
	dir := t.TempDir()
	f, err := Create(dir, "n", 1, 1024)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Add(time.Now(), []core.Record{record(1)}, peerName); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, name), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Add(time.Now(), []core.Record{record(2)}, peerName); err == nil || !strings.Contains(err.Error(), "cannot be written") {
		t.Errorf("%v", err)
	}
}

// Without space the recorder is refused at the start.
func TestNoSpace(t *testing.T) {
	dir := t.TempDir()
	if f, err := Create(dir, "n", 1, 1<<44/recordSize); err == nil {
		f.Close()
		t.Fatal("16 TiB were accepted")
	}
	if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file was left: %v", err)
	}
}

// Whatever stands in the file, Read returns, and what it returns can be said.
func FuzzRead(f *testing.F) {
	dir := f.TempDir()
	w, err := Create(dir, "node-a", 42, 4)
	if err != nil {
		f.Fatal(err)
	}
	for i := range 6 {
		if err := w.Add(time.Now(), []core.Record{record(i)}, peerName); err != nil {
			f.Fatal(err)
		}
	}
	w.Close()
	whole, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:recordSize+100])
	f.Add([]byte("TERMFLT1"))
	bad := append([]byte(nil), whole...)
	bad[recordSize+fixedSize], bad[2*recordSize+64] = 255, 255
	f.Add(bad)
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Read(dir, false)
		if err != nil {
			return
		}
		for i := range l.Entries {
			if e := &l.Entries[i]; strings.Contains(What(&e.Record, "")+e.State.String()+e.Role.String()+e.Residency.String()+e.Reason.String(), "invalid") && !strings.Contains(e.Detail, "invalid") {
				t.Fatalf("%+v", e)
			}
		}
	})
}

func BenchmarkAdd(b *testing.B) {
	f, err := Create(b.TempDir(), "n", 1, DefaultRecords)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	recs := make([]core.Record, 16)
	for i := range recs {
		recs[i] = record(i)
	}
	for b.Loop() {
		if err := f.Add(time.Now(), recs, peerName); err != nil {
			b.Fatal(err)
		}
	}
}
