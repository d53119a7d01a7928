package sdk

import (
	"fmt"
	"slices"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func (s *Session) grantFailed(grant uint64, err error) {
	detail := cut(err.Error(), MaxDetail)
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_GrantFailed{GrantFailed: &contract.GrantFailed{
		Grant: grant, Cause: causeOf(err, contract.Cause_CAUSE_INTERNAL), Detail: detail,
	}}}, len(detail))
}

func (s *Session) revoked(grant uint64, quiet bool) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_Revoked{Revoked: &contract.Revoked{Grant: grant, Quiet: quiet}}}, 0)
}

func (s *Session) grant(m *contract.Grant) {
	if s.grants[m.Grant] != nil {
		s.breach("Grant.grant %d is in use", m.Grant)
		return
	}
	granter, ok := s.backend.(Granter)
	if !ok {
		s.grantFailed(m.Grant, unsupported("backend %s takes no grants (it is not receiver_checked)", s.info.Name))
		return
	}
	g, err := s.newGrant(m)
	if err != nil {
		s.grantFailed(m.Grant, err)
		return
	}
	s.grants[m.Grant] = g
	g.busy = true
	s.job(jobGrant, func() func() {
		err := func() (err error) {
			defer recovered(&err, "Grant")
			return granter.Grant(&g.Grant)
		}()
		return func() {
			g.busy = false
			if err != nil {
				delete(s.grants, m.Grant)
				s.grantFailed(m.Grant, err)
			} else {
				s.post(&contract.PluginEvent{Event: &contract.PluginEvent_Granted{Granted: &contract.Granted{Grant: m.Grant}}}, 0)
			}
			if g.revoke != nil {
				s.revokeNow(granter, g)
			}
		}
	})
}

func (s *Session) newGrant(m *contract.Grant) (*grantState, error) {
	if len(s.grants) >= maxGrants {
		return nil, &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("%d grants are the limit", maxGrants)}
	}
	destination, err := opener("Grant.destination", m.Destination)
	if err != nil {
		return nil, breached("%w", err)
	}
	g := &grantState{Grant: Grant{ID: m.Grant, Destination: destination, Writers: m.Writers}}
	if slices.Contains(m.Writers, "") {
		return nil, breached("Grant.writers names a node that is empty")
	}
	for i, part := range m.Parts {
		e, ok := s.pools[part.GetPool()]
		if !ok || e.err != nil {
			return nil, breached("Grant.parts[%d].pool %d is unknown or bad", i, part.GetPool())
		}
		for j := range e.pool.Tensors {
			if t := &e.pool.Tensors[j]; s.readyRegion(t.RegionID) != t.Region {
				return nil, breached("Grant.parts[%d].pool %d: region %d is gone", i, part.GetPool(), t.RegionID)
			}
		}
		pages, _, err := checkRuns(fmt.Sprintf("Grant.parts[%d].pages", i), part.GetPages(), e.pool.Pages)
		if err == nil && pages > uint64(e.pool.Pages) {
			err = fmt.Errorf("Grant.parts[%d].pages names %d pages of a pool of %d", i, pages, e.pool.Pages)
		}
		if err != nil {
			return nil, breached("%w", err)
		}
		g.Parts = append(g.Parts, GrantPart{Pool: e.pool, Pages: NewPageSet(runList(part.GetPages())...)})
	}
	return g, nil
}

// revoke closes a grant. An unknown one is still handed to the backend, with no parts: the opener must
// be refused for good.
func (s *Session) revoke(m *contract.Revoke) {
	granter, ok := s.backend.(Granter)
	if !ok {
		s.revoked(m.Grant, false)
		return
	}
	g := s.grants[m.Grant]
	if g == nil {
		destination, err := opener("Revoke.destination", m.Destination)
		if err != nil {
			s.breach("%v", err)
			s.revoked(m.Grant, false)
			return
		}
		g = &grantState{Grant: Grant{ID: m.Grant, Destination: destination}}
		s.grants[m.Grant] = g
	}
	if g.revoke != nil {
		return // being revoked; one answer
	}
	g.revoke = m
	if !g.busy {
		s.revokeNow(granter, g)
	}
}

func (s *Session) revokeNow(granter Granter, g *grantState) {
	s.job(jobGrant, func() func() {
		quiet := false
		err := func() (err error) {
			defer recovered(&err, "Revoke")
			quiet = granter.Revoke(&g.Grant)
			return nil
		}()
		return func() {
			if err != nil {
				s.logf(contract.Log_LEVEL_ERROR, "grant %d: %v", g.ID, err)
			}
			delete(s.grants, g.ID)
			s.revoked(g.ID, quiet)
		}
	})
}

// opener converts and checks a key.
func opener(field string, m *contract.Opener) (Opener, error) {
	if m.GetIncarnation() == 0 || m.GetSequence() == 0 {
		return Opener{}, fmt.Errorf("%s is %d.%d; neither part may be 0", field, m.GetIncarnation(), m.GetSequence())
	}
	return Opener{m.Incarnation, m.Sequence}, nil
}
