"""What each process of a FullySharded run of a large model holds at most, in a control group of its own. See README.md.

python benchmarks/large-model/main.py [--size half] [--workers 8] [--steps 2] [--limit]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import headrace as hr

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/large_lm"))
sys.path.insert(1, str(Path(__file__).parents[1]))
from harness import machine
from llama import SIZES, LanguageModel, Shape, count

MOST, MOST_OF_HOST = 1.15, 1.2
LENGTH = 32
SHAPES = {
    **SIZES,
    # The layers of "1.5b", half as wide: 374 M parameters.
    "half": Shape(33, 1024, 2816, 16, 4),
    # Made in parts as well, and hardly more than what each process has without a model.
    "small": Shape(2, 512, 704, 8, 4),
}


class Groups:
    """Control groups of memory: one of the run, and in it one a process, which it joins when it builds its model."""

    def __init__(self, limit: int) -> None:
        within = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
        self._place = Path(f"/sys/fs/cgroup/memory{within.rpartition(':')[2]}/large-model-{os.getpid()}")
        self._starter = os.getpid()
        self._limit = limit

    def __enter__(self) -> Groups:
        self._place.mkdir()
        (self._place / "memory.use_hierarchy").write_text("1")
        if self._limit:
            (self._place / "memory.limit_in_bytes").write_text(str(self._limit))
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._place.glob("*/"), self._place):
            each.rmdir()

    def join(self) -> None:
        own = self._own()
        if os.getpid() != self._starter and not own.is_dir():
            own.mkdir()
            (own / "cgroup.procs").write_text(str(os.getpid()))

    def held(self) -> dict[str, int]:
        """Returns the most bytes that this process has been charged for since it joined, and those of shared memory.

        The process that makes shared memory is charged for it.
        """
        lines = (line.split() for line in (self._own() / "memory.stat").read_text().splitlines())
        shared = next(int(value) for name, value in lines if name == "shmem")
        return {"peak": int((self._own() / "memory.max_usage_in_bytes").read_text()), "shared": shared}

    def peak_of_host(self) -> int:
        return int((self._place / "memory.max_usage_in_bytes").read_text())

    def _own(self) -> Path:
        return self._place / str(os.getpid())


def build(size: str, groups: Groups) -> nn.Module:
    groups.join()
    return LanguageModel(SHAPES[size], LENGTH)


def steps(folder: Path, groups: Groups) -> Callable[[hr.Worker], None]:
    def train(worker: hr.Worker) -> None:
        start = groups.held()
        for batch in worker.batches():
            worker.step(batch)
        # Before the model is saved, of which rank 0 then has all parameters.
        told = {"start": start, "end": groups.held(), "host_bytes": groups.peak_of_host()}
        (folder / f"{worker.rank}.json").write_text(json.dumps(told))

    return train


def measure(size: str, workers: int, count: int, limit: int) -> dict[str, int]:
    """Returns the most bytes of any process before the first step and in all, and of all together."""
    tokens = torch.randint(0, 256, (2 * workers, LENGTH), generator=torch.Generator().manual_seed(0))
    with Groups(limit) as groups, tempfile.TemporaryDirectory() as folder:
        job = hr.Job(
            model=functools.partial(build, size, groups),
            loss=lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
            data=(tokens, tokens),
            global_batch_size=workers,
            steps=count,
        )
        strategy = hr.FullySharded(workers, deferred=True)
        hr.launch(steps(Path(folder), groups), job, strategy, device="cpu", checkpoints=False, check=False)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers)]
        found = {"host_bytes": max(rank["host_bytes"] for rank in ranks)}
        for when, name in (("start", "start_bytes"), ("end", "peak_bytes")):
            shared = sum(rank[when]["shared"] for rank in ranks) // workers
            found[name] = max(rank[when]["peak"] - rank[when]["shared"] for rank in ranks) + shared
        return found


def needed(size: str, workers: int) -> tuple[int, int]:
    """Returns the bytes of parameters, gradients and AdamW's state, and of what a process needs of them."""
    with torch.device("meta"):
        unit = sum(each.nbytes for each in LanguageModel(SHAPES[size], LENGTH).blocks[0].parameters())
    state = 16 * count(SHAPES[size])
    return state, state // workers + unit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="half")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit", action="store_true", help="end a run that needs more than the target")
    given = parser.parse_args()
    state, wanted = needed(given.size, given.workers)
    # What processes have without a model.
    without, (small, small_wanted) = measure("small", given.workers, given.steps, 0), needed("small", given.workers)
    without["start_bytes"] -= small // 4 // given.workers
    without["peak_bytes"] -= small_wanted
    without["host_bytes"] -= small
    limit = int(MOST_OF_HOST * state) + without["host_bytes"] if given.limit else 0
    found = measure(given.size, given.workers, given.steps, limit)
    held = {key: found[key] - without[key] for key in found}
    result = {
        **machine(), "command": " ".join(sys.argv), "limit_bytes": limit,
        "state_bytes": state, "wanted_bytes": wanted, **held, "without_a_model": without,
        "start_of_wanted": round(held["start_bytes"] / wanted, 3),
        "peak_of_wanted": round(held["peak_bytes"] / wanted, 3), "most": MOST,
        "host_of_state": round(held["host_bytes"] / state, 3), "most_of_host": MOST_OF_HOST,
    }  # fmt: skip
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / f"{given.size}-{given.workers}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
