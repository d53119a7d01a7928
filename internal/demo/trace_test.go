package demo

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

const goodLine = `{"timestamp": 3, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`

func TestReadTrace(t *testing.T) {
	reqs, err := ReadTrace(strings.NewReader(goodLine+"\n\n"+strings.Replace(goodLine, "3", "4", 1)+"\n"+goodLine), 2)
	if err != nil {
		t.Fatal(err)
	}
	if len(reqs) != 2 || reqs[1].Timestamp != 4 || reqs[0].InputLength != 600 || !slices.Equal(reqs[0].HashIDs, []int64{0, 1}) {
		t.Fatalf("%+v", reqs)
	}
}

func TestReadTraceNamesLineAndField(t *testing.T) {
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
		{"too long", goodLine, strings.Repeat(" ", maxTraceLine+1), "line 2: longer than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ReadTrace(strings.NewReader(goodLine+"\n"+strings.Replace(goodLine, c.replace, c.with, 1)), 10)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
		})
	}
	if _, err := ReadTrace(strings.NewReader("\n"), 10); err == nil {
		t.Fatal("an empty trace was accepted")
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add([]byte(goodLine))
	f.Add([]byte(`{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[9]}`))
	f.Add([]byte(`{"timestamp":1e99,"hash_ids":[[]]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		reqs, err := ReadTrace(bytes.NewReader(b), 100)
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

func TestGeneratedTraceFollowsThePublishedDistribution(t *testing.T) {
	reqs := GenerateTrace(4000, 3)
	var file bytes.Buffer
	if err := WriteTrace(&file, reqs); err != nil {
		t.Fatal(err)
	}
	if back, err := ReadTrace(&file, 4000); err != nil || len(back) != 4000 {
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
	if !slices.EqualFunc(reqs, GenerateTrace(4000, 3), func(a, b Request) bool {
		return a.Timestamp == b.Timestamp && slices.Equal(a.HashIDs, b.HashIDs)
	}) {
		t.Error("equal seeds make different traces")
	}
}

func TestSpreadStaysWithinTicks(t *testing.T) {
	burst := GenerateTrace(200, 1)
	spread := GenerateTrace(200, 1)
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
