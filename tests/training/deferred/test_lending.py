"""A model that is lent its parameters computes what the whole one does, and holds one of them at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from headrace.training.deferred import parts
from headrace.training.deferred.lending import holding, lending, lending_here, lent
from headrace.training.deferred.parts import Deferral, Parts, parts_of
from headrace.training.user_code.sketches import along, gradients_of

SIZE = 48


class Net(nn.Module):
    """Ends that are tied, a layer that is used twice, one with weight norm, and a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(SIZE, SIZE)
        self.twice = nn.Linear(SIZE, SIZE)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
        self.recurrent = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.leave = nn.Linear(SIZE, SIZE, bias=False)
        self.leave.weight = self.enter.weight
        with torch.no_grad():
            self.twice.weight.mul_(1 / self.twice.weight.std())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.twice(self.enter(tokens))))
        found: Tensor = self.leave(self.recurrent(self.normed(x))[0])
        return found


def made(seed: int = 1) -> tuple[nn.Module, nn.Module, Parts]:
    """Returns a model whole and in parts, which it has."""
    torch.manual_seed(seed)
    whole = Net()
    torch.manual_seed(seed)
    deferral = Deferral()
    module = deferral.build(Net)
    own = parts_of(module)
    assert own is not None, deferral.problem
    return whole, module, own


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1024)


def test_forward_and_backward_are_those_of_the_whole_model() -> None:
    whole, module, own = made()
    tokens = torch.randint(0, SIZE, (3, 5))
    expected = whole(tokens)
    expected.square().sum().backward()
    with lending(module):
        assert lent(module) == own.views.keys()
        found = module(tokens)
        found.square().sum().backward()
        assert torch.equal(found, expected)
        for name, each in module.named_parameters():
            assert torch.equal(each.grad, whole.get_parameter(name).grad), name
            assert not (name in own.views and each.untyped_storage().nbytes()), name
    assert all(module.get_parameter(name).is_meta for name in own.views)
    assert not lent(module)


def test_what_is_held_keeps_its_values_until_the_end() -> None:
    whole, module, _ = made()
    with lending(module), holding(module, ["twice.weight"]):
        storage = module.get_parameter("twice.weight").untyped_storage()
        module(torch.zeros(1, 2, dtype=torch.int64))
        assert storage.nbytes() == 4 * SIZE * SIZE
        assert torch.equal(module.get_parameter("twice.weight"), whole.get_parameter("twice.weight"))
    assert storage.nbytes() == 0


def test_slices_are_those_of_the_whole_parameters() -> None:
    whole, module, own = made()
    cuts = {"twice.weight": lambda each: each[:, 12:30], "enter.weight": lambda each: each[12:30]}
    sliced = own.sliced(cuts)
    for name, cut in cuts.items():
        assert torch.equal(sliced.value(name), cut(whole.get_parameter(name)))
        target = torch.empty_like(sliced.value(name))
        sliced.write(name, target)
        assert torch.equal(target, sliced.value(name))
    assert torch.equal(sliced.value("recurrent.weight_hh_l0"), whole.get_parameter("recurrent.weight_hh_l0"))
    assert lending_here(module).__enter__() is None


def test_parts_of_other_constructors_and_seeds_are_told_apart() -> None:
    assert made()[2].digest == made()[2].digest
    assert made()[2].digest != made(2)[2].digest


@pytest.mark.parametrize("cut", [0, 1])
def test_a_sketch_along_a_cut_is_that_of_the_slice(cut: int) -> None:
    gradient = torch.randn(6, 4, dtype=torch.float64)
    take = partial(torch.narrow, dim=cut, start=1, length=2)
    assert torch.allclose(along(gradient)[cut][1:3], along(take(gradient))[cut])
    assert [len(each) for each in along(gradient)] == [6, 4]


def test_large_gradients_are_kept_as_vectors_and_leave_what_was_there() -> None:
    layer = nn.Linear(4, 3).double()
    layer.weight.grad = before = torch.ones_like(layer.weight)
    named = dict(layer.named_parameters())
    total = layer(torch.randn(5, 4, dtype=torch.float64)).square().sum()
    (weight, *_), _ = whole = torch.autograd.grad(total, [*named.values()], retain_graph=True)
    found = gradients_of(total, {**named, "none": nn.Parameter(torch.ones(2))}, ["weight"])
    assert found["none"] is None
    assert found["weight"] is not None
    assert all(map(torch.allclose, found["weight"], along(whole[0])))
    assert found["bias"] is not None
    assert torch.equal(found["bias"][0], whole[1])
    assert layer.weight.grad is before
    assert len(weight) == 4
