"""What the author of a backend writes and gets: the words of the contract as Python types.

Sizes and offsets are bytes, times are seconds unless the name says otherwise.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from .op import Op
    from .plan import PageSet


class MemoryKind(enum.IntEnum):
    """What a region is made of."""

    HOST_SHM = 1
    CUDA_IPC = 2  # refused by name in this version
    CUDA_VMM = 3  # refused by name in this version


class Lane(enum.IntEnum):
    """The path that bytes really take, fastest first."""

    RDMA = 1
    NVLINK = 2
    SHM = 3
    CMA = 4
    TCP = 5
    ANY = 6  # not known yet (Backend.add_peer), or no demand (Peer.require_lane); never of a finished op


class Cause(enum.IntEnum):
    """Why an operation did not end as done."""

    TRANSPORT = 1
    PEER_UNREACHABLE = 2
    REFUSED = 3
    BOUNDS = 4
    UNSUPPORTED = 5
    NO_TERMINAL = 6
    PROTOCOL = 7
    LIMIT = 8
    LANE = 9
    INTERNAL = 10
    SHUTDOWN = 11
    EMPTY = 12
    PEER_ABSENT = 13
    FALSE_PREDICATE = 14
    POISONED = 15


class BusyKind(enum.IntEnum):
    """Long calls that the host is told of."""

    REGISTER = 1
    CONNECT = 2
    FIRST_POST = 3


class Level(enum.IntEnum):
    """Severity of a log line."""

    DEBUG = 1
    INFO = 2
    WARN = 3
    ERROR = 4


class Stop(enum.Enum):
    """Why an op should end early."""

    ABORTED = "op aborted by the host"
    PEER_REMOVED = "peer removed by the host"
    SESSION_OVER = "session over"


# Features that the host knows. docs/contract.md of Terminus says what each promises.
RECEIVER_CHECKED = "receiver_checked"
BYTE_PROGRESS = "byte_progress"
FENCE_PEER = "fence_peer"
STRIDED = "strided"
LAYER_RANGE = "layer_range"
REPAGE = "repage"

#: Counter of slices that were refused because their opener was revoked or unknown.
LATE_REFUSED = "late_refused"


class Error(Exception):
    """An error that carries the cause to report. Without one an error of add_region is
    Cause.INTERNAL, of add_peer Cause.PEER_UNREACHABLE."""

    def __init__(self, cause: Cause, message: str):
        super().__init__(message)
        self.cause = Cause(cause)


class Stopped(Error):
    """The op that this was done for is to stop (Op.stop)."""

    def __init__(self, why: Stop):
        super().__init__(Cause.PEER_UNREACHABLE, why.value)


@dataclass(frozen=True)
class Limits:
    """Limits of the backend; 0 means none of its own."""

    max_ops: int = 0
    max_ops_per_peer: int = 0
    max_op_bytes: int = 0
    max_bytes_per_peer: int = 0
    max_runs: int = 0
    max_regions: int = 0
    progress_timeout_ns: int = 0


@dataclass
class Info:
    """Describes a backend. It is asked once, before start."""

    name: str  # [a-z][a-z0-9-]*, at most 32 bytes
    version: str
    features: "list[str]" = field(default_factory=list)
    limits: Limits = Limits()
    #: None, or an instance of a dataclass that holds the defaults. The JSON Schema that the engine checks
    #: the YAML options against is made from it, and the options are decoded, strictly, before start.
    config: Any = None
    op_concurrency: int = 0  # threads that run transfer at once; 0 means 16


@dataclass
class Start:
    """What Backend.start gets."""

    node: str
    incarnation: int
    epoch: int
    host_id: str  # equal on two engines of one machine
    runtime_dir: str  # private directory of this epoch
    config: Any  # Info.config with the options applied
    #: busy(kind, subject) declares a long call (registering, connecting, first post) until the returned
    #: function is called, so that the host extends its beat bound to 120 s.
    busy: Callable[[BusyKind, int], Callable[[], None]]
    log: Callable[[Level, str], None]
    #: fatal(reason) ends the process with a Fault that the host shows. For what makes the epoch useless.
    fatal: Callable[[str], None]


@dataclass(eq=False)
class Region:
    """Mapped memory of a local worker."""

    id: int
    kind: MemoryKind
    size: int
    #: The mapping. None after remove_region has returned: keep no slice of it, because what is still
    #: referred to cannot be unmapped, and then the process has to end.
    bytes: "memoryview | None" = None
    address: int = 0  # of the mapping, for libraries that register memory
    fd: int = -1  # the memory descriptor, owned by the SDK; valid until remove_region has returned
    lease: int = -1  # the lease, owned by the SDK; goes to every process that maps the region
    #: May be set by add_region: what a peer's backend needs to write here, at most 64 KiB.
    export: bytes = b""


@dataclass(eq=False)
class Peer:
    """A plugin epoch of another engine: the target of ops (add_peer) or an admitted writer (accept)."""

    handle: int
    node: str
    incarnation: int
    epoch: int
    endpoint: bytes  # may be empty for an admitted writer
    same_host: bool
    require_lane: Lane
    token: bytes  # 32 bytes, equal at both ends
    data: Any = None  # the backend's own


@dataclass(eq=False)
class RemoteRegion:
    """Memory of a peer's worker."""

    peer: Peer
    id: int
    size: int
    export: bytes
    data: Any = None  # the backend's own


@dataclass(frozen=True)
class Opener:
    """One open of a room at one engine. Never reused."""

    incarnation: int
    sequence: int


@dataclass(frozen=True)
class Generation:
    """The pair of openers between which an op moves bytes."""

    source: Opener
    destination: Opener


@dataclass(eq=False)
class Tensor:
    """One layer's K or V: page i occupies [offset + i*page_stride, +page_bytes) of the region."""

    region_id: int
    offset: int
    page_stride: int
    page_bytes: int
    layer: int
    region: "Region | None" = None  # None for a remote tensor
    remote: "RemoteRegion | None" = None  # of a remote tensor whose region was announced


@dataclass(eq=False)
class Pool:
    """Tensors that share page ids."""

    id: int
    pages: int
    tensors: "list[Tensor]"


@dataclass(eq=False)
class GrantPart:
    """Pages of one local pool."""

    pool: Pool
    pages: "PageSet"


@dataclass(eq=False)
class Grant:
    """The pages of one destination opener."""

    id: int
    destination: Opener
    parts: "list[GrantPart]"
    writers: "tuple[str, ...]" = ()  # nodes; none: every admitted writer
    data: Any = None  # the backend's own

    def admits(self, node: str) -> bool:
        """Tell whether the writers of a node (Peer.node, as accept got it) may write under this grant. A
        backend with RECEIVER_CHECKED asks besides covers: an opener is no secret."""
        return not self.writers or node in self.writers

    def covers(self, region: int, off: int, n: int) -> bool:
        """Tell whether every byte of [off, off+n) of the region belongs to a granted page. A backend
        with RECEIVER_CHECKED asks before it copies a slice. An empty range is covered."""
        end = off + n
        while off < end:
            following = self._covered_from(region, off)
            if following is None:
                return False
            off = following
        return True

    def _covered_from(self, region: int, off: int) -> "int | None":
        for part in self.parts:
            for t in part.pool.tensors:
                if t.region_id != region or off < t.offset:
                    continue
                page, inside = divmod(off - t.offset, t.page_stride)
                if page < part.pool.pages and inside < t.page_bytes and page in part.pages:
                    return t.offset + page * t.page_stride + t.page_bytes
        return None


class Backend(abc.ABC):
    """Moves bytes. The SDK calls start first and close last; everything else may be called from several
    threads at once, but calls for one region or one peer never overlap, and no transfer runs on a region
    or peer that is not added or is being removed.

    A backend may have more methods, each of which the SDK finds by its name:

    - ``accept(peer)`` and ``unaccept(peer)``: it knows its writers before they connect. accept only
      records and must not block; an exception is reported as PeerFailed.
    - ``grant(grant)`` and ``revoke(grant) -> bool`` (with RECEIVER_CHECKED): pages opened to an opener,
      and closed for good; revoke returns whether no byte of that opener can land any more.
    - ``fence_peer(node, incarnation, epoch) -> bool`` (with FENCE_PEER): whether every writer epoch up
      to this one is provably quiet. At most 5 s.
    - ``counters() -> dict[str, int]``: more counters for Stats (at most 256, names of at most 64 bytes).
    - ``add_remote_region(remote_region)`` and ``remove_remote_region(remote_region)``: its regions
      export something.
    """

    @abc.abstractmethod
    def info(self) -> Info:
        """Describe the backend."""

    @abc.abstractmethod
    def start(self, s: Start) -> bytes:
        """Prepare the backend and return its endpoint: opaque bytes that peers' plugins get in add_peer.
        An exception is shown to the operator and not retried."""

    def add_region(self, r: Region) -> None:
        """Make memory known. The SDK has mapped, populated and proved it. RegionReady follows."""

    def remove_region(self, r: Region) -> None:
        """Forget it; the SDK unmaps afterwards. No op on it is unquiet."""

    @abc.abstractmethod
    def add_peer(self, p: Peer) -> Lane:
        """Make a remote plugin epoch known. Connect now (declare busy) or lazily."""

    def remove_peer(self, p: Peer) -> None:
        """Close what belongs to the peer; its ops have ended."""

    @abc.abstractmethod
    def transfer(self, op: "Op") -> None:
        """Do one op and end it by exactly one of op.done, fail, skip, aborted. Runs on a thread of its
        own; op.stop tells when the host aborts the op or drops the peer. To end the op later from
        elsewhere, call op.keep before returning. What returns, raises or drops the handle without an end
        is ended by the SDK as failed with Cause.NO_TERMINAL, quiet=False."""

    def close(self) -> None:
        """Release everything. The process exits afterwards."""
