package wasmhost

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// maxTable is the most elements that the tables of a module have together.
const maxTable = 1 << 20

// boundTables gives every table of a module its first size as its maximum: table.grow would take memory of the
// host, 8 bytes an element, beside the pages of the guest's own that are bounded. What is malformed otherwise is
// for the compiler to refuse.
func boundTables(code []byte) ([]byte, error) {
	const header, tables = 8, 4
	for at := header; at < len(code); {
		size, n := binary.Uvarint(code[at+1:])
		begin := at + 1 + n
		if n <= 0 || size > uint64(len(code)-begin) {
			return code, nil
		}
		end := begin + int(size)
		if code[at] == tables {
			section, err := boundTableSection(code[begin:end])
			if err != nil {
				return nil, err
			}
			out := binary.AppendUvarint(bytes.Clone(code[:at+1]), uint64(len(section)))
			return append(append(out, section...), code[end:]...), nil // there is one such section, or the compiler refuses
		}
		at = end
	}
	return code, nil
}

func boundTableSection(section []byte) ([]byte, error) {
	next := func() (v uint64) {
		v, n := binary.Uvarint(section)
		section = section[max(n, 0):]
		if n <= 0 || v > 1<<32-1 {
			v, section = 0, nil
		}
		return v
	}
	count := next()
	out := binary.AppendUvarint(nil, count)
	var total uint64
	for range min(count, maxTable) {
		if len(section) < 3 || section[0] != 0x70 && section[0] != 0x6F || section[1] > 1 {
			return nil, errors.New("the module has a table that is not a plain one of funcref or externref")
		}
		kind, bounded := section[0], section[1] == 1
		section = section[2:]
		first := next()
		if bounded {
			_ = next()
		}
		if total += first; total > maxTable {
			return nil, fmt.Errorf("the module has tables of more than %d elements, which is the limit", maxTable)
		}
		out = append(out, kind, 1)
		out = binary.AppendUvarint(binary.AppendUvarint(out, first), first)
	}
	return append(out, section...), nil // what is left makes it malformed, as it was
}
