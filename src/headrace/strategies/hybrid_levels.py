"""What the levels of a hybrid may be, from the outermost to the innermost."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import UsageError
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.context_hybrid import check_rings
from headrace.strategies.context_parallel import ContextParallel
from headrace.strategies.expert_hybrid import check_experts
from headrace.strategies.expert_parallel import ExpertParallel
from headrace.strategies.fully_sharded import FullySharded
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.parameter_averaging import ParameterAveraging
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.served_hybrid import Served, check_outer
from headrace.strategies.strategy import Strategy
from headrace.strategies.tensor_parallel import TensorParallel

ORDER = (Mirrored | ParameterAveraging | Served, FullySharded, Pipeline, TensorParallel)
"""A strategy of each kind at most, in this order."""


def by_kind(
    levels: Sequence[Strategy],
) -> tuple[Strategy | None, FullySharded | None, Pipeline | None, TensorParallel | None]:
    """Returns the level of each kind in `ORDER`; None where there is none."""
    data, sharded, pipeline, tensor = (
        next((each for each in levels if isinstance(each, kinds)), None) for kinds in ORDER
    )
    assert isinstance(sharded, FullySharded | None)
    assert isinstance(pipeline, Pipeline | None)
    assert isinstance(tensor, TensorParallel | None)
    return data, sharded, pipeline, tensor


def check_levels(levels: Sequence[Strategy]) -> None:
    """Refuses strategies that cannot be within each other in this order, with a UsageError that has the remedy."""
    inner = levels[1]
    if any(isinstance(each, ExpertParallel) for each in levels):
        check_experts(levels)
        levels = levels[:-1]
    elif any(isinstance(each, ContextParallel) for each in levels):
        check_rings(levels)
        levels = levels[:-1]
    places = [next((at for at, kinds in enumerate(ORDER) if isinstance(each, kinds)), -1) for each in levels]
    if -1 not in places and places.count(0) < 2 and places != sorted(set(places)):
        named, ordered = (
            ", ".join(f"hr.{type(each).__name__}" for each in chosen)
            for chosen in (levels, [levels[at] for at in sorted(range(len(levels)), key=places.__getitem__)])
        )
        first = "give each once" if len({*places}) < len(places) else f"use {ordered}"
        raise UsageError(
            f"the levels of a hybrid are {named}; {first}, in the order hr.Mirrored (or averaging, or servers), "
            "hr.FullySharded, hr.Pipeline, hr.TensorParallel: the last exchanges most, and should be inside a host"
        )
    if -1 in places[1:] or places.count(0) > 1:
        wrong = next(each for each, place in zip(levels[1:], places[1:], strict=True) if place < 1)
        raise UsageError(
            "the inner strategy of a hybrid must be hr.TensorParallel(...), hr.Pipeline(...), hr.FullySharded(...), "
            "hr.ContextParallel(...) or hr.ExpertParallel(...), which hold one model on several devices, got "
            f"{wrong!r}"
        )
    if places[0] not in (0, 1, 2):
        raise UsageError(
            "the outer strategy of a hybrid must be hr.Mirrored(...), hr.ParameterAveraging(...), "
            "hr.ParameterServer(...), hr.Downpour(...), hr.FullySharded(...) or hr.Pipeline(...), got "
            f"{levels[0]!r}"
        )
    outer, (_, sharded, pipeline, tensor) = levels[0], by_kind(levels)
    if sharded and outer is not sharded:
        _check_sharded(outer)
    if isinstance(outer, Served) and tensor and any(each.in_parts for each in levels):
        raise UsageError(
            "servers must know the slices before the start, and copies of the whole model are tried for that: leave "
            f"out deferred=True, or use hr.Mirrored(...) in the place of hr.{type(outer).__name__}(...)"
        )
    if sharded and pipeline:
        sharded.check_stages()
    if pipeline and tensor and tensor.sequence:
        raise UsageError(
            "sequence=True divides what goes from layer to layer, where hr.Pipeline(...) cuts; leave it out"
        )
    _check_outer(outer, inner, pipeline, tensor)


def _check_outer(outer: Strategy, inner: Strategy, pipeline: Pipeline | None, tensor: TensorParallel | None) -> None:
    if isinstance(outer, Mirrored | ParameterAveraging) and outer.min_workers is not None:
        raise UsageError(
            f"min_workers={outer.min_workers} lets workers come and go one by one, and the ranks of a replica "
            "cannot; leave it out"
        )
    if isinstance(outer, Served):
        if pipeline and tensor:
            raise UsageError(
                f"the servers of hr.{type(outer).__name__}(...) have the shards of a stage or of a slice, and each "
                "stage would have slices; leave out hr.TensorParallel(...), or use hr.Mirrored(...) around both"
            )
        check_outer(outer, inner)
    if isinstance(outer, Mirrored) and outer.balance != "equal":
        raise UsageError(
            f"balance={outer.balance!r} compares workers that each have the whole model, and "
            f"{inner.name} divides it; use balance='equal'"
        )
    if isinstance(outer, ParameterAveraging) and outer.via != "all_reduce":
        raise UsageError(
            f"via={outer.via!r} lets workers come and go one by one, and the ranks of a replica cannot; use "
            "via='all_reduce'"
        )
    if isinstance(outer, ParameterAveraging) and not isinstance(outer.period, int):
        raise UsageError(
            f"period={outer.period!r} adapts to what the ranks of one slice measure, and all slices of a "
            "replica must synchronize after the same rounds; give a number such as period=16"
        )


def _check_sharded(outer: Strategy) -> None:
    if not isinstance(outer, Mirrored):
        raise UsageError(
            "replicas that hr.FullySharded(...) divides sum their gradients in every round: the outer strategy must be "
            f"hr.Mirrored(...), got {outer!r}"
        )
    if outer.codec != "plain":
        raise UsageError(
            f"codec={outer.codec!r} is for gradients of whole parameters, and the ranks of hr.FullySharded(...) have "
            "parts; use codec='plain'"
        )


def refuse_tied(pipeline: Pipeline, plan: Plan, model: ModelSpec, clip_norm: float) -> None:
    """Refuses to clip by a norm of gradients of which several ranks of a replica hold one, with a UsageError."""
    placement = pipeline.schedule_of(len(plan.roles)).placement()
    rank_of = {layer: placement[stage] for stage, layers in enumerate(plan.partition) for layer in layers}
    for parameter in model.parameters:
        holders = {rank_of[layer.name] for layer in model.layers if parameter.name in layer.parameters}
        if parameter.trainable and len(holders) > 1:
            raise UsageError(
                f"clip_norm={clip_norm:g} needs every gradient once, and several stages of a replica hold "
                f"{parameter.name!r}; use hr.Hybrid(hr.FullySharded(...), hr.Pipeline(...)), hr.Pipeline alone, or "
                "leave clip_norm out"
            )
