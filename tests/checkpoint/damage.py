"""Damage of every kind to the newest checkpoint of a sound folder, and whether it is found."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoint.states import equal, save, small_state
from headrace.checkpoint import CheckpointFolder

__all__ = ["Damage", "complaint", "damages", "prepare"]

STEPS = (10, 20, 30)
RANKS = 2
NUMBERS = 20_000
"""Of a state, so that a file has 80 kB."""
BLOCK = 4096


@dataclass(frozen=True)
class Damage:
    """One thing that is done to a folder.

    Attributes:
        kind: for the table.
        what: exactly what, for people.
        do: is given the folder.
        bad: what must be named: a path below the folder, or that of its folder.
        found: the step that must be loaded instead.
    """

    kind: str
    what: str
    do: Callable[[Path], None]
    bad: str
    found: int = 20


def prepare(folder: Path) -> None:
    """Makes the sound folder."""
    for step in STEPS:
        save(CheckpointFolder(folder), step, RANKS, len(STEPS), NUMBERS)


def complaint(sound: Path, damage: Damage, aside: Path) -> str:
    """Does the damage to a copy; returns what was wrong with how it was found, "" for nothing."""
    shutil.copytree(sound, aside)
    try:
        damage.do(aside)
        newest, wrong = CheckpointFolder(aside).latest()
        if newest is None or newest.step != damage.found:
            return f"{damage.what}: {newest and newest.step} was loaded, not {damage.found}"
        if not all(equal(newest.read(rank), small_state(damage.found, rank, NUMBERS)) for rank in range(RANKS)):
            return f"{damage.what}: what was loaded is not what was saved"
        named = [str(error.path.relative_to(aside)) for error in wrong]
        if damage.bad not in named or len(wrong) != STEPS[-1] // 10 - damage.found // 10:
            return f"{damage.what}: {named} were named, not {damage.bad}"
        return ""
    finally:
        shutil.rmtree(aside)


def damages(dice: random.Random, sound: Path) -> Iterator[Damage]:
    """Yields one of each kind by turns: all truncations and exchanges first, then flips and truncations without end."""
    yield from _exchanges()
    places = [f"step-{STEPS[-1]:08d}/{name}" for name in ("manifest.json", "rank-0.safetensors", "rank-1.safetensors")]
    sizes = {place: (sound / place).stat().st_size for place in places}
    for place, size in sizes.items():
        yield Damage("missing", f"{place} is missing", lambda path, place=place: (path / place).unlink(), place)
        yield from (_cut(place, at) for at in {*range(0, size, BLOCK), 1, 7, 8, 9, size - 1})
        # Where the structure is, every bit counts as much as where the numbers are.
        yield from (_flip(place, bit) for bit in range(8 * 200))
    while True:
        place = dice.choice(places)
        yield _flip(place, dice.randrange(8 * sizes[place]))
        place = dice.choice(places)
        yield _cut(place, dice.randrange(sizes[place]))


def _flip(place: str, bit: int) -> Damage:
    def flip(path: Path) -> None:
        with (path / place).open("r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ (1 << bit % 8)]))

    return Damage("flipped bit", f"bit {bit} of {place}", flip, place)


def _cut(place: str, size: int) -> Damage:
    return Damage("truncation", f"{place} cut to {size}", lambda path: os.truncate(path / place, size), place)


def _exchanges() -> Iterator[Damage]:
    """Yields every exchange of two files or folders that touches the newest checkpoint."""
    names = ("manifest.json", "rank-0.safetensors", "rank-1.safetensors")
    newest = f"step-{STEPS[-1]:08d}"
    for other in (f"step-{step:08d}" for step in STEPS[:-1]):
        for name in names:
            for how, act in (("exchanged with", _exchange), ("replaced by", _replace)):
                one, two = f"{newest}/{name}", f"{other}/{name}"
                yield Damage(
                    "exchange between checkpoints",
                    f"{one} {how} {two}",
                    lambda path, act=act, one=one, two=two: act(path / one, path / two),
                    # A manifest that is in the wrong folder is found by its step.
                    one,
                    10 if act is _exchange and other.endswith("20") else 20,
                )
        yield Damage(
            "folders exchanged",
            f"{newest} and {other}",
            lambda path, other=other: _exchange(path / newest, path / other),
            f"{newest}/manifest.json",
            10 if other.endswith("20") else 20,
        )
    ranks = [f"{newest}/{name}" for name in names[1:]]
    for one, two in (ranks, ranks[::-1]):
        for how, act in (("exchanged with", _exchange), ("replaced by", _replace)):
            yield Damage(
                "exchange between ranks",
                f"{one} {how} {two}",
                lambda path, act=act, one=one, two=two: act(path / one, path / two),
                ranks[0] if act is _exchange else one,
            )


def _exchange(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def _replace(one: Path, two: Path) -> None:
    one.write_bytes(two.read_bytes())
