"""Stages, one after the other, do what the model does: forward, gradients and buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.batches import call
from headrace.pipeline.stage import OUTPUT, Stage, TracedModel, cut
from headrace.pipeline.trace.tracing import trace
from headrace.trees import map_tensors
from pipeline.zoo import ZOO, Case


def partitions(traced: TracedModel, stages: int, about: int) -> list[list[list[str]]]:
    """Returns all that can be had, or about so many of them."""
    layers = traced.layers
    places = [index + 1 for index, layer in enumerate(layers[:-1]) if not layer.joined]
    chosen = list(combinations(places, stages - 1))
    names = [layer.name for layer in layers]
    every = chosen[:: max(1, len(chosen) // about)]
    return [[names[a:b] for a, b in pairwise([0, *cuts, len(names)])] for cuts in every]


def forward(
    traced: TracedModel, stages: Sequence[Stage], batch: Any
) -> tuple[Any, list[tuple[Stage, dict[str, Any], dict[str, Any]]]]:
    """Runs stages with nothing in common but what crosses; returns the output, and what each stage got and gave."""
    inputs = traced.inputs(batch)
    given: dict[tuple[int, str], Any] = {}
    story = []
    for stage in stages:
        got = {name: inputs[name] for name in stage.inputs}
        for value in stage.receives:
            received = given[stage.index, value.name]
            if isinstance(received, Tensor):
                received = received.detach().clone().requires_grad_(received.requires_grad)
            got[value.name] = received
        gave = stage.run(got)
        story.append((stage, got, gave))
        for value in stage.sends:
            for consumer in value.consumers:
                given[consumer, value.name] = gave[value.name]
    return story[-1][2][OUTPUT], story


def backward(loss: Tensor, story: list[tuple[Stage, dict[str, Any], dict[str, Any]]]) -> None:
    """Sends gradients back the way that the values came."""
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for stage, got, gave in reversed(story):
        pairs = [(gave[v.name], gradients[v.name]) for v in stage.sends if v.name in gradients]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        for value in stage.receives:
            received = got[value.name]
            if isinstance(received, Tensor) and received.grad is not None:
                before = gradients.get(value.name)
                gradients[value.name] = received.grad if before is None else before + received.grad


NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name == "cnn" else []) for name in ZOO]


def total(output: Any) -> Tensor:
    parts: list[Tensor] = []
    map_tensors(
        lambda tensor: parts.append((tensor * torch.linspace(1, 2, tensor.numel()).view_as(tensor)).sum()), output
    )
    return torch.stack(parts).sum()


def build(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return case.model().double(), map_tensors(
        lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, case.batch(3)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_stages_do_what_the_model_does(name: str, stages: int) -> None:
    model, batch = build(ZOO[name])
    traced = trace(model, batch)
    assert tuple(notice.partition(" ")[0] for notice in traced.notices) == ZOO[name].kept
    found = partitions(traced, stages, ZOO[name].partitions)
    if not found:
        assert stages > 1 + sum(not layer.joined for layer in traced.layers[:-1])
    for partition in found:
        for training in (True, False):
            whole, staged = copy.deepcopy(model).train(training), model.train(training)
            state = copy.deepcopy(model.state_dict())
            pieces = cut(traced, partition)
            torch.manual_seed(1)
            expected = call(whole, batch, None)
            torch.manual_seed(1)
            output, story = forward(traced, pieces, batch)
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
            total(expected).backward()
            staged.zero_grad()
            backward(total(output), story)
            for (key, one), other in zip(whole.named_parameters(), staged.parameters(), strict=True):
                torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-12, msg=f"{key}, {partition}")
            for (key, one), other in zip(whole.named_buffers(), staged.buffers(), strict=True):
                torch.testing.assert_close(other, one, msg=f"{key}, {partition}")
            model.load_state_dict(state)
            assert {p for piece in pieces for p in piece.parameters} == {n for n, _ in model.named_parameters()}
