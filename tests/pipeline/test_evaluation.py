"""Models that do something else in evaluation are cut where they are in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.pipeline.stage import cut
from headrace.pipeline.trace.tracing import trace
from headrace.trees import tensors_of
from pipeline.test_stage import forward, partitions


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.drop = nn.Dropout(0.5)


class Auxiliary(Layered):
    """Inception's way: another output from the middle, in training alone."""

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.second(F.dropout(self.first(x), 0.5, self.training)))
        if self.training:
            return self.head(x), self.third(x)
        return self.head(x)


class Early(Layered):
    """What it gives in evaluation is made in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if not self.training:
            return x.flatten(1)
        return self.head(self.third(self.second(x)))


class Skipping(Layered):
    """In evaluation a value crosses cuts that it does not in training."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        x = self.drop(self.third(self.second(first)))
        return self.head(x) if self.training else self.head(x + first).softmax(1)


class Backwards(Layered):
    """In evaluation two layers are done in the other order."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.third(self.second(x)) if self.training else self.second(self.third(x))
        return self.head(x)


class Inner(nn.Module):
    """It is not the model itself that does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.after = Skipping(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x))


@pytest.mark.parametrize("kind", [Auxiliary, Early, Skipping, Backwards, Inner])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_do_what_the_model_does_in_training_and_in_evaluation(kind: type[nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 4)
    traced = trace(model, x)
    assert traced.evaluated is not None
    possible = partitions(traced, stages, 10)
    assert possible
    for partition in possible:
        made = cut(traced, partition)
        torch.manual_seed(1)
        expected = model.train()(x)
        torch.manual_seed(1)
        output, _ = forward(traced, made, x)
        assert all(torch.equal(*pair) for pair in zip(tensors_of(output), tensors_of(expected), strict=True))
        model.eval()
        output, _ = forward(traced.evaluated, [stage.evaluated for stage in made], x + 1)
        assert not made[0].evaluated.last
        assert torch.equal(output, model(x + 1))


def test_layers_that_evaluation_does_in_another_order_are_not_parted() -> None:
    traced = trace(Backwards(), torch.randn(6, 4))
    assert [layer.joined for layer in traced.layers] == ["", "evaluation does second after third", "", ""]


def test_of_a_model_that_is_the_same_in_evaluation_there_is_one_recording() -> None:
    assert trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(6, 4)).evaluated is None
