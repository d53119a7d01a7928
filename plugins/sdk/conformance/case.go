package conformance

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Profile groups cases by what they ask of a plugin.
type Profile string

// The profiles, in the order in which they run.
const (
	TransferCore    Profile = "transfer-core"
	TransferAbort   Profile = "transfer-abort"
	TransferQuiesce Profile = "transfer-quiesce"
	TransferLayout  Profile = "transfer-layout"
	Process         Profile = "process"
	Robustness      Profile = "robustness"
	CollectiveCore  Profile = "collective-core"
)

// Profiles lists them in that order.
func Profiles() []Profile {
	return []Profile{TransferCore, TransferAbort, TransferQuiesce, TransferLayout, Process, Robustness, CollectiveCore}
}

// Needs that are not features of the handshake.
const (
	// NeedProcess: the case needs a plugin that is a process (kill, stop, control socket, stderr).
	NeedProcess = "carrier:process"
	// NeedCUDAIPC and NeedCUDAVMM: the plugin takes such memory, and the machine has a GPU.
	NeedCUDAIPC = "mem:cuda-ipc"
	NeedCUDAVMM = "mem:cuda-vmm"
	// NeedCollective: the plugin serves collectives.
	NeedCollective = "kind:collective"
)

// Case is one conversation with a plugin.
type Case struct {
	// ID is "group/name", stable for ever: reports, known-failing files and bug trackers cite it.
	ID    string
	Title string // one line: what the plugin must do
	// Rule is the rule of the contract that the case is about, "R1" … "R12".
	Rule    string
	Profile Profile
	// Needs are the features (and other needs, see the constants) without which the case is
	// Unsupported.
	Needs []string
	// Incident is the public report that the case restates, "" if none: "sglang#36707: …".
	Incident string
	// Script is the conversation in words, one step a line, "> " from the host, "< " from the plugin,
	// "= " what is checked. Shown by `explain`.
	Script string
	// Timeout bounds the case, set-up and checks included; 0 means DefaultTimeout. Config.Scale
	// multiplies it.
	Timeout time.Duration
	// Fresh cases get plugins of their own, since they end or upset them. The others share a pair.
	Fresh bool
	// Storm cases are random, by the seed of the run.
	Storm bool
	// Run is the conversation.
	Run func(*T)
}

// DefaultTimeout of a case.
const DefaultTimeout = 20 * time.Second

var registry []Case

// register adds cases; called by the init functions of the files that hold them.
func register(cases ...Case) {
	for _, c := range cases {
		if err := c.check(); err != nil {
			panic(err)
		}
		c.Script = strings.TrimSpace(c.Script)
		registry = append(registry, c)
	}
}

var idPattern = regexp.MustCompile(`^[a-z][a-z0-9]*/[a-z0-9]+(-[a-z0-9]+)*$`)

func (c *Case) check() error {
	switch {
	case !idPattern.MatchString(c.ID):
		return fmt.Errorf("case id %q: want group/name of lower-case words", c.ID)
	case c.Title == "", c.Run == nil, strings.TrimSpace(c.Script) == "":
		return fmt.Errorf("case %s: title, script and run are needed", c.ID)
	case !slices.Contains(Profiles(), c.Profile):
		return fmt.Errorf("case %s: unknown profile %q", c.ID, c.Profile)
	case Rule(c.Rule) == "":
		return fmt.Errorf("case %s: unknown rule %q", c.ID, c.Rule)
	case slices.ContainsFunc(registry, func(o Case) bool { return o.ID == c.ID }):
		return fmt.Errorf("case %s is registered twice", c.ID)
	}
	return nil
}

// Cases returns every case, by profile in the order of Profiles, then by id.
func Cases() []Case {
	cases := slices.Clone(registry)
	order := Profiles()
	slices.SortFunc(cases, func(a, b Case) int {
		if d := slices.Index(order, a.Profile) - slices.Index(order, b.Profile); d != 0 {
			return d
		}
		return strings.Compare(a.ID, b.ID)
	})
	return cases
}

// Rule returns the sentence of a rule of docs/contract.md, "" for an unknown one.
func Rule(id string) string { return rules[id] }

// rules are the sentences of docs/contract.md; a test compares them.
var rules = map[string]string{
	"R1":  "Every accepted op ends in exactly one of Done, Failed, Skipped, Aborted. A skip or an abort is an end with a cause, never silence.",
	"R2":  "A terminal status never changes. Late writes are counted and dropped.",
	"R3":  "Everything is keyed by (room, role, opener). A generation is the pair of openers; a stale one changes nothing. Ids of ops, regions, pools and plans are never reused within their scope.",
	"R4":  "An end does not mean \"safe to reuse\". Written pages are reusable only when *quiet* (no access can land any more) or *fenced* (the means are provably gone). Never on a timer.",
	"R5":  "The host owns every deadline. What is known to be complete is drained before anything is judged expired.",
	"R6":  "Death of the plugin, end of its stream or missing beats end every key with an op outstanding in, or a destination registered with, that plugin epoch.",
	"R7":  "Abort is idempotent. Of an ended op it changes nothing.",
	"R8":  "Accepted precedes all. Progress grows and never follows an end.",
	"R9":  "\"In progress\" can be disproved: progress is a byte counter that grows; none within the stall bound is an error. Beats are not progress.",
	"R10": "A failure reaches every known counterpart at once with the first cause.",
	"R11": "Success only when every source rank reported its end, the pages written are exactly those registered, and the commit carries the same generation.",
	"R12": "A bad frame, op, peer or plugin harms only its own rooms. A control loop never dies silently.",
}
