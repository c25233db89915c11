"""Autocast around forward and loss; what comes out is in the parameters' type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.spec.job import Share
from headrace.spec.options import Options
from headrace.training.clipping import LossScale
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import WholeModel
from training.test_whole_model import Kept

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Spy(nn.Module):
    """Keeps the type that its layer computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        output = self.layer(x)
        self.seen.append(output.dtype)
        return {"logits": output, "count": torch.tensor([len(x)])}


def share() -> Share:
    torch.manual_seed(0)
    return Share((torch.randn(4, 3), torch.tensor([0, 1, 1, 0])), 4, 4, 0)


@pytest.mark.parametrize("precision", sorted(HALF))
def test_forward_and_loss_are_in_half_precision_and_gradients_are_not(precision: str) -> None:
    model, sink, losses = Spy(), Kept(), []

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        losses.append((output["logits"] @ torch.ones(2, 1)).dtype)
        return F.cross_entropy(output["logits"], target)

    computed = WholeModel(model, Objective(loss), sink, options=Options(precision=precision)).run(share())
    assert model.seen == losses == [HALF[precision]]
    assert [gradient.dtype for gradient in sink.gradients if gradient is not None] == [torch.float32] * 2
    assert computed.loss is not None
    assert computed.loss.dtype == torch.float32


@pytest.mark.parametrize("precision", sorted(HALF))
def test_predictions_are_computed_in_half_precision_and_measured_in_single(precision: str) -> None:
    model = Spy().eval()
    output = WholeModel(model, Objective(F.cross_entropy), options=Options(precision=precision)).predict(share().batch)
    assert model.seen == [HALF[precision]]
    assert output["logits"].dtype == torch.float32
    assert output["count"].dtype == torch.int64
    assert not torch.equal(output["logits"], model(share().batch[0])["logits"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_is_scaled_for_backward_alone(accumulate: int) -> None:
    def gradients(scale: LossScale | None) -> tuple[Tensor, float]:
        torch.manual_seed(1)
        sink = Kept()
        compute = WholeModel(
            nn.Linear(3, 2), Objective(F.cross_entropy), sink, options=Options(accumulate=accumulate), scale=scale
        )
        loss = compute.run(share()).loss
        assert loss is not None
        assert sink.gradients[0] is not None
        return sink.gradients[0], float(loss)

    plain, loss = gradients(None)
    scaled, same = gradients(LossScale())
    assert loss == same
    torch.testing.assert_close(scaled, plain * 2.0**16, rtol=1e-6, atol=0)


def test_autocast_ends_with_the_step() -> None:
    WholeModel(nn.Linear(3, 2), Objective(F.cross_entropy), Kept(), options=Options(precision="bf16")).run(share())
    assert not torch.is_autocast_enabled("cpu")
