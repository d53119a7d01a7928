package demo

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// maxRanks bounds the ranks of a side: every one is a process with a pool of its own.
const maxRanks = 8

// ranksOf reads --ranks, as prefill:decode.
func ranksOf(text string) (n [2]int, err error) {
	parts := strings.Split(text, ":")
	if len(parts) == len(n) {
		for i, p := range parts {
			if n[i], err = strconv.Atoi(p); err != nil || n[i] < 1 || n[i] > maxRanks {
				parts = nil
			}
		}
	}
	if len(parts) != len(n) {
		return [2]int{1, 1}, fmt.Errorf("--ranks %q: must be two numbers between 1 and %d, such as 2:4", text, maxRanks)
	}
	return n, nil
}

// headsFor is the fewest heads that both numbers of ranks divide.
func headsFor(n [2]int) int {
	heads := n[0]
	for heads%n[1] != 0 {
		heads += n[0]
	}
	return heads
}

// ofRank is what one of so many ranks has of the model: its share of the heads.
func (h PlanHeader) ofRank(size int) PlanHeader {
	h.PageBytes /= size
	h.Heads /= size
	return h
}

// ranks puts what the workers of one side report together, so that the rest of the demo sees one worker of the
// whole model: a room has ended when it has at every rank, and succeeded when it has at every rank.
type ranks struct {
	lines    []rankLines
	attempts map[attemptID]*rankAttempt
}

// rankLines is what one rank said last.
type rankLines struct {
	ready         bool
	progress, end report
	ended         bool
}

// rankAttempt is one attempt, as far as ranks have reported it.
type rankAttempt struct {
	opened      bool
	said        bool // that it has ended
	ended, room int  // ranks
	sum         [2]report
}

// several says that there is more than one.
func (r *ranks) several() bool { return len(r.lines) > 1 }

func newRanks(n int) *ranks {
	return &ranks{lines: make([]rankLines, n), attempts: make(map[attemptID]*rankAttempt)}
}

// add takes a line of a rank. It returns what that comes to for the side; false: nothing as yet.
func (r *ranks) add(rank int, line report) (report, bool) {
	if !r.several() {
		return line, true
	}
	switch l := &r.lines[rank]; line.T {
	case "ready":
		l.ready = true
		for i := range r.lines {
			if !r.lines[i].ready {
				return report{}, false
			}
		}
	case "progress":
		l.progress = line
		for i := range r.lines {
			if p := r.lines[i].progress; i != rank {
				line.Done = min(line.Done, p.Done)
				line.Bytes += p.Bytes
				line.Written += p.Written
			}
		}
	case "end":
		l.end, l.ended = line, true
		return r.end()
	case "open", "ended", "room":
		return r.attempt(line)
	}
	return line, true
}

// end is the last line of a side: when all ranks have said theirs, or one says that it went wrong.
func (r *ranks) end() (report, bool) {
	sum, all := report{T: "end"}, true
	var failed []error
	for i := range r.lines {
		l := &r.lines[i]
		all = all && l.ended
		sum.Leaked += l.end.Leaked
		sum.Written += l.end.Written
		sum.Pages += l.end.Pages
		sum.Runs += l.end.Runs
		if l.end.Error != "" {
			failed = append(failed, fmt.Errorf("rank %d: %s", i, l.end.Error))
		}
	}
	if err := errors.Join(failed...); err != nil {
		sum.Error = err.Error()
	}
	return sum, all || sum.Error != ""
}

// attempt takes a line about a room. It counts as opened with the first rank: from then on the death of the
// workers ends it. It counts as ended when one rank says that it failed, so that the router aborts it at the others.
func (r *ranks) attempt(line report) (report, bool) {
	a := r.attempts[line.id()]
	if a == nil {
		a = &rankAttempt{}
		r.attempts[line.id()] = a
	}
	switch line.T {
	case "open":
		first := !a.opened
		a.opened = true
		return line, first
	case "ended":
		a.ended++
		a.sum[0] = together(a.sum[0], line)
		first := !a.said && (a.ended == len(r.lines) || line.Status == statusFailed)
		a.said = a.said || first
		return a.sum[0], first
	}
	a.room++
	a.sum[1] = together(a.sum[1], line)
	if a.room < len(r.lines) {
		return report{}, false
	}
	delete(r.attempts, line.id())
	return a.sum[1], true
}

// together adds the line of one more rank to those of others. Of ranks that saw different ends the worst counts: not
// ended, then failed.
func together(sum, line report) report {
	if sum.T == "" {
		return line
	}
	worse, better := sum, line
	if sum.terminal() && (!line.terminal() || sum.Status == statusSuccess) {
		worse, better = line, sum
	}
	out := worse
	out.split = sum.split || line.split || worse.Status == statusFailed && better.Status == statusSuccess &&
		worse.Reason != reasonEngineLost && worse.Reason != reasonOutcomeUnknown && line.T == "room"
	out.Opened = min(sum.Opened, line.Opened)
	out.Ended = max(sum.Ended, line.Ended)
	out.Bytes = sum.Bytes + line.Bytes
	out.Mismatched = sum.Mismatched + line.Mismatched
	out.BadAux = sum.BadAux || line.BadAux
	out.NoAux = sum.NoAux || line.NoAux
	out.Asked = sum.Asked || line.Asked
	if better.Asked && better.Status == worse.Status {
		out.Reason, out.Detail = better.Reason, better.Detail
	}
	return out
}
