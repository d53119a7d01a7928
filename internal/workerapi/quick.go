package workerapi

// quick reads a header as clients write it: one flat object of the keys of everyday requests, with plain
// integers and plain strings. It returns false for everything else, valid or not, which json then reads
// from the start; what it accepts it reads as json would.
func (h *header) quick(b []byte) bool {
	s := scanner{b: b}
	if !s.byte('{') {
		return false
	}
	for {
		key, ok := s.text()
		if !ok || !s.byte(':') {
			return false
		}
		switch string(key) {
		case "t":
			t, ok := s.text()
			if !ok {
				return false
			}
			if h.T, ok = everyday[string(t)]; !ok {
				return false
			}
		case "seq":
			v, ok := s.integer()
			if !ok || v < 0 {
				return false
			}
			h.Seq = uint64(v)
		case "peer_group":
			v, ok := s.text()
			if !ok {
				return false
			}
			h.PeerGroup = string(v)
		case "last":
			if h.Last, ok = s.boolean(); !ok {
				return false
			}
		case "parts":
			if !h.quickParts(&s) {
				return false
			}
		default:
			v, ok := s.integer()
			if !ok {
				return false
			}
			switch string(key) {
			case "slot":
				h.Slot = v
			case "room":
				h.Room = v
			case "attempt":
				h.Attempt = v
			case "priority":
				h.Priority = v
			case "deadline_ms":
				h.Deadline = v
			case "chunk":
				h.Chunk = v
			case "aux":
				h.Aux = v
			default:
				return false
			}
		}
		if s.byte(',') {
			continue
		}
		return s.byte('}') && s.end()
	}
}

func (h *header) quickParts(s *scanner) bool {
	if h.Parts != nil || !s.byte('[') {
		return false
	}
	h.Parts = make([]partHeader, 0, 1)
	for {
		var p partHeader
		if !s.byte('{') {
			return false
		}
		for {
			key, ok := s.text()
			if !ok || !s.byte(':') {
				return false
			}
			v, ok := s.integer()
			if !ok {
				return false
			}
			switch string(key) {
			case "pool":
				p.Pool = v
			case "pages":
				p.Pages = v
			case "prefix":
				p.Prefix = v
			default:
				return false
			}
			if !s.byte(',') {
				break
			}
		}
		if !s.byte('}') {
			return false
		}
		h.Parts = append(h.Parts, p)
		if !s.byte(',') {
			return s.byte(']')
		}
	}
}

// everyday are the requests that quick reads, so that their names are not made anew.
var everyday = map[string]string{
	"open": "open", "register": "register", "send": "send", "abort": "abort", "release": "release",
	"failure": "failure", "aux": "aux",
}

// scanner reads the few kinds of JSON tokens that quick knows. Each method skips spaces first.
type scanner struct {
	b []byte
	i int
}

func (s *scanner) spaces() {
	for s.i < len(s.b) && s.b[s.i] == ' ' {
		s.i++
	}
}

func (s *scanner) end() bool {
	s.spaces()
	return s.i == len(s.b)
}

func (s *scanner) byte(c byte) bool {
	s.spaces()
	if s.i < len(s.b) && s.b[s.i] == c {
		s.i++
		return true
	}
	return false
}

// text is a string of printable ASCII without escapes.
func (s *scanner) text() ([]byte, bool) {
	if !s.byte('"') {
		return nil, false
	}
	for from := s.i; s.i < len(s.b); s.i++ {
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			return s.b[from : s.i-1], true
		case c < ' ' || c > '~' || c == '\\':
			return nil, false
		}
	}
	return nil, false
}

// integer is at most 18 digits, without a fraction or an exponent.
func (s *scanner) integer() (v int64, ok bool) {
	s.spaces()
	sign := int64(1)
	if s.i < len(s.b) && s.b[s.i] == '-' {
		sign = -1
		s.i++
	}
	from := s.i
	for ; s.i < len(s.b) && '0' <= s.b[s.i] && s.b[s.i] <= '9'; s.i++ {
		if s.i-from == 18 {
			return 0, false
		}
		v = 10*v + int64(s.b[s.i]-'0')
	}
	if s.i == from || s.b[from] == '0' && (s.i > from+1 || sign < 0) {
		return 0, false
	}
	return sign * v, true // what follows must be a comma or an end, not . or e
}

func (s *scanner) boolean() (v, ok bool) {
	s.spaces()
	for _, word := range [...]string{"true", "false"} {
		if n := s.i + len(word); n <= len(s.b) && string(s.b[s.i:n]) == word {
			s.i = n
			return word == "true", true
		}
	}
	return false, false
}
