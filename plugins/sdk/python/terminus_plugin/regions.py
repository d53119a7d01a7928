"""Regions: descriptors, mapping, canary, removal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable

from . import contract_pb2 as pb
from . import memory
from . import plan as plans
from .backend import BusyKind, Cause, Error, Level, MemoryKind, Region
from .ops import Recent, breached, cause_of
from .text import cut

if TYPE_CHECKING:
    from .session import Session

RECENT_REGIONS = 1 << 14  # refused regions that are remembered, for descriptors that come later


class RegionState:
    """The session's side of a region."""

    def __init__(self, m: Any):
        self.region = Region(m.region, m.kind, m.size)
        self.add = m
        self.fds: "tuple[int, int] | None" = None  # memory, lease; until they are mapped
        self.mapping: "memory.Mapping | None" = None
        self.ready = False
        self.busy = False  # a job runs
        self.removing = False
        self.unquiet = 0  # ops not yet quiet; guarded by Session.mu

    def unmap(self) -> None:
        """Give everything back. Raises when the backend still refers to the mapping."""
        r = self.region
        r.bytes, r.address, r.fd, r.lease = None, 0, -1, -1
        if self.mapping is not None and not self.mapping.close():
            raise RuntimeError(f"region {r.id} cannot be unmapped: the backend keeps a slice of Region.bytes")
        self.mapping = None
        if self.fds is not None:
            close_all(self.fds)
            self.fds = None


def close_all(fds: "tuple[int, ...] | list[int]") -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


class Regions:
    """The part of a Session that keeps the regions. All on the loop, except descriptors."""

    def __init__(self: "Session"):
        self.regions: "dict[int, RegionState]" = {}
        self._orphans: "dict[int, tuple[int, int]]" = {}
        self._refused = Recent(RECENT_REGIONS)

    def region_handlers(self: "Session") -> "dict[str, Callable[[Any], None]]":
        return {"region_add": self._region_add, "region_remove": self._region_remove}

    def descriptors(self: "Session", region: int, memory: int, lease: int) -> None:
        """Hand over the descriptors of a region; they belong to the session from here on. Called by the
        reader of the control socketpair, before or after the RegionAdd."""
        if self.over.is_set():
            close_all((memory, lease))
        else:
            self.result(lambda: self._take_descriptors(region, (memory, lease)))

    def _take_descriptors(self: "Session", region: int, fds: "tuple[int, int]") -> None:
        r = self.regions.get(region)
        if region in self._refused:
            close_all(fds)
        elif r is not None and r.fds is None and r.mapping is None and not r.busy:
            r.fds = fds
            self._map(r)
        elif r is not None:
            close_all(fds)
            self.breach(f"descriptors of region {region} came twice")
        elif len(self._orphans) >= 1 << 16:
            close_all(fds)
            self.breach(f"descriptors of region {region}: {len(self._orphans)} others wait for their RegionAdd")
        else:
            close_all(self._orphans.pop(region, ()))
            self._orphans[region] = fds

    def _region_add(self: "Session", m: Any) -> None:
        if m.region in self.regions:
            self.breach(f"RegionAdd.region {m.region} is in use")
            return
        r = RegionState(m)
        r.fds = self._orphans.pop(m.region, None)
        most = min(self.info.limits.max_regions or 1 << 16, 1 << 16)
        try:
            if len(self.regions) >= most:
                raise Error(Cause.LIMIT, f"{most} regions are the limit")
            _check(m)
        except Error as e:
            self._region_failed(r, e)
            return
        r.region.kind = MemoryKind(m.kind)
        self.regions[m.region] = r
        if r.fds is not None:
            self._map(r)

    def _region_failed(self: "Session", r: RegionState, e: Exception) -> None:
        """Forget the region; descriptors that still come are closed."""
        self._unmap(r)
        self.regions.pop(r.region.id, None)
        self._refused.add(r.region.id)
        cause = cause_of(e, Cause.INTERNAL)
        detail = cut(str(e) or repr(e))
        self.post(
            pb.PluginEvent(region_failed=pb.RegionFailed(region=r.region.id, cause=cause, detail=detail)), len(detail)
        )

    def _map(self: "Session", r: RegionState) -> None:
        """Map and register beside the loop."""
        r.busy = True

        def work() -> "Callable[[], None]":
            done = self.declare_busy(BusyKind.REGISTER, r.region.id)
            error = self._open(r)
            if error is not None:
                self._unmap(r)
            done()

            def mapped() -> None:
                r.busy = False
                if error is not None:
                    self._region_failed(r, error)
                    if r.removing:
                        self._region_removed(r.region.id)
                    return
                r.ready = True
                export = r.region.export
                self.post(pb.PluginEvent(region_ready=pb.RegionReady(region=r.region.id, export=export)), len(export))
                if r.removing:
                    self._try_remove(r)

            return mapped

        self.job("region", work)

    def _open(self: "Session", r: RegionState) -> "Exception | None":
        """Everything between descriptors and RegionReady."""
        fds, r.fds = r.fds, None
        try:
            m = r.mapping = memory.Mapping(*fds, r.region.size, "RegionAdd.size")
            m.populate()
            if not r.add.no_canary:
                memory.prove(m, r.add.canary_offset, r.add.canary)
        except (OSError, ValueError, Error) as e:
            return e
        region = r.region
        region.bytes, region.address, region.fd, region.lease = m.bytes, m.address, m.fd, m.lease
        _, error = self.call("add_region", region)
        if error is None and not (isinstance(region.export, bytes) and len(region.export) <= 64 << 10):
            error = ValueError("the backend exports what is not bytes, or more than 65536 of them")
            self.call("remove_region", region)
        return error

    def _region_remove(self: "Session", m: Any) -> None:
        r = self.regions.get(m.region)
        if r is None:
            close_all(self._orphans.pop(m.region, ()))
            self._region_removed(m.region)
            return
        with self.mu:
            again, r.removing = r.removing, True
            unquiet = r.unquiet
        if again:
            return
        if unquiet:
            self.breach(f"RegionRemove.region {m.region}: {unquiet} ops on it are not quiet; it is removed after them")
        self._try_remove(r)

    def settle(self: "Session") -> None:
        """Do what waited for ops: removals and the end of a drain."""
        for r in list(self.regions.values()):
            if r.removing:
                self._try_remove(r)
        for p in list(self.peers.values()):
            if p.removing:
                self.try_remove_peer(p)
        if self.draining and self.drain_at < float("inf") and not self.ops:
            self.finish_drain()

    def _try_remove(self: "Session", r: RegionState) -> None:
        """Go on with a removal when nothing holds the region any more."""
        if r.busy or r.unquiet:
            return
        if not r.ready:
            self._unmap(r)
            self.regions.pop(r.region.id, None)
            self._region_removed(r.region.id)
            return
        r.busy, r.ready = True, False

        def work() -> "Callable[[], None]":
            _, error = self.call("remove_region", r.region)
            unmapped = self._unmap(r)

            def removed() -> None:
                r.busy = False
                if error is not None:
                    self.log(Level.ERROR, f"region {r.region.id}: remove_region raised {error!r}")
                self.regions.pop(r.region.id, None)
                if unmapped:
                    self._region_removed(r.region.id)

            return removed

        self.job("region", work)

    def _unmap(self: "Session", r: RegionState) -> bool:
        """Unmap. What cannot be unmapped ends the process, which is the only other way to let go of it."""
        try:
            r.unmap()
        except RuntimeError as e:
            self.fatal(e)
            return False
        return True

    def _region_removed(self: "Session", region: int) -> None:
        self.post(pb.PluginEvent(region_removed=pb.RegionRemoved(region=region)))

    def ready_region(self: "Session", id: int) -> "Region | None":
        """Resolve a tensor's region; None when no op may name it."""
        r = self.regions.get(id)
        return r.region if r is not None and r.ready and not r.removing else None

    def unmap_all(self: "Session") -> None:
        """The end: no call of the backend runs any more. Raises when a region cannot be unmapped."""
        while self._results:  # descriptors that nobody took
            self._results.popleft()()
        for fds in self._orphans.values():
            close_all(fds)
        self._orphans.clear()
        while self.regions:
            self.regions.popitem()[1].unmap()


def _check(m: Any) -> None:
    if m.kind in (pb.MEMORY_KIND_CUDA_IPC, pb.MEMORY_KIND_CUDA_VMM):
        raise Error(
            Cause.UNSUPPORTED, f"RegionAdd.kind {pb.MemoryKind.Name(m.kind)} is not served by contract version 1"
        )
    if m.kind != pb.MEMORY_KIND_HOST_SHM:
        raise breached(f"RegionAdd.kind is {m.kind}")
    if not 8 <= m.size <= 1 << 46:
        raise breached(f"RegionAdd.size is {m.size}")
    if not plans.fits(m.canary_offset, 0, 1, 8, m.size):
        raise breached(f"RegionAdd.canary_offset {m.canary_offset} leaves the region of {m.size} bytes")
