"""Mixtures whose experts are divided over workers are trained as on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UsageError
from strategies.contract_runs import distance, train
from strategies.mixtures import ADAMW, Aliased, Blended, Chained, Expert, OwnStacked, Reader, Routed, Scaled, read


def unequal(model: Reader) -> None:
    """Lets every token go to the same two experts, so that the others never have one."""
    for layer in model.layers:
        layer.router.weight.data.zero_()  # type: ignore[union-attr]
        layer.router.requires_grad_(False)


def tied(model: Reader) -> None:
    model.layers[0].experts[1].wide = model.layers[0].experts[0].wide  # type: ignore[union-attr, index]


def frozen(model: Reader) -> None:
    for layer in model.layers:
        layer.experts[0].requires_grad_(False)  # type: ignore[union-attr]
        layer.experts[3].wide.requires_grad_(False)  # type: ignore[union-attr]


class Tempered(Expert):
    """Has a parameter without rows, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.heat, self.none = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.heat


class Warm(Routed):
    def __init__(self) -> None:
        super().__init__(5)
        self.experts = nn.ModuleList(Tempered() for _ in range(5))
        self.heat = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.heat


MIRRORED = hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2))
SHARDED = hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2))
JOBS: dict[str, Callable[..., hr.Job]] = {
    "list": read,
    "dense": partial(read, Blended),
    "stacked": partial(read, OwnStacked),
    "buffers": partial(read, Scaled),
    "uneven": partial(read, partial(Routed, 5)),
    "uneven stacked": partial(read, partial(OwnStacked, 7)),
    "rare experts": partial(read, partial(Routed, 16, 1)),
    "experts without tokens": partial(read, change=unequal),
    "frozen experts": partial(read, change=frozen),
    "clipped": partial(read, options=hr.Options(clip_norm=0.05)),
    "clipped stacked": partial(read, OwnStacked, options=hr.Options(clip_norm=0.05)),
    "accumulated": partial(read, options=hr.Options(accumulate=2)),
    "averaged": partial(read, OwnStacked, options=hr.Options(ema_decay=0.9)),
    "without rows": partial(read, Warm, options=hr.Options(clip_norm=0.05)),
    "recomputed": partial(read, options=hr.Options(recompute="full")),
    "recomputed but for matrix products": partial(read, options=hr.Options(recompute="selective")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [(name, 3) for name in sorted(JOBS)] + [("list", 1), ("list", 4)])
def test_workers_that_are_threads_are_one_device(name: str, workers: int) -> None:
    right, found = train(JOBS[name](), hr.OneDevice()), train(JOBS[name](), hr.ExpertParallel(workers))
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [(name, 2) for name in sorted(JOBS)] + [("list", 1)])
def test_mirrors_of_workers_that_divide_experts_are_one_device(name: str, workers: int) -> None:
    """Batches have 4, 4 and 2 examples: of four workers two have none of the last."""
    right = train(JOBS[name](), hr.OneDevice())
    found = train(JOBS[name](), hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(workers)))
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


SHARDS = {
    "experts": (SHARDED, 4),
    "replicas": (hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.ExpertParallel(2)), 8),
    "three shards": (hr.Hybrid(hr.FullySharded(3), hr.ExpertParallel(2)), 8),
    "one unit": (hr.Hybrid(hr.FullySharded(2, units=[]), hr.ExpertParallel(3)), 8),
    "kept": (hr.Hybrid(hr.FullySharded(2, reshard_after_forward=False), hr.ExpertParallel(2)), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "levels"), [(name, "experts") for name in sorted(JOBS)] + [("without rows", each) for each in SHARDS]
)
def test_shards_of_workers_that_divide_experts_are_one_device(name: str, levels: str) -> None:
    """The last batch has fewer examples than there are workers, so that some have none."""
    strategy, batch = SHARDS[levels]
    job = JOBS[name](batch=batch, examples=2 * batch + 2)
    right, found = train(job, hr.OneDevice()), train(job, strategy)
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


def test_a_unit_inside_of_what_calls_experts_is_refused() -> None:
    strategy = hr.Hybrid(hr.FullySharded(2, units=["layers.*.experts.*"]), hr.ExpertParallel(2))
    with pytest.raises(UsageError, match=r"units: 'layers\.0\.experts\.0' is inside of a module that calls experts"):
        train(read(), strategy)


@pytest.mark.slow
def test_micro_batches_of_a_weighed_loss_are_those_of_one_device() -> None:
    def mean(output: torch.Tensor, target: torch.Tensor) -> hr.Mean:
        weights = (target + 1).to(output.dtype)
        return hr.Mean((F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())

    # The last batch has 2 examples: of 3 workers one has micro-batches of none.
    job = read(loss=mean, batch=8, options=hr.Options(accumulate=2))
    right, found = train(job, hr.OneDevice()), train(job, hr.ExpertParallel(3))
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first", [hr.ExpertParallel(2), MIRRORED, SHARDED], ids=["plain", "mirrored", "sharded"])
def test_processes_are_one_device_and_go_on_with_other_numbers(first: hr.Strategy, tmp_path: Path) -> None:
    job = read(partial(Routed, 5), optimizer=ADAMW, options=hr.Options(clip_norm=0.05))
    right = train(job, hr.OneDevice())
    saving = dataclasses.replace(job, epochs=1)
    with LocalEngine() as engine:
        given: dict[str, Any] = {"device": "cpu", "engine": engine}
        hr.fit(saving, first, run_dir=tmp_path, **given)
        for place, strategy in enumerate((hr.ExpertParallel(3), hr.Mirrored(2), MIRRORED, SHARDED)):
            run = hr.fit(job, strategy, run_dir=tmp_path / str(place), resume=tmp_path, **given)
            found = {name: each.detach() for name, each in run.model.named_parameters()}
            assert max(float((found[name] - right.tensors[name]).abs().max()) for name in found) <= 1e-9


def test_an_expert_without_tokens_decays_as_on_one_device() -> None:
    """A stacked parameter has a gradient of zeros there; an entry of a list that is not called has none."""
    for mixture, decays in ((OwnStacked, True), (Routed, False)):
        job = read(mixture, steps=1, epochs=None, change=unequal)
        before = dict(job.model().named_parameters())  # type: ignore[operator]
        found = train(job, hr.ExpertParallel(2)).tensors
        right = train(job, hr.OneDevice()).tensors
        assert distance(found, right) <= 1e-9
        names = ["layers.0.rows.weight"] if decays else [f"layers.0.experts.{n}.wide.weight" for n in range(4)]
        experts = [(before[name].detach(), found[name]) for name in names]
        if decays:
            experts = [*zip(*experts[0], strict=True)]
        changed = [not torch.equal(old, new) for old, new in experts]
        # Of the four experts two have the tokens; which they are is torch's choice between equal scores.
        assert sum(changed) == (4 if decays else 2)


REFUSED: dict[str, tuple[Callable[[], hr.Job], hr.ExpertParallel, str]] = {
    "none": (lambda: read(lambda: nn.Linear(6, 6)), hr.ExpertParallel(2), r"Reader has no experts: .*use mirrored, or"),
    "too few": (read, hr.ExpertParallel(5), r"is of 4 experts, of which each of 5 workers .* use 4 workers or fewer"),
    "capacity": (
        partial(read, partial(Routed, capacity=5)),
        hr.ExpertParallel(2),
        r"'layers\.0' \(Routed\) computes other values for the same tokens",
    ),
    "a chain": (
        partial(read, Chained),
        hr.ExpertParallel(2),
        r"the forward of Chained calls the experts of .*experts'",
    ),
    "a pattern": (
        read,
        hr.ExpertParallel(2, experts=["layers.*.router"]),
        r"matches 'layers\.0\.router' \(Linear\), which is neither",
    ),
    "shared": (
        partial(
            read, change=lambda model: setattr(model.layers[0].experts[1], "wide", model.layers[0].experts[0].wide)
        ),
        hr.ExpertParallel(2),
        r"'layers\.0\.experts\.0\.wide\.weight' and 'layers\.0\.experts\.1\.wide\.weight' are one",
    ),
    "buffers": (
        partial(read, change=lambda model: model.layers[1].experts[1].register_buffer("seen", torch.zeros(1))),
        hr.ExpertParallel(2),
        r"layers\.1\.experts\.1\.seen is a buffer of an expert",
    ),
    "a buffer in a list": (
        partial(read, Aliased),
        hr.ExpertParallel(2),
        "changes a buffer by another name than the one it is registered by",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_divided_is_refused_before_the_start(name: str) -> None:
    job, strategy, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        train(job(), strategy)


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ((hr.FullySharded(2, offload=True), hr.ExpertParallel(2)), "offload=True keeps parts in host memory"),
        ((hr.ExpertParallel(2), hr.FullySharded(2)), r"hybrid are hr\.ExpertParallel, hr\.FullySharded; use"),
        ((hr.Pipeline(2), hr.ExpertParallel(2)), "records what its stages call"),
        ((hr.ExpertParallel(2), hr.TensorParallel(2)), "gives all its devices the same tokens"),
        ((hr.Mirrored(2), hr.ExpertParallel(2), hr.ContextParallel(2)), "divides sequences over workers"),
        ((hr.ParameterAveraging(2, period=2), hr.ExpertParallel(2)), "lets replicas step alone"),
        ((hr.ExpertParallel(2), hr.Mirrored(2)), r"the levels of a hybrid are hr\.ExpertParallel, hr\.Mirrored; use"),
        ((hr.Mirrored(2, codec="bf16"), hr.ExpertParallel(2)), "codec='bf16' is for gradients of whole models"),
        ((hr.Mirrored(2, min_workers=1), hr.ExpertParallel(2)), "min_workers=1 lets workers come and go"),
        ((hr.Mirrored(2, balance="speed"), hr.ExpertParallel(2)), "and expert_parallel divides it"),
    ],
)
def test_what_experts_cannot_be_nested_with_is_refused(levels: tuple[hr.Strategy, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        hr.Hybrid(*levels)


def test_each_worker_of_a_replica_has_an_expert() -> None:
    with pytest.raises(UsageError, match="is of 4 experts, of which each of 5 workers"):
        train(read(), hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(5)))


def test_options_that_are_none() -> None:
    with pytest.raises(UsageError, match="workers must be a whole number"):
        hr.ExpertParallel(0)
    for experts in ("layers", [], [3]):
        with pytest.raises(UsageError, match="experts is 'auto', or a list of"):
            hr.ExpertParallel(2, experts=experts)  # type: ignore[arg-type]


def test_dropout_in_experts_needs_processes() -> None:
    job = read(partial(Routed, dropout=0.5))
    with pytest.raises(UsageError, match="draws random numbers, and the workers of ThreadEngine share one generator"):
        train(job, hr.ExpertParallel(2))
    assert train(job, hr.ExpertParallel(1)).losses != pytest.approx(train(read(), hr.ExpertParallel(1)).losses)
