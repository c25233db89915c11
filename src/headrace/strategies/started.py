"""Whether a launcher has started as many processes as a strategy asks for: said before one waits for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from math import prod

from headrace.errors import InfeasiblePlan
from headrace.strategies.checks import COUNTS
from headrace.strategies.strategy import Strategy, describe_options


def require_started(strategy: Strategy, ranks: int) -> None:
    """Refuses another number of processes than that of a strategy, whose levels multiply.

    Raises:
        InfeasiblePlan: it contradicts that of the launcher; what the options do not say is as many as there are.
    """
    levels = tuple(_levels(strategy))
    options = [describe_options(each) for each in levels]
    named = [next((name for name in COUNTS if name in each), "") for each in options]
    if "" in named:
        # One process, or of one's own: its plan says it.
        return
    counts = [_number(each[name]) for each, name in zip(options, named, strict=True)]
    known, said = prod(count or 1 for count in counts), _described(strategy, levels, counts)
    servers = levels[0].processes().serving if counts[0] else _number(options[0].get("servers")) or 0
    if None in counts:
        fits, asked, right = servers or ranks % known == 0, f"a multiple of {known}", "as many"
    else:
        fits, asked, right = ranks == known + servers, f"{known + servers}", f"{known + servers}"
    if not fits:
        asked += f" processes, {servers} of which are servers or their backups" if servers else " processes"
        numbers = " and ".join(dict.fromkeys(named))
        raise InfeasiblePlan(
            f"{said} is {asked}, and the launcher started {ranks}; start {right}, or give other numbers of {numbers}"
        )


def _levels(strategy: Strategy) -> Iterator[Strategy]:
    """Yields the strategies that are within each other, from the outermost to the innermost."""
    assert is_dataclass(strategy)
    inside = [value for each in fields(strategy) if isinstance(value := getattr(strategy, each.name), Strategy)]
    if not inside:
        yield strategy
    for each in inside:
        yield from _levels(each)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _described(strategy: Strategy, levels: Sequence[Strategy], counts: Sequence[int | None]) -> str:
    """Names a strategy with its counts: "hybrid(mirrored(2), pipeline(2))"."""
    each = [f"{level.name}({count or '?'})" for level, count in zip(levels, counts, strict=True)]
    return each[0] if levels == (strategy,) else f"{strategy.name}({', '.join(each)})"
