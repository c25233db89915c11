"""Processes that fill one cache and are killed at random moments, and what they leave to the next ones."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.data.cache.record import pack
from headrace.data.cache.store import Store, store_of
from headrace.data.pipeline.steps import Cache

__all__ = ["Campaign", "campaign"]

COUNT = 400
ALL = COUNT + 8
"""The last ones no victim fills, however fast they all are: there is always something to make anew."""
SIZES = (20, 5_000, 150_000)
"""Bytes of examples: many in a page, one in a few, and such that writing one takes a while."""
LONGEST_S = 0.05
"""From a process's first sign of life to its end; a batch is written in about a millisecond."""
PATIENCE_S = 60.0


@dataclass
class Campaign:
    """What came of it.

    Attributes:
        kept: examples that were found, of all trials.
        made: examples that were made, of all trials.
        undone: trials that found a record half-written.
        wrong: what was not right.
    """

    kept: int = 0
    made: int = 0
    undone: int = 0
    wrong: list[str] = field(default_factory=list)


def campaign(trials: int, folder: Path, processes: int = 2, seed: int = 0) -> Campaign:
    """Runs the trials, each on what the one before has left, until a folder is full, then on the next one."""
    torch.set_num_threads(1)  # so that a fork has nothing to lose
    dice, result = random.Random(seed), Campaign()
    for trial in range(trials):
        size = SIZES[trial % len(SIZES)]
        place = folder / f"{size}-{trial // 12}"
        victims = [_victim(place, size, dice.randrange(COUNT)) for _ in range(processes)]
        promised = {index for victim in victims for index in _end(victim, dice.uniform(0, LONGEST_S))}
        length = len(pack(0, example(0, size)))
        result.undone += any(path.stat().st_size % length for path in place.glob("*.records"))
        # A definition of its own, so that nothing is remembered.
        store = store_of(_cache(place, size), ALL)
        found = [index for index, absent in enumerate(store.find(range(ALL))) if absent is None]
        result.kept += len(found)
        if missing := promised - set(found):
            result.wrong.append(f"trial {trial}: {len(missing)} examples that were kept are not there")
        if lines := store.take_notices():
            result.wrong.append(f"trial {trial}: {lines}")
        _check(store, found, size, trial, result)
        # Every third folder's rest is made anew and everything looked at again.
        if trial % 12 > 8:
            rest = sorted(set(range(ALL)) - set(found))
            store.put([(index, example(index, size)) for index in rest])
            result.made += len(rest)
            _check(store_of(_cache(place, size), ALL), range(ALL), size, trial, result)
    return result


def example(index: int, size: int) -> tuple[torch.Tensor, int]:
    """Returns what is kept of an index."""
    return torch.from_numpy(np.random.Philox(key=index).random_raw(size // 8 + 1).view(np.uint8)), index


def _cache(place: Path, size: int) -> Cache:
    return Cache(str(place), None, f"size {size}", f"examples of {size} bytes")


def _check(store: Store, indices: range | list[int], size: int, trial: int, result: Campaign) -> None:
    absent = store.find(indices)
    for index, why in zip(indices, absent, strict=True):
        if why is not None:
            result.wrong.append(f"trial {trial}: example {index} is {why}")
            continue
        tensor, number = store.example(index)
        wanted, _ = example(index, size)
        if number != index or not torch.equal(tensor, wanted):
            result.wrong.append(f"trial {trial}: example {index} is not what was kept")


def _victim(place: Path, size: int, first: int) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(read_end)
            _fill(store_of(_cache(place, size), ALL), size, first, write_end)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    return process, read_end


def _fill(store: Store, size: int, first: int, told: int) -> None:
    os.write(told, b"begun\n")
    while True:
        for start in range(first, first + COUNT, 8):
            indices = [index % COUNT for index in range(start, start + 8)]
            absent = store.find(indices)
            store.put([(index, example(index, size)) for index, why in zip(indices, absent, strict=True) if why])
            os.write(told, b"".join(b"%d\n" % index for index in indices))


def _end(victim: tuple[int, int], moment_s: float) -> set[int]:
    """Kills a process, and returns the indices that it said are kept."""
    process, read_end = victim
    with open(read_end, "rb", buffering=0) as told:
        ready, _, _ = select.select([told], [], [], PATIENCE_S)
        first = os.read(read_end, 6)
        said = b""
        # The moment is what is drawn; nothing is hoped for. What is said is read, or the pipe would be full.
        until = time.monotonic() + moment_s
        while (left := until - time.monotonic()) > 0:
            if select.select([told], [], [], left)[0]:
                said += os.read(read_end, 1 << 16)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert ready, "a filling process gave no sign of life"
        assert first == b"begun\n", first
        said += told.read()
        return {int(line) for line in said.rpartition(b"\n")[0].split()}


if __name__ == "__main__":
    done = campaign(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"{done.kept} kept, {done.made} made anew, {done.undone} left undone\n")
    sys.exit("\n".join(done.wrong) or (0 if done.kept and done.made else f"{done.kept} kept, {done.made} made"))
