package conformance

import (
	"fmt"
	"slices"
	"strings"
)

// Match tells whether a pattern matches a case id. Both are words between slashes; "*" in the pattern stands
// for any text within a word, "**" as a word for any number of words.
func Match(pattern, id string) bool {
	return matchWords(strings.Split(pattern, "/"), strings.Split(id, "/"))
}

func matchWords(pattern, words []string) bool {
	if len(pattern) == 0 {
		return len(words) == 0
	}
	if pattern[0] == "**" {
		return matchWords(pattern[1:], words) || len(words) > 0 && matchWords(pattern, words[1:])
	}
	return len(words) > 0 && matchWord(pattern[0], words[0]) && matchWords(pattern[1:], words[1:])
}

func matchWord(pattern, word string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == word
	}
	if !strings.HasPrefix(word, head) {
		return false
	}
	for i := len(head); i <= len(word); i++ {
		if matchWord(rest, word[i:]) {
			return true
		}
	}
	return false
}

type selected struct {
	Case
	skip  string // why it does not run
	known bool
}

func matchesAny(patterns []string, id string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return Match(p, id) })
}

// selection applies Profiles, Run, Skip and KnownFailing. A pattern of Run or Skip that matches no case is
// an error: most likely a typing mistake, which must not look like a run in which nothing failed.
func (cfg *Config) selection() (list []selected, err error) {
	for _, p := range cfg.Profiles {
		if !slices.Contains(Profiles(), p) {
			return nil, fmt.Errorf("unknown profile %q; the profiles are %s", p, profileList())
		}
	}
	for _, p := range slices.Concat(cfg.Run, cfg.Skip) {
		if !slices.ContainsFunc(registry, func(c Case) bool { return Match(p, c.ID) }) {
			return nil, fmt.Errorf("pattern %q matches no case; `engine conformance list` shows their ids", p)
		}
	}
	for _, c := range Cases() {
		s := selected{Case: c, known: matchesAny(cfg.KnownFailing, c.ID)}
		switch {
		case len(cfg.Profiles) > 0 && !slices.Contains(cfg.Profiles, c.Profile):
			s.skip = "its profile was not asked for"
		case len(cfg.Run) > 0 && !matchesAny(cfg.Run, c.ID):
			s.skip = "it was not asked for"
		case matchesAny(cfg.Skip, c.ID):
			s.skip = "it was to be skipped"
		}
		list = append(list, s)
	}
	if !slices.ContainsFunc(list, func(s selected) bool { return s.skip == "" }) {
		return nil, cfg.nothingLeft()
	}
	return list, nil
}

// nothingLeft is the error of a selection that leaves out every case: a run of nothing must not look like one in
// which nothing failed.
func (cfg *Config) nothingLeft() error {
	for _, p := range cfg.Profiles {
		if !slices.ContainsFunc(registry, func(c Case) bool { return c.Profile == p }) {
			return fmt.Errorf("no case is left to run: profile %s has no cases in this version of the suite", p)
		}
	}
	return fmt.Errorf("no case is left to run: profiles, run and skip together leave out all %d", len(registry))
}

// NothingRan says why no case met the plugin: each that was chosen needs something that is not here. "" when one did.
func (r *Results) NothingRan() (why string) {
	for _, c := range r.Cases {
		switch {
		case c.Outcome >= Passed || len(c.Trace) > 0:
			return ""
		case c.Outcome == Unsupported:
			why = c.Why()
		}
	}
	return why
}

// unmatched names the known-failing patterns that match no case.
func (cfg *Config) unmatched() (problems []string) {
	for _, p := range cfg.KnownFailing {
		if !slices.ContainsFunc(registry, func(c Case) bool { return Match(p, c.ID) }) {
			problems = append(problems, fmt.Sprintf("known-failing pattern %q matches no case; take it out of the list", p))
		}
	}
	return problems
}

// idle names the known-failing patterns none of whose cases ran, and why the last of them did not. That is no problem, since
// one list may serve machines with a GPU and without.
func (cfg *Config) idle(results []*Result) (notes []string) {
	for _, p := range cfg.KnownFailing {
		ran, reason := false, ""
		for _, r := range results {
			if Match(p, r.Case.ID) {
				ran, reason = ran || r.Outcome >= Passed, r.Why()
			}
		}
		if !ran && reason != "" {
			notes = append(notes, fmt.Sprintf("known-failing pattern %q did not run here: %s", p, reason))
		}
	}
	return notes
}

func profileList() string {
	var names []string
	for _, p := range Profiles() {
		names = append(names, string(p))
	}
	return strings.Join(names, ", ")
}
