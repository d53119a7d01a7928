package reliability

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestClaimsHaveTests: SECURITY.md claims no protection without a test that tries to break in, and the tests are
// there. A claim is a row of a table whose last column is headed "test".
func TestClaimsHaveTests(t *testing.T) {
	text, err := os.ReadFile("../../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`([a-z0-9/]+) ((?:Test|Fuzz)[A-Za-z0-9]+)`")
	row, number := regexp.MustCompile(`^\| (S[0-9]+) \|`), regexp.MustCompile(`\bS[0-9]+\b`)
	claims, inClaims := map[string]bool{}, false
	for i, line := range strings.Split(string(text), "\n") {
		cells := strings.Split(strings.Trim(line, "|"), "|")
		last := strings.TrimSpace(cells[len(cells)-1])
		switch {
		case !strings.HasPrefix(line, "|"):
			inClaims = false
		case last == "test":
			inClaims = true
		case inClaims && !strings.HasPrefix(last, "---"):
			if m := row.FindStringSubmatch(line); m == nil || claims[m[1]] {
				t.Errorf("SECURITY.md:%d is a claim without a number of its own: %s", i+1, line)
			} else {
				claims[m[1]] = true
			}
			if !named.MatchString(last) {
				t.Errorf("SECURITY.md:%d claims a protection and names no test: %s", i+1, line)
			}
		}
		for _, m := range named.FindAllStringSubmatch(line, -1) {
			wantTest(t, m[1], m[2])
		}
	}
	if len(claims) == 0 {
		t.Error("SECURITY.md has no table of claims")
	}
	for _, n := range number.FindAllString(string(text), -1) {
		if !claims[n] {
			t.Errorf("SECURITY.md refers to %s, which is no claim", n)
		}
	}
}
