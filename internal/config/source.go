package config

import "fmt"

// SourceKind tells where a value came from.
type SourceKind string

// The kinds of sources, weakest first.
const (
	FromDefault SourceKind = "default"
	FromFile    SourceKind = "file"
	FromEnv     SourceKind = "env"
	FromFlag    SourceKind = "flag"
)

// Source is the place of a value.
type Source struct {
	Kind SourceKind
	Name string // file name, variable or key of the flag
	Line int    // of a file, from 1
	Col  int
}

// String writes file:line:col, the variable, --set key, or "default".
func (s Source) String() string {
	switch s.Kind {
	case FromFile:
		if s.Line == 0 {
			return s.Name
		}
		return fmt.Sprintf("%s:%d:%d", s.Name, s.Line, s.Col)
	case FromEnv:
		return s.Name
	case FromFlag:
		return "--set " + s.Name
	}
	return string(FromDefault)
}

// Value is one leaf of the effective configuration.
type Value struct {
	Key    string // limits.peer_ops
	Value  string // as YAML would write it on one line
	Source Source
}
