"""What the model gets of a batch, and what the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.batches import arguments, call, examples_of, select_target
from headrace.errors import DataError, JobError
from headrace.modules import describe

X, Y, Z = torch.ones(4, 2), torch.zeros(4), torch.full((4,), 2.0)


class Told(nn.Module):
    """Returns what it was called with."""

    def forward(self, *arguments: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, keywords


DICT = {"x": X, "y": Y}


@pytest.mark.parametrize(
    ("batch", "inputs", "arguments", "keywords"),
    [
        pytest.param((X, Y), None, (X,), {}, id="pair"),
        pytest.param([X, Y], None, (X,), {}, id="list"),
        pytest.param(X, None, (X,), {}, id="tensor"),
        pytest.param(DICT, None, (), DICT, id="dict"),
        pytest.param(DICT, "x", (X,), {}, id="key"),
        pytest.param(DICT, ("y",), (), {"y": Y}, id="keys"),
        pytest.param((X, Y, Z), 2, (Z,), {}, id="index"),
        pytest.param((X, Y, Z), (2, 0), (Z, X), {}, id="indices"),
        pytest.param(DICT, lambda batch: batch["y"], (Y,), {}, id="function"),
    ],
)
def test_the_model_gets(batch: Any, inputs: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    got, named = call(Told(), batch, inputs)
    assert [id(value) for value in got] == [id(value) for value in arguments]
    assert {key: id(value) for key, value in named.items()} == {key: id(value) for key, value in keywords.items()}


TRIPLE = (X, Y, Z)


@pytest.mark.parametrize(
    ("batch", "inputs", "said"),
    [
        ((DICT, Y), None, "a dict with the keys ['x', 'y']"),
        (DICT, ("x", "y"), "x=..., y=..."),
        (TRIPLE, (0, 2), "a Tensor, a Tensor"),
    ],
)
def test_what_the_model_gets_is_told(batch: Any, inputs: Any, said: str) -> None:
    assert arguments(batch, inputs) == said


@pytest.mark.parametrize(
    ("batch", "target", "expected"),
    [
        pytest.param((X, Y), None, Y, id="pair"),
        pytest.param(TRIPLE, None, TRIPLE, id="triple"),
        pytest.param(DICT, None, DICT, id="dict"),
        pytest.param(DICT, "y", Y, id="key"),
        pytest.param(TRIPLE, 1, Y, id="index"),
        pytest.param(DICT, lambda batch: batch["x"], X, id="function"),
        pytest.param(X, None, X, id="tensor"),
    ],
)
def test_the_loss_gets(batch: Any, target: Any, expected: Any) -> None:
    assert select_target(batch, target) is expected


@pytest.mark.parametrize("wrong", ["z", 7, ("x", "z")])
def test_what_the_batch_does_not_have_is_refused_with_its_form(wrong: Any) -> None:
    with pytest.raises(JobError, match=r"inputs=.* does not fit a batch that is a dict with the keys \['x', 'y'\]"):
        call(Told(), DICT, wrong)
    if not isinstance(wrong, tuple):
        with pytest.raises(JobError, match=r"target=.* does not fit a batch that is a tuple of 3"):
            select_target(TRIPLE, wrong)


@pytest.mark.parametrize("inputs", ["x", ("x", "y"), None])
def test_what_the_model_raises_is_its_own(inputs: Any) -> None:
    def model(*places: Any, **keywords: Any) -> Any:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        call(model, DICT, inputs)


TEXTS = ["a", "bc", "d", ""]


@pytest.mark.parametrize(
    "batch",
    [X, (X, Y), DICT, ({"a": [X]}, Y), {"text": TEXTS[:3], "x": X}, (torch.tensor(7), None, X), {"text": TEXTS}],
)
def test_a_batch_is_as_long_as_its_first_tensor_or_its_texts(batch: Any) -> None:
    assert examples_of(batch) == 4


def test_a_batch_of_unknown_length_is_an_error() -> None:
    with pytest.raises(DataError, match="has neither a tensor nor a list of texts"):
        examples_of({"longest": torch.tensor(7)})


def test_a_model_is_described_in_its_order_and_tied_weights_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 3, dtype=torch.float64)
            self.second = nn.Linear(2, 3, bias=False)
            self.second.weight = self.first.weight
            self.small = nn.Parameter(torch.zeros((), dtype=torch.bfloat16), requires_grad=False)
            self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            return x

    spec = describe(Model(), sliceable=False)
    assert [(p.name, p.shape, p.dtype, p.trainable) for p in spec.parameters] == [
        ("small", (), "bfloat16", False),
        ("first.weight", (3, 2), "float64", True),
        ("first.bias", (3,), "float64", True),
    ]
    assert [(b.name, b.shape, b.dtype, b.trainable) for b in spec.buffers] == [("mask", (5,), "bool", False)]
    assert spec.trainable_bytes == 72
    assert not spec.sliceable
