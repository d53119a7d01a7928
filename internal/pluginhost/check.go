package pluginhost

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// contractVersions are the versions that this host speaks, newest first.
var contractVersions = []uint32{sdk.ContractVersion}

// checkHandshake returns an error that wraps ErrRefused when the plugin cannot be used.
func checkHandshake(r *contract.HandshakeResponse, features []string) error {
	switch {
	case r.Error != "":
		return refusedf("%s", r.Error)
	case !slices.Contains(contractVersions, r.Version):
		return refusedf("it chose contract version %d, this engine speaks %v", r.Version, contractVersions)
	case !nameRE.MatchString(r.Name):
		return refusedf("its name %q is not [a-z][a-z0-9-]*, at most 32 bytes", r.Name)
	case len(r.Kinds) == 0:
		return refusedf("it serves no kind (HandshakeResponse.kinds is empty)")
	case len(r.Endpoint) > sdk.MaxEndpoint:
		return refusedf("its endpoint has %d bytes, the limit is %d", len(r.Endpoint), sdk.MaxEndpoint)
	}
	for _, f := range r.RequiredFeatures {
		if !slices.Contains(features, f) {
			return refusedf("it needs the feature %q, which this engine does not have (it has %v)", f, features)
		}
	}
	if field := badEnum(r.ProtoReflect()); field != "" {
		return refusedf("HandshakeResponse.%s has an undefined enum value", field)
	}
	return nil
}

// checkFrame returns the violation in a frame of the plugin, or nil. size is its encoded size.
func checkFrame(f *contract.PluginFrame, size int, control bool) *contract.Fault {
	if size > sdk.MaxFrame {
		return &contract.Fault{Rule: "frame", Field: "PluginFrame",
			Detail: fmt.Sprintf("%d bytes, the limit is %d", size, sdk.MaxFrame)}
	}
	for _, ev := range f.Events {
		if !control && plain(ev) {
			continue
		}
		m := ev.ProtoReflect()
		fd := m.WhichOneof(m.Descriptor().Oneofs().Get(0))
		if fd == nil {
			continue // unknown to this version; counted and ignored by the caller
		}
		name := string(fd.Message().Name())
		if control && ev.GetBeat() == nil {
			return &contract.Fault{Rule: "R8", Field: name, Detail: "on the Control stream, which carries beats only"}
		}
		if ev.GetDone().GetLane() == contract.Lane_LANE_ANY {
			return &contract.Fault{Rule: "frame", Field: "Done.lane", Detail: "LANE_ANY; the lane really used is demanded"}
		}
		if field := badEnum(m.Get(fd).Message()); field != "" {
			return &contract.Fault{Rule: "frame", Field: name + "." + field, Detail: "undefined enum value"}
		}
	}
	return nil
}

// plain tells the frequent good events without reflection.
func plain(ev *contract.PluginEvent) bool {
	switch ev := ev.Event.(type) {
	case *contract.PluginEvent_Accepted, *contract.PluginEvent_Progress, *contract.PluginEvent_Quiesced:
		return true
	case *contract.PluginEvent_Done:
		lane := ev.Done.GetLane()
		return lane >= contract.Lane_LANE_RDMA && lane <= contract.Lane_LANE_TCP
	}
	return false
}

// badEnum returns the path of a field of m whose enum value is 0 or unknown. proto3 does not tell an
// absent enum from 0, so every enum of a message counts.
func badEnum(m protoreflect.Message) string {
	plan := enumPlan(m.Descriptor())
	for _, f := range plan {
		switch {
		case f.fd.IsList():
			list := m.Get(f.fd).List()
			for i := range list.Len() {
				if f.sub {
					if bad := badEnum(list.Get(i).Message()); bad != "" {
						return fmt.Sprintf("%s[%d].%s", f.fd.Name(), i, bad)
					}
				} else if !defined(f.fd, list.Get(i).Enum()) {
					return fmt.Sprintf("%s[%d]", f.fd.Name(), i)
				}
			}
		case f.sub:
			if m.Has(f.fd) {
				if bad := badEnum(m.Get(f.fd).Message()); bad != "" {
					return string(f.fd.Name()) + "." + bad
				}
			}
		case !defined(f.fd, m.Get(f.fd).Enum()):
			return string(f.fd.Name())
		}
	}
	return ""
}

func defined(fd protoreflect.FieldDescriptor, n protoreflect.EnumNumber) bool {
	return n != 0 && fd.Enum().Values().ByNumber(n) != nil
}

type enumField struct {
	fd  protoreflect.FieldDescriptor
	sub bool // a message that has enums itself
}

// enumPlans holds, for every message that a plugin may send, the fields that lead to an enum.
var enumPlans = buildEnumPlans()

func enumPlan(d protoreflect.MessageDescriptor) []enumField { return enumPlans[d.FullName()] }

func buildEnumPlans() map[protoreflect.FullName][]enumField {
	plans := make(map[protoreflect.FullName][]enumField)
	var visit func(d protoreflect.MessageDescriptor) bool
	visit = func(d protoreflect.MessageDescriptor) bool {
		if plan, seen := plans[d.FullName()]; seen {
			return len(plan) > 0
		}
		plans[d.FullName()] = nil
		var plan []enumField
		for i := range d.Fields().Len() {
			fd := d.Fields().Get(i)
			switch {
			case fd.IsMap():
			case fd.Enum() != nil:
				plan = append(plan, enumField{fd: fd})
			case fd.Message() != nil && visit(fd.Message()):
				plan = append(plan, enumField{fd: fd, sub: true})
			}
		}
		plans[d.FullName()] = plan
		return len(plan) > 0
	}
	visit((&contract.HandshakeResponse{}).ProtoReflect().Descriptor())
	visit((&contract.PluginEvent{}).ProtoReflect().Descriptor())
	return plans
}

// faultError is a violation as an error.
func faultError(f *contract.Fault) error { return fmt.Errorf("%w: %s", ErrViolation, describe(f)) }

func describe(f *contract.Fault) string {
	text := "rule " + f.Rule
	if f.Field != "" {
		text += ", " + f.Field
	}
	if f.Detail != "" {
		text += ": " + f.Detail
	}
	return text
}
