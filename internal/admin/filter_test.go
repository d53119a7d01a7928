package admin

import (
	"net/url"
	"testing"
)

// FuzzFilter: what parses reads back as the same filter.
func FuzzFilter(f *testing.F) {
	for _, q := range []string{"", "live=true&limit=3", "older=5s&role=source", "state=W&status=Transferring&peer=a&group=b&reason=c&residency=d", "limit=x", "older=-1s", "a=b"} {
		f.Add(q)
	}
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		want, err := parseFilter(q)
		if err != nil {
			return
		}
		got, err := parseFilter(want.values())
		if err != nil || got != want {
			t.Fatalf("%q: %+v reads back as %+v, %v", query, want, got, err)
		}
	})
}
