"""Models that no graph can say, cut between the calls of their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from headrace.errors import JobError
from headrace.pipeline.replay.tracing import trace_calls
from headrace.pipeline.stage import TracedModel, cut
from headrace.pipeline.trace.inputs import arguments
from headrace.pipeline.trace.tracing import trace
from headrace.training.user_code.trial import unchanged
from headrace.trees import tensors_of
from pipeline.test_stage import backward, forward


class Cache:
    """Holds what layers have computed; torch knows nothing of it."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def update(self, value: Tensor) -> Tensor:
        self.values.append(value)
        return value


@dataclass
class Output:
    """What a model returns."""

    hidden: Tensor
    cache: Cache | None
    loss: Tensor | None = None


class Block(nn.Module):
    """A block whose second half adds to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> tuple[Tensor, Any]:
        hidden = torch.tanh(self.up(x))
        hidden = hidden if cache is None else cache.update(hidden)
        x = x + self.down(hidden)
        return (x if mask is None else x * mask), cache


class Decoder(nn.Module):
    """A cache, a mask that is None where nothing is hidden, labels, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.ones(5, 4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        cache = Cache()
        hidden = None if bool(mask.all()) else mask[..., None].to(x.dtype)
        for block in self.blocks:
            x, cache = block(x, hidden, cache=cache)
        scores = self.head(x)
        loss = None if labels is None else nn.CrossEntropyLoss()(scores.flatten(0, 1), labels.flatten())
        return Output(scores, cache, loss)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(7, (2, 5))
    return {"ids": ids, "mask": torch.ones_like(ids), "labels": ids}


class Chain(nn.Module):
    """Three blocks, with something between them; `wrap` is done to the second one."""

    def __init__(
        self,
        between: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: x,
        wrap: Callable[[nn.Module], nn.Module] = lambda block: block,
    ) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.second = wrap(self.second)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.between(self, self.second(self.between(self, self.first(x)))))


def reshaping(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _, args, output: output.view(len(args[0]), -1) * len(args[0]))
    return module


def normalized(module: nn.Module) -> nn.Module:
    parametrizations.weight_norm(module[1])  # type: ignore[index]
    return module


def own_gradient(model: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(inner.pow(3).sum(), inner)
    return x + gradient


def setting(model: nn.Module, x: Tensor) -> Tensor:
    model.seen = x.shape  # type: ignore[assignment]
    return x


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    x += 1
    return x


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "plain": Chain,
    "an attribute": lambda: Chain(setting),
    "in place": lambda: Chain(in_place),
    "a choice by the data": lambda: Chain(lambda model, x: x * 2 if x.sum() > 0 else -x),
    "autograd inside": lambda: Chain(own_gradient),
    "vmap": lambda: Chain(lambda model, x: torch.func.vmap(torch.sin)(x)),
    "a script module": lambda: Chain(wrap=torch.jit.script),
    "a hook that knows the batch": lambda: Chain(wrap=reshaping),
    "a parametrization": lambda: Chain(wrap=normalized),
}


def replayed(model: nn.Module, batch: Any) -> TracedModel:
    with unchanged(model):
        return trace_calls(model, arguments(batch, None), None, check=True)


def assert_staged(model: nn.Module, traced: TracedModel, batch: Any, loss: Callable[[Any], Tensor]) -> None:
    """Asserts that output and gradients of every layer as a stage are the whole model's."""
    groups: list[list[str]] = [[]]
    for layer in traced.layers:
        groups[-1].append(layer.name)
        if not layer.joined:
            groups.append([])
    model.zero_grad()
    args, kwargs = arguments(batch, None)
    expected = loss(model(*args, **kwargs))
    expected.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    output, story = forward(traced, cut(traced, [group for group in groups if group]), batch)
    got = loss(output)
    backward(got, story)
    torch.testing.assert_close(got, expected)
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, gradients[name])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_in_stages_is_whole(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CHAINS[name](), torch.randn(3, 4)
    traced = replayed(model, batch)
    assert len([layer for layer in traced.layers if not layer.joined]) >= 3
    assert_staged(model, traced, torch.randn(5, 4), lambda output: output.square().mean())


def test_a_sparse_output_in_stages_is_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), Sparse())
    traced = replayed(model, torch.randn(3, 4))
    assert_staged(model, traced, torch.randn(5, 4), lambda output: output.to_dense().square().mean())


class Sparse(nn.Module):
    """Returns where each number is, and the number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


@pytest.mark.parametrize("padded", [False, True])
def test_caches_masks_and_labels_in_stages(padded: bool) -> None:
    torch.manual_seed(0)
    model, batch = Decoder(), tokens()
    traced = replayed(model, batch)
    assert [layer.name for layer in traced.layers] == ["embedding", *(f"blocks.{index}" for index in range(3)), "head"]
    # The parameter that forward reads itself is where that runs.
    assert ["position" in layer.parameters for layer in traced.layers] == [False, True, True, True, True]
    if padded:
        batch["mask"][0, 3:] = 0
    assert_staged(model, traced, batch, lambda output: output.loss)


def test_what_only_some_layers_have_written_to_is_not_returned() -> None:
    model, batch = Decoder(), tokens()
    traced = replayed(model, batch)
    names = [layer.name for layer in traced.layers]
    output, _ = forward(traced, cut(traced, [names[:2], names[2:]]), batch)
    assert isinstance(output, Output)
    with pytest.raises(JobError, match="uses the output, a Cache, which is on another stage"):
        output.cache.values  # type: ignore[union-attr]  # noqa: B018


class Smuggling(nn.Module):
    """A block that leaves a value for a later one, past its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.kept = output[0].mean()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x, _ = block(x)
            x = x + self.kept if index == 2 else x
        return x


def test_what_goes_past_arguments_and_results_is_not_cut() -> None:
    torch.manual_seed(0)
    model = Smuggling()
    traced = replayed(model, torch.randn(3, 4))
    assert [bool(layer.joined) for layer in traced.layers] == [False, True, True, False]
    assert "fails without the layers before it: AttributeError" in traced.layers[1].joined
    assert_staged(model, traced, torch.randn(4, 4), lambda output: output.sum())


class Left(nn.Module):
    """A layer that leaves a value in an attribute, which the model adds to its output."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.left = super().forward(x)
            return self.left

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), self.Layer(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x))) + self.second.left.square().mean()


def test_what_a_layer_leaves_in_an_attribute_is_no_constant() -> None:
    torch.manual_seed(0)
    model = Left()
    traced = trace(model, torch.randn(3, 4))
    assert [bool(layer.joined) for layer in traced.layers] == [False, True, False]
    assert_staged(model, traced, torch.randn(4, 4), lambda output: output.sum())


class Skipping(nn.Module):
    """Leaves out layers by a number that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.left_out = 9

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.left_out else block(x)[0]
        return x


def test_another_sequence_of_calls_is_an_error_with_the_remedy() -> None:
    model, batch = Skipping(), torch.randn(3, 4)
    traced = replayed(model, batch)
    first, _ = cut(traced, [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]])
    model.left_out = 1
    with pytest.raises(JobError, match=r"calls blocks.2 where it called blocks.1; set rates of skipped layers"):
        first.run(traced.inputs(batch))


def test_the_same_dropout_between_layers_for_two_stages_is_not_cut() -> None:
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(self.blocks[0](x)[0], 0.5, self.training)
            return self.blocks[3](self.blocks[2](self.blocks[1](x)[0] + x)[0])[0]

    layers = replayed(Twice(), torch.randn(3, 4)).layers
    assert [bool(layer.joined) for layer in layers] == [False, True, False, False]
    assert layers[1].joined == "blocks.1 and later ones get the same random numbers"


def test_hidden_layers_at_random_are_refused_and_a_rate_of_0_is_not() -> None:
    def model(rate: float) -> nn.Module:
        class Random(Skipping):
            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = x if self.training and torch.rand([]) < rate else block(x)[0]
                return x

        return Random()

    torch.manual_seed(0)
    assert not any(layer.joined for layer in replayed(model(0.0), torch.randn(3, 4)).layers)
    layers = replayed(model(1e-6), torch.randn(3, 4)).layers
    assert all(layer.joined for layer in layers[:-1])


def test_the_finer_tracer_serves() -> None:
    graph, calls = trace(Chain(), torch.randn(3, 4)), trace(Chain(setting), torch.randn(3, 4))
    assert (type(graph).__name__, type(calls).__name__) == ("RecordedModel", "ReplayedModel")
    # What the inputs alone go into runs on every stage.
    assert [layer.name for layer in graph.layers][1:] == [layer.name for layer in calls.layers]


def test_nothing_is_left_of_a_run() -> None:
    model, batch = Decoder(), tokens()
    before = [dict(vars(module)) for module in model.modules()]
    traced = replayed(model, batch)
    forward(traced, cut(traced, [[layer.name] for layer in traced.layers]), batch)
    assert [dict(vars(module)) for module in model.modules()] == before
    copy.deepcopy(model)
    assert tensors_of(list(model.parameters()))


class Recomputing(nn.Module):
    """Recomputes its blocks in backward, and sets an attribute."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        self.count = len(x)
        for block in self.blocks:
            x = checkpoint(lambda value, block=block: block(value)[0], x, use_reentrant=self.reentrant)
        return x


def test_checkpoints_of_blocks_are_recomputed_in_stages() -> None:
    torch.manual_seed(0)
    model = Recomputing(reentrant=False)
    traced = trace(model, torch.randn(3, 4))
    assert type(traced).__name__ == "ReplayedModel"
    assert not any(layer.joined for layer in traced.layers)
    assert_staged(model, traced, torch.randn(4, 4), lambda output: output.sum())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_blocks_within_a_function_with_its_own_backward_are_refused() -> None:
    with pytest.raises(JobError, match=r"within a function that has its own backward, .* use_reentrant=False, or"):
        trace(Recomputing(reentrant=True), torch.randn(3, 4))


class Mapped(nn.Module):
    """Calls a layer within vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.func.vmap(lambda row: self.second(row))(self.first(x))
        return output


def test_layers_within_a_transform_are_refused() -> None:
    with pytest.raises(JobError, match=r"it calls second within a transform of torch.func .*submodule"):
        trace(Mapped(), torch.randn(3, 4))
