"""A share that is cut into micro-batches: the same gradient, one forward and backward after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import DataError, UsageError
from headrace.spec.job import Share
from headrace.spec.options import Options
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import WholeModel, cut
from training.test_whole_model import Kept, module, part, weighted


class Inputs(NamedTuple):
    x: Tensor
    mask: Tensor | None


def run(share: Share, loss: Callable[..., Any], pieces: int) -> tuple[Kept, float, nn.Module, list[list[float]]]:
    sink, model, said = Kept(), module(), []

    def total(values: Sequence[float]) -> list[float]:
        said.append(list(values))
        return [2 * value for value in values]

    compute = WholeModel(model, Objective(loss), sink, total, options=Options(accumulate=pieces))
    computed = compute.run(share)
    assert computed.loss is not None
    assert not computed.loss.requires_grad
    return sink, float(computed.loss), model, said


@pytest.mark.parametrize("pieces", [2, 3, 5, 6, 100])
@pytest.mark.parametrize("loss", [F.mse_loss, weighted])
@pytest.mark.parametrize(("low", "high"), [(0, 6), (1, 4), (5, 6)])
def test_the_gradient_is_that_of_the_whole_share(pieces: int, loss: Callable[..., Any], low: int, high: int) -> None:
    whole, mean, _, said = run(part(low, high), loss, 1)
    sink, found, model, told = run(part(low, high), loss, pieces)
    assert found == pytest.approx(mean, rel=1e-13)
    # The weight is asked for once, however many pieces there are.
    assert told == said
    for one, other in zip(sink.gradients, whole.gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_the_optimizer_holds_stay_where_they_are() -> None:
    model, sink = module(), Kept()
    held = [torch.full_like(parameter, 7.0) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), held, strict=True):
        parameter.grad = gradient
    WholeModel(model, Objective(F.mse_loss), sink, options=Options(accumulate=3)).run(part(0, 6))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))
    assert all((gradient == 7.0).all() for gradient in held)
    assert all((gradient != 7.0).any() for gradient in sink.gradients if gradient is not None)


def test_without_a_sink_they_add_up_where_torch_adds_them_up() -> None:
    sink, _, _, _ = run(part(0, 6), F.mse_loss, 3)
    model = module()
    WholeModel(model, Objective(F.mse_loss), options=Options(accumulate=3)).run(part(0, 6))
    found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, sink.gradients, strict=True))  # type: ignore[arg-type]


def test_pieces_that_weigh_nothing_together_say_nothing() -> None:
    sink = Kept()
    nothing = Objective(lambda output, target: weighted(output, -target.abs()), weighed=True)
    computed = WholeModel(module(), nothing, sink, options=Options(accumulate=2)).run(part(0, 6))
    assert (computed.loss, computed.weight) == (None, 0.0)
    assert all(gradient is None or not gradient.any() for gradient in sink.gradients)


def test_each_piece_goes_through_the_model_alone_and_none_is_empty() -> None:
    seen: list[int] = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.layer(x)

    compute = WholeModel(Counting(), Objective(F.mse_loss), Kept(), options=Options(accumulate=4))
    compute.run(part(0, 6))
    compute.run(part(0, 3))
    compute.run(part(2, 2))
    assert seen == [2, 2, 1, 1, 1, 1, 1]


def test_a_tree_is_cut_along_its_first_dim() -> None:
    batch = {"in": Inputs(torch.arange(6), None), "out": [torch.ones(6, 2), (torch.zeros(6),)]}
    piece = cut(batch, 2, 5, 6)
    assert type(piece["in"]) is Inputs
    assert piece["in"].x.tolist() == [2, 3, 4]
    assert piece["in"].mask is None
    assert piece["out"][0].shape == (3, 2)
    assert type(piece["out"][1]) is tuple


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.ones(6), torch.tensor(1.0)), r"batch\[1\] is a tensor of shape \(\),"),
        ({"x": torch.ones(6), "packed": torch.ones(11, 2)}, r"batch\['packed'\] is a tensor of shape \(11, 2\),"),
        ({"x": torch.ones(6), "meta": {"name": "a"}}, r"batch\['meta'\]\['name'\] is a str,"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, named: str) -> None:
    with pytest.raises(DataError, match=f"{named}.*each of the 6 examples.*use accumulate=1"):
        cut(batch, 0, 3, 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(accumulate=2), r"Options\(accumulate=2\)"),
        (Options(precision="bf16"), r"Options\(precision='bf16'\)"),
        pytest.param(Options(compile=True), r"Options\(compile=True\)", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_runs_forward_itself_is_told_what_that_leaves_out(options: Options, said: str) -> None:
    compute = WholeModel(module(), Objective(F.mse_loss), Kept(), options=options)
    with pytest.raises(UsageError, match=rf"{said} says how forward is run.*use worker.step\(batch\)"):
        compute.backward(torch.zeros(()), part(0, 6))
