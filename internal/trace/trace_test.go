package trace

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const goodLine = `{"timestamp": 3, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`

func TestRead(t *testing.T) {
	reqs, err := Read(strings.NewReader(goodLine+"\n\n"+strings.Replace(goodLine, "3", "4", 1)+"\n"+goodLine), 2)
	if err != nil {
		t.Fatal(err)
	}
	if len(reqs) != 2 || reqs[1].Timestamp != 4 || reqs[0].InputLength != 600 || !slices.Equal(reqs[0].HashIDs, []int64{0, 1}) {
		t.Fatalf("%+v", reqs)
	}
}

func TestReadNamesLineAndField(t *testing.T) {
	for _, c := range []struct{ name, replace, with, want string }{
		{"not JSON", goodLine, `{`, "line 2: not a JSON object"},
		{"a list", goodLine, `[1]`, "line 2: not a JSON object"},
		{"missing field", `"timestamp"`, `"time"`, "line 2: timestamp: missing"},
		{"missing ids", `"hash_ids"`, `"ids"`, "line 2: hash_ids: missing"},
		{"text for a number", `600`, `"600"`, "line 2: input_length: is a string, must be an integer"},
		{"fraction", `600`, `600.5`, "line 2: input_length: is a number 600.5, must be an integer"},
		{"text for a list", `[0, 1]`, `"0"`, "line 2: hash_ids: is a string, must be an integer list"},
		{"zero tokens", `600`, `0`, "line 2: input_length: 0 is not between 1 and"},
		{"too many tokens", `600`, `4194305`, "line 2: input_length: 4194305 is not between"},
		{"negative answer", `5`, `-5`, "line 2: output_length: -5 is not between 0"},
		{"too few ids", `[0, 1]`, `[0]`, "line 2: hash_ids: 1 ids, but input_length 600 makes 2 blocks"},
		{"negative id", `[0, 1]`, `[0, -1]`, "line 2: hash_ids[1]: -1 is negative"},
		{"back in time", `3`, `2`, "line 2: timestamp: 2 is before the 3"},
		{"too long", goodLine, strings.Repeat(" ", maxLine+1), "line 2: longer than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Read(strings.NewReader(goodLine+"\n"+strings.Replace(goodLine, c.replace, c.with, 1)), 10)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
		})
	}
	if _, err := Read(strings.NewReader("\n"), 10); err == nil {
		t.Fatal("an empty trace was accepted")
	}
}

func TestGeneratedTraceFollowsThePublishedDistribution(t *testing.T) {
	reqs := Generate(4000, 3)
	var file bytes.Buffer
	if err := Write(&file, reqs); err != nil {
		t.Fatal(err)
	}
	if back, err := Read(&file, 4000); err != nil || len(back) != 4000 {
		t.Fatalf("what is generated cannot be read: %v", err)
	}
	lengths := make([]int, len(reqs))
	seen := map[int64]bool{}
	blocks, hits, shared := 0, 0, 0
	for i, r := range reqs {
		lengths[i] = r.InputLength
		own := 0
		for _, id := range r.HashIDs {
			if seen[id] {
				own++
			}
			seen[id] = true
		}
		blocks += len(r.HashIDs)
		hits += own
		if own > 1 {
			shared++
		}
	}
	slices.Sort(lengths)
	within := func(name string, got, want, tolerance float64) {
		if got < want*(1-tolerance) || got > want*(1+tolerance) {
			t.Errorf("%s is %.3f, published is %.3f", name, got, want)
		}
	}
	within("p50", float64(lengths[2000]), 6909, 0.1)
	within("p90", float64(lengths[3600]), 27367, 0.1)
	within("p99", float64(lengths[3960]), 85401, 0.2)
	within("share of requests with more than one cached block", float64(shared)/4000, 0.387, 0.1)
	within("share of blocks that are cached", float64(hits)/float64(blocks), 0.366, 0.3)
	if !slices.EqualFunc(reqs, Generate(4000, 3), func(a, b Request) bool {
		return a.Timestamp == b.Timestamp && slices.Equal(a.HashIDs, b.HashIDs)
	}) {
		t.Error("equal seeds make different traces")
	}
}

func TestSpreadStaysWithinTicks(t *testing.T) {
	burst := Generate(200, 1)
	spread := Generate(200, 1)
	Spread(spread, 1)
	different := 0
	for i := range burst {
		d := spread[i].Timestamp - burst[i].Timestamp
		if d < 0 || d >= tickMillis {
			t.Fatalf("request %d moved by %d ms", i, d)
		}
		if d > 0 {
			different++
		}
		if i > 0 && spread[i].Timestamp < spread[i-1].Timestamp {
			t.Fatalf("request %d is out of order", i)
		}
	}
	if different < 150 {
		t.Fatalf("only %d requests moved", different)
	}
}

// TestSpreadLeavesRealTimesAlone: a trace whose times are finer than ticks is replayed as it is.
func TestSpreadLeavesRealTimesAlone(t *testing.T) {
	reqs := []Request{{Timestamp: 0}, {Timestamp: 0}, {Timestamp: 3000}, {Timestamp: 3017}}
	want := slices.Clone(reqs)
	if Spread(reqs, 1) || !slices.EqualFunc(reqs, want, func(a, b Request) bool { return a.Timestamp == b.Timestamp }) {
		t.Fatalf("%v", reqs)
	}
}

func TestUncached(t *testing.T) {
	reqs := []Request{
		{InputLength: 1100, HashIDs: []int64{0, 1, 2}},
		{InputLength: 1600, HashIDs: []int64{0, 1, 3, 4}},
		{InputLength: 1600, HashIDs: []int64{0, 1, 3, 4}}, // an exact repeat
		{InputLength: 700, HashIDs: []int64{7, 1}},        // id 1 with another prefix: nothing of it is of use
		{InputLength: 512, HashIDs: []int64{0}},
	}
	if got, want := Uncached(reqs), []int{1100, 576, 0, 700, 0}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestLoad(t *testing.T) {
	if reqs, err := Load("", 7, 1); err != nil || len(reqs) != 7 {
		t.Errorf("%d requests, %v", len(reqs), err)
	}
	file := filepath.Join(t.TempDir(), "trace")
	if _, err := Load(file, 7, 1); err == nil || !strings.Contains(err.Error(), "trace: open "+file) {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(file, []byte(goodLine+"\nx\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(file, 7, 1); err == nil || !strings.HasPrefix(err.Error(), "trace "+file+": line 2: ") {
		t.Errorf("a bad line: %v", err)
	}
	if reqs, err := Load(file, 1, 1); err != nil || len(reqs) != 1 {
		t.Errorf("%d requests, %v", len(reqs), err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(goodLine))
	f.Add([]byte(`{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[9]}`))
	f.Add([]byte(`{"timestamp":1e99,"hash_ids":[[]]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		reqs, err := Read(bytes.NewReader(b), 100)
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := Write(&out, reqs); err != nil {
			t.Fatal(err)
		}
		if back, err := Read(&out, 100); err != nil || len(back) != len(reqs) {
			t.Fatalf("what was read cannot be written and read again: %d of %d requests, %v", len(back), len(reqs), err)
		}
		Spread(reqs, 1)
		for i, n := range Uncached(reqs) {
			if n < 0 || n > reqs[i].InputLength {
				t.Fatalf("request %d of %d tokens needs %d", i, reqs[i].InputLength, n)
			}
		}
	})
}
