"""Processes that are killed at random moments leave nothing wrong in the cache that they fill together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIALS = 24
"""benchmarks/input-cache/ tells of more."""


@pytest.mark.slow
def test_killed_processes_leave_nothing_wrong(tmp_path: Path) -> None:
    # In a process of its own, because this one has threads, which a fork would not survive.
    done = subprocess.run(
        [sys.executable, "-m", "data.cache.kills", str(TRIALS), str(tmp_path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir())


FILL = """
import sys
from collections import Counter
import torch
from headrace.data import Loader, from_arrays

made = Counter()

def double(example):
    made[int(example[0])] += 1
    return example[0], example[1] * 2

rank = int(sys.argv[2])
numbers = torch.arange(600)
pipeline = from_arrays(numbers, numbers.repeat_interleave(500).reshape(600, 500)).shuffle().map(double).prefetch(0)
loader = Loader(pipeline.cache(sys.argv[1], key="a"), 0, 16, (1, 1), rank)
shares = loader.rounds()
for _ in range(2 * loader.rounds_per_epoch):
    share = next(shares)
    assert (share.batch[1] == 2 * share.batch[0][:, None]).all()
    if loader.counters.examples == 8:
        print("begun", flush=True)
        sys.stdin.readline()
assert set(made.values()) == {1}
assert not loader.counters.notices, loader.counters.notices
print(len(made), flush=True)
"""


@pytest.mark.slow
def test_two_processes_fill_one_folder_at_once(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(tmp_path / "cache"), str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "begun\n", worker.communicate()
        ended = [worker.communicate("\n", timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], ended
    # One may run into its second epoch while the other is still in its first.
    assert 600 <= sum(int(out) for out, _ in ended) <= 1200
    assert len(list((tmp_path / "cache").glob("*.records"))) == 2
