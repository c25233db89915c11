"""The page's colours: one a strategy, one a part of a step, told apart by colour-blind eyes, in light and dark.

A colour is the name of a variable of the style sheet, so that the same picture is legible on light and dark grounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.report.model.summary import Summary

_GROUND = {
    "ink": ("#1b1f24", "#e6e8eb"),
    "quiet": ("#59626d", "#9aa4af"),
    "grid": ("#e1e5ea", "#2c333b"),
    "paper": ("#ffffff", "#14181d"),
    "bad": ("#b3261e", "#ff8a80"),
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

PARTS: Mapping[str, str] = {part: part.removesuffix("_s") for part in _PART_COLOURS}
"""Colours by the part of a step."""


def colours_of(strategies: Iterable[str]) -> dict[str, str]:
    """Returns each strategy's colour: a fixed one for the common strategies, a free one for the others."""
    names = sorted(set(strategies))
    free = [index for index in range(len(_SERIES)) if index not in _FIXED.values()]
    strangers = [name for name in names if name not in _FIXED]
    chosen = {name: free[index % len(free)] for index, name in enumerate(strangers)}
    return {name: f"series-{_FIXED.get(name, chosen.get(name, 0))}" for name in names}


def words_on(colour: str) -> str:
    """Returns the colour in which words are legible on another."""
    return "ink" if colour == PARTS["other_s"] else "paper"


def style_variables(dark: bool) -> str:
    """Returns the variables as CSS declarations."""
    values = _GROUND | {PARTS[part]: colours for part, colours in _PART_COLOURS.items()}
    values |= {f"series-{index}": colours for index, colours in enumerate(_SERIES)}
    return " ".join(f"--{name}: {colours[dark]};" for name, colours in values.items())


def colour_sheet(selector: str, more: str = "") -> str:
    """Returns the rules that give an element its colours, on light and dark grounds; `more` are declarations."""
    dark = f"@media (prefers-color-scheme: dark) {{ {selector} {{ {style_variables(dark=True)} }} }}"
    return f"{selector} {{ {more}{style_variables(dark=False)} }}\n{dark}\n"


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
