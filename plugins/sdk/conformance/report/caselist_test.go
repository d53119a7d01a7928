package report

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
)

// TestCaseList keeps the list of docs/conformance.md in step with the suite.
func TestCaseList(t *testing.T) {
	const (
		file  = "../../../../docs/conformance.md"
		begin = "<!-- cases: written by TestCaseList -->\n"
		end   = "<!-- end of cases -->\n"
	)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(b), begin)
	old, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the list", file)
	}
	list := caseList()
	if *update {
		if err := os.WriteFile(file, []byte(head+begin+list+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if old != list {
		t.Errorf("the list of cases in %s is not that of the suite; write it anew with -update", file)
	}
}

func caseList() string {
	var b strings.Builder
	profile := conformance.Profile("")
	for _, c := range conformance.Cases() {
		if c.Profile != profile {
			profile = c.Profile
			fmt.Fprintf(&b, "\n### %s\n\n| case | rule | what holds |\n|---|---|---|\n", profile)
		}
		title := strings.ReplaceAll(c.Title, "|", `\|`)
		if len(c.Needs) > 0 {
			title += " (" + strings.Join(c.Needs, ", ") + ")"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", c.ID, c.Rule, title)
	}
	b.WriteByte('\n')
	return b.String()
}
