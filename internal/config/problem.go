package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	Source Source
	Key    string // full key, empty when the file as a whole is meant
	Msg    string // what is wrong
	Fix    string // what to write instead
}

// String is one line: place: key: what is wrong; fix: what to do.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.Source.String())
	if p.Key != "" {
		b.WriteString(": " + p.Key)
	}
	b.WriteString(": " + p.Msg)
	if p.Fix != "" {
		b.WriteString("; fix: " + p.Fix)
	}
	return b.String()
}

// Problems is the error of Load: every problem of every source.
type Problems []Problem

// Error writes one problem a line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

func (ps *Problems) add(src Source, key, msg, fix string) {
	*ps = append(*ps, Problem{Source: src, Key: key, Msg: msg, Fix: fix})
}

// has reports whether a problem is at key or below it.
func (ps Problems) has(key string) bool {
	for _, p := range ps {
		if rest, ok := strings.CutPrefix(p.Key, key); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return true
		}
	}
	return false
}

// sorted orders problems as a reader meets them: files in the order given, by line, then the variables,
// the flags and the defaults.
func (ps Problems) sorted(files []string) Problems {
	rank := func(s Source) int {
		switch s.Kind {
		case FromFile:
			return slices.Index(files, s.Name)
		case FromEnv:
			return len(files)
		case FromFlag:
			return len(files) + 1
		}
		return len(files) + 2
	}
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(
			cmp.Compare(rank(a.Source), rank(b.Source)),
			cmp.Compare(a.Source.Line, b.Source.Line),
			cmp.Compare(a.Source.Col, b.Source.Col),
			cmp.Compare(a.Source.Name, b.Source.Name),
			cmp.Compare(a.Key, b.Key),
		)
	})
	return ps
}

// Suggest returns the candidate nearest to word, or "" when none is near.
func Suggest(word string, candidates []string) string {
	best, bestD := "", 3
	if len(word) <= 3 {
		bestD = 2
	}
	for _, c := range candidates {
		if strings.EqualFold(word, c) {
			return c
		}
		if d := distance(strings.ToLower(word), c); d < bestD {
			best, bestD = c, d
		}
	}
	return best
}

// distance is the edit distance of two words, a swap of neighbours counting as one edit. Words
// longer than 64 bytes are far from everything.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, rows[i-2][j-2]+1)
			}
			rows[i][j] = d
		}
	}
	return rows[len(a)][len(b)]
}

// didYouMean turns a suggestion into a fix; otherwise lists what there is.
func didYouMean(word string, candidates []string) string {
	if s := Suggest(word, candidates); s != "" {
		return fmt.Sprintf("did you mean %q?", s)
	}
	return "use one of: " + strings.Join(candidates, ", ")
}

// ProblemAt is a problem of a key, at the place that set it or, if none did, at the nearest mapping around
// it. For what only others can judge, such as the options of a plugin.
func (c *Config) ProblemAt(key, msg, fix string) Problem {
	return Problem{Source: c.sourceOf(key), Key: key, Msg: msg, Fix: fix}
}

// Sorted puts problems in the order of the sources that were given to Load.
func (ps Problems) Sorted(files []string) Problems { return ps.sorted(files) }
