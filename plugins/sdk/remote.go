package sdk

import (
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

type remoteRegionState struct {
	RemoteRegion
	busy     bool
	ready    bool
	removing bool
}

func (s *Session) remoteRegionFailed(key remoteKey, err error) {
	detail := cut(err.Error(), MaxDetail)
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_RemoteRegionFailed{RemoteRegionFailed: &contract.RemoteRegionFailed{
		Peer: key.peer, Region: key.id, Cause: causeOf(err, contract.Cause_CAUSE_INTERNAL), Detail: detail,
	}}}, len(detail))
}

func (s *Session) remoteRegionRemoved(key remoteKey) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_RemoteRegionRemoved{RemoteRegionRemoved: &contract.RemoteRegionRemoved{
		Peer: key.peer, Region: key.id,
	}}}, 0)
}

func (s *Session) remoteRegionAdd(m *contract.RemoteRegionAdd) {
	key := remoteKey{m.Peer, m.Region}
	p := s.peers[m.Peer]
	switch {
	case s.remoteRegions[key] != nil:
		s.breach("RemoteRegionAdd.region %d of peer %d is in use", m.Region, m.Peer)
		return
	case p == nil || !p.ready || p.accept || p.removing:
		s.remoteRegionFailed(key, breached("RemoteRegionAdd.peer %d is no ready peer", m.Peer))
		return
	case len(s.remoteRegions) >= maxTable:
		s.remoteRegionFailed(key, &Error{Cause: contract.Cause_CAUSE_LIMIT, Err: fmt.Errorf("%d remote regions are the limit", maxTable)})
		return
	case len(m.Export) > MaxEndpoint:
		s.remoteRegionFailed(key, breached("RemoteRegionAdd.export has %d bytes, at most %d are allowed", len(m.Export), MaxEndpoint))
		return
	}
	r := &remoteRegionState{RemoteRegion: RemoteRegion{Peer: &p.Peer, ID: m.Region, Size: m.Size, Export: m.Export}}
	s.remoteRegions[key] = r
	importer, ok := s.backend.(Importer)
	if !ok {
		s.remoteRegionAdded(r)
		return
	}
	r.busy, p.imports = true, p.imports+1
	s.job(jobPeer, func() func() {
		err := func() (err error) {
			defer recovered(&err, "AddRemoteRegion")
			return importer.AddRemoteRegion(&r.RemoteRegion)
		}()
		return func() {
			r.busy, p.imports = false, p.imports-1
			switch {
			case err == nil:
				s.remoteRegionAdded(r)
			default:
				if s.remoteRegions[key] == r {
					delete(s.remoteRegions, key)
				}
				s.remoteRegionFailed(key, err)
			}
			if r.removing {
				s.dropRemoteRegion(r)
			}
			if p.removing {
				s.tryRemovePeer(p)
			}
		}
	})
}

func (s *Session) remoteRegionAdded(r *remoteRegionState) {
	r.ready = true
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_RemoteRegionReady{RemoteRegionReady: &contract.RemoteRegionReady{
		Peer: r.Peer.Handle, Region: r.ID,
	}}}, 0)
}

func (s *Session) remoteRegionRemove(m *contract.RemoteRegionRemove) {
	key := remoteKey{m.Peer, m.Region}
	r := s.remoteRegions[key]
	if r == nil {
		s.remoteRegionRemoved(key)
		return
	}
	if r.removing {
		return
	}
	r.removing = true
	if !r.busy {
		s.dropRemoteRegion(r)
	}
}

// dropRemoteRegion tells the backend, when it knows the region, and answers the host.
func (s *Session) dropRemoteRegion(r *remoteRegionState) {
	key := remoteKey{r.Peer.Handle, r.ID}
	p := s.peers[key.peer]
	importer, ok := s.backend.(Importer)
	if !ok || !r.ready || s.remoteRegions[key] != r || p == nil || p.removing {
		delete(s.remoteRegions, key)
		s.remoteRegionRemoved(key)
		return
	}
	r.busy, p.imports = true, p.imports+1
	s.job(jobPeer, func() func() {
		err := func() (err error) {
			defer recovered(&err, "RemoveRemoteRegion")
			importer.RemoveRemoteRegion(&r.RemoteRegion)
			return nil
		}()
		return func() {
			p.imports--
			if err != nil {
				s.logf(contract.Log_LEVEL_ERROR, "remote region %d of peer %d: %v", key.id, key.peer, err)
			}
			if s.remoteRegions[key] == r {
				delete(s.remoteRegions, key)
			}
			s.remoteRegionRemoved(key)
			if p.removing {
				s.tryRemovePeer(p)
			}
		}
	})
}
