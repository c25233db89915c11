"""What strategies with servers decide alike: who serves, who holds which shard, what a round costs."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.policies import PLACEMENTS
from headrace.policies.placement import place
from headrace.policies.roles import require_memory, worker_and_server_roles
from headrace.policies.sharding import parse_sharding
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Role, Segment
from headrace.transport.codec import CODECS

_PIECES = {"shared_memory": "max_size:4MB", "tcp": "max_size:1MB"}
"""How parameters are cut if nobody says how: while a server works on a piece, the next one is on its way. Over TCP a
piece is a letter, which needs not be put together."""


def check_served(options: Options) -> None:
    """Refuses options that cannot be had where workers do not go in step.

    Raises:
        UsageError: with the remedy.
    """
    if options.on_nonfinite == "rollback":
        raise UsageError(
            "on_nonfinite='rollback' brings all workers back together, and those of a parameter server are never "
            "at the same round; use 'skip', which drops the one gradient, or 'raise'"
        )
    if options.batch_norm == "sync":
        raise UsageError(
            "batch_norm='sync' makes workers meet in every layer, and those of a parameter server do not wait for "
            "each other; use batch_norm='local', or mirrored"
        )
    if options.precision == "fp16":
        raise UsageError(
            "precision='fp16' needs one loss scale for all workers, and those of a parameter server do not agree on "
            "anything in a round; use precision='bf16', which needs none"
        )


def check_whole(name: str, value: int | None) -> None:
    """Raises:
    UsageError: `value` is no whole number of at least 0, nor None.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(f"{name} must be a whole number of at least 0, got {value!r}")


def check_backups(backups: int, servers: int) -> None:
    """Raises:
    UsageError: there cannot be so many.
    """
    if backups is None:
        raise UsageError("backups must be 0 or 1, got None")
    check_whole("backups", backups)
    if backups > 1:
        raise UsageError(
            f"backups={backups} asks for {backups * servers} backups of {servers} server{'s' * (servers > 1)}, and a "
            "server has one at most; use backups=1, which gives each its own"
        )


def check_seats(sharding: str | None, placement: str, scale: str, ways: tuple[str, str, str]) -> None:
    """Refuses what does not exist.

    Args:
        sharding, placement, scale: as the strategies have them.
        ways: transport, push codec, pull codec.

    Raises:
        UsageError: with what does exist.
    """
    if sharding is not None:
        parse_sharding(sharding)
    transport, *codecs = ways
    if placement not in PLACEMENTS:
        raise UnknownName("placement", placement, PLACEMENTS)
    if scale not in ("share", "full"):
        raise UsageError(f"scale must be 'share' or 'full', got {scale!r}")
    if transport not in ("shared_memory", "tcp"):
        raise UnknownName("transport", transport, ("shared_memory", "tcp"))
    for codec in codecs:
        if codec not in CODECS:
            raise UnknownName("codec", codec, CODECS)


def seats(
    strategy: str,
    workers: int | None,
    servers: int,
    sharding: str | None,
    placement: str,
    model: ModelSpec,
    cluster: Cluster,
    transport: str,
    copies: int = 3,
    backups: int = 0,
) -> tuple[tuple[Role, ...], tuple[Segment, ...]]:
    """Says who works, who serves, and which server has which shard.

    A worker needs the model's size `copies` times: its parameters, what autograd makes, what lies on its way. A backup
    holds what its server does, and is filled from a copy.

    Raises:
        InfeasiblePlan: with the numbers.
    """
    roles = worker_and_server_roles(strategy, workers, servers, cluster, backups)
    count = sum(role.kind == "worker" for role in roles)
    require_memory(strategy, (copies * count + 1 + 2 * backups) * model.trainable_bytes, cluster)
    return roles, shards(model, range(count, count + servers), sharding, placement, transport)


def shards(
    model: ModelSpec, servers: Sequence[int], sharding: str | None, placement: str, transport: str
) -> tuple[Segment, ...]:
    """Cuts a model's parameters, or those of a part of it, into shards, and says which server has which.

    Raises:
        InfeasiblePlan: the optimizer needs whole parameters, or a server would have nothing to do.
    """
    if sharding is None:
        sharding = _PIECES[transport] if model.sliceable else "whole"
    if sharding != "whole" and not model.sliceable:
        raise InfeasiblePlan(
            f"sharding={sharding!r} cuts parameters, and the job's optimizer needs whole ones (as Muon does); "
            "use sharding='whole'"
        )
    return place(parse_sharding(sharding)(model.parameters), servers, PLACEMENTS[placement])
