"""Plans, page runs and their expansion to bytes. Pure functions; every check names the field."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from .backend import REPAGE, Cause, Error, Pool, Region, RemoteRegion, Tensor


class BadPlan(Exception):
    """What the host said makes no sense. The text names the field."""


class Run(NamedTuple):
    """count pages: start, start+stride, …"""

    start: int
    count: int
    stride: int


class Copy(NamedTuple):
    """len contiguous bytes from a local region to a remote one: what a plan expands to."""

    src: Region
    src_off: int
    dst_region: int
    dst: "RemoteRegion | None"  # None when the region was not announced
    dst_off: int
    len: int


class Row(NamedTuple):
    """count pieces of len bytes at constant strides: the form that libraries with strided descriptors
    want. Piece i goes from src[src_off + i*src_stride] to dst_region at dst_off + i*dst_stride."""

    src: Region
    src_off: int
    src_stride: int
    dst_region: int
    dst: "RemoteRegion | None"
    dst_off: int
    dst_stride: int
    len: int
    count: int


@dataclass
class Slice:
    """One strided copy inside a pair of pages, its tensors resolved. A slice whose pieces touch is
    folded into one piece."""

    layer: int
    src: Tensor
    dst: Tensor
    src_off: int  # from the start of the source page
    dst_off: int
    len: int
    src_stride: int
    dst_stride: int
    count: int
    src_page: int = 0  # the page of its group, below Plan.src_pages
    dst_page: int = 0


#: The largest PlanAdd.src_pages and dst_pages.
MAX_GROUP = 4096


@dataclass(eq=False)
class Plan:
    """How groups of src_pages pages of a local pool become groups of dst_pages pages of a remote one. Both
    are 1 unless the backend has REPAGE."""

    id: int
    src: Pool
    dst: Pool
    src_pages: int
    dst_pages: int
    slices: "list[Slice]"

    def bytes_per_group(self, layer_from: int = 0, layer_to: int = 1 << 32) -> int:
        """What the plan moves for one group of pages in layers [layer_from, layer_to)."""
        return sum(s.len * s.count for s in self.slices if layer_from <= s.layer < layer_to)

    def rows(self, src: "list[Run]", dst: "list[Run]", layer_from: int, layer_to: int) -> Iterator[Row]:
        """Expand runs × slices of the layers, slice by slice, to strided rows."""
        for s, pairs in self._paired(src, dst, layer_from, layer_to):
            for a, b in pairs:
                yield from _rows(s, a, b)

    def copies(self, src: "list[Run]", dst: "list[Run]", layer_from: int, layer_to: int) -> Iterator[Copy]:
        """Expand rows to contiguous copies, joining neighbours. An op can have a hundred thousand of them."""
        for s, pairs in self._paired(src, dst, layer_from, layer_to):
            region, dst_region, remote, n = s.src.region, s.dst.region_id, s.dst.remote, s.len
            at = to = length = 0  # the copy that may still grow
            for src_off, dst_off in self._offsets(s, pairs):
                if at + length == src_off and to + length == dst_off and length:
                    length += n
                    continue
                if length:
                    yield Copy(region, at, dst_region, remote, to, length)
                at, to, length = src_off, dst_off, n
            if length:
                yield Copy(region, at, dst_region, remote, to, length)

    @staticmethod
    def _offsets(s: Slice, pairs: "list[tuple[Run, Run]]") -> "Iterator[tuple[int, int]]":
        """Where the pieces of a slice stand, page by page."""
        src_page, dst_page = s.src.page_stride, s.dst.page_stride
        src_base, dst_base = s.src.offset + s.src_off, s.dst.offset + s.dst_off
        pieces = range(s.count)
        for (a, count, a_stride), (b, _, b_stride) in pairs:
            at, to = src_base + a * src_page, dst_base + b * dst_page
            for _ in range(count):
                if s.count == 1:
                    yield at, to
                else:
                    for i in pieces:
                        yield at + i * s.src_stride, to + i * s.dst_stride
                at += a_stride * src_page
                to += b_stride * dst_page

    def _paired(
        self, src: "list[Run]", dst: "list[Run]", layer_from: int, layer_to: int
    ) -> "Iterator[tuple[Slice, list[tuple[Run, Run]]]]":
        """The slices of the layers with the runs of pages that each copies."""
        pairs: "dict[tuple[int, int], list[tuple[Run, Run]]]" = {}
        for s in self._joined(layer_from, layer_to):
            place = s.src_page, s.dst_page
            if place not in pairs:
                a, b = pick(src, s.src_page, self.src_pages), pick(dst, s.dst_page, self.dst_pages)
                pairs[place] = list(pair_runs(a, b))
            yield s, pairs[place]

    def _joined(self, layer_from: int, layer_to: int) -> Iterator[Slice]:
        """The slices of the layers, those joined that touch at both ends in every page."""
        held = None
        for s in self.slices:
            if not layer_from <= s.layer < layer_to:
                if held is not None:
                    yield held
                held = None
            elif held is not None and _touch(held, s):
                held = replace(held, len=held.len + s.len)
            else:
                if held is not None:
                    yield held
                held = s
        if held is not None:
            yield held


def _touch(a: Slice, b: Slice) -> bool:
    return (
        a.count == 1
        and b.count == 1
        and a.src_page == b.src_page
        and a.dst_page == b.dst_page
        and a.src.region_id == b.src.region_id
        and a.dst.region_id == b.dst.region_id
        and a.src.page_stride == b.src.page_stride
        and a.dst.page_stride == b.dst.page_stride
        and a.src.offset + a.src_off + a.len == b.src.offset + b.src_off
        and a.dst.offset + a.dst_off + a.len == b.dst.offset + b.dst_off
    )


def _rows(s: Slice, a: Run, b: Run) -> Iterator[Row]:
    """One slice over a pair of runs of equal count: the longer dimension becomes the row."""
    src_page, dst_page = a.stride * s.src.page_stride, b.stride * s.dst.page_stride
    src_off = s.src.offset + a.start * s.src.page_stride + s.src_off
    dst_off = s.dst.offset + b.start * s.dst.page_stride + s.dst_off
    inner, inner_src, inner_dst = s.count, s.src_stride, s.dst_stride
    outer, outer_src, outer_dst = a.count, src_page, dst_page
    if outer >= inner:
        inner, outer = outer, inner
        inner_src, outer_src = outer_src, inner_src
        inner_dst, outer_dst = outer_dst, inner_dst
    region = s.src.region
    assert region is not None  # a local tensor of a ready region
    for i in range(outer):
        yield Row(
            region,
            src_off + i * outer_src,
            inner_src,
            s.dst.region_id,
            s.dst.remote,
            dst_off + i * outer_dst,
            inner_dst,
            s.len,
            inner,
        )


def pick(runs: "list[Run]", at: int, of: int) -> "list[Run]":
    """The pages of a run list that stand at place `at` of their group of `of`, again as runs."""
    if of == 1:
        return runs
    out = []
    for r in runs:
        if at >= r.count:
            at -= r.count
            continue
        n = (r.count - at + of - 1) // of
        out.append(Run(r.start + at * r.stride, n, r.stride * of))
        at += n * of - r.count
    return out


def pair_runs(a: "list[Run]", b: "list[Run]") -> "Iterator[tuple[Run, Run]]":
    """Walk two run lists of equal length in pages and yield pairs of equal count."""
    if [r.count for r in a] == [r.count for r in b]:
        yield from zip(a, b)
        return
    left, right = iter(a), iter(b)
    ra = rb = Run(0, 0, 1)
    while True:
        if ra.count == 0:
            ra = next(left, None)
            if ra is None:
                return
        if rb.count == 0:
            rb = next(right, None)
            if rb is None:
                return
        n = min(ra.count, rb.count)
        yield Run(ra.start, n, ra.stride), Run(rb.start, n, rb.stride)
        ra = Run(ra.start + n * ra.stride, ra.count - n, ra.stride)
        rb = Run(rb.start + n * rb.stride, rb.count - n, rb.stride)


def fits(off: int, stride: int, count: int, n: int, size: int) -> bool:
    """Tell whether count pieces of n bytes from off at stride lie within size."""
    if count == 0:
        return off <= size
    return (count - 1) * stride + off + n <= size


def check_runs(field: str, m: Any, pages: int) -> "tuple[list[Run], int, bool]":
    """Check runs of the wire against the pages of a pool: the runs, the number of pages, and whether one
    has a stride. Raises BadPlan."""
    start, count, stride = list(m.start), list(m.count), list(m.stride)
    n = len(start)
    if len(count) != n or len(stride) not in (0, n):
        raise BadPlan(f"{field}: {n} starts, {len(count)} counts, {len(stride)} strides")
    if 0 in count:
        raise BadPlan(f"{field}.count[{count.index(0)}] is 0")
    if 0 in stride:
        raise BadPlan(f"{field}.stride[{stride.index(0)}] is 0")
    runs = [_new_run(Run, r) for r in zip(start, count, stride or itertools.repeat(1))]
    strided = any(s > 1 and c > 1 for s, c in zip(stride, count))
    for i, r in enumerate(runs):
        first, pages_of, k = r
        if first + (pages_of - 1) * k >= pages:
            raise BadPlan(
                f"{field}: run {i} (start {r.start}, count {r.count}, stride {r.stride}) "
                f"leaves the pool of {pages} pages"
            )
    return runs, sum(count), strided


_new_run = tuple.__new__  # a fifth of the cost of Run(*r)


def new_pool(m: Any, resolve: "Callable[[Tensor], int]") -> Pool:
    """Check the geometry of a PoolAdd. resolve fills in the tensor's region and returns its size; for a
    remote region that was not announced that is no more than a bound. Raises BadPlan."""
    if m.pages == 0:
        raise BadPlan("PoolAdd.pages is 0")
    if not m.tensors:
        raise BadPlan("PoolAdd.tensors is empty")
    pool = Pool(m.pool, m.pages, [])
    for i, w in enumerate(m.tensors):
        t = Tensor(w.region, w.offset, w.page_stride, w.page_bytes, w.layer)
        if t.page_bytes == 0 or t.page_stride < t.page_bytes:
            raise BadPlan(f"PoolAdd.tensors[{i}]: page_bytes {t.page_bytes}, page_stride {t.page_stride}")
        try:
            size = resolve(t)
        except BadPlan as e:
            raise BadPlan(f"PoolAdd.tensors[{i}].region {w.region}: {e}") from None
        if not fits(t.offset, t.page_stride, m.pages, t.page_bytes, size):
            raise BadPlan(f"PoolAdd.tensors[{i}]: {m.pages} pages leave the region of {size} bytes")
        pool.tensors.append(t)
    return pool


def new_plan(m: Any, src: Pool, dst: Pool, repage: bool) -> Plan:
    """Check the slices of a PlanAdd against both pools. repage says that the backend serves plans of other
    than one page to one page. Raises BadPlan, or Error for what is not served."""
    groups = f"PlanAdd.src_pages:dst_pages is {m.src_pages}:{m.dst_pages}"
    if not repage and (m.src_pages, m.dst_pages) != (1, 1):
        raise Error(Cause.UNSUPPORTED, f"{groups}; other than 1:1 needs feature {REPAGE}")
    if not (1 <= m.src_pages <= MAX_GROUP and 1 <= m.dst_pages <= MAX_GROUP):
        raise BadPlan(f"{groups}; each is from 1 to {MAX_GROUP}")
    plan = Plan(m.plan, src, dst, m.src_pages, m.dst_pages, [])
    total = 0
    for i, w in enumerate(m.slices):
        name = f"PlanAdd.slices[{i}]"
        if w.src_tensor >= len(src.tensors):
            raise BadPlan(f"{name}.src_tensor is {w.src_tensor}; the pool has {len(src.tensors)}")
        if w.dst_tensor >= len(dst.tensors):
            raise BadPlan(f"{name}.dst_tensor is {w.dst_tensor}; the pool has {len(dst.tensors)}")
        a, b = src.tensors[w.src_tensor], dst.tensors[w.dst_tensor]
        s = Slice(
            a.layer, a, b, w.src_off, w.dst_off, w.len, w.src_stride, w.dst_stride, w.count, w.src_page, w.dst_page
        )
        if s.src_page >= plan.src_pages or s.dst_page >= plan.dst_pages:
            raise BadPlan(
                f"{name}: src_page {s.src_page}, dst_page {s.dst_page}; "
                f"the groups have {plan.src_pages} and {plan.dst_pages} pages"
            )
        if s.len == 0 or s.count == 0:
            raise BadPlan(f"{name}: len {s.len}, count {s.count}; neither may be 0")
        if a.layer != b.layer:
            raise BadPlan(f"{name}: source layer {a.layer}, destination layer {b.layer}")
        if not fits(s.src_off, s.src_stride, s.count, s.len, a.page_bytes):
            raise BadPlan(f"{name}: source bytes leave the page of {a.page_bytes} bytes")
        if not fits(s.dst_off, s.dst_stride, s.count, s.len, b.page_bytes):
            raise BadPlan(f"{name}: destination bytes leave the page of {b.page_bytes} bytes")
        if s.count > 1 and s.dst_stride < s.len:
            raise BadPlan(f"{name}.dst_stride is {s.dst_stride}, less than len {s.len}: pieces overlap")
        if s.count > 1 and s.src_stride == s.len == s.dst_stride:
            s.len, s.count = s.len * s.count, 1
        total += s.len * s.count
        if total >= 1 << 64:
            raise BadPlan("PlanAdd.slices: the sizes overflow")
        plan.slices.append(s)
    return plan


class PageSet:
    """A set of page ids. Immutable."""

    def __init__(self, runs: Iterable[Run] = ()):
        spans: "list[list[int]]" = []
        for first, last in sorted(_spans(runs)):
            if spans and first <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], last)
            else:
                spans.append([first, last])
        self._from = [s[0] for s in spans]
        self._to = [s[1] for s in spans]

    def __contains__(self, page: int) -> bool:
        i = bisect.bisect_right(self._from, page)
        return i > 0 and page < self._to[i - 1]

    def __len__(self) -> int:
        return sum(self._to) - sum(self._from)


def _spans(runs: Iterable[Run]) -> "Iterator[tuple[int, int]]":
    for r in runs:
        if r.stride == 1:
            yield r.start, r.start + r.count
        else:
            for i in range(r.count):
                yield r.start + i * r.stride, r.start + i * r.stride + 1
