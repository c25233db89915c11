"""Parameter servers: shards, and the workers that push to them and pull from them. Usable alone; see README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ps.applier import Applier, Pace, Remedies
    from headrace.ps.client import Client
    from headrace.ps.form import Form, Piece
    from headrace.ps.leases import Leases
    from headrace.ps.pairing import Pairing
    from headrace.ps.replication import Authority, View
    from headrace.ps.server import Server
    from headrace.ps.session import Connection
    from headrace.ps.shard import Shard
    from headrace.ps.snapshots import Snapshots

__all__ = [
    "Applier",
    "Authority",
    "Client",
    "Connection",
    "Form",
    "Leases",
    "Pace",
    "Pairing",
    "Piece",
    "Remedies",
    "Server",
    "Shard",
    "Snapshots",
    "View",
]

# What is imported when it is first asked for: the machines need no torch.
_HOMES = {
    "Applier": "headrace.ps.applier",
    "Authority": "headrace.ps.replication",
    "Client": "headrace.ps.client",
    "Connection": "headrace.ps.session",
    "Form": "headrace.ps.form",
    "Leases": "headrace.ps.leases",
    "Pace": "headrace.ps.applier",
    "Pairing": "headrace.ps.pairing",
    "Piece": "headrace.ps.form",
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
