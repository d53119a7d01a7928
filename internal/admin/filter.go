package admin

import (
	"fmt"
	"net/url"
	"strconv"
	"time"
)

// values writes the filter as a query.
func (f RoomFilter) values() url.Values {
	q := url.Values{}
	for _, p := range f.texts() {
		if *p.value != "" {
			q.Set(p.name, *p.value)
		}
	}
	if f.Live {
		q.Set("live", "true")
	}
	if f.OlderNS > 0 {
		q.Set("older", time.Duration(f.OlderNS).String())
	}
	if f.Limit > 0 {
		q.Set("limit", strconv.Itoa(f.Limit))
	}
	return q
}

type filterText struct {
	name  string
	value *string
}

func (f *RoomFilter) texts() []filterText {
	return []filterText{
		{"role", &f.Role}, {"state", &f.State}, {"status", &f.Status}, {"residency", &f.Residency},
		{"reason", &f.Reason}, {"peer", &f.Peer}, {"group", &f.Group},
	}
}

// parseFilter is the inverse; an unknown name or a bad value is an error.
func parseFilter(q url.Values) (RoomFilter, error) {
	f := RoomFilter{}
	texts := map[string]*string{}
	for _, p := range f.texts() {
		texts[p.name] = p.value
	}
	for name, vs := range q {
		v := vs[0]
		var err error
		switch {
		case len(vs) > 1:
			return f, fmt.Errorf("%s is given more than once", name)
		case texts[name] != nil:
			*texts[name] = v
		case name == "live":
			f.Live, err = strconv.ParseBool(v)
		case name == "limit":
			f.Limit, err = strconv.Atoi(v)
			if err == nil && (f.Limit < 1 || f.Limit > MaxRooms) {
				err = fmt.Errorf("want 1 to %d", MaxRooms)
			}
		case name == "older":
			var d time.Duration
			if d, err = time.ParseDuration(v); err == nil && d < 0 {
				err = fmt.Errorf("want a duration above zero")
			}
			f.OlderNS = int64(d)
		default:
			return f, fmt.Errorf("unknown filter %q", name)
		}
		if err != nil {
			return f, fmt.Errorf("filter %s=%q: %w", name, v, err)
		}
	}
	return f, nil
}
