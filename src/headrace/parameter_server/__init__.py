"""Parameter servers: shards, and the workers that push to them and pull from them. Usable alone; see README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.parameter_server.client.client import Client
    from headrace.parameter_server.client.session import ServerConnection
    from headrace.parameter_server.core.leases import LeaseTable
    from headrace.parameter_server.core.shard import Shard
    from headrace.parameter_server.models import ModelClient, serve_model
    from headrace.parameter_server.replication.machine import Authority, View
    from headrace.parameter_server.replication.transport import ReplicatedTransport
    from headrace.parameter_server.server.optimizer import Remedies, RoundClock, ShardOptimizer
    from headrace.parameter_server.server.server import Server
    from headrace.parameter_server.server.snapshots import Snapshots
    from headrace.parameter_server.wire import ShardLayout, ShardSpec

__all__ = [
    "Authority",
    "Client",
    "LeaseTable",
    "ModelClient",
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
    "serve_model",
]

# What is imported when it is first asked for: the machines need no torch.
_HOMES = {
    "ShardOptimizer": "headrace.parameter_server.server.optimizer",
    "Authority": "headrace.parameter_server.replication.machine",
    "Client": "headrace.parameter_server.client.client",
    "ServerConnection": "headrace.parameter_server.client.session",
    "ShardLayout": "headrace.parameter_server.wire",
    "ModelClient": "headrace.parameter_server.models",
    "serve_model": "headrace.parameter_server.models",
    "LeaseTable": "headrace.parameter_server.core.leases",
    "RoundClock": "headrace.parameter_server.server.optimizer",
    "ReplicatedTransport": "headrace.parameter_server.replication.transport",
    "ShardSpec": "headrace.parameter_server.wire",
    "Remedies": "headrace.parameter_server.server.optimizer",
    "Server": "headrace.parameter_server.server.server",
    "Shard": "headrace.parameter_server.core.shard",
    "Snapshots": "headrace.parameter_server.server.snapshots",
    "View": "headrace.parameter_server.replication.machine",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace.parameter_server' has no attribute {name!r}")
