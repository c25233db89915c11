"""What tracing says of models, and which it refuses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.errors import JobError, UsageError
from headrace.pipeline.stage import OUTPUT, Value, cut
from headrace.pipeline.trace.graph_tracing import trace_graph
from headrace.pipeline.trace.inputs import arguments
from headrace.pipeline.trace.recorded_forward import Untraceable
from headrace.pipeline.trace.tracing import trace
from headrace.training.user_code.trial import unchanged
from pipeline.zoo import ZOO, Gated, Normalised, Several, Tied, UNet, dense


class Model(nn.Module):
    """Three layers, and something between the first two.

    Args:
        between: what is done to the hidden values, by the model.
    """

    def __init__(self, between: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(4))
        self.count, self.cache = 0, dict[str, Any]()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.between(self, self.first(x))))


class Whole(nn.Module):
    """Something that is done in a module of its own.

    Args:
        between: see `Model`.
    """

    def __init__(self, between: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = Model(between)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class Doubled(torch.autograd.Function):
    """Has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


def counts(model: nn.Module, x: Tensor) -> Tensor:
    model.count += 1  # type: ignore[operator, assignment]
    return x


def noisy(model: nn.Module, x: Tensor) -> Tensor:
    return x + torch.randn(4)


def dropped(model: nn.Module, x: Tensor) -> Tensor:
    return x if random.random() < 2 else x * 0


def decided(model: nn.Module, x: Tensor) -> Tensor:
    return x if np.random.random() < 2 else x * 0


def half(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x * 2


def by_parameters(model: nn.Module, x: Tensor) -> Tensor:
    return x * sum(parameter.norm() for parameter in model._modules["first"].parameters())  # type: ignore[union-attr]


UNTRACEABLE: dict[str, tuple[Callable[..., Any], str]] = {
    "data": (lambda model, x: x if x.sum() > 0 else -x, "depends on the data"),
    "item": (lambda model, x: x[: int(x.argmax().item()) * 0 + 2].repeat(2, 1), "depends on the data"),
    "examples": (lambda model, x: x if len(x) == 4 else x + 1, "depends on the number of examples"),
    "state": (counts, "it sets count in its attributes"),
    "state of another": (lambda model, x: vars(model.second).update(seen=x) or x, "it sets seen in its attributes"),
    "an item of a table": (lambda model, x: model.cache.update(x=x) or x, "it sets x in its attributes"),
    "constant noise": (noisy, "draws random numbers"),
    "decided by chance": (dropped, "draws random numbers"),
    "decided by numpy": (decided, "draws random numbers"),
    "autocast": (half, "switches autocast"),
    "parameters": (by_parameters, "has not read as self.name"),
    # These would compute with the memory of what a proxy stands for.
    "another type of it": (
        lambda model, x: torch.as_tensor(x, dtype=torch.float64).float(),
        "aten._to_copy.default by",
    ),
    "vmap": (lambda model, x: torch.func.vmap(torch.sin)(x), "by means that are not recorded"),
    "an array of it": (lambda model, x: torch.from_numpy(np.sin(np.asarray(x.detach()))), "not producing an array"),
}


CHANCE = {"decided by chance", "decided by numpy"}


@pytest.mark.parametrize("name", sorted(UNTRACEABLE.keys() - CHANCE))
@pytest.mark.parametrize("make", [Model, Whole])
def test_what_cannot_be_recorded_as_a_graph_is_replayed(name: str, make: Callable[..., nn.Module]) -> None:
    between, reason = UNTRACEABLE[name]
    torch.manual_seed(0)
    model, batch = make(between), torch.randn(4, 4)
    args, kwargs = arguments(batch, None)
    if make is Model:
        with unchanged(model), pytest.raises(Untraceable, match=reason):
            trace_graph(model, args, kwargs, None)
    else:
        with unchanged(model):
            (notice,) = trace_graph(model, args, kwargs, None).notices
        assert notice.startswith("Model is one layer, not cut: ")
        assert reason in notice
    traced = trace(model, batch)
    names = [layer.name for layer in traced.layers]
    assert [each.removeprefix("inner.") for each in names] == ["first", "second", "third"]
    one, two = cut(traced, [names[:1], names[1:]])
    torch.manual_seed(2)
    expected = model(batch)
    torch.manual_seed(2)
    values = {**traced.inputs(batch), **one.run(traced.inputs(batch))}
    torch.manual_seed(2)
    torch.testing.assert_close(two.run(values)[OUTPUT], expected)


@pytest.mark.parametrize("name", sorted(CHANCE))
def test_what_neither_tracer_takes_is_refused_with_both_reasons(name: str) -> None:
    between, reason = UNTRACEABLE[name]
    with pytest.raises(JobError, match=f"Model cannot be cut into stages: .*{reason}.*; nor between the calls of its"):
        trace(Model(between), torch.randn(4, 4))


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    model.seen += x.detach().mean(0)  # type: ignore[operator, assignment]
    return x + model.seen  # type: ignore[operator]


def matched(model: nn.Module, x: Tensor) -> Tensor:
    match x:
        case Tensor():
            return x * 2
    return x


def handed_on(model: nn.Module, x: Tensor) -> Tensor:
    model.kept = x * 2
    return vars(model).pop("kept") + 1  # type: ignore[no-any-return]


TRACEABLE: dict[str, Callable[..., Any]] = {
    "a buffer that is written in place": in_place,
    "a backward of its own": lambda model, x: Doubled.apply(x),
    "questions about the shape": lambda model, x: (
        x.view(len(x), -1) if x.dim() == 2 and isinstance(x, Tensor) else None
    ),
    "noise like the input": lambda model, x: x + torch.randn_like(x) + torch.rand(x.shape[0], 1),
    "loops over a shape": lambda model, x: torch.stack([x[:, index] for index in range(x.shape[1])], 1),
    "several at once": lambda model, x: torch.cat([part * 2 for part in x.chunk(2, 1)], 1) + x.max(1).values[:, None],
    "a number of the data": lambda model, x: x * x.detach().mean().item(),
    "a table of sizes": lambda model, x: x * {4: 2.0}.get(x.shape[1], 1.0) * (3.0 if str(x.shape[1]) == "4" else 1.0),
    "a pattern": matched,
    "types of numbers": lambda model, x: (
        x * 2 if isinstance(x.shape[0], int) and isinstance(x.shape, tuple) and not isinstance(x, nn.Parameter) else x
    ),
    "types of tensors": lambda model, x: x * 2 if isinstance(x, torch.FloatTensor) and torch.is_tensor(x) else x,
    "a type of a parameter": lambda model, x: x * 2 if isinstance(model.first.weight, nn.Parameter) else x,
    "an attribute until it is deleted": handed_on,
    "a table that is filled once": lambda model, x: x * model.cache.setdefault("ones", torch.ones(4)),
    "a tensor of it": lambda model, x: torch.as_tensor(x) + torch.stack([x[0], x[1]]).sum(0),
    "written parts": lambda model, x: x.clone().index_fill_(1, torch.tensor([0]), 0.0),
}


@pytest.mark.parametrize("name", TRACEABLE)
def test_what_python_does_with_tensors_is_followed(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Model(TRACEABLE[name]), torch.randn(4, 4)
    traced = trace(model, batch)
    assert [layer.name for layer in traced.layers] == ["first", "second", "third"]
    assert (type(traced).__name__, traced.notices) == ("RecordedModel", ())
    one, two = cut(traced, [["first"], ["second", "third"]])
    x = torch.randn(6, 4)
    results = []
    for staged in (True, False):
        model.seen.zero_()  # type: ignore[operator]
        model.zero_grad()
        torch.manual_seed(2)
        output = two.run(one.run(traced.inputs(x)))[OUTPUT] if staged else model(x)
        output.sum().backward()
        results.append((output.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(*results)


TYPES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a type": lambda model, x: x * 2 if type(x) is Tensor else x,
    "what can be called": lambda model, x: x if callable(x) else x * 2,
    "a type in evaluation": lambda model, x: x * 2 if not model.training and type(x) is Tensor else x,
}


@pytest.mark.parametrize("name", TYPES)
def test_what_python_decides_by_the_type_of_a_value_is_that_of_tensors(name: str) -> None:
    """Proxies are none: outputs were others, without a word."""
    torch.manual_seed(0)
    model, x = Model(TYPES[name]), torch.randn(4, 4)
    traced = trace(model, x)
    assert type(traced).__name__ == "ReplayedModel"
    one, two = cut(traced, [["first"], ["second", "third"]])
    for mode in (True, False):
        model.train(mode)
        first, second = (stage if mode else stage.evaluated for stage in (one, two))
        torch.testing.assert_close(second.run(first.run(traced.inputs(x)))[OUTPUT], model(x))


@pytest.mark.parametrize("decide", [lambda n: {4: 2.0}.get(n, 1.0), str, "{}".format, repr])
def test_a_size_that_was_looked_up_or_written_must_stay(decide: Callable[[Any], Any]) -> None:
    model = Model(lambda model, x: x * 2 if decide(x.shape[1]) in (2.0, "4") else x)
    (stage,) = cut(traced := trace(model, torch.randn(3, 4)), [["first", "second", "third"]])
    model.first = nn.Linear(4, 5)
    with pytest.raises(JobError, match="in the forward of Model is 4, and now that is 5; give every batch the same"):
        stage.run(traced.inputs(torch.randn(3, 4)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_recomputes_is_cut_as_if_it_did_not(reentrant: bool) -> None:
    def between(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: model.second(torch.tanh(x)), x, use_reentrant=reentrant)  # type: ignore[operator]

    model, x = Model(between), torch.randn(4, 4)
    traced = trace(model, x)
    assert [layer.name for layer in traced.layers] == ["first", "second", "second:2", "third"]
    (notice,) = traced.notices
    assert notice == "torch.utils.checkpoint is left out of what is cut; recompute='always' does as much here"
    one, two = cut(traced, [["first"], ["second", "second:2", "third"]])
    torch.testing.assert_close(two.run(one.run(traced.inputs(x)))[OUTPUT], model(x))


def test_nothing_is_left_of_tracing() -> None:
    model = ZOO["blocks"].model()
    model.eval()
    model.blocks[1].train()  # type: ignore[index]
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    chance = random.getstate()
    classes = [dict(vars(kind)) for kind in (nn.Module, torch.autograd.Function)]
    trace(model, torch.randn(3, 4, generator=torch.Generator()))
    assert torch.initial_seed() == 5
    first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(1))
    assert random.getstate() == chance
    assert [module.training for module in model.modules()] == modes
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert [dict(vars(kind)) for kind in (nn.Module, torch.autograd.Function)] == classes
    assert len([1]) == 1
    assert len.__module__ == "builtins"


def test_skips_go_from_the_producer_to_the_consumer() -> None:
    traced = trace(UNet(), torch.randn(2, 1, 8, 8))
    stages = cut(traced, [["first"], ["pool", "second"], ["pool:2", "middle"], ["third", "last"]])
    assert [[(value.producer, value.consumers) for value in stage.sends] for stage in stages] == [
        [(0, (1, 3))],
        [(1, (2,))],
        [(2, (3,))],
        [],
    ]
    assert all(isinstance(value, Value) for stage in stages for value in stage.receives)


def test_inputs_come_from_the_batch_wherever_they_are_needed() -> None:
    batch = {"left": torch.randn(2, 4), "scale": torch.rand(2, 1)}
    traced = trace(Several(), batch)
    first, second = cut(traced, [["left", "right"], ["head"]])
    assert (first.inputs, second.inputs) == (("left",), ("scale",))
    with pytest.raises(JobError, match="cut for a batch with left, scale, and now gets left, scale, names='a'"):
        traced.inputs({**batch, "names": "a"})


def test_tied_parameters_are_used_by_several_stages() -> None:
    traced = trace(Tied(), torch.randint(0, 7, (2, 6)))
    stages = cut(traced, [["embedding"], ["mix"], ["mix:2", "head"]])
    names = [name for name, _ in traced.module.named_parameters()]
    users = {name: [stage.index for stage in stages if name in stage.parameters] for name in names}
    shared = {name: indices for name, indices in users.items() if len(indices) > 1}
    assert shared == {"embedding.weight": [0, 2], "mix.weight": [1, 2], "mix.bias": [1, 2]}


def test_hooks_of_layers_run_and_those_of_the_model_are_refused() -> None:
    model, batch, seen = dense(), torch.randn(2, 4), []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))  # type: ignore[index]
    (stage,) = cut(trace(model, batch), [["0", "1", "2", "3"]])
    seen.clear()
    stage.run({"input_1": batch})
    assert seen == ["hook"]
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(JobError, match="Sequential cannot be cut into stages: it has forward hooks"):
        trace(model, batch)


def test_a_run_that_asks_what_was_answered_otherwise_is_refused() -> None:
    model = Model(lambda model, x: x if x.shape[1] == 4 and x.dim() == 2 else x[0])
    (stage,) = cut(traced := trace(model, torch.randn(3, 4)), [["first", "second", "third"]])
    with pytest.raises(
        JobError, match="in the forward of Model is True, and now that is False; give every batch the same"
    ):
        stage.run(traced.inputs(torch.randn(2, 3, 4)))


@pytest.mark.parametrize(
    ("model", "partition", "said"),
    [
        (Gated, [["first"], ["gate"]], "must have all 4 layers of the model, in order"),
        (Gated, [["first", "first:2"], ["head", "gate"]], "must have all 4 layers of the model, in order"),
        (Gated, [["first", "first:2", "gate", "head"], []], "at least one a stage"),
        (
            Normalised,
            [["first", "norm"], ["second", "norm:2", "head"]],
            "between norm and second: norm and norm:2 share the buffer norm.",
        ),
    ],
)
def test_a_partition_that_is_none_is_refused(model: type[nn.Module], partition: list[list[str]], said: str) -> None:
    traced = trace(model(), torch.randn(2, 4))
    with pytest.raises(UsageError, match=said):
        cut(traced, partition)


@pytest.mark.parametrize(
    "between",
    [
        lambda model, x: torch.where(x > 0, x, 1.0),
        lambda model, x: torch.where(x > 0, model.seen, 0),
        lambda model, x: torch.clamp(x, model.seen - 1, model.seen + 1) if isinstance(x, Tensor) else None,
    ],
)
def test_torch_does_not_take_a_proxy_for_the_tensor_that_it_says_it_is(
    between: Callable[[nn.Module, Tensor], Any],
) -> None:
    model, batch = Model(between), (torch.rand(3, 4), torch.rand(3, 4))
    first, second = cut(trace(model, batch), (("first",), ("second", "third")))
    values = first.run({name: batch[0] for name in first.inputs})
    assert torch.equal(second.run(values)[OUTPUT], model(batch[0]))


def test_models_are_traced_while_other_threads_trace_and_use_theirs() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(*[part for _ in range(20) for part in (nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1))])

    before = dict(vars(nn.Module))
    used, done = net().eval(), threading.Event()
    models = [net() for _ in range(3)]

    def traced(module: nn.Module) -> list[str]:
        return [layer.name for layer in trace(module, torch.ones(3, 4)).layers]

    def use() -> int:
        count = 0
        while not done.is_set() or not count:
            used.train(used.training)
            used.count = count  # type: ignore[assignment]
            checkpoint(used, torch.ones(2, 4), use_reentrant=False, preserve_rng_state=False).sum().backward()
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        using = pool.submit(use)
        try:
            found = list(pool.map(traced, models * 5))
        finally:
            done.set()
        assert using.result() > 0
    assert all(each == found[0] for each in found)
    assert dict(vars(nn.Module)) == before
