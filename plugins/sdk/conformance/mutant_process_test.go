package conformance

import (
	"fmt"
	"os/exec"
	"path/filepath"
)

// processMutants are processes: the program mutant, with the fault as its argument.
var processMutants = []mutant{
	{name: "floods-stdout", process: "floods-stdout", killer: "stdio/stdout-is-the-handshakes",
		fault: "a library prints to standard output"},
	{name: "floods-stderr", process: "floods-stderr", unsure: []string{"shutdown/clean"}, killer: "stdio/no-flood",
		fault: "each op is logged at length on standard error"},
	{name: "outlives-its-host", process: "outlives-its-host", also: []string{"lease/*"}, killer: "lease/host-gone-idle",
		fault: "the end of the control socket is not noticed"},
	{name: "exits-0-with-open-ops", process: "exits-0-with-open-ops", also: []string{"loss/*", "lease/*", "shutdown/*"}, killer: "loss/stream-eof",
		fault: "an op of 4 MiB ends the process, with status 0"},
	{name: "leaves-a-child", process: "leaves-a-child", also: []string{"leftover/*"}, killer: "leftover/nothing-after-close",
		fault: "a helper process goes on when the plugin has ended"},
	{name: "never-exits", process: "never-exits", also: []string{"shutdown/*"}, killer: "shutdown/clean",
		fault: "Close of the backend does not return"},
	{name: "exits-1", process: "exits-1", killer: "shutdown/clean",
		fault: "a good end has status 1"},
	{name: "ignores-sigterm", process: "ignores-sigterm", killer: "shutdown/sigterm",
		fault: "SIGTERM is ignored"},
	{name: "dies-of-sigint", process: "dies-of-sigint", killer: "shutdown/sigint-ignored",
		fault: "a ^C at the engine's terminal ends the plugin"},
	{name: "one-lock", process: "one-lock", also: []string{"loss/frozen-receiver"}, killer: "loss/frozen-receiver",
		fault: "one lock is held while an op waits for its receiver, and Stats needs it"},
	{name: "one-life-a-node", process: "one-life-a-node", also: []string{"loss/peer-reborn"}, killer: "loss/peer-reborn",
		fault: "a node that was started again is refused as a duplicate"},
	{name: "info-differs", process: "info-differs", killer: "cli/info",
		fault: "info knows fewer features than the handshake"},
	{name: "waits-by-hand", process: "waits-by-hand", killer: "cli/by-hand",
		fault: "started by hand it waits for a host that never comes"},
	{name: "leaves-files", process: "leaves-files", also: []string{"loss/frozen-writer"}, killer: "loss/frozen-writer",
		fault: "each op leaves a file in the runtime directory"},
	{name: "leaks-grants", process: "leaks-grants", killer: "leak/grants",
		fault: "64 KiB are kept of each grant"},
	{name: "leaks-peers", process: "leaks-peers", killer: "leak/hundred-peers",
		fault: "each peer leaves a descriptor open"},
	{name: "leaks-plans", process: "leaks-plans", killer: "leak/plans",
		fault: "64 KiB are kept of each plan"},
	{name: "one-epoch-a-node", process: "one-epoch-a-node", killer: "loss/new-epoch-beside",
		fault: "a new epoch of a writer takes the place of the one before it"},
	{name: "two-lives-a-node", process: "two-lives-a-node", killer: "storm/kill",
		fault: "a node that was started again for the second time is refused"},
	{name: "daemon-keeps-memory", process: "daemon-keeps-memory", killer: "leftover/nothing-after-kill",
		fault: "a daemon of the library holds large memory until it is told to let go, which a plugin that is killed does not do"},
}

// buildMutant builds the program in dir. Not under the race detector, for speed: it is the suite that is tested.
func buildMutant(dir string) (program string, err error) {
	program = filepath.Join(dir, "mutant")
	if out, err := exec.Command("go", "build", "-o", program, "./mutant").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the mutants: %w\n%s", err, out)
	}
	return program, nil
}
