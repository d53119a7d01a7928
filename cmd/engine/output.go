package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
)

// list prints items as -o says; rows makes the table.
func list[T any](a *app, items []T, rows func(t *table)) error {
	if items == nil {
		items = []T{}
	}
	return a.print(admin.List[T]{APIVersion: admin.APIVersion, Items: items}, rows)
}

// print writes v as JSON or YAML, or the table.
func (a *app) print(v any, rows func(t *table)) error {
	if a.output == "table" {
		t := &table{colour: a.colour}
		rows(t)
		return t.write(a.stdout)
	}
	b, err := a.encode(v, true)
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(b)
	return err
}

// encode writes v as one JSON or YAML text that ends with a newline.
func (a *app) encode(v any, indent bool) ([]byte, error) {
	b, err := json.Marshal(v)
	if indent && a.output == "json" {
		b, err = json.MarshalIndent(v, "", "  ")
	}
	if err != nil {
		return nil, fmt.Errorf("write the result: %w", err)
	}
	if a.output == "yaml" {
		if b, err = yaml.JSONToYAML(b); err != nil {
			return nil, fmt.Errorf("write the result: %w", err)
		}
	} else {
		b = append(b, '\n')
	}
	return []byte(printable(string(b), "\n")), nil
}

// table is rows of cells, the first row the header.
type table struct {
	colour bool
	rows   [][]cell
	widths []int // of the columns, at least; write makes them as wide as the rows
}

type cell struct {
	text string
	tint string // an escape sequence, or ""
}

const (
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	plain  = "\x1b[0m"
)

// row adds plain or tinted cells; an empty text is shown as "-".
func (t *table) row(cells ...any) {
	r := make([]cell, len(cells))
	for i, c := range cells {
		switch v := c.(type) {
		case cell:
			r[i] = v
		default:
			r[i] = cell{text: fmt.Sprint(v)}
		}
		if r[i].text == "" {
			r[i].text = "-"
		}
	}
	t.rows = append(t.rows, r)
}

func (t *table) write(w io.Writer) error {
	widths := t.widths
	for _, r := range t.rows {
		for i := range r {
			c := &r[i]
			c.text = printable(c.text, "")
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	var b strings.Builder
	for _, r := range t.rows {
		for i, c := range r {
			text := c.text
			if t.colour && c.tint != "" {
				text = c.tint + text + plain
			}
			b.WriteString(text)
			if i < len(r)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2))
			}
		}
		b.WriteByte('\n')
	}
	t.widths = widths
	_, err := io.WriteString(w, b.String())
	return err
}

// statusCell tints a KVPoll status.
func statusCell(status string) cell {
	switch status {
	case "Failed":
		return cell{status, red}
	case "Success":
		return cell{status, green}
	}
	return cell{text: status}
}

// stateCell tints the state of a plugin or peer: good states are plain.
func stateCell(state string) cell {
	switch state {
	case "up", "ready":
		return cell{state, green}
	case "down", "dead", "refused":
		return cell{state, red}
	}
	return cell{state, yellow}
}

// age writes nanoseconds for people: 12.4s, 3h2m.
func age(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d < 0:
		return "-" + age(-ns)
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	}
	return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
}

// ago is an age for people, or never when there is none.
func ago(ns int64, never string) string {
	if ns == 0 {
		return never
	}
	return age(ns) + " ago"
}

// printable writes control characters, other than those of keep, as a string of JSON does: a detail that
// came from elsewhere, or from a file, must not drive the terminal.
func printable(s, keep string) string {
	if !strings.ContainsFunc(s, unicode.IsControl) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unicode.IsControl(r) && !strings.ContainsRune(keep, r) {
			fmt.Fprintf(&b, "\\u%04x", r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// size writes bytes for people.
func size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, u := float64(n), 0
	for f >= 1024 && u < len(units)-1 {
		f, u = f/1024, u+1
	}
	if u == 0 || f == float64(int64(f)) {
		return fmt.Sprintf("%d%s", int64(f), units[u])
	}
	return fmt.Sprintf("%.1f%s", f, units[u])
}

// count writes a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// problemJSON is a config.Problem for -o json and yaml.
type problemJSON struct {
	Place string `json:"place"`
	File  string `json:"file,omitempty"`
	Line  int    `json:"line,omitempty"`
	Col   int    `json:"col,omitempty"`
	Key   string `json:"key,omitempty"`
	What  string `json:"what"`
	Fix   string `json:"fix"`
}

func problemOf(p config.Problem) problemJSON {
	j := problemJSON{Place: p.Source.String(), Key: p.Key, What: p.Msg, Fix: p.Fix}
	if p.Source.Kind == config.FromFile {
		j.File, j.Line, j.Col = p.Source.Name, p.Source.Line, p.Source.Col
	}
	return j
}
