"""Write a transfer backend for Terminus in Python.

A plugin is a program that calls serve with its backend:

    import terminus_plugin as tp

    class Copy(tp.Backend): ...

    if __name__ == "__main__":
        tp.serve(Copy())

The SDK owns the process (handshake, beats, drain, the death of the host), maps and proves memory, keeps
regions, pools, peers and plans, expands plans to bytes, and ends every op that its author forgot.
example/copy_backend.py is a whole backend.
"""

from .backend import (
    BYTE_PROGRESS,
    FENCE_PEER,
    LATE_REFUSED,
    LAYER_RANGE,
    RECEIVER_CHECKED,
    REPAGE,
    STRIDED,
    Backend,
    BusyKind,
    Cause,
    Error,
    Generation,
    Grant,
    GrantPart,
    Info,
    Lane,
    Level,
    Limits,
    MemoryKind,
    Opener,
    Peer,
    Pool,
    Region,
    RemoteRegion,
    Start,
    Stop,
    Stopped,
    Tensor,
)
from .memory import Mapping, copy
from .op import Op
from .plan import Copy, PageSet, Plan, Row, Run, Slice
from .process import serve

__all__ = [
    "BYTE_PROGRESS",
    "FENCE_PEER",
    "LATE_REFUSED",
    "LAYER_RANGE",
    "RECEIVER_CHECKED",
    "REPAGE",
    "STRIDED",
    "Backend",
    "BusyKind",
    "Cause",
    "Copy",
    "Error",
    "Generation",
    "Grant",
    "GrantPart",
    "Info",
    "Lane",
    "Level",
    "Limits",
    "Mapping",
    "MemoryKind",
    "Op",
    "Opener",
    "PageSet",
    "Peer",
    "Plan",
    "Pool",
    "Region",
    "RemoteRegion",
    "Row",
    "Run",
    "Slice",
    "Start",
    "Stop",
    "Stopped",
    "Tensor",
    "copy",
    "serve",
]
