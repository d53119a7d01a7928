package node

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

var workerapiNoBackend = workerapi.Error{Code: workerapi.NoBackend, Field: "region", Message: "the transfer plugin died twice while it took the region; see engine plugins list"}

func opener(o statemachine.Opener) *contract.Opener {
	return &contract.Opener{Incarnation: o.Inc, Sequence: o.Seq}
}

// wireRuns writes runs column-wise; the stride column is left out when all strides are 1.
func wireRuns(runs []layout.Run) *contract.Runs {
	r := &contract.Runs{Start: make([]uint32, len(runs)), Count: make([]uint32, len(runs))}
	for i, x := range runs {
		r.Start[i], r.Count[i] = uint32(x.Start), uint32(x.Count)
		if x.Stride != 1 && r.Stride == nil {
			r.Stride = make([]uint32, len(runs))
			for j := range i {
				r.Stride[j] = 1
			}
		}
		if r.Stride != nil {
			r.Stride[i] = uint32(x.Stride)
		}
	}
	return r
}

// reasonOf is the verdict that an op's cause leads to.
func reasonOf(c contract.Cause) statemachine.Reason {
	switch c {
	case contract.Cause_CAUSE_NO_TERMINAL:
		return statemachine.NoTerminal
	case contract.Cause_CAUSE_PROTOCOL:
		return statemachine.Protocol
	case contract.Cause_CAUSE_LIMIT:
		return statemachine.LimitExceeded
	case contract.Cause_CAUSE_SHUTDOWN:
		return statemachine.Draining
	case contract.Cause_CAUSE_UNSUPPORTED, contract.Cause_CAUSE_LANE:
		return statemachine.BackendDown
	}
	return statemachine.TransferFailed
}

// detailOf is what the plugin said, for people.
func detailOf(b *epoch, c contract.Cause, detail string) string {
	if len(detail) > 256 {
		detail = detail[:256]
	}
	return fmt.Sprintf("plugin %s: %s: %s", b.name, causeName(c), detail)
}

func causeName(c contract.Cause) string {
	const prefix = "CAUSE_"
	if s := c.String(); len(s) > len(prefix) {
		return s[len(prefix):]
	}
	return c.String()
}

func regionError(b *epoch, f *contract.RegionFailed) error {
	return &workerapi.Error{Code: workerapi.BadMemory, Field: "region", Rule: workerapi.RuleMemory, Message: detailOf(b, f.Cause, f.Detail)}
}

// laneName is a lane as config and metrics write it.
func laneName(l contract.Lane) string {
	return strings.ToLower(strings.TrimPrefix(l.String(), "LANE_"))
}

// lane is the inverse of laneName; empty means any.
func lane(name string) contract.Lane {
	if l, ok := contract.Lane_value["LANE_"+strings.ToUpper(name)]; ok && name != "" {
		return contract.Lane(l)
	}
	return contract.Lane_LANE_ANY
}

func jsonOptions(o map[string]any) ([]byte, error) {
	b, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("cannot be written as JSON: %w", err)
	}
	return b, nil
}
