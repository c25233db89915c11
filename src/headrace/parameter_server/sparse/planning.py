"""Whether the servers have memory for the rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import InfeasiblePlan
from headrace.spec.cluster import Cluster
from headrace.spec.embedding import TableSpec
from headrace.spec.plan import Plan


def require_rows(
    strategy: str, tables: Sequence[TableSpec], expected_rows: int | None, plan: Plan, cluster: Cluster
) -> None:
    """Refuses tables whose rows, with their optimizer's state, are more than the memory of the servers' hosts.

    Of each table `expected_rows` count, or all of them for None. Raises InfeasiblePlan with the numbers.
    """
    needed = sum(_bytes(table, expected_rows) for table in tables)
    serving = [plan.role(rank).host for rank in (*plan.servers, *plan.backups)]
    for host in cluster.hosts:
        here = needed * serving.count(host.name) // len(plan.servers)
        if here > host.memory_bytes:
            largest = max(tables, key=lambda table: _bytes(table, expected_rows))
            raise InfeasiblePlan(
                f"{strategy} needs {here:,} bytes on {host.name} for rows and their optimizer's state, and it has "
                f"{host.memory_bytes:,} left; the largest table is {largest.name!r}, {largest.rows:,} rows of "
                f"{largest.width}; use servers on more hosts, or say by expected_rows how many rows are ever changed"
            )


def part_of(table: TableSpec, servers: int) -> TableSpec:
    """Returns what one of several servers holds of a table: its part of the rows that may be held."""
    if table.limit is None:
        return table
    return replace(table, limit=replace(table.limit, rows=max(1, table.limit.rows // servers)))


def _bytes(table: TableSpec, expected_rows: int | None) -> int:
    return table.bytes if expected_rows is None else table.bytes_of(min(expected_rows, table.most_rows))
