"""Parameter servers: shards, and the workers that push to them and pull from them. Usable alone; see README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ps.applier import Remedies, RoundClock, ShardOptimizer
    from headrace.ps.client import Client
    from headrace.ps.form import ShardLayout, ShardSpec
    from headrace.ps.leases import LeaseTable
    from headrace.ps.pairing import ReplicatedTransport
    from headrace.ps.replication import Authority, View
    from headrace.ps.server import Server
    from headrace.ps.session import ServerConnection
    from headrace.ps.shard import Shard
    from headrace.ps.snapshots import Snapshots

__all__ = [
    "Authority",
    "Client",
    "LeaseTable",
    "Remedies",
    "ReplicatedTransport",
    "RoundClock",
    "Server",
    "ServerConnection",
    "Shard",
    "ShardLayout",
    "ShardOptimizer",
    "ShardSpec",
    "Snapshots",
    "View",
]

# What is imported when it is first asked for: the machines need no torch.
_HOMES = {
    "ShardOptimizer": "headrace.ps.applier",
    "Authority": "headrace.ps.replication",
    "Client": "headrace.ps.client",
    "ServerConnection": "headrace.ps.session",
    "ShardLayout": "headrace.ps.form",
    "LeaseTable": "headrace.ps.leases",
    "RoundClock": "headrace.ps.applier",
    "ReplicatedTransport": "headrace.ps.pairing",
    "ShardSpec": "headrace.ps.form",
    "Remedies": "headrace.ps.applier",
    "Server": "headrace.ps.server",
    "Shard": "headrace.ps.shard",
    "Snapshots": "headrace.ps.snapshots",
    "View": "headrace.ps.replication",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace.ps' has no attribute {name!r}")
