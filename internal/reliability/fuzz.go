package reliability

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Fuzz is the result of `make fuzz`: every fuzzer of the module, each for a while.
type Fuzz struct {
	Version string    `json:"version"` // of the program, as git describes it
	Command string    `json:"command"` // that does the same again
	Began   time.Time `json:"began"`
	Targets []Target  `json:"targets"`
}

// Target is what one fuzzer did.
type Target struct {
	Package string  `json:"package"` // below the module, such as internal/peer
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
	Execs   int64   `json:"execs"`
	Corpus  int     `json:"corpus"` // inputs that each reach code of their own
	Failed  bool    `json:"failed"`
}

var fuzzLine = regexp.MustCompile(`(?m)^fuzz: elapsed: (\S+), (?:gathering baseline|execs: (\d+) \(.*?\)(?:, new interesting: \d+ \(total: (\d+)\))?)`)

var timeIsUp = regexp.MustCompile(`(?m)^--- FAIL: \S+ \(\S+\)\n +context deadline exceeded\n(?:FAIL|exit status)`)

// ReadFuzz takes a target's figures from what go test -fuzz printed: the last line of progress. ok is go
// test's exit. An end by nothing but the fuzzer's own time is none of the target's: Go up to 1.27 may report
// it as a failure (golang/go#75804).
func ReadFuzz(out string, ok bool, t *Target) error {
	all := fuzzLine.FindAllStringSubmatch(out, -1)
	if len(all) == 0 {
		return fmt.Errorf("%s %s: go test printed no line of progress:\n%s", t.Package, t.Name, out)
	}
	t.Failed = !ok && !timeIsUp.MatchString(out)
	last := all[len(all)-1]
	took, err := time.ParseDuration(last[1])
	if err != nil {
		return fmt.Errorf("%s %s: elapsed: %w", t.Package, t.Name, err)
	}
	t.Seconds = took.Seconds()
	t.Execs, _ = strconv.ParseInt(last[2], 10, 64) // digits, or nothing when the time went to what was kept before
	for _, l := range all {
		if n, err := strconv.Atoi(l[3]); err == nil { // the last line may lack it
			t.Corpus = n
		}
	}
	return nil
}

func (f *Fuzz) render(b *strings.Builder) {
	b.WriteString(`
## Fuzzing

Every decoder of bytes from outside, and the core itself, under coverage-guided fuzzing. A run begins with the inputs that
earlier ones kept (` + "`testdata/fuzz`" + `).

| fuzzer | seconds | inputs tried | inputs kept | failures |
|---|---|---|---|---|
`)
	var execs int64
	for _, t := range f.Targets {
		failed := 0
		if t.Failed {
			failed = 1
		}
		fmt.Fprintf(b, "| `%s %s` | %.0f | %d | %d | %d |\n", t.Package, t.Name, t.Seconds, t.Execs, t.Corpus, failed)
		execs += t.Execs
	}
	fmt.Fprintf(b, "\n%d inputs in all; version %s, %s; again: `%s`.\n", execs, f.Version, f.Began.Format(time.DateOnly), f.Command)
}
