"""What examples go through: maps, filters, padding, and what becomes of those that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headrace as hr
from headrace.data import InputPipeline, from_arrays, from_torch
from headrace.data.loading.loader import Loader
from headrace.data.pipeline.source import as_tensor, collate, padded
from headrace.errors import DataError, UsageError


def numbers(count: int = 10) -> InputPipeline:
    return from_arrays(torch.arange(count))


def swept(pipeline: InputPipeline, batch: int = 4, seed: int = 0) -> list[Any]:
    """Returns the batches of the first epoch."""
    loader = Loader(pipeline, seed, batch, (1,), 0)
    return [share.batch for share in loader.rounds(0, loader.rounds_per_epoch)]


def values(pipeline: InputPipeline, batch: int = 4) -> list[int]:
    return [
        value for each in swept(pipeline, batch) for value in (each[0] if isinstance(each, tuple) else each).tolist()
    ]


def test_steps_are_done_in_their_order() -> None:
    pipeline = numbers().map(lambda e: (e[0] + 1,)).filter(lambda e: e[0] % 2 == 0).map(lambda e: (e[0] * 10,))
    assert values(pipeline) == [20, 40, 60, 80, 100]
    assert [len(batch[0]) for batch in swept(pipeline)] == [2, 2, 1], "all others stay in their batch"


def test_a_field_is_taken_and_replaced() -> None:
    pair = from_arrays(torch.arange(6), torch.arange(6) * 100).map(lambda label: label + 1, field=1)
    first, second = swept(pair, 6)[0]
    assert first.tolist() == list(range(6))
    assert second.tolist() == [1, 101, 201, 301, 401, 501]
    named = from_arrays({"a": torch.arange(3), "b": torch.arange(3)}).map(lambda a: a * 2, field="a")
    batch = swept(named, 3)[0]
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([0, 2, 4], [0, 1, 2])


def test_a_batched_map_gets_lists() -> None:
    sizes = []

    def double(examples: list[Any], rng: list[np.random.Generator]) -> list[Any]:
        sizes.append(len(examples))
        return [(example[0] * 2 + generator.integers(1),) for example, generator in zip(examples, rng, strict=True)]

    assert values(numbers().map(double, batched=True)) == list(range(0, 20, 2))
    assert sizes == [4, 4, 2]
    with pytest.raises(DataError, match=r"it returned 1 examples for 4"):
        swept(numbers().map(lambda examples: examples[:1], batched=True))


@pytest.mark.parametrize("batched", [False, True])
def test_what_cannot_be_had_is_raised_or_skipped(batched: bool) -> None:
    def fragile(example: Any) -> Any:
        if 7 in ([int(each[0]) for each in example] if batched else [int(example[0])]):
            raise KeyError("seven")
        return example

    pipeline = numbers().map(fragile, batched=batched)
    with pytest.raises(DataError, match=r"example.* 7 cannot be had|one of example 4 to example 7") as caught:
        swept(pipeline)
    assert isinstance(caught.value.__cause__, KeyError)
    assert values(pipeline.on_error("skip")) == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def test_an_empty_share_has_the_shapes_of_others() -> None:
    pipeline = from_arrays(torch.zeros(5, 3)).map(lambda e: (e[0].repeat(2),)).filter(lambda _: True)
    loader = Loader(pipeline, 0, 2, (1, 1, 1), 2)
    share = next(loader.rounds())
    assert (share.examples, share.batch[0].shape) == (0, (0, 6))
    none = Loader(pipeline.filter(lambda _: False), 0, 2, (1,), 0)
    with pytest.raises(DataError, match="every example is left out"):
        next(none.rounds())


@pytest.mark.parametrize("steps", [0, 1])
def test_an_empty_share_has_no_text_and_no_bytes(steps: int) -> None:
    pipeline = from_torch([(torch.zeros(3), b"content", {"name": "text", "parts": [b"a", 1.0]})] * 5)
    for _ in range(steps):
        pipeline = pipeline.map(lambda example: example)
    share = next(Loader(pipeline, 0, 2, (1, 1, 1), 2).rounds())
    image, content, rest = share.batch
    assert (share.examples, image.shape, content, rest["name"]) == (0, (0, 3), [], [])
    assert (rest["parts"][0], rest["parts"][1].shape) == ([], (0,))


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(LENGTHS, st.none() | st.integers(9, 12))
def test_padding_keeps_every_element(lengths: list[int], to: int | None) -> None:
    examples = [(torch.arange(length) + 1, torch.tensor(length)) for length in lengths]
    batch, sizes = padded(examples, 0.0, to)
    assert batch.shape == (len(lengths), to or max(lengths))
    assert sizes.tolist() == lengths
    for row, length in zip(batch.tolist(), lengths, strict=True):
        assert row == [*range(1, length + 1), *[0] * (len(row) - length)]


def test_what_cannot_be_padded_is_said() -> None:
    with pytest.raises(DataError, match=r"float32 \[2, 3\] and float32 \[2, 4\]"):
        padded([torch.zeros(2, 3), torch.zeros(2, 4)], 0.0)
    with pytest.raises(DataError, match="an example is 5 long, and pad_to is 4"):
        padded([torch.zeros(5)], 0.0, 4)
    ragged = numbers(4).map(lambda e: (torch.zeros(int(e[0]) + 1),))
    with pytest.raises(DataError, match=r"differ in shape, \[1\] and \[2\]"):
        swept(ragged)
    assert swept(ragged.batch(pad=-1))[0][0].shape == (4, 4)


@pytest.mark.parametrize("batch", [collate, lambda examples: padded(examples, 0.0)])
def test_arrays_may_be_views_of_any_kind(batch: Callable[[Any], Tensor]) -> None:
    packed = np.zeros(3, dtype=[("flag", "i1"), ("x", "<f4")])
    packed["x"] = [1, 2, 3]
    examples = [packed["x"], np.arange(3, dtype=np.float32)[::-1], np.arange(3, dtype=">f4")]
    assert batch(examples).tolist() == [[1, 2, 3], [2, 1, 0], [0, 1, 2]]
    assert as_tensor(packed["x"], "x").tolist() == [1, 2, 3]


def test_text_cannot_be_padded() -> None:
    with pytest.raises(DataError, match=r"an example of a batch is no tensor: .*; make it numbers in a map"):
        padded([["a", "b"], ["c"]], 0.0)


def test_a_seed_may_be_a_number_of_numpys() -> None:
    assert values(numbers().shuffle(np.int64(3))) == values(numbers().shuffle(3))


@pytest.mark.parametrize("pad", [None, 0])
@pytest.mark.parametrize("without", [0, 3])
def test_examples_of_a_batch_have_the_same_names(without: int, pad: float | None) -> None:
    examples = [{"x": torch.ones(2), "y": torch.ones(2)} for _ in range(4)]
    del examples[without]["y"]
    with pytest.raises(DataError, match="some examples of a batch have 'y' and others have not"):
        list(hr.data.batches(from_torch(examples).batch(4, pad=pad)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda p: p.batch(0), "size must be"),
        (lambda p: p.batch(pad_to=3), "say with what"),
        (lambda p: p.batch(lengths=[1, 2]), r"lengths must be \(10,\)"),
        (lambda p: p.take(0), "take takes"),
        (lambda p: p.repeat(0), "epochs are the job's"),
        (lambda p: p.split(2, 2), "rank 2 of 2"),
        (lambda p: p.split(0.5, 2), "rank 0.5 of 2"),
        (lambda p: p.split("0", 2), "rank '0' of 2"),
        (lambda p: p.map(int, parallel="fast"), "parallel must be one of"),
        (lambda p: p.map(int, parallel=0), "count must be"),
        (lambda p: p.on_error("ignore"), "on_error must be"),
        (lambda p: p.prefetch(memory_limit=0), "memory_limit must be"),
        (lambda p: p.map("x"), "map and filter take a function of an example, got 'x'"),
        (lambda p: p.filter(None), "map and filter take a function of an example, got None"),
        (lambda p: p.shuffle("7"), "the seed of shuffle must be a whole number, or None for the job's, got '7'"),
        (lambda p: hr.data.from_files("*", label="cat"), "label must be a function of a file's name, got 'cat'"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        wrong(numbers())


def test_take_split_and_repeat() -> None:
    assert values(numbers().take(3)) == [0, 1, 2]
    parts = [values(numbers().split(rank, 3)) for rank in range(3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert values(numbers().split(1, 2).take(2)) == [1, 3]
    assert sorted(values(numbers(5).repeat(2).shuffle())) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    drawn = numbers(3).map(lambda e, rng: (int(rng.integers(1 << 30)),))
    one, two = values(drawn.repeat(2), 3)[:3], values(drawn.repeat(2), 3)[3:]
    assert one == values(drawn, 3)
    assert all(a != b for a, b in zip(one, two, strict=True)), "each time it is augmented anew"


def test_by_hand() -> None:
    pipeline = numbers().shuffle().map(lambda e, rng: (e[0], int(rng.integers(9)))).batch(4)
    first, again, next_one = (
        [batch[0].tolist() for batch in hr.data.batches(pipeline, epoch=epoch)] for epoch in (0, 0, 1)
    )
    assert first == again != next_one
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert [batch[0].tolist() for batch in hr.data.batches(pipeline, start=1)] == first[1:]
    with pytest.raises(UsageError, match="batch"):
        next(hr.data.batches(numbers()))


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.Mirrored(3), hr.CentralStorage(2)], ids=str)
def test_the_mean_is_over_what_is_left(strategy: hr.Strategy) -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1)
    kept = inputs[:, 0] > 0.2
    job = hr.Job(
        model=Linear,
        loss=lambda output, target: ((output - target) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=from_arrays(inputs, targets).filter(lambda example: bool(example[0][0] > 0.2)),
        global_batch_size=8,
        epochs=3,
    )
    run = hr.fit(job, strategy, engine=hr.ThreadEngine())
    weight = torch.zeros(3, requires_grad=True)
    for start in [0, 8, 16, 24, 32] * 3:
        rows = torch.arange(start, start + 8)[kept[start : start + 8]]
        (gradient,) = torch.autograd.grad(((inputs[rows] @ weight - targets[rows]) ** 2).mean(), weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    torch.testing.assert_close(run.model.weight.detach(), weight.detach(), rtol=1e-5, atol=1e-6)
