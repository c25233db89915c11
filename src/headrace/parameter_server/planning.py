"""Strategies with servers: checks of their options, the plan, and what each server holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.parameter_server.sparse.messages import longest_push
from headrace.parameter_server.wire import ShardLayout, ShardSpec
from headrace.policies.sharding import PLACEMENTS, parse_sharding, place
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Plan, Segment
from headrace.transport.codec import CODECS

if TYPE_CHECKING:
    from headrace.training.synchronization import MeanState
    from headrace.transport.base import ServerTransport

_DEFAULT_SHARDING = {"shared_memory": "max_size:4MB", "tcp": "max_size:1MB"}
"""While a server updates one shard, the next one is sent. Over TCP a shard of 1 MB fits in one frame."""


@dataclass(frozen=True)
class ServerProcess:
    """The process of a server or a backup.

    Attributes:
        number: which no other process of the run ever has.
        address: where other hosts reach this one; "" where the run is on one host.
        end: the server's, of its connections; None to open one.
    """

    number: int = 0
    address: str = ""
    end: ServerTransport | None = None


def check_whole(name: str, value: int | None) -> None:
    """Raises UsageError unless `value` is None or a whole number of at least 0."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(f"{name} must be a whole number of at least 0, got {value!r}")


def check_server_options(
    servers: int,
    backups: int,
    transport: str,
    sharding: str | None = None,
    placement: str = "greedy",
    scale: str = "share",
    codecs: Sequence[str] = (),
) -> None:
    """Raises UsageError, with the values that exist, if an option that all strategies with servers share is wrong."""
    if backups is None:
        raise UsageError("backups must be 0 or 1, got None")
    check_whole("backups", backups)
    if backups > 1:
        raise UsageError(
            f"backups={backups} asks for {backups * servers} backups of {servers} server{'s' * (servers > 1)}, and a "
            "server has one at most; use backups=1, which gives each its own, and another one when one is lost"
        )
    if sharding is not None:
        parse_sharding(sharding)
    if placement not in PLACEMENTS:
        raise UnknownName("placement", placement, PLACEMENTS)
    if scale not in ("share", "full"):
        raise UsageError(f"scale must be 'share' or 'full', got {scale!r}")
    if transport not in ("shared_memory", "tcp"):
        raise UnknownName("transport", transport, ("shared_memory", "tcp"))
    for codec in codecs:
        if codec not in CODECS:
            raise UnknownName("codec", codec, CODECS)


def assign_shards(
    model: ModelSpec, servers: Sequence[int], sharding: str | None, placement: str, transport: str
) -> tuple[Segment, ...]:
    """Cuts the parameters of a model, or of a part of it, into shards, and assigns each to a server.

    Raises InfeasiblePlan if the optimizer needs whole parameters, or all of them, or a server would have no shard.
    """
    needs = model.optimizer
    if needs.random or (needs.coupled and len(servers) > 1):
        raise InfeasiblePlan(f"{needs.coupled}, and each server has some of them; {needs.remedy}")
    if needs.values:
        why = needs.coupled or "the job's optimizer is made from the parameters' values"
        raise InfeasiblePlan(
            f"{why}, and servers make it before they get these values; use mirrored, or make its first state in its "
            "first step"
        )
    if sharding is None:
        sharding = _DEFAULT_SHARDING[transport] if model.sliceable else "whole"
    if sharding != "whole" and not model.sliceable:
        raise InfeasiblePlan(
            f"sharding={sharding!r} cuts parameters, and the job's optimizer needs whole ones (as Muon does); "
            "use sharding='whole'"
        )
    return place(parse_sharding(sharding)(model.parameters), servers, PLACEMENTS[placement])


def layout_of(plan: Plan, model: ModelSpec, rank: int, state: MeanState | None = None) -> ShardLayout:
    """Returns the shards of one server: pieces of parameters, then the pieces of optimizer state that is averaged."""
    known = {parameter.name: parameter for parameter in model.parameters}
    shards = [_shard_of(segment, known[segment.parameter]) for segment in plan.segments if segment.owner == rank]
    shards += _state_shards(shards, known, state) if state else ()
    # An option "codec" is of what is pushed.
    push = plan.options.get("push_codec", plan.options.get("codec", "plain"))
    pull = plan.options.get("pull_codec", "plain")
    return ShardLayout(shards, str(push), str(pull), longest_push(model.tables))


def _shard_of(segment: Segment, parameter: ParameterSpec) -> ShardSpec:
    """Keeps rows, for optimizers that look at them; a segment that cuts through a row is flat."""
    length = segment.stop - segment.start
    rows, rest = (parameter.shape[:1], parameter.shape[1:]) if parameter.shape else ((1,), ())
    width = parameter.elements // rows[0] if rows[0] else 1
    shape = parameter.shape if length == parameter.elements else (length,)
    if width and length != parameter.elements and not length % width and not segment.start % width:
        shape = (length // width, *rest)
    return ShardSpec(segment.parameter, segment.start, shape, parameter.dtype)


def _state_shards(shards: Sequence[ShardSpec], known: Mapping[str, ParameterSpec], state: MeanState) -> list[ShardSpec]:
    pieces = []
    for like, spec in zip(state.likes, state.specs, strict=True):
        for shard in (shard for shard in shards if shard.parameter == like.name):
            if spec.shape == known[like.name].shape:
                pieces.append(ShardSpec(spec.name, shard.start, shard.shape, spec.dtype, exact=True))
            elif not shard.start:
                # State of the whole parameter goes with the parameter's first shard.
                pieces.append(ShardSpec(spec.name, 0, spec.shape, spec.dtype, exact=True))
    return pieces


def places_of(layout: ShardLayout, module: nn.Module, state: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Returns flat views of the shards in a module's parameters, which become contiguous, or in optimizer state."""
    named = {**dict(module.named_parameters()), **(state or {})}
    places = []
    for spec in layout.pieces:
        parameter = named[spec.parameter]
        if not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()
        places.append(parameter.data.view(-1)[spec.start : spec.start + spec.elements])
    return places
