package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/internal/bench"
)

// TestBenchList: without a name the benchmarks are listed, and nothing is started.
func TestBenchList(t *testing.T) {
	code, out, errOut := command(t, nil, "bench")
	if code != exitOK || errOut != "" || strings.Count(out, "\n") != 1+len(bench.All()) {
		t.Errorf("exit %d\n%s%s", code, out, errOut)
	}
	code, out, _ = command(t, nil, "bench", "-o", "json")
	var listed struct{ Items []benchJSON }
	if err := json.Unmarshal([]byte(out), &listed); err != nil || code != exitOK || len(listed.Items) != len(bench.All()) {
		t.Errorf("exit %d, %v\n%s", code, err, out)
	}
	_, help, _ := command(t, nil, "bench", "--help")
	for _, b := range bench.All() {
		if !strings.Contains(help, "\n  "+b.Name+" ") {
			t.Errorf("the help does not name %s:\n%s", b.Name, help)
		}
	}
}

func TestBenchTable(t *testing.T) {
	ratio := func(v float64) *float64 { return &v }
	reference := &bench.Reference{Name: "bare gRPC stream", Value: 0.6}
	report := bench.Report{Results: []bench.Result{
		{Name: "event", Value: 0.4213, Unit: "µs", Better: bench.Lower, Reference: reference, Ratio: ratio(0.7021), Target: &bench.Target{Of: bench.OfValue, Limit: 0.5}},
		{Name: "trip", Value: 91.26, Unit: "µs", Better: bench.Lower, Reference: reference, Ratio: ratio(1.4), Target: &bench.Target{Of: bench.OfRatio, Limit: 1.3}, Note: "median"},
		{Name: "lives", Value: 812345.6, Unit: "rooms/s", Better: bench.Higher, Target: &bench.Target{Of: bench.OfValue, Limit: 500000}},
		{Name: "calls", Unit: "calls", Better: bench.Lower},
	}}
	var out bytes.Buffer
	a := newApp(&out, &out, nil)
	a.output = "table"
	if err := a.print(report, func(t *table) { benchRows(t, report) }); err != nil {
		t.Fatal(err)
	}
	golden(t, "bench_table", out.String())
}

// TestBenchJSON: the shape that scripts read, with null where there is no reference.
func TestBenchJSON(t *testing.T) {
	b, err := json.Marshal(bench.Report{Results: []bench.Result{{Name: "event", Value: 0.4, Unit: "µs", Better: bench.Lower}}})
	const want = `{"results":[{"name":"event","value":0.4,"unit":"µs","better":"lower","reference":null,"ratio":null}]}`
	if err != nil || string(b) != want {
		t.Errorf("%s, %v\nwant %s", b, err, want)
	}
}
