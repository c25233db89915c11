"""Saves whose disk is remembered, what must hold of whatever a power cut leaves of them, and mutants that break it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from checkpoint.model_disk import Act, Crash, ModelDisk
from checkpoint.states import equal, small_state
from headrace.checkpoint import CheckpointFolder
from headrace.errors import CorruptCheckpoint

__all__ = [
    "MUTANTS",
    "STEPS",
    "Allowed",
    "at_once",
    "complaint",
    "different",
    "fingerprint",
    "history",
    "killed_histories",
]

PATH = Path("model")
STEPS = (10, 20, 30, 40, 35, 35, 50)
"""Of the saves. After 40 the run goes on from an older checkpoint, after the first 35 again."""
KEEP = 2
RANKS = 2


@dataclass(frozen=True)
class Allowed:
    """Which of the saves, by number, may be the newest one that is found; None where there may be none."""

    saves: frozenset[int | None]


NOTHING = Allowed(frozenset({None}))


class Killed(BaseException):
    """The process ends here; what it did lives on in the disk's cache."""


def save(disk: ModelDisk, number: int, before: Allowed) -> Allowed:
    """Does the save of this number and says on the disk what may be found meanwhile and afterwards."""
    step = STEPS[number]
    folder = CheckpointFolder(PATH, disk)
    disk.mark(before)
    folder.begin(step)
    files = [folder.write(step, rank, _state(number, rank)) for rank in range(RANKS)]
    found: set[int | None] = {number, *before.saves}
    if step in folder.steps():
        # One of the same step gives way: the ones before may be what is left.
        found |= {int(folder.open(other).description["save"]) for other in folder.steps()}
    disk.mark(Allowed(frozenset(found)))
    folder.commit(step, files, {"save": number}, KEEP)
    after = Allowed(frozenset({number}))
    disk.mark(after)
    return after


def history() -> ModelDisk:
    """Returns a disk on which everything was saved, one after the other."""
    disk, allowed = ModelDisk(), NOTHING
    for number in range(len(STEPS)):
        allowed = save(disk, number, allowed)
    return disk


def at_once(acts: Sequence[Act], dice: random.Random) -> list[Act]:
    """Returns a history in which the ranks wrote their files at the same time: each one's acts in order, mixed."""
    mixed: list[Act] = []
    for writing, group in itertools.groupby(acts, lambda act: "part/rank-" in act.label and "delete" not in act.label):
        found = list(group)
        if writing:
            order = [_rank(act) for act in found]
            dice.shuffle(order)
            queues = {rank: iter([act for act in found if _rank(act) == rank]) for rank in set(order)}
            found = [next(queues[rank]) for rank in order]
        mixed += found
    return mixed


def killed_histories() -> Iterator[tuple[ModelDisk, int]]:
    """Yields disks on which a save was killed before one of its acts and the next went through; and since which act."""
    disk, allowed = ModelDisk(), NOTHING
    for number in range(len(STEPS) - 1):
        finished = disk.forked()
        after = save(finished, number, allowed)
        for last in range(sum(act.kind != "mark" for act in finished.acts[len(disk.acts) :])):
            victim = disk.forked(_killing_after(last))
            with suppress(Killed):
                save(victim, number, allowed)
            survivor = victim.forked()
            said = [act.mark for act in survivor.acts if isinstance(act.mark, Allowed)]
            save(survivor, number + 1, [NOTHING, *said][-1])
            yield survivor, len(victim.acts)
        disk, allowed = finished, after


def complaint(crash: Crash) -> str:
    """Returns what is wrong with what a crash left, "" for nothing."""
    allowed = _allowed(crash)
    folder = CheckpointFolder(PATH, ModelDisk(crash.tree))
    newest, wrong = folder.latest()
    if wrong:
        return f"a committed checkpoint is damaged: {wrong[0]}"
    number = None if newest is None else int(newest.description["save"])
    if number not in allowed.saves:
        return f"save {number} is the newest, allowed are {set(allowed.saves)}"
    try:
        for step in folder.steps():
            checkpoint = folder.open(step)
            saved = int(checkpoint.description["save"])
            if not all(equal(checkpoint.read(rank), _state(saved, rank)) for rank in range(RANKS)):
                return f"step {step} is a mixture"
    except CorruptCheckpoint as error:
        return f"a committed checkpoint is damaged: {error}"
    return ""


def different(crashes: Iterable[Crash]) -> list[Crash]:
    """Returns one crash of all that left the same, where the same is allowed."""
    return list({fingerprint(crash): crash for crash in crashes}.values())


def fingerprint(crash: Crash) -> bytes:
    """Returns what tells two crashes apart."""
    listed = sorted((folder, sorted(files.items())) for folder, files in crash.tree.items())
    return hashlib.blake2b(repr((listed, sorted(map(str, _allowed(crash).saves)))).encode(), digest_size=16).digest()


def _rank(act: Act) -> str:
    return act.label.rpartition("/")[2]


def _allowed(crash: Crash) -> Allowed:
    return crash.mark if isinstance(crash.mark, Allowed) else NOTHING


@functools.cache
def _state(number: int, rank: int) -> dict[str, Tensor]:
    return small_state(1000 * number + STEPS[number], rank)


def _killing_after(acts: int) -> Callable[[Act], None]:
    left = [acts]

    def count(_: Act) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return count


def _without(matches: Callable[[Act, Act], bool]) -> Callable[[Sequence[Act]], list[Act]]:
    """Leaves out every act of which `matches(act, the one before)` holds."""

    def mutate(acts: Sequence[Act]) -> list[Act]:
        doomed = {id(act) for last, act in itertools.pairwise(acts) if matches(act, last)}
        return [act for act in acts if id(act) not in doomed]

    return mutate


def _in_place(ending: str) -> Callable[[Sequence[Act]], list[Act]]:
    """Does under the final name what is done under the name with `ending`: no renaming."""

    def mutate(acts: Sequence[Act]) -> list[Act]:
        kept = [act for act in acts if not (act.label.startswith("rename ") and ending in act.label)]
        return [
            replace(act, names=tuple((name.removesuffix(ending), node) for name, node in act.names)) for act in kept
        ]

    return mutate


def _renames(act: Act, ending: str) -> bool:
    return act.label.startswith("rename ") and ending in act.label


MUTANTS: dict[str, Callable[[Sequence[Act]], list[Act]]] = {
    "a rank's file is not synced": _without(lambda act, _: act.kind == "sync" and "rank-" in act.label),
    "the manifest is not synced": _without(lambda act, _: act.kind == "sync" and "manifest" in act.label),
    "the part folder is not synced": _without(lambda act, _: act.kind == "sync" and act.label.endswith(".part")),
    "the folder is not synced after a commit": _without(
        lambda act, last: act.label == "sync root" and _renames(last, ".part")
    ),
    "the folder is not synced before deleting": _without(
        lambda act, last: act.label == "sync root" and last.label.endswith(".old")
    ),
    "the folder is not synced before clearing": _without(
        lambda act, last: act.label == "sync root" and last.kind == "mark"
    ),
    "not written aside": _in_place(".part"),
    "not moved aside before deleting": _in_place(".old"),
}
"""Ways of saving that leave something out, made of the acts of the true one."""
