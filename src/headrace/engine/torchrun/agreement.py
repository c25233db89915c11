"""The launcher's processes compare what must be the same on all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headrace.engine.torchrun.store import gather
from headrace.errors import UsageError
from headrace.machine.identity import host_name, machine_identity

_NAMED = 3
"""Ranks that a message names; more would fill the line."""

_Told = tuple[str, str, Mapping[str, str]]


def require_same(facts: Mapping[str, str]) -> None:
    """Compares facts, by name, of all ranks; all call it together, with the same names.

    Raises:
        UsageError: some rank has another fact than rank 0, or two machines have one name.
    """
    compare([json.loads(text) for text in gather(json.dumps([host_name(), machine_identity(), facts]))])


def compare(told: Sequence[_Told]) -> None:
    """Raises what `require_same` does, of each rank's host, machine and facts."""
    machines: dict[str, tuple[int, str]] = {}
    for rank, (host, machine, _) in enumerate(told):
        other, known = machines.setdefault(host, (rank, machine))
        if known != machine:
            raise UsageError(
                f"rank {other} and rank {rank} are on two machines, or in two containers, that are both called {host}; "
                "give each one a name of its own by HEADRACE_HOST"
            )
    first, _, facts = told[0]
    for what, mine in facts.items():
        others = [
            f"rank {rank} on {host} has {theirs.get(what, 'none')}"
            for rank, (host, _, theirs) in enumerate(told)
            if theirs.get(what) != mine
        ]
        if others:
            more = f" (and {len(others) - _NAMED} more)" if len(others) > _NAMED else ""
            raise UsageError(
                f"{what} differs: {', '.join(others[:_NAMED])}{more}, rank 0 on {first} has {mine}; "
                "every host needs the same"
            )
