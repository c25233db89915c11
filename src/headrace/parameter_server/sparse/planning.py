"""How rows of tables are read and how many there may be, and whether the servers have memory for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.spec.cluster import Cluster
from headrace.spec.embedding import TableSpec
from headrace.spec.plan import Plan


@dataclass(frozen=True)
class RowOptions:
    """How workers read the rows of sparse embeddings on servers.

    Attributes:
        expected: how many rows of each table are ever changed at most; None for all. The servers must have memory for
            them.
        prefetch: whether the rows of the next batch are pulled while this one computes.
        hot: so many rows of each table, those that a worker asks for most, are copied to it; 0 for none.
        hot_age: steps for which a worker reads a copy before it pulls the row again.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterServer(workers=2, rows=hr.RowOptions(prefetch=True, hot=10_000))
        >>> strategy.rows.hot
        10000
    """

    expected: int | None = None
    prefetch: bool = False
    hot: int = 0
    hot_age: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.prefetch, bool):
            raise UsageError(f"prefetch of rows must be True or False, got {self.prefetch!r}")
        for name, least in (("expected", 1), ("hot", 0), ("hot_age", 1)):
            value = getattr(self, name)
            none = value is None and name == "expected"
            if not none and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UsageError(f"{name} of rows must be a whole number of at least {least}, got {value!r}")

    @staticmethod
    def of(value: RowOptions | Mapping[str, Any]) -> RowOptions:
        """Returns options that may be given as a dict, as texts do: `{'hot': 1000}`."""
        if isinstance(value, RowOptions):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(f"rows are hr.RowOptions(...), or a dict such as {{'hot': 1000}}, got {value!r}")
        known = [field.name for field in fields(RowOptions)]
        for name in value:
            if name not in known:
                raise UnknownName("option", name, known, "rows")
        return RowOptions(**value)

    @property
    def near(self) -> str:
        """What makes workers read rows that are older than those of the servers; "" for nothing."""
        parts = [*(["prefetch=True"] if self.prefetch else []), *([f"hot={self.hot}"] if self.hot else [])]
        return f"rows=hr.RowOptions({', '.join(parts)})" if parts else ""


def check_near(options: RowOptions, tables: Sequence[TableSpec], workers: int, staleness_bound: int | None) -> None:
    """Refuses to read older rows where that gives something up: raises InfeasiblePlan with the remedy."""
    near = options.near
    if not near:
        return
    if not tables:
        raise InfeasiblePlan(f"{near} is for sparse embeddings, and the model has none; leave it out")
    first = tables[0].name
    if staleness_bound is not None:
        raise InfeasiblePlan(
            f"{near} reads rows of the sparse embedding {first!r} that are older than staleness_bound="
            f"{staleness_bound} allows; use staleness_bound=None, or leave it out"
        )
    limited = next((table.name for table in tables if table.limit is not None), None)
    if options.prefetch and limited is not None:
        raise InfeasiblePlan(
            f"{near} pulls rows before this worker's last push, which may evict them from the table {limited!r}; leave "
            "out prefetch, or limit_rows"
        )
    if options.hot and workers == 1:
        raise InfeasiblePlan(
            f"{near} lets the one worker read rows of the sparse embedding {first!r} from before its own pushes, so "
            "that it would not equal one device; use more workers, or leave it out"
        )


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
                f"{largest.width}; use servers on more hosts, or say by "
                "rows=hr.RowOptions(expected=1000) how many rows are ever changed"
            )


def part_of(table: TableSpec, servers: int) -> TableSpec:
    """Returns what one of several servers holds of a table: its part of the rows that may be held."""
    if table.limit is None:
        return table
    return replace(table, limit=replace(table.limit, rows=max(1, table.limit.rows // servers)))


def _bytes(table: TableSpec, expected_rows: int | None) -> int:
    return table.bytes if expected_rows is None else table.bytes_of(min(expected_rows, table.most_rows))
