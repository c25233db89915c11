"""Over random numbers of workers and threads, kills and resizes: each epoch visits each example once, in one order."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import InputPipeline, from_arrays
from headrace.data.loading.loader import Loader
from headrace.spec.job import Share


def augmented(example: Any, rng: np.random.Generator) -> Any:
    return example[0], rng.integers(1 << 40)


def pipeline(count: int, threads: int, lengths: bool) -> InputPipeline:
    made = from_arrays(torch.arange(count)).shuffle().map(augmented, parallel=threads or "inline")
    return made.batch(lengths=np.arange(count) % 7) if lengths else made


def pairs(share: Share) -> list[tuple[int, int]]:
    return list(zip(share.batch[0].tolist(), share.batch[1].tolist(), strict=True))


@pytest.mark.slow
@settings(max_examples=int(os.environ["HEADRACE_HISTORIES"]) // 2)
@given(st.data(), st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_whatever_happens(data: st.DataObject, count: int, batch: int, epochs: int, lengths: bool, seed: int) -> None:
    alone = Loader(pipeline(count, 0, lengths), seed, batch, (1,), 0)
    rounds = alone.rounds_per_epoch * epochs
    shares = alone.rounds()
    expected = [pairs(next(shares)) for _ in range(rounds)]
    for epoch in range(epochs):
        seen = expected[epoch * alone.rounds_per_epoch : (epoch + 1) * alone.rounds_per_epoch]
        assert sorted(index for each in seen for index, _ in each) == list(range(count))
    done: list[list[tuple[int, int]]] = []
    while len(done) < rounds:
        # Another number of workers goes on from here; some of what they have read is lost with them.
        workers, threads = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
        weights = tuple(data.draw(st.lists(st.integers(1, 3), min_size=workers, max_size=workers)))
        loaders = [Loader(pipeline(count, threads, lengths), seed, batch, weights, rank) for rank in range(workers)]
        running = [loader.rounds(len(done)) for loader in loaders]
        for _ in range(data.draw(st.integers(1, rounds - len(done)))):
            done.append([pair for each in running for pair in pairs(next(each))])
        for each in running:
            each.close()
    assert done == expected
