"""Saving processes that are killed at random moments, and what they leave to the next one."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint.states import equal, small_state
from headrace.checkpoint import CheckpointFolder

__all__ = ["Campaign", "campaign"]

RANKS = 2
KEEP = 2
SIZES = (10, 100_000)
"""Numbers in a state: one that fits into a block, one whose writing takes a while."""
LONGEST_S = 0.03
"""From a process's first sign of life to its end, at most; a save takes a few ms."""
LONGEST_SAVES = 3
"""Where a save takes longer, as on a busy machine: this many saves."""
PATIENCE_S = 60.0


@dataclass
class Campaign:
    """What came of it.

    Attributes:
        sound: trials after which the newest committed checkpoint was whole and what was told.
        saves: committed, by all processes.
        left: how many trials left a folder that was being written, one that was being deleted.
        wrong: what was not right.
    """

    sound: int = 0
    saves: int = 0
    left: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def campaign(trials: int, folder: Path, seed: int = 0) -> Campaign:
    """Runs the trials, each on what the one before has left."""
    torch.set_num_threads(1)  # so that a fork has nothing to lose
    dice, result = random.Random(seed), Campaign()
    step, longest_s = 0, max(LONGEST_S, LONGEST_SAVES * _save_s(folder.parent))
    for trial in range(trials):
        told = _victim(folder, step, dice.choice(SIZES), dice.uniform(0, longest_s))
        result.saves += len(told)
        result.left.update({name.rpartition(".")[2] for name in os.listdir(folder) if "." in name})
        newest, wrong = CheckpointFolder(folder).latest()
        found = 0 if newest is None else newest.step
        promised = max([step, *told])
        if wrong or found < promised:
            result.wrong.append(f"trial {trial}: step {promised} was promised, {found} is there; {wrong}")
        elif newest is not None and not _whole(newest.read(0), newest.description, 0):
            result.wrong.append(f"trial {trial}: step {found} is not what was saved")
        else:
            result.sound += 1
        step = found
    return result


def _save_s(folder: Path) -> float:
    """Returns how long a large save takes now."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        began = time.monotonic()
        _save(Path(place), 1, max(SIZES))
        return time.monotonic() - began


def _victim(folder: Path, step: int, numbers: int, moment_s: float) -> list[int]:
    """Lets a process save one step after the other, kills it, and returns the steps that it said were committed."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(read_end)
            _save_on(folder, step, numbers, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    with open(read_end, "rb", buffering=0) as told:
        ready, _, _ = select.select([told], [], [], PATIENCE_S)
        time.sleep(moment_s)  # the moment is what is drawn; nothing is hoped for
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert ready, "a saving process gave no sign of life"
        return [int(line) for line in told.read().split() if int(line)]


def _save_on(folder: Path, step: int, numbers: int, told: int) -> None:
    os.write(told, b"0\n")
    while True:
        step += 1
        _save(folder, step, numbers)
        os.write(told, b"%d\n" % step)


def _save(folder: Path, step: int, numbers: int) -> None:
    checkpoints = CheckpointFolder(folder)
    checkpoints.begin(step)
    files = [checkpoints.write(step, rank, small_state(step, rank, numbers)) for rank in range(RANKS)]
    checkpoints.commit(step, files, {"step": step, "numbers": numbers}, KEEP)


def _whole(state: dict[str, torch.Tensor], description: object, rank: int) -> bool:
    assert isinstance(description, dict)
    return equal(state, small_state(description["step"], rank, description["numbers"]))


if __name__ == "__main__":
    done = campaign(int(sys.argv[1]), Path(sys.argv[2]))
    sys.exit("\n".join(done.wrong) or (0 if done.sound == int(sys.argv[1]) else "trials are missing"))
