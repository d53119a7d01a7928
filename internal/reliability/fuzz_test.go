package reliability

import "testing"

func TestReadFuzz(t *testing.T) {
	const out = `fuzz: elapsed: 0s, gathering baseline coverage: 0/134 completed
fuzz: elapsed: 1s, gathering baseline coverage: 134/134 completed, now fuzzing with 2 workers
fuzz: elapsed: 3s, execs: 73214 (24402/sec), new interesting: 2 (total: 136)
fuzz: elapsed: 6s, execs: 150310 (25698/sec), new interesting: 5 (total: 139)
fuzz: elapsed: 6s, execs: 150311 (0/sec), new interesting: 5 (total: 139)
PASS
ok  	github.com/terminus-kv/terminus/core	6.1s
`
	got := Target{Package: "core", Name: "FuzzMachine"}
	if err := ReadFuzz(out, true, &got); err != nil {
		t.Fatal(err)
	}
	if want := (Target{Package: "core", Name: "FuzzMachine", Seconds: 6, Execs: 150311, Corpus: 139}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if err := ReadFuzz("ok  	core	0.1s [no tests to run]\n", true, &got); err == nil {
		t.Error("a fuzzer that never ran has a result")
	}
	for _, c := range []struct {
		end    string
		failed bool
	}{
		{"--- FAIL: FuzzMachine (6.0s)\n    context deadline exceeded\nFAIL\nexit status 1\nFAIL\tcore\t6.1s\n", false},
		{"--- FAIL: FuzzMachine (6.0s)\n    --- FAIL: FuzzMachine (0.00s)\n        fuzz_test.go:9: context deadline exceeded\n    Failing input written to testdata/fuzz/FuzzMachine/0a\n", true},
		{"--- FAIL: FuzzMachine (6.0s)\n    fuzzing process hung or terminated unexpectedly: exit status 2\n", true},
	} {
		if err := ReadFuzz(out+c.end, false, &got); err != nil || got.Failed != c.failed {
			t.Errorf("failed is %v (%v) after:\n%s", got.Failed, err, c.end)
		}
	}
}
