"""Peers, pools, plans, remote regions, grants and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from . import contract_pb2 as pb
from . import plan as plans
from .backend import (
    FENCE_PEER,
    REPAGE,
    BusyKind,
    Cause,
    Error,
    Grant,
    GrantPart,
    Lane,
    Level,
    Opener,
    Peer,
    Pool,
    RemoteRegion,
    Stop,
)
from .ops import breached, cause_of, opener, slower
from .text import cut

if TYPE_CHECKING:
    from .backend import Tensor
    from .regions import RegionState
    from .session import Session

MAX_TABLE = 1 << 16
MAX_GRANTS = 1 << 20
MAX_FENCES = 1 << 10  # fences that wait for a thread
MAX_EXPORT = 64 << 10


class PeerState:
    """The session's side of a peer."""

    def __init__(self, peer: Peer, accept: bool):
        self.peer = peer
        self.accept = accept  # an admitted writer (PeerAccept), not a target
        self.ready = accept
        self.busy = not accept  # a job runs
        self.removing = False
        self.imports = 0  # calls for its remote regions that run
        self.live = 0  # ops not yet ended; guarded by Session.mu


class PoolEntry:
    """Keeps a bad pool too: ops that name it are told why."""

    def __init__(self, m: Any, resolve: "Callable[[Tensor], int]"):
        self.pool: "Pool | None" = None
        self.error: "Exception | None" = None
        try:
            self.pool = plans.new_pool(m, resolve)
        except plans.BadPlan as e:
            self.error = e


class PlanEntry:
    """Keeps a bad plan too."""

    def __init__(self, peer: int):
        self.peer = peer
        self.plan: "plans.Plan | None" = None
        self.error: "Exception | None" = None
        self.regions: "list[RegionState]" = []  # distinct local ones


class RemoteState:
    """The session's side of a remote region."""

    def __init__(self, region: RemoteRegion):
        self.region = region
        self.busy = False
        self.ready = False
        self.removing = False


class GrantState:
    """The session's side of a grant."""

    def __init__(self, grant: Grant):
        self.grant = grant
        self.busy = False
        self.revoking = False


class Peers:
    """The part of a Session that keeps what belongs to peers. All on the loop."""

    def __init__(self: "Session"):
        self.peers: "dict[int, PeerState]" = {}
        self.pools: "dict[int, PoolEntry]" = {}
        self.plans: "dict[int, PlanEntry]" = {}
        self._remote: "dict[tuple[int, int], PoolEntry]" = {}
        self._remote_regions: "dict[tuple[int, int], RemoteState]" = {}
        self._grants: "dict[int, GrantState]" = {}

    def peer_handlers(self: "Session") -> "dict[str, Callable[[Any], None]]":
        return {
            "peer_add": self._peer_add,
            "peer_accept": self._peer_accept,
            "peer_remove": self._peer_remove,
            "pool_add": self._pool_add,
            "pool_remove": lambda m: self.pools.pop(m.pool, None),
            "remote_pool_add": self._remote_pool_add,
            "remote_pool_remove": lambda m: self._remote.pop((m.peer, m.pool), None),
            "remote_region_add": self._remote_region_add,
            "remote_region_remove": self._remote_region_remove,
            "plan_add": self._plan_add,
            "plan_remove": lambda m: self.plans.pop(m.plan, None),
            "grant": self._grant,
            "revoke": self._revoke,
            "fence_peer": self._fence_peer,
        }

    # Peers

    def _peer_failed(self: "Session", handle: int, e: Exception) -> None:
        cause = cause_of(e, Cause.PEER_UNREACHABLE)
        self.post(
            pb.PluginEvent(peer_failed=pb.PeerFailed(peer=handle, cause=cause, detail=cut(str(e) or repr(e)))), 256
        )

    def _peer_removed(self: "Session", handle: int) -> None:
        self.post(pb.PluginEvent(peer_removed=pb.PeerRemoved(peer=handle)))

    def _check_peer(self: "Session", m: Any, lane: int) -> None:
        """Raises Error."""
        if len(self.peers) >= MAX_TABLE:
            raise Error(Cause.LIMIT, f"{MAX_TABLE} peers are the limit")
        if len(m.token) != 32:
            raise breached(f"the token of peer {m.peer} has {len(m.token)} bytes, not 32")
        if lane not in Lane.__members__.values():
            raise breached(f"PeerAdd.require_lane is {lane}")
        if len(m.endpoint) > MAX_EXPORT:
            raise breached(
                f"the endpoint of peer {m.peer} has {len(m.endpoint)} bytes, at most {MAX_EXPORT} are allowed"
            )

    def _peer_add(self: "Session", m: Any) -> None:
        if m.peer in self.peers:
            self.breach(f"PeerAdd.peer {m.peer} is in use")
            return
        try:
            self._check_peer(m, m.require_lane)
        except Error as e:
            self._peer_failed(m.peer, e)
            return
        peer = Peer(m.peer, m.node, m.incarnation, m.epoch, m.endpoint, m.same_host, Lane(m.require_lane), m.token)
        p = self.peers[m.peer] = PeerState(peer, accept=False)

        def work() -> "Callable[[], None]":
            done = self.declare_busy(BusyKind.CONNECT, m.peer)
            lane, error = self._connect(peer)
            done()

            def connected() -> None:
                p.busy = False
                if error is not None:
                    del self.peers[m.peer]
                    self._peer_failed(m.peer, error)
                    if p.removing:
                        self._peer_removed(m.peer)
                    return
                p.ready = True
                self.post(pb.PluginEvent(peer_ready=pb.PeerReady(peer=m.peer, lane=int(lane))))
                if p.removing:
                    self.try_remove_peer(p)

            return connected

        self.job("peer", work)

    def _connect(self: "Session", peer: Peer) -> "tuple[Any, Exception | None]":
        """Call the backend and hold its answer against the demanded lane."""
        lane, error = self.call("add_peer", peer)
        if error is not None:
            return lane, error
        if lane not in Lane.__members__.values():
            error = Error(Cause.INTERNAL, f"add_peer returned lane {lane!r}")
        elif slower(lane, peer.require_lane):
            error = Error(Cause.LANE, f"only lane {Lane(lane).name} exists, {peer.require_lane.name} is demanded")
        if error is not None:
            self.call("remove_peer", peer)
        return lane, error

    def _peer_accept(self: "Session", m: Any) -> None:
        """Calls accept on the loop: it only records, and every later Grant must find it done."""
        if m.peer in self.peers:
            self.breach(f"PeerAccept.peer {m.peer} is in use")
            return
        peer = Peer(m.peer, m.node, m.incarnation, m.epoch, m.endpoint, m.same_host, Lane.ANY, m.token)
        try:
            self._check_peer(m, Lane.ANY)
        except Error as e:
            self._peer_failed(m.peer, e)
            return
        if hasattr(self.backend, "accept"):
            _, error = self.call("accept", peer)
            if error is not None:
                self._peer_failed(m.peer, error)
                return
        self.peers[m.peer] = PeerState(peer, accept=True)

    def _peer_remove(self: "Session", m: Any) -> None:
        p = self.peers.get(m.peer)
        if p is None:
            self._peer_removed(m.peer)
            return
        if p.removing:
            return
        for table in (self._remote, self._remote_regions):
            for key in [key for key in table if key[0] == m.peer]:
                del table[key]
        for id in [id for id, e in self.plans.items() if e.peer == m.peer]:
            del self.plans[id]
        with self.mu:
            p.removing = True
            open_ops = [st for st in self.ops.values() if st.peer is p and not st.ended]
        for st in open_ops:
            self.abort_op(st, Stop.PEER_REMOVED)
        self.try_remove_peer(p)

    def try_remove_peer(self: "Session", p: PeerState) -> None:
        """Go on with a removal when the ops of the peer have ended."""
        if p.busy or p.imports or p.live:
            return
        p.busy, p.ready = True, False

        def work() -> "Callable[[], None]":
            method = "unaccept" if p.accept else "remove_peer"
            error = self.call(method, p.peer)[1] if hasattr(self.backend, method) else None

            def removed() -> None:
                if error is not None:
                    self.log(Level.ERROR, f"peer {p.peer.handle}: {method} raised {error!r}")
                del self.peers[p.peer.handle]
                self._peer_removed(p.peer.handle)

            return removed

        self.job("peer", work)

    # Pools and plans

    def _pool_add(self: "Session", m: Any) -> None:
        if m.pool in self.pools or len(self.pools) >= MAX_TABLE:
            self.breach(f"PoolAdd.pool {m.pool} is in use, or {MAX_TABLE} pools are there")
            return

        def resolve(t: "Tensor") -> int:
            t.region = self.ready_region(t.region_id)
            if t.region is None:
                raise plans.BadPlan("not ready")
            return t.region.size

        e = self.pools[m.pool] = PoolEntry(m, resolve)
        if e.error is not None:
            self.breach(f"pool {m.pool}: {e.error}")

    def _remote_pool_add(self: "Session", m: Any) -> None:
        key = (m.peer, m.pool.pool)
        if key in self._remote or len(self._remote) >= MAX_TABLE:
            self.breach(f"RemotePoolAdd.pool {key[1]} of peer {m.peer} is in use, or {MAX_TABLE} pools are there")
            return
        if not self._is_target(m.peer):
            self.breach(f"RemotePoolAdd.peer {m.peer} is not a peer")
            return
        if not m.HasField("pool"):
            self.breach("RemotePoolAdd.pool is missing")
            return

        def resolve(t: "Tensor") -> int:
            r = self._remote_regions.get((m.peer, t.region_id))
            if r is None:
                return 1 << 63
            if not r.ready or r.removing:
                raise plans.BadPlan("not ready")
            t.remote = r.region
            return r.region.size

        e = self._remote[key] = PoolEntry(m.pool, resolve)
        if e.error is not None:
            self.breach(f"remote pool {key[1]} of peer {m.peer}: {e.error}")

    def _is_target(self: "Session", handle: int) -> bool:
        p = self.peers.get(handle)
        return p is not None and not p.accept and not p.removing

    def _plan_add(self: "Session", m: Any) -> None:
        if m.plan in self.plans or len(self.plans) >= MAX_TABLE:
            self.breach(f"PlanAdd.plan {m.plan} is in use, or {MAX_TABLE} plans are there")
            return
        if not self._is_target(m.peer):
            self.breach(f"PlanAdd.peer {m.peer} is not a peer")
            return
        e = self.plans[m.plan] = PlanEntry(m.peer)
        try:
            e.plan = self._make_plan(m)
            ids = {s.src.region_id for s in e.plan.slices}
            e.regions = [self.regions[id] for id in sorted(ids)]
        except (plans.BadPlan, Error) as error:
            e.error = error
            self.breach(f"plan {m.plan}: {error}")

    def _make_plan(self: "Session", m: Any) -> plans.Plan:
        """Raises BadPlan or Error."""
        src = self.pools.get(m.src_pool)
        if src is None:
            raise plans.BadPlan(f"PlanAdd.src_pool {m.src_pool} is unknown")
        if src.error is not None:
            raise plans.BadPlan(f"PlanAdd.src_pool {m.src_pool} is bad: {src.error}")
        dst = self._remote.get((m.peer, m.dst_pool))
        if dst is None:
            raise plans.BadPlan(f"PlanAdd.dst_pool {m.dst_pool} of peer {m.peer} is unknown")
        if dst.error is not None:
            raise plans.BadPlan(f"PlanAdd.dst_pool {m.dst_pool} is bad: {dst.error}")
        for t in src.pool.tensors:
            if self.ready_region(t.region_id) is not t.region:
                raise plans.BadPlan(f"PlanAdd.src_pool {m.src_pool}: region {t.region_id} is gone")
        return plans.new_plan(m, src.pool, dst.pool, self.has(REPAGE))

    # Remote regions

    def _remote_region_failed(self: "Session", key: "tuple[int, int]", e: Exception) -> None:
        cause = cause_of(e, Cause.INTERNAL)
        self.post(
            pb.PluginEvent(
                remote_region_failed=pb.RemoteRegionFailed(
                    peer=key[0], region=key[1], cause=cause, detail=cut(str(e) or repr(e))
                )
            ),
            256,
        )

    def _remote_region_removed(self: "Session", key: "tuple[int, int]") -> None:
        self.post(pb.PluginEvent(remote_region_removed=pb.RemoteRegionRemoved(peer=key[0], region=key[1])))

    def _remote_region_add(self: "Session", m: Any) -> None:
        key = (m.peer, m.region)
        p = self.peers.get(m.peer)
        if key in self._remote_regions:
            self.breach(f"RemoteRegionAdd.region {m.region} of peer {m.peer} is in use")
            return
        if p is None or not p.ready or p.accept or p.removing:
            self._remote_region_failed(key, breached(f"RemoteRegionAdd.peer {m.peer} is no ready peer"))
            return
        if len(self._remote_regions) >= MAX_TABLE:
            self._remote_region_failed(key, Error(Cause.LIMIT, f"{MAX_TABLE} remote regions are the limit"))
            return
        if len(m.export) > MAX_EXPORT:
            self._remote_region_failed(
                key, breached(f"RemoteRegionAdd.export has {len(m.export)} bytes, at most {MAX_EXPORT} are allowed")
            )
            return
        r = self._remote_regions[key] = RemoteState(RemoteRegion(p.peer, m.region, m.size, m.export))
        if not hasattr(self.backend, "add_remote_region"):
            self._remote_region_added(key, r)
            return

        def then(error: "Exception | None") -> None:
            r.busy = False
            if error is None:
                self._remote_region_added(key, r)
            else:
                if self._remote_regions.get(key) is r:
                    del self._remote_regions[key]
                self._remote_region_failed(key, error)
            if r.removing:
                self._drop_remote_region(key, r)

        self._import("add_remote_region", p, r, then)

    def _import(
        self: "Session", method: str, p: PeerState, r: RemoteState, then: "Callable[[Exception | None], None]"
    ) -> None:
        """Call the backend for a remote region beside the loop, which holds off the removal of the peer."""
        r.busy = True
        p.imports += 1

        def work() -> "Callable[[], None]":
            _, error = self.call(method, r.region)

            def finished() -> None:
                p.imports -= 1
                then(error)
                if p.removing:
                    self.try_remove_peer(p)

            return finished

        self.job("peer", work)

    def _remote_region_added(self: "Session", key: "tuple[int, int]", r: RemoteState) -> None:
        r.ready = True
        self.post(pb.PluginEvent(remote_region_ready=pb.RemoteRegionReady(peer=key[0], region=key[1])))

    def _remote_region_remove(self: "Session", m: Any) -> None:
        key = (m.peer, m.region)
        r = self._remote_regions.get(key)
        if r is None:
            self._remote_region_removed(key)
        elif not r.removing:
            r.removing = True
            if not r.busy:
                self._drop_remote_region(key, r)

    def _drop_remote_region(self: "Session", key: "tuple[int, int]", r: RemoteState) -> None:
        """Tell the backend, when it knows the region, and answer the host."""
        p = self.peers.get(key[0])

        def then(error: "Exception | None") -> None:
            if error is not None:
                self.log(Level.ERROR, f"remote region {key[1]} of peer {key[0]}: remove_remote_region raised {error!r}")
            if self._remote_regions.get(key) is r:
                del self._remote_regions[key]
            self._remote_region_removed(key)

        known = r.ready and self._remote_regions.get(key) is r and p is not None and not p.removing
        if known and hasattr(self.backend, "remove_remote_region"):
            self._import("remove_remote_region", p, r, then)
        else:
            then(None)

    # Grants

    def _grant(self: "Session", m: Any) -> None:
        if m.grant in self._grants:
            self.breach(f"Grant.grant {m.grant} is in use")
            return
        try:
            if not hasattr(self.backend, "grant"):
                raise Error(Cause.UNSUPPORTED, f"backend {self.info.name} takes no grants (it is not receiver_checked)")
            g = self._grants[m.grant] = GrantState(self._new_grant(m))
        except Error as e:
            self._grant_failed(m.grant, e)
            return
        g.busy = True

        def work() -> "Callable[[], None]":
            _, error = self.call("grant", g.grant)

            def granted() -> None:
                g.busy = False
                if error is None:
                    self.post(pb.PluginEvent(granted=pb.Granted(grant=m.grant)))
                else:
                    del self._grants[m.grant]
                    self._grant_failed(m.grant, error)
                if g.revoking:
                    self._revoke_now(g)

            return granted

        self.job("grant", work)

    def _grant_failed(self: "Session", grant: int, e: Exception) -> None:
        cause = cause_of(e, Cause.INTERNAL)
        self.post(
            pb.PluginEvent(grant_failed=pb.GrantFailed(grant=grant, cause=cause, detail=cut(str(e) or repr(e)))), 256
        )

    def _new_grant(self: "Session", m: Any) -> Grant:
        """Raises Error."""
        if len(self._grants) >= MAX_GRANTS:
            raise Error(Cause.LIMIT, f"{MAX_GRANTS} grants are the limit")
        g = Grant(m.grant, opener("Grant.destination", m.destination), [], tuple(m.writers))
        if "" in g.writers:
            raise breached("Grant.writers names a node that is empty")
        for i, part in enumerate(m.parts):
            e = self.pools.get(part.pool)
            if e is None or e.pool is None:
                raise breached(f"Grant.parts[{i}].pool {part.pool} is unknown or bad")
            for t in e.pool.tensors:
                if self.ready_region(t.region_id) is not t.region:
                    raise breached(f"Grant.parts[{i}].pool {part.pool}: region {t.region_id} is gone")
            try:
                runs, pages, _ = plans.check_runs(f"Grant.parts[{i}].pages", part.pages, e.pool.pages)
            except plans.BadPlan as error:
                raise breached(str(error)) from None
            if pages > e.pool.pages:
                raise breached(f"Grant.parts[{i}].pages names {pages} pages of a pool of {e.pool.pages}")
            g.parts.append(GrantPart(e.pool, plans.PageSet(runs)))
        return g

    def _revoke(self: "Session", m: Any) -> None:
        """Close a grant. An unknown one is still handed to the backend, with no parts: the opener must be
        refused for good."""
        if not hasattr(self.backend, "revoke"):
            self._revoked(m.grant, False)
            return
        g = self._grants.get(m.grant)
        if g is None:
            try:
                destination: Opener = opener("Revoke.destination", m.destination)
            except Error as e:
                self.breach(str(e))
                self._revoked(m.grant, False)
                return
            g = self._grants[m.grant] = GrantState(Grant(m.grant, destination, []))
        if g.revoking:
            return  # one answer
        g.revoking = True
        if not g.busy:
            self._revoke_now(g)

    def _revoke_now(self: "Session", g: GrantState) -> None:
        def work() -> "Callable[[], None]":
            quiet, error = self.call("revoke", g.grant)

            def revoked() -> None:
                if error is not None:
                    self.log(Level.ERROR, f"grant {g.grant.id}: revoke raised {error!r}")
                self._grants.pop(g.grant.id, None)
                self._revoked(g.grant.id, quiet is True)

            return revoked

        self.job("grant", work)

    def _revoked(self: "Session", grant: int, quiet: bool) -> None:
        self.post(pb.PluginEvent(revoked=pb.Revoked(grant=grant, quiet=quiet)))

    # Fences

    def _fence_peer(self: "Session", m: Any) -> None:
        if not self.has(FENCE_PEER) or self.jobs_waiting("fence") >= MAX_FENCES:
            self._fenced(m.fence, pb.FENCE_RESULT_UNKNOWN)
            return

        def work() -> "Callable[[], None]":
            quiet, error = self.call("fence_peer", m.node, m.incarnation, m.epoch)

            def fenced() -> None:
                if error is not None:
                    self.log(Level.ERROR, f"fence {m.fence}: fence_peer raised {error!r}")
                self._fenced(m.fence, pb.FENCE_RESULT_QUIET if quiet is True else pb.FENCE_RESULT_UNKNOWN)

            return fenced

        self.job("fence", work)

    def _fenced(self: "Session", fence: int, result: int) -> None:
        self.post(pb.PluginEvent(fenced=pb.Fenced(fence=fence, result=result)))
