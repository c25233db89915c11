"""What a fleet's servers hold: a number for each lease, in several shards."""

from __future__ import annotations

from headrace.parameter_server.wire import ShardLayout, ShardSpec


def fleet_form(leases: int) -> ShardLayout:
    """Returns four shards with a number for each lease."""
    return ShardLayout([ShardSpec(f"count-{shard}", 0, (leases,)) for shard in range(4)])
