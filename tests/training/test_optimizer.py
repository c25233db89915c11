"""Optimizers as the user wrote them, and built again over pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.spec.options import Options
from headrace.spec.plan import Segment
from headrace.training.optimizer import (
    StatePiece,
    build,
    build_over,
    load_state,
    state_bytes,
    state_pieces,
)
from headrace.training.reduction import may_write_gradients
from headrace.training.update import AVERAGE, Updater
from training.odd_optimizers import Averaging

optim = torch.optim

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam)},
    **{kind.__name__: kind for kind in (optim.RAdam, optim.Adamax, optim.Adadelta, optim.ASGD, optim.Rprop)},
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD-momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD-nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "SGD-fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "SGD-warming-up": partial(optim.SGD, lr=0.0),
    "Adam-fused": partial(optim.Adam, weight_decay=0.1, fused=True),
    "Adam-foreach": partial(optim.Adam, foreach=True),
    "Adam-amsgrad": partial(optim.Adam, amsgrad=True, maximize=True, weight_decay=0.1),
    "RMSprop-centred": partial(optim.RMSprop, centered=True, momentum=0.9),
}
MATRIXWISE: dict[str, Callable[..., Any]] = {
    "Adafactor": optim.Adafactor,
    "Adafactor-warming-up": partial(optim.Adafactor, lr=0.0),
    "Muon": optim.Muon,
}


def named() -> list[tuple[str, Tensor]]:
    return list(nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)).named_parameters())


def names_by_group(optimizer: optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(partial(optim.SGD, lr=0.1), id="of names and tensors"),
        pytest.param(lambda pairs: optim.SGD([tensor for _, tensor in pairs], lr=0.1), id="of tensors"),
        pytest.param(lambda tensors: optim.SGD([{"params": [t.requires_grad_()]} for t in tensors], lr=0.1), id="old"),
    ],
)
def test_every_group_knows_its_names(factory: Callable[..., Any]) -> None:
    optimizer = build(factory, named())
    assert [name for group in names_by_group(optimizer) for name in group] == ["0.weight", "1.weight"]


def test_groups_are_as_the_factory_made_them() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        groups = [
            {"params": [t for n, t in pairs if n[0] == "1"], "lr": 0.5},
            {"params": [t for n, t in pairs if n[0] == "0"]},
        ]
        return optim.SGD(groups, lr=0.1)

    optimizer = build(factory, named())
    assert names_by_group(optimizer) == [["1.weight"], ["0.weight"]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must return a torch.optim.Optimizer, got dict; for example"):
        build(dict, named())


def test_an_optimizer_of_another_model_is_refused() -> None:
    elsewhere = nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"^2 of the tensors in the job's Adam are not parameters of the model"):
        build(lambda _: optim.Adam(elsewhere.parameters()), named())


def test_an_error_in_the_factory_is_its_own() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        build(factory, named())


@pytest.mark.parametrize("name", sorted({*ELEMENTWISE, *MATRIXWISE} - {"Adam-foreach"}))
def test_torch_only_reads_gradients_but_where_it_is_told_foreach(name: str) -> None:
    """Mirrored lets all workers' optimizers read one sum; this is why it may."""
    optimizer = build({**ELEMENTWISE, **MATRIXWISE}[name], named())
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for _ in range(3):
        gradients = [torch.randn_like(tensor) for tensor in tensors]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
        assert all(torch.equal(t.grad, g) for t, g in zip(tensors, gradients, strict=True) if t.grad is not None)


def over(
    factory: Callable[..., Any], pieces: Sequence[tuple[Segment, Tensor]], values: bool = False
) -> optim.Optimizer:
    return build_over(factory, named(), pieces, values)[0]


def test_pieces_keep_the_options_of_their_groups() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        groups = [{"params": [pairs[0]], "lr": 0.5, "betas": (0.5, 0.6)}, {"params": [pairs[1]], "weight_decay": 0.2}]
        return optim.AdamW(groups, lr=0.1, eps=1e-3)

    pieces = [
        (Segment("0.weight", 0, 5, 0), torch.zeros(5)),
        (Segment("0.weight", 5, 12, 0), torch.zeros(7)),
        (Segment("1.weight", 0, 3, 0), torch.zeros(3)),
    ]
    built = over(factory, pieces)
    assert type(built) is optim.AdamW
    assert [[len(tensor) for tensor in group["params"]] for group in built.param_groups] == [[5, 7], [3]]
    assert [group["lr"] for group in built.param_groups] == [0.5, 0.1]
    assert [group["betas"] for group in built.param_groups] == [(0.5, 0.6), (0.9, 0.999)]
    assert [group["weight_decay"] for group in built.param_groups] == [0.01, 0.2]
    assert {group["eps"] for group in built.param_groups} == {1e-3}


def test_pieces_lie_where_they_were_and_are_returned_in_order() -> None:
    memory = torch.arange(48.0)
    pieces = [(Segment("0.weight", 20, 48, 0), memory[20:]), (Segment("0.weight", 0, 20, 0), memory[:20])]
    optimizer, tensors = build_over(partial(optim.SGD, lr=1.0), named(), pieces)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    assert torch.equal(memory, torch.arange(48.0) - 1)
    assert [len(tensor) for tensor in tensors] == [28, 20]


def test_groups_are_chosen_by_whole_shapes() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        return optim.SGD([{"params": [t]} for _, t in pairs if t.shape == (6, 8)] + [{"params": [pairs[1][1]]}], lr=0.1)

    built = over(factory, [(Segment("0.weight", 0, 5, 0), torch.zeros(5))])
    assert [[tuple(tensor.shape) for tensor in group["params"]] for group in built.param_groups] == [[(5,)], [(0, 6)]]
    assert names_by_group(built) == [["0.weight"], ["1.weight"]]


@pytest.mark.parametrize("name", sorted({**ELEMENTWISE, **MATRIXWISE}))
def test_who_owns_nothing_has_an_optimizer_that_does_nothing(name: str) -> None:
    optimizer = over({**ELEMENTWISE, **MATRIXWISE}[name], [])
    optimizer.step()
    assert sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"]) == 0


class Referring(optim.SGD):
    """Holds its parameters in an attribute, too, and what the constructor was given."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params, lr=0.1)
        self.defaults.clear()
        self.model = model
        self.mine = [tensor for group in self.param_groups for tensor in group["params"]]


def test_what_holds_the_parameters_holds_their_pieces() -> None:
    model = nn.Linear(1, 1)
    optimizer = over(partial(Referring, model=model), [(Segment("1.weight", 0, 3, 0), torch.arange(3.0))])
    assert isinstance(optimizer, Referring)
    assert optimizer.model is model
    assert [tensor.tolist() for tensor in optimizer.mine] == [[], [0.0, 1.0, 2.0]]


def test_state_of_the_constructor_is_cut_as_the_parameters_are() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        optimizer = optim.SGD([tensor for _, tensor in pairs], lr=0.1, momentum=0.9)
        for index, (_, tensor) in enumerate(pairs):
            optimizer.state[tensor]["momentum_buffer"] = torch.arange(float(tensor.numel())).view(tensor.shape) + index
        return optimizer

    pieces = [(Segment("0.weight", 2, 4, 0), torch.zeros(2)), (Segment("0.weight", 40, 48, 0), torch.zeros(1, 8))]
    optimizer, (first, second) = build_over(factory, named(), pieces)
    assert optimizer.state[first]["momentum_buffer"].tolist() == [2.0, 3.0]
    assert optimizer.state[second]["momentum_buffer"].tolist() == [[*map(float, range(40, 48))]]
    assert len(optimizer.state) == 2


def test_what_a_constructor_makes_of_values() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        optimizer = optim.SGD([tensor for _, tensor in pairs], lr=0.1)
        optimizer.state[pairs[0][1]]["slow"] = pairs[0][1].detach().clone()
        return optimizer

    pairs = named()
    owned = [(Segment("0.weight", 3, 5, 0), torch.zeros(2))]
    for values, expected in ((True, pairs[0][1].detach().flatten()[3:5]), (False, torch.zeros(2))):
        optimizer, (tensor,) = build_over(factory, pairs, owned, values)
        assert torch.equal(optimizer.state[tensor]["slow"], expected)


def stepped(
    factory: Callable[..., Any], cuts: list[list[int]], start: int, stop: int, pieces: Any = None, values: Any = None
) -> Any:
    """Does steps on parameters cut into pieces; returns their values and the state, by owner of a piece."""
    pairs = [("0.weight", torch.linspace(-1, 1, 48).view(6, 8)), ("1.weight", torch.linspace(2, -2, 24).view(4, 6))]
    pairs = pairs if values is None else [(name, values[name]) for name, _ in pairs]
    cut: list[tuple[Segment, Tensor]] = []
    for (name, tensor), ends in zip(pairs, cuts, strict=True):
        for low, high in zip([0, *ends], [*ends, tensor.numel()], strict=True):
            piece = tensor.flatten()[low:high].clone() if ends else tensor.clone()
            cut.append((Segment(name, low, high, 0), piece))
    optimizer, tensors = build_over(factory, [(name, nn.Parameter(tensor)) for name, tensor in pairs], cut)
    owned = [(segment, tensor) for (segment, _), tensor in zip(cut, tensors, strict=True)]
    updater = Updater(optimizer, owned, Options(), 1)
    if pieces is not None:
        updater.load(pieces)
    for step in range(start, stop):
        for segment, piece in owned:
            whole = torch.sin(torch.arange(48.0) * (step + 1) + len(segment.parameter))
            piece.grad = whole[segment.start : segment.stop].view_as(piece)
        optimizer.step()
    after = {
        name: torch.cat([piece.detach().flatten() for segment, piece in owned if segment.parameter == name]).view_as(t)
        for name, t in pairs
    }
    return after, updater.state()


CUTS = [[[], []], [[20], []], [[16, 32], [3]]]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
@pytest.mark.parametrize("after", CUTS, ids=str)
@pytest.mark.parametrize("before", CUTS, ids=str)
def test_state_goes_on_however_it_was_cut(name: str, before: list[list[int]], after: list[list[int]]) -> None:
    factory = ELEMENTWISE[name]
    expected, _ = stepped(factory, [[], []], 0, 5)
    values, pieces = stepped(factory, before, 0, 2)
    resumed, _ = stepped(factory, after, 2, 5, pieces, values)
    for parameter, tensor in resumed.items():
        torch.testing.assert_close(tensor, expected[parameter], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MATRIXWISE))
def test_state_of_whole_matrices_keeps_its_shape(name: str) -> None:
    factory = MATRIXWISE[name]
    expected, _ = stepped(factory, [[], []], 0, 5)
    values, pieces = stepped(factory, [[], []], 0, 2)
    resumed, _ = stepped(factory, [[], []], 2, 5, pieces, values)
    assert all(torch.equal(tensor, expected[parameter]) for parameter, tensor in resumed.items())


def test_pieces_say_where_they_belong() -> None:
    tensor = nn.Parameter(torch.zeros(2, 3))
    scalar = nn.Parameter(torch.zeros(()))
    optimizer = optim.Adam([tensor, scalar])
    tensor.grad, scalar.grad = torch.ones(2, 3), torch.ones(())
    optimizer.step()
    pieces = state_pieces(optimizer, [(Segment("a", 6, 12, 0), tensor), (Segment("b", 0, 1, 0), scalar)])
    placed = {(piece.parameter, piece.key): (piece.start, tuple(piece.value.shape)) for piece in pieces}
    assert placed == {
        ("a", "step"): (-1, ()),
        ("a", "exp_avg"): (6, (6,)),
        ("a", "exp_avg_sq"): (6, (6,)),
        ("b", "step"): (-1, ()),
        ("b", "exp_avg"): (-1, ()),
        ("b", "exp_avg_sq"): (-1, ()),
    }
    assert state_bytes(optimizer) == 4 * (1 + 6 + 6 + 3)


def test_saved_state_does_not_change_with_the_optimizer() -> None:
    tensor = nn.Parameter(torch.zeros(4))
    optimizer = optim.SGD([tensor], lr=0.1, momentum=0.9)
    owned = [(Segment("a", 0, 4, 0), tensor)]
    tensor.grad = torch.ones(4)
    optimizer.step()
    (piece,) = state_pieces(optimizer, owned)
    optimizer.step()
    assert torch.equal(piece.value, torch.ones(4))
    load_state(optimizer, owned, [piece])
    optimizer.step()
    assert torch.equal(piece.value, torch.ones(4))
    assert torch.equal(optimizer.state[tensor]["momentum_buffer"], torch.full((4,), 1.9))


def test_state_is_loaded_in_its_parameters_order_of_memory() -> None:
    """Fused optimizers go over memory."""
    image = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = optim.SGD([image], lr=0.1, momentum=0.9, fused=True)
    piece = StatePiece("a", "momentum_buffer", 0, torch.arange(48.0))
    load_state(optimizer, [(Segment("a", 0, 48, 0), image)], [piece])
    loaded = optimizer.state[image]["momentum_buffer"]
    assert loaded.stride() == image.stride()
    assert torch.equal(loaded.flatten(), torch.arange(48.0))


def test_what_others_read_stays_as_it_is_while_the_state_is_saved() -> None:
    read: list[Tensor] = []

    class Watched(Averaging):
        def train(self) -> None:
            read.append(memory.clone())
            super().train()

    memory = torch.arange(4.0)
    parameter = nn.Parameter(memory.view(2, 2))
    updater = Updater(Watched([parameter]), [(Segment("a", 0, 4, 0), parameter)], Options(), 1)
    for round_ in range(2):
        parameter.grad = torch.ones(2, 2)
        updater.step(round_)
    before = memory.clone()
    (evaluated,) = [piece.value for piece in updater.state() if piece.key == AVERAGE]
    assert not torch.equal(evaluated, before)
    assert torch.equal(read[-1], before)
    assert torch.equal(memory, before)
    parameter.grad = torch.ones(2, 2)
    updater.step(2)
    assert not torch.equal(memory, before)


def test_a_parameter_without_state_stays_without() -> None:
    tensor = nn.Parameter(torch.zeros(4))
    optimizer = optim.SGD([tensor], lr=0.1, momentum=0.9)
    piece = StatePiece("b", "momentum_buffer", 0, torch.ones(4))
    load_state(optimizer, [(Segment("a", 0, 4, 0), tensor)], [piece])
    assert tensor not in optimizer.state


class Eager(optim.Optimizer):
    """Makes its state in the constructor and counts on it, as Adagrad does before torch 2.13."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sum": torch.full_like(parameter, 2.0), "steps": 0}

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["sum"] += 1
            state["steps"] += 1


def test_a_state_of_the_constructor_comes_back_where_nothing_is_loaded() -> None:
    tensor = nn.Parameter(torch.zeros(4))
    updater = Updater(Eager([tensor]), [(Segment("a", 0, 4, 0), tensor)], Options(), 1)
    for _ in range(2):
        updater.load([])
        assert updater.optimizer.state[tensor]["steps"] == 0
        assert torch.equal(updater.optimizer.state[tensor]["sum"], torch.full((4,), 2.0))
        updater.optimizer.step()
        assert torch.equal(updater.optimizer.state[tensor]["sum"], torch.full((4,), 3.0))


def test_hooks_may_write_gradients() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.1)
    assert not may_write_gradients(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert may_write_gradients(optimizer)
