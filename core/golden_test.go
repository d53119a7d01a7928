package core_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestProtocolCitesGoldens: every golden file has its place in docs/protocol.md, and the names there in italics, in
// a column "shown" or with an underscore, are golden files.
func TestProtocolCitesGoldens(t *testing.T) {
	text, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	cited := map[string]bool{}
	for _, file := range files {
		cited[strings.TrimSuffix(filepath.Base(file), ".txt")] = false
	}
	italics := regexp.MustCompile(`(?:^|[^*])\*([a-z0-9_/]+(?:, [a-z0-9_/]+)*)\*`)
	shown := false
	for i, line := range strings.Split(string(text), "\n") {
		if !strings.HasPrefix(line, "|") {
			shown = false
		} else if strings.HasSuffix(line, "| shown |") {
			shown = true
		}
		column := strings.LastIndex(strings.TrimSuffix(line, "|"), "|")
		for _, at := range italics.FindAllStringSubmatchIndex(line, -1) {
			for _, name := range strings.Split(line[at[2]:at[3]], ", ") {
				_, golden := cited[name]
				_, err := os.Stat(filepath.Join("testdata", name+".txt"))
				if err != nil {
					_, err = os.Stat(filepath.Join(spans, name+".txt"))
				}
				switch {
				case golden:
					cited[name] = true
				case strings.Contains(string(text), "**"+name+"**"): // a word that the page defines
				case err != nil && (strings.Contains(name, "_") || shown && at[0] >= column):
					t.Errorf("docs/protocol.md:%d cites %s, which is no golden file", i+1, name)
				}
			}
		}
	}
	for name, found := range cited {
		if !found {
			t.Errorf("docs/protocol.md does not cite testdata/%s.txt", name)
		}
	}
}
