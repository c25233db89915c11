"""Digests of models: one for the same code and configuration, another after any change, none for hidden content."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.pipeline.digest import digest


def activation(x: Tensor) -> Tensor:
    return x.relu()


@dataclass
class Config:
    width: int = 4
    residual: bool = False


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(config.width, config.width)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return activation(self.linear(x)) + (x if self.config.residual else 0)


def other_forward(self: Any, x: Tensor) -> Tensor:
    return activation(self.linear(x)) - (x if self.config.residual else 0)


def model(**changes: Any) -> nn.Module:
    return nn.Sequential(Block(Config(**changes)), Block(Config(**changes)))


def test_models_of_the_same_code_and_configuration_have_one_digest() -> None:
    first, second = model(), model()
    assert digest(first) is not None
    assert digest(first) == digest(second)
    with torch.no_grad():
        first[0].linear.weight.add_(1.0)
    assert digest(first) == digest(second), "training changes parameters"


CHANGES: dict[str, Callable[[Any], object]] = {
    "a value of the configuration": lambda made: setattr(made[1].config, "residual", True),
    "a new attribute": lambda made: setattr(made[1], "scale", 2),
    "a shape": lambda made: setattr(made[1], "linear", nn.Linear(4, 5)),
    "a type": lambda made: made[1].double(),
    "a frozen parameter": lambda made: made[1].requires_grad_(False),
    "tied parameters": lambda made: setattr(made[1].linear, "weight", made[0].linear.weight),
    "a buffer's content": lambda made: made[1].steps.add_(1),
    "a hook": lambda made: made[1].register_forward_hook(lambda *args: None),
    "a forward of one object": lambda made: setattr(made[1], "forward", functools.partial(other_forward, made[1])),
    "modes": lambda made: made[1].eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_the_model_is_seen(change: Callable[[Any], object]) -> None:
    made = model()
    change(made)
    assert digest(made) not in (None, digest(model()))


def test_any_change_of_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [digest(model())]
    monkeypatch.setattr(Block, "forward", other_forward)
    found.append(digest(model()))
    # What forward calls, by its name in this file.
    monkeypatch.setitem(globals(), "activation", lambda x: x.sigmoid())
    found.append(digest(model()))
    monkeypatch.setattr(nn.Linear, "forward", other_forward)
    found.append(digest(model()))
    assert None not in found
    assert len(set(found)) == 4


def test_defaults_and_closures_count() -> None:
    def loss(scale: float, power: int) -> Callable[..., Tensor]:
        def scaled(output: Tensor, target: Tensor, power: int = power) -> Tensor:
            return scale * (output - target).abs().pow(power).mean()

        return scaled

    assert digest(loss(1.0, 2)) == digest(loss(1.0, 2)) is not None
    assert len({digest(loss(1.0, 2)), digest(loss(2.0, 2)), digest(loss(1.0, 3))}) == 3


def test_an_object_whose_content_is_hidden_has_no_digest() -> None:
    assert digest(threading.Lock()) is None
    assert digest(each for each in "ab") is None
    made = model()
    made[1].lock = threading.Lock()
    assert digest(made) is None
    assert digest(torch.zeros(10_000_000)) is None, "it takes too long"
    assert digest(random.Random(1)) != digest(random.Random(2))


def test_code_of_a_notebook_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(source: str) -> str | None:
        cell: dict[str, Any] = {"__name__": "__main__", "nn": nn}
        exec(source, cell)
        return digest(cell["Net"]())

    source = "def act(x): return x.relu()\nclass Net(nn.Identity):\n  scale = 1\n  def forward(self, x): return act(x)"
    monkeypatch.delattr("__main__.__file__", raising=False)
    assert found(source) == found(source) is not None
    assert (
        len({found(source), found(source.replace("scale = 1", "scale = 2")), found(source.replace("relu", "abs"))}) == 3
    )
