package demo

import (
	"bytes"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/trace"
)

func TestDefaultPlanIsTheMainJob(t *testing.T) {
	d := Defaults()
	for seed := range uint64(5) {
		p, err := newPlan(planOptions{Rooms: d.Rooms, Bytes: d.Bytes, Seed: seed, AbortFraction: d.AbortFraction, Arrival: d.Arrival})
		if err != nil {
			t.Fatal(err)
		}
		s := p.summary()
		aborted := int64(0)
		for _, r := range p.Rooms {
			if r.Aborter != "" {
				aborted += int64(r.Moved()) * p.PageBytesAll()
			}
		}
		if s.Rooms < 1000 || s.Bytes-aborted < 2<<30 || 2*s.Several < s.Rooms || s.Empty == 0 || s.CachedPages == 0 || s.Aborts != 51 {
			t.Errorf("seed %d: %+v, %d bytes of aborted rooms", seed, s, aborted)
		}
		if p.poolBytes() > 2*maxPoolBytes {
			t.Errorf("seed %d: a pool of %d bytes", seed, p.poolBytes())
		}
	}
}

func TestPlanSaysWhatItMovesInstead(t *testing.T) {
	d := Defaults()
	for _, c := range []struct {
		rooms int
		bytes int64
		want  string
	}{
		{d.Rooms, d.Bytes, ""},
		{5000, 512 << 20, "asked to move 512.0 MiB, going to move 1.2"},
		{5000, 512 << 20, "a page has at least 512 B in each of 4 tensors; fewer --rooms move less"},
		{1, d.Bytes, "a page has at most 256.0 KiB in each of 4 tensors; more --rooms move more"},
		{80, 24 << 20, "rounded up to a multiple of 128 B, to"},
	} {
		p, err := newPlan(planOptions{Rooms: c.rooms, Bytes: c.bytes, Seed: d.Seed, AbortFraction: d.AbortFraction, Arrival: d.Arrival})
		if err != nil {
			t.Fatal(err)
		}
		got := p.sizeNote(c.bytes)
		t.Log(got)
		if !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("%d rooms, %d bytes: %q, want %q", c.rooms, c.bytes, got, c.want)
		}
	}
}

func TestPlanRefusesWhatDoesNotFit(t *testing.T) {
	_, err := planTrace([]trace.Request{{InputLength: trace.MaxTokens}}, planOptions{Bytes: maxBytes})
	if err == nil || !strings.Contains(err.Error(), "each worker would need a pool of 128.00 GiB") {
		t.Fatalf("got %v", err)
	}
	_, err = planTrace([]trace.Request{}, planOptions{Bytes: 1})
	if err == nil {
		t.Fatal("an empty trace was planned")
	}
}

func TestPlanSharesPrefixes(t *testing.T) {
	reqs, err := trace.Read(strings.NewReader(`{"timestamp":0,"input_length":1100,"output_length":1,"hash_ids":[0,1,2]}
{"timestamp":1,"input_length":1600,"output_length":1,"hash_ids":[0,1,3,4]}
{"timestamp":2,"input_length":1600,"output_length":1,"hash_ids":[0,1,3,4]}
{"timestamp":3,"input_length":600,"output_length":1,"hash_ids":[0,2]}
{"timestamp":4,"input_length":500,"output_length":1,"hash_ids":[0]}
`), 10)
	if err != nil {
		t.Fatal(err)
	}
	p, err := planTrace(reqs, planOptions{Bytes: 1 << 20, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	r := p.Rooms
	a, b := r[0].ID, r[1].ID
	for i, want := range []struct {
		pages, cached, keep int
		prefix              []Share
	}{
		{18, 0, 16, nil},
		{25, 16, 25, []Share{{a, 16}}},
		{25, 25, 0, []Share{{a, 16}, {b, 9}}}, // an exact repeat: zero pages move
		{10, 8, 0, []Share{{a, 8}}},           // id 2 stood for another place
		{8, 0, 0, nil},                        // and id 0 for 512 tokens
	} {
		got := r[i]
		if got.Pages != want.pages || got.Cached != want.cached || got.Keep != want.keep || !reflect.DeepEqual(got.Prefix, want.prefix) {
			t.Errorf("room %d: %+v, want %+v", i, got, want)
		}
	}
	if len(r[2].Chunks) != 0 || r[2].Moved() != 0 {
		t.Errorf("chunks of the repeat: %v", r[2].Chunks)
	}
	if r[2].Owner(15) != a || r[2].Owner(16) != b || r[0].Owner(3) != a {
		t.Error("Owner names the wrong room")
	}
}

func TestPlanFileRoundTrip(t *testing.T) {
	p := testPlan(t, 50)
	var b bytes.Buffer
	if err := p.write(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	back, err := readPlan(&b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back.PlanHeader, p.PlanHeader) || len(back.Rooms) != len(p.Rooms) || back.Rooms[7].ID != p.Rooms[7].ID {
		t.Fatal("the plan changed on its way")
	}
	for _, c := range []struct{ replace, with, want string }{
		{`"version":1`, `"version":2`, "line 1: version 2"},
		{`"rooms":50`, `"rooms":0`, "line 1: rooms 0"},
		{`"rooms":50`, `"rooms":51`, "line 52"},
		{`"page_bytes":`, `"page_bytes":9999`, "line 1: page_bytes"},
		{`"pool_pages":4200`, `"pool_pages":-1`, "line 1: page_tokens"},
		{`"cached":0`, `"cached":-1`, "line 2: room"},
		{`"at_us":0`, `"at_us":-1`, "out of range"},
	} {
		if _, err := readPlan(strings.NewReader(strings.Replace(text, c.replace, c.with, 1))); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.with, err, c.want)
		}
	}
}

func FuzzReadPlan(f *testing.F) {
	f.Add([]byte(`{"version":1,"page_tokens":64,"block_pages":8,"tensors":4,"page_bytes":512,"pool_pages":10,"rooms":1}
{"room":1,"pages":1,"chunks":[1]}`))
	f.Add([]byte(`{"version":1,"rooms":100000}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := readPlan(bytes.NewReader(b))
		if err == nil && len(p.Rooms) != p.Count {
			t.Fatalf("%d rooms, header says %d", len(p.Rooms), p.Count)
		}
	})
}

// A pipe that --schedule named was waited for, for ever.
func TestScheduleThatIsNoFile(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	o := WorkerDefaults()
	o.Role, o.Socket, o.Schedule = RolePrefill, "none", pipe
	got := make(chan error, 1)
	go func() { got <- Worker(t.Context(), o) }()
	select {
	case err := <-got:
		if err == nil || !strings.Contains(err.Error(), "schedule: open "+pipe+": it is no regular file") {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a pipe is waited for")
	}
}

func TestOptionsAreChecked(t *testing.T) {
	o := Defaults()
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	o.Rooms, o.Bytes, o.AbortFraction, o.Arrival, o.Output, o.Plugin, o.Ranks, o.Deadline = 0, 0, 2, "x", "yaml", "tcp", "2", 0
	_, err := Run(t.Context(), o)
	for _, want := range []string{"--rooms", "--bytes", "--abort-fraction", "--arrival", "-o", "--plugin", "--ranks", "--deadline"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named in %v", want, err)
		}
	}
	w := WorkerDefaults()
	w.Quiet, w.Size = 0, 2
	err = Worker(t.Context(), w)
	for _, want := range []string{"--role", "--socket", "--size", "--quiet"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not named in %v", want, err)
		}
	}
}

func FuzzPlanTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 3, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`))
	f.Add([]byte(`{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[9]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		reqs, err := trace.Read(bytes.NewReader(b), 100)
		if err != nil {
			return
		}
		p, err := planTrace(reqs, planOptions{Bytes: 1 << 20, AbortFraction: 1})
		if err != nil {
			return // nothing to move
		}
		var out bytes.Buffer
		if err := p.write(&out); err != nil {
			t.Fatal(err)
		}
		if _, err := readPlan(&out); err != nil {
			t.Fatalf("a plan that was made cannot be read: %v", err)
		}
	})
}
