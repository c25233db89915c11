"""Parameter servers: shards, and the workers that push to them and pull from them. Usable alone; see README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.registry import lazy_names

if TYPE_CHECKING:
    from headrace.parameter_server.client.client import Client
    from headrace.parameter_server.client.session import ServerConnection
    from headrace.parameter_server.core.leases import LeaseTable
    from headrace.parameter_server.core.shard import Shard
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

# The machines need no torch.
__getattr__ = lazy_names(
    __name__,
    {
        "Authority": "headrace.parameter_server.replication.machine:Authority",
        "Client": "headrace.parameter_server.client.client:Client",
        "LeaseTable": "headrace.parameter_server.core.leases:LeaseTable",
        "Remedies": "headrace.parameter_server.server.optimizer:Remedies",
        "ReplicatedTransport": "headrace.parameter_server.replication.transport:ReplicatedTransport",
        "RoundClock": "headrace.parameter_server.server.optimizer:RoundClock",
        "Server": "headrace.parameter_server.server.server:Server",
        "ServerConnection": "headrace.parameter_server.client.session:ServerConnection",
        "Shard": "headrace.parameter_server.core.shard:Shard",
        "ShardLayout": "headrace.parameter_server.wire:ShardLayout",
        "ShardOptimizer": "headrace.parameter_server.server.optimizer:ShardOptimizer",
        "ShardSpec": "headrace.parameter_server.wire:ShardSpec",
        "Snapshots": "headrace.parameter_server.server.snapshots:Snapshots",
        "View": "headrace.parameter_server.replication.machine:View",
    },
)
