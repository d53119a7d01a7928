"""Worker client of the Terminus engine, standard library only.

A worker (one rank of a model instance) opens a `Client` to the engine on its node, shares memory with it
(`Client.create_region`, `Client.add_pool`) and hands over the KV cache of one request in one `Room`::

    with Client("/run/terminus/worker.sock", "prefill-0", "source", layout=layout) as client:
        region = client.create_region(pages * page_bytes)
        pool = client.add_pool(pages, [Tensor(region, 0, page_bytes, page_bytes, layer=0)])
        room = client.open(42)
        room.send([(pool, page_ids)], last=True, aux=b"...")
        while room.poll() not in (KVPoll.Failed, KVPoll.Success):
            ...                                  # a memory read, no system call
        room.wait_reusable(60.0)                 # a terminal status does not mean that pages may be reused
        room.release()

When the engine is lost (`Client.lost`) every room that has not ended polls Failed (engine_lost), and the worker
goes on with the next engine by `Client.redial`. The protocol is docs/worker-api.md.
"""
from .client import Client, Layout
from .connection import Pending
from .errors import (
    BadDescriptor,
    BadField,
    BadFrame,
    BadMemory,
    BadState,
    ConnectFailed,
    Draining,
    EngineLost,
    LimitExceeded,
    NoBackend,
    NotReusable,
    ProtocolError,
    Refused,
    RequestTimeout,
    TerminusError,
)
from .group import GroupChange, GroupItem
from .memory import Region, Staging, Tensor
from .room import Failure, Part, Room
from .status import KVPoll, Residency

__all__ = [
    "BadDescriptor", "BadField", "BadFrame", "BadMemory", "BadState", "Client", "ConnectFailed", "Draining",
    "EngineLost", "Failure", "GroupChange", "GroupItem", "KVPoll", "Layout", "LimitExceeded", "NoBackend",
    "NotReusable", "Part", "Pending", "ProtocolError", "Refused", "Region", "RequestTimeout", "Residency", "Room",
    "Staging", "Tensor", "TerminusError",
]
