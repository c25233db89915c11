"""What a fleet's servers hold: a number for each lease, in several shards."""

from __future__ import annotations

from headrace.ps.form import Form, Piece

__all__ = ["fleet_form"]


def fleet_form(leases: int) -> Form:
    """Returns four shards with a number for each lease."""
    return Form([Piece(f"count-{shard}", 0, (leases,)) for shard in range(4)])
