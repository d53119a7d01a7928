package config

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Duration is a length of time that is written with a unit: 10s, 1m30s, 500ms.
type Duration time.Duration

// MaxDuration is the longest Duration that is accepted: a deadline of days is none.
const MaxDuration = Duration(24 * time.Hour)

// Std returns the standard library's type.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String writes whole seconds below a day as seconds (300s, not 5m0s), all else as time.Duration does.
func (d Duration) String() string {
	if s := time.Duration(d); s%time.Second == 0 && s < 24*time.Hour {
		return strconv.FormatInt(int64(s/time.Second), 10) + "s"
	}
	return time.Duration(d).String()
}

// MarshalText is String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText accepts what time.ParseDuration does, if it has a unit and is in (0, MaxDuration].
func (d *Duration) UnmarshalText(text []byte) error {
	s := string(text)
	if _, err := strconv.ParseFloat(s, 64); err == nil {
		return &valueError{"a duration needs a unit", "write " + s + "s or " + s + "ms"}
	}
	v, err := time.ParseDuration(s)
	switch {
	case err != nil:
		return &valueError{fmt.Sprintf("%q is not a duration", s), "write a number and a unit of ms, s, m or h, such as 10s"}
	case v <= 0:
		return &valueError{"a clock of " + s + " would never end a wait or end it at once", "write a duration above zero; no clock can be switched off"}
	case Duration(v) > MaxDuration:
		return &valueError{s + " is longer than a day", "write at most 24h"}
	}
	*d = Duration(v)
	return nil
}

// Bytes is a size that is written with a unit: 512B, 64KiB, 4MB, 1GiB.
type Bytes int64

var byteUnits = []struct {
	name string
	size int64
}{
	{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"B", 1},
}

// String writes the largest unit that divides the size.
func (b Bytes) String() string {
	for _, u := range byteUnits {
		if b != 0 && int64(b)%u.size == 0 {
			return strconv.FormatInt(int64(b)/u.size, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(b), 10) + "B"
}

// MarshalText is String.
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// UnmarshalText accepts a decimal number and a unit; the size is above zero.
func (b *Bytes) UnmarshalText(text []byte) error {
	v, err := parseBytes(string(text), "a size", "64MiB")
	if err != nil {
		return err
	}
	*b = Bytes(v)
	return nil
}

// Rate is bytes a second, written 50MB/s.
type Rate int64

// String writes the largest unit that divides the rate.
func (r Rate) String() string { return Bytes(r).String() + "/s" }

// MarshalText is String.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText accepts a size followed by /s; the rate is above zero.
func (r *Rate) UnmarshalText(text []byte) error {
	s, ok := strings.CutSuffix(string(text), "/s")
	if !ok {
		return &valueError{fmt.Sprintf("%q is not a rate", text), "write a size per second, such as 50MB/s"}
	}
	v, err := parseBytes(s, "a rate", "50MB/s")
	if err != nil {
		return err
	}
	*r = Rate(v)
	return nil
}

func parseBytes(s, what, example string) (int64, error) {
	digits := s
	size := int64(0)
	for _, u := range byteUnits {
		if rest, ok := strings.CutSuffix(s, u.name); ok {
			digits, size = strings.TrimSpace(rest), u.size
			break
		}
	}
	f, err := parseNumber(digits)
	switch {
	case size == 0 && err == nil:
		return 0, &valueError{what + " needs a unit", "write B, KiB, MiB, GiB or TiB after the number, such as " + example}
	case size == 0, err != nil:
		return 0, &valueError{fmt.Sprintf("%q is not %s", s, what), "write a number and a unit of B, KiB, MiB, GiB or TiB, such as " + example}
	}
	v := f * float64(size)
	switch {
	case v < 1:
		return 0, &valueError{what + " must be above zero", "write for example " + example}
	case v >= 1<<62:
		return 0, &valueError{fmt.Sprintf("%q is too large", s), "write for example " + example}
	}
	return int64(v), nil
}

// parseNumber reads digits with an optional fraction, and nothing else that a float may look like.
func parseNumber(s string) (float64, error) {
	if !number.MatchString(s) {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseFloat(s, 64)
}

var number = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

// Percent is a share, written 10%.
type Percent float64

// String writes the share with its sign.
func (p Percent) String() string { return strconv.FormatFloat(float64(p), 'g', -1, 64) + "%" }

// Of returns the share of n.
func (p Percent) Of(n int64) int64 { return int64(float64(n) * float64(p) / 100) }

// MarshalText is String.
func (p Percent) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText accepts 0% to 100%.
func (p *Percent) UnmarshalText(text []byte) error {
	s, ok := strings.CutSuffix(string(text), "%")
	v, err := parseNumber(strings.TrimSpace(s))
	switch {
	case !ok && err == nil:
		return &valueError{"a share needs a percent sign", "write " + s + "%"}
	case !ok, err != nil:
		return &valueError{fmt.Sprintf("%q is not a share", text), "write a number and a percent sign, such as 10%"}
	case v > 100:
		return &valueError{fmt.Sprintf("%q is not between 0%% and 100%%", text), "write such as 10%"}
	}
	*p = Percent(v)
	return nil
}

// Names is one name or a list of names, in order of preference.
type Names []string

// valueError is what is wrong with a value, and its fix.
type valueError struct{ msg, fix string }

func (e *valueError) Error() string { return e.msg + "; fix: " + e.fix }

// split returns the message and the fix of an error of a value.
func split(err error) (msg, fix string) {
	var v *valueError
	if errors.As(err, &v) {
		return v.msg, v.fix
	}
	return err.Error(), ""
}
