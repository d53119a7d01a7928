package demo

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// incidentSteps are the twelve steps of the silent inflight pin. Both replays take them in this order.
var incidentSteps = [12]string{
	"the source opens the room",
	"the destination opens it",
	"the two bind",
	"send(chunk 0), not the last",
	"a thread is inside its write",
	"ABORT arrives",
	"the status becomes Failed",
	"the transfer info is dropped",
	"the write returns",
	"the thread reports progress",
	"send(last chunk)",
	"the inflight queue polls",
}

// incidentPoll is how long the last step polls where nothing ends it: "for ever", on a demo's budget.
const incidentPoll = time.Second

// incident is the outcome of one replay.
type incident struct {
	status  [12]string // the source's status after each step
	note    [12]string
	pinned  bool
	polls   int
	verdict string // of ours: the reason
}

// The values of a status table that merges with max().
const (
	pollFailed = iota
	pollBootstrapping
	pollWaitingForInput
	pollTransferring
	pollSuccess
)

var pollNames = [...]string{"Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"}

// maxTable is a status table as the incident's backend had it, no more and no less than these rules:
// a status other than Failed is merged by max(), an abort sets Failed and drops the transfer info, a
// chunk whose transfer info is gone is skipped, and nobody has a deadline.
type maxTable struct {
	mu     sync.Mutex
	status map[int64]int
	info   map[int64]bool // where to write to; learnt at bind
}

func (t *maxTable) update(room int64, status int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if status != pollFailed {
		status = max(t.status[room], status)
	}
	t.status[room] = status
}

func (t *maxTable) poll(room int64) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.status[room]
}

func (t *maxTable) bind(room int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.info[room] = true
}

func (t *maxTable) bound(room int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.info[room]
}

func (t *maxTable) abort(room int64) {
	t.update(room, pollFailed)
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.info, room)
}

// transfer is what a worker thread does with one chunk; write is the RDMA write.
func (t *maxTable) transfer(room int64, last bool, write func()) {
	if !t.bound(room) {
		return // skipped, without a word
	}
	write()
	if last {
		t.update(room, pollSuccess)
	} else {
		t.update(room, pollTransferring)
	}
}

// replayMax takes the steps under max()-merge rules.
func replayMax(pollFor time.Duration) incident {
	const room = 42
	var in incident
	t := &maxTable{status: map[int64]int{}, info: map[int64]bool{}}
	step := 0
	done := func(note string) {
		in.status[step], in.note[step] = pollNames[t.poll(room)], note
		step++
	}

	t.update(room, pollBootstrapping)
	done("")
	done("")
	t.bind(room)
	t.update(room, pollWaitingForInput)
	done("")

	inside, finish, returned := make(chan struct{}), make(chan struct{}), make(chan struct{})
	thread := func() {
		defer close(returned)
		t.transfer(room, false, func() {
			close(inside)
			<-finish
		})
	}
	go thread()
	done("")
	<-inside
	done("")
	done("")
	t.abort(room)
	done("")
	done("what a later chunk would need")
	close(finish)
	<-returned
	// The thread has written by the time it is back: steps 9 and 10 are one call here.
	in.status[step], in.note[step] = pollNames[pollFailed], ""
	step++
	done("max(0, 3) = 3: the room is back from the dead")
	t.transfer(room, true, func() {})
	done("no transfer info: skipped without a word")

	for end := time.Now().Add(pollFor); time.Now().Before(end); in.polls++ {
		if s := t.poll(room); s == pollFailed || s == pollSuccess {
			break
		}
		time.Sleep(time.Millisecond)
	}
	s := t.poll(room)
	in.pinned = s != pollFailed && s != pollSuccess
	done(fmt.Sprintf("%d polls in %.1f s, and nothing will ever write again", in.polls, pollFor.Seconds()))
	return in
}

// print shows one replay as a story.
func (in *incident) print(w io.Writer, title string) {
	fmt.Fprintf(w, "%s\n", title)
	for i, what := range incidentSteps {
		fmt.Fprintf(w, "  %2d  %-30s %-16s %s\n", i+1, what, in.status[i], in.note[i])
	}
}

// playIncident replays both ways and says what came out. The error means that a replay did not come
// out as it has to.
func playIncident(w io.Writer) error {
	theirs := replayMax(incidentPoll)
	theirs.print(w, "The silent inflight pin, under max()-merge rules (source's status after each step)")
	if !theirs.pinned {
		return fmt.Errorf("the incident's rules ended the room as %s; it should be pinned", theirs.status[11])
	}
	fmt.Fprintf(w, "  => PINNED: the room is %s for ever, its pages are held, the client hangs.\n\n", theirs.status[11])

	ours, err := replayCore()
	if err != nil {
		return fmt.Errorf("replay under the engine's rules: %w", err)
	}
	ours.print(w, "The same twelve steps, under the engine's rules")
	if ours.pinned {
		return fmt.Errorf("the engine's rules left the room %s", ours.status[11])
	}
	fmt.Fprintf(w, "  => %s\n\n", ours.verdict)
	return nil
}
