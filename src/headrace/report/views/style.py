"""The page's colours: one a strategy, one a part of a step, told apart by colour-blind eyes, in light and dark.

Pictures are drawn with placeholder colours. The page replaces each by a variable of its style sheet, so that the
same picture is legible on a light and on a dark background.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.report.model.summary import Summary

INK = "#010101"
QUIET = "#010102"
GRID = "#010103"
PAPER = "#010104"

_GROUND = {
    "ink": (INK, "#1b1f24", "#e6e8eb"),
    "quiet": (QUIET, "#59626d", "#9aa4af"),
    "grid": (GRID, "#e1e5ea", "#2c333b"),
    "paper": (PAPER, "#ffffff", "#14181d"),
}

_SERIES = (
    ("#0067a5", "#5cb3f0"),
    ("#c8500a", "#f59356"),
    ("#007d5f", "#3fc79e"),
    ("#a3457f", "#e58fc1"),
    ("#8a6500", "#d9b040"),
    ("#5b52b5", "#a59cf5"),
    ("#2f7f93", "#6fcadb"),
    ("#6b6f75", "#b3b8bf"),
)
"""Okabe and Ito's hues, each at a contrast of at least 4.5 to its ground: (light, dark)."""

_FIXED = {"one_device": 0, "mirrored": 1, "central_storage": 2}

_PART_COLOURS = {
    "wait_s": ("#6e7680", "#7d8791"),
    "compute_s": ("#3f5873", "#9fb8d6"),
    "exchange_s": ("#b36200", "#f0a94a"),
    "update_s": ("#7d4a9c", "#c79ae3"),
    "other_s": ("#cdd3d9", "#454d56"),
}

PARTS: Mapping[str, str] = {part: f"#0102{index:02x}" for index, part in enumerate(_PART_COLOURS)}
"""Stand-ins by the part of a step."""

_PALE = frozenset({PARTS["other_s"]})

_STRATEGIES = tuple(f"#0103{index:02x}" for index in range(len(_SERIES)))

STAND_INS: Mapping[str, str] = {
    **{stand_in: name for name, (stand_in, _, _) in _GROUND.items()},
    **{stand_in: part.removesuffix("_s") for part, stand_in in PARTS.items()},
    **{stand_in: f"series-{index}" for index, stand_in in enumerate(_STRATEGIES)},
}
"""Style variables by stand-in, without the leading dashes."""


def colours_of(strategies: Iterable[str]) -> dict[str, str]:
    """Returns each strategy's placeholder: a fixed one for the common strategies, a free one for the others."""
    names = sorted(set(strategies))
    free = [index for index in range(len(_SERIES)) if index not in _FIXED.values()]
    strangers = [name for name in names if name not in _FIXED]
    chosen = {name: free[index % len(free)] for index, name in enumerate(strangers)}
    return {name: _STRATEGIES[_FIXED.get(name, chosen.get(name, 0))] for name in names}


def words_on(colour: str) -> str:
    """Returns the variable of the colour in which words are legible on a stand-in."""
    return "ink" if colour in _PALE else "paper"


def style_variables(dark: bool) -> str:
    """Returns the variables as CSS declarations."""
    values = {name: colours for name, (_, *colours) in _GROUND.items()}
    values |= {part.removesuffix("_s"): list(colours) for part, colours in _PART_COLOURS.items()}
    values |= {f"series-{index}": list(colours) for index, colours in enumerate(_SERIES)}
    return " ".join(f"--{name}: {colours[dark]};" for name, colours in values.items())


DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""Lengths on and off, in line widths: solid, dashed, dotted, dash and dot."""


@dataclass(frozen=True)
class RunStyle:
    """How one run is drawn in every picture; earlier runs have wider lines, so that they show under later ones."""

    colour: str
    dashes: Sequence[float]
    width: float


@dataclass(frozen=True)
class Picture:
    """A figure of the page, which answers one question.

    `reading` says how to read it. Its colours are of `key`: "runs", those of them that have servers
    ("served") or average ("averaged"), "parts" of a step, or "marks" of rates. `answer` is
    a sentence computed from the runs' data, "" where they do not say. `group` is the fold of the page that it is in, ""
    for what is always seen.
    """

    title: str
    svg: str
    reading: str
    key: str = ""
    answer: str = ""
    group: str = ""


def run_styles(summaries: Sequence[Summary]) -> tuple[RunStyle, ...]:
    """Returns one style a run, in order."""
    colours = colours_of(each.strategy for each in summaries)
    return tuple(
        RunStyle(colours[each.strategy], DASHES[index % len(DASHES)], 2.4 if index == 0 and len(summaries) > 1 else 1.6)
        for index, each in enumerate(summaries)
    )
