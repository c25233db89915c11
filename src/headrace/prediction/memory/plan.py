"""A plan of memory: what the fullest worker of a run will hold, as it was asked for, and with other choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.prediction.memory.kinds import RankMemory
from headrace.report.format import byte_count, plural

_COLUMNS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "state": ("state",),
    "activations": ("activations",),
    "other": ("buffers", "gathered", "exchange", "batch"),
}
_NAME, _WIDTH = 22, 8
_WIDTHS = {"parameters": 11, "gradients": 10, "activations": 12}


@dataclass(frozen=True)
class MemoryPlan:
    """What the fullest worker will hold at the moment when it holds most; printed, a table of 80 columns.

    Not in it are Python and torch themselves, what kernels take for a moment, and what the C library keeps.

    Attributes:
        strategy: its name.
        workers: how many.
        examples: of a batch, of the fullest worker.
        memory: as the job is.
        choices: the same with one thing changed, by what that is.
        impossible: why other choices cannot be had, by what they are.
        roles: what each holds, where processes differ; `memory` is that of the fullest.

    Examples:
        >>> plan = hr.summary(job, hr.Mirrored(workers=2))
        >>> plan.memory.parameters
        232
    """

    strategy: str
    workers: int
    examples: int
    memory: RankMemory
    choices: Mapping[str, RankMemory] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, RankMemory] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes of the fullest worker, at most."""
        return self.memory.peak

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.strategy}, {plural(self.workers, 'worker')}: what the fullest holds at its peak, with "
            f"{plural(self.examples, 'example')}"
        )
        widths = [_WIDTHS.get(name, _WIDTH) for name in (*_COLUMNS, "peak")]
        yield _row("", (*_COLUMNS, "peak"), widths)
        rows = {"as it is": self.memory, **self.roles, **self.choices}
        for name, memory in rows.items():
            cells = [sum(getattr(memory, kind) for kind in kinds) for kinds in _COLUMNS.values()]
            yield _row(name, [byte_count(cell) if cell else "" for cell in (*cells, memory.peak)], widths)
        least = min(self.choices, key=lambda name: self.choices[name].peak, default="")
        if least and (saved := self.peak - self.choices[least].peak) > 0:
            yield f"{least} needs least: {byte_count(saved)} less ({saved / self.peak:.0%})."
        for name, why in self.impossible.items():
            yield f"{name}: {why}"
        for name, memory in rows.items():
            if memory.host:
                yield f"{name}, on an accelerator: {byte_count(memory.host)} in host memory besides"
        if self.memory.routed:
            yield "assumed: a router chooses each expert as often as the others"
        yield "Python and torch themselves, and what kernels take for a moment, come on top."


def _row(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"{name:<{_NAME}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
