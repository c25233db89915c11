"""What strategies check of their options and of the device, and how many processes they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import nn

from headrace.devices import DEVICES, DeviceKind, kind_of, one_each
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.modules import beside_frozen, derived_state
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import (
    MOST_MEMBERS,
    Plan,
    ProcessCounts,
    device_kinds,
    exchanges_in_host_memory,
)

BALANCES = ("equal", "speed")
"""How a global batch is split."""

COUNTS = ("workers", "stages", "devices")
"""What strategies call the option that says how many ranks compute."""


def defer(strategy: object, deferred: object) -> None:
    """Notes of a strategy with this option whether its workers make parameters one by one; a UsageError if not bool."""
    if not isinstance(deferred, bool):
        raise UsageError(f"deferred must be True or False, got {deferred!r}")
    object.__setattr__(strategy, "in_parts", deferred)


def process_counts(strategy: str, options: Mapping[str, Any], one_host: bool) -> ProcessCounts:
    """Returns how many processes a strategy's options ask for; raises UsageError if they do not say."""
    option = next((name for name in COUNTS if name in options), None)
    count = options[option] if option else 1
    if count is None:
        raise UsageError(
            f"{strategy} does not say how many {option} it has, and the cluster is to start them; give "
            f"{option}=2 or another number (--workers 2)"
        )
    servers = options.get("servers", 0)
    return ProcessCounts(count, servers, servers * options.get("backups", 0), one_host)


def check_count(name: str, count: int | None) -> None:
    """Raises a `UsageError` unless `count` is None or a whole number of at least 1."""
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        remedy = "leave it out for what there is" if name == "workers" else "give a number such as 1 or 2"
        raise UsageError(f"{name} must be a whole number of at least 1, got {count!r}; {remedy}")


def check_balance(balance: str) -> None:
    """Raises an `UnknownName` unless `balance` says how a batch is split."""
    if balance not in BALANCES:
        raise UnknownName("balance", balance, BALANCES)


def refuse_measured(balance: str) -> str:
    """Returns why shares that are not equal cannot be rehearsed; "" for equal ones."""
    if balance == "equal":
        return ""
    return "its shares follow what workers measure, and nothing is measured here; use balance='equal'"


def refuse_parts(equals_one_device: bool) -> str:
    """Returns why a strategy cannot be rehearsed whose workers hold parts of one model."""
    alone = "; its numbers are those of one device: train in one process" if equals_one_device else ""
    return (
        f"its workers hold parts of one model, and those of a rehearsal have whole ones{alone}; see "
        "`headrace simulate` for the time"
    )


def refuse_backups(backups: int) -> str:
    """Returns why servers with backups cannot be rehearsed; "" for those without."""
    return "a server and its backup do not fail here; use backups=0" if backups else ""


def check_elastic(workers: int | None, least: int | None, most: int | None, balance: str = "equal") -> None:
    """Raises a `UsageError` unless `min_workers` and `max_workers` fit each other, `workers` and `balance`."""
    check_count("min_workers", least)
    check_count("max_workers", most)
    if least is None and most is not None:
        raise UsageError(f"max_workers={most} lets workers join, so the run must go on without some; give min_workers")
    if least is not None and workers is not None and least > workers:
        raise UsageError(f"min_workers={least} is more than workers={workers}; use min_workers={workers} or fewer")
    if workers is not None and most is not None and most < workers:
        raise UsageError(f"max_workers={most} is less than workers={workers}; use max_workers={workers} or more")
    if most is not None and most > MOST_MEMBERS:
        raise UsageError(f"max_workers={most} is more than the {MOST_MEMBERS} that may come and go; use fewer")
    if least is not None and balance != "equal":
        raise UsageError(
            f"balance={balance!r} measures workers that stay, and min_workers={least} lets them come and go; give one "
            "of them"
        )


def refuse_elastic_tables(model: ModelSpec, least: int | None) -> None:
    """Raises UsageError if workers may join (`least` is `min_workers`) that would lack the rows of sparse tables."""
    if model.tables and least is not None:
        raise UsageError(
            f"the sparse table {model.tables[0].name!r} is on every worker, and one that joins would not have its "
            "rows; leave out min_workers and max_workers, or use parameter_server"
        )


def refuse_coupled(name: str, model: ModelSpec) -> None:
    """Raises UsageError if the optimizer needs all parameters in one process, under a strategy that divides them."""
    if needs := model.optimizer.coupled:
        raise UsageError(f"{needs}, and {name} divides the parameters among processes; {model.optimizer.remedy}")


def refuse_derived_state(name: str, module: nn.Module, carries_frozen: bool = False) -> None:
    """Raises UsageError if a state dict has other tensors than the model, under a strategy whose ranks have parts.

    Where a strategy `carries_frozen`, those beside a frozen parameter, as scales of numbers in 4 bits, may be there.
    """
    beside = beside_frozen(module).keys() if carries_frozen else ()
    if derived := [key for key in derived_state(module) if key not in beside]:
        raise UsageError(
            f"{', '.join(map(repr, derived)):.200}: the model's state_dict makes these tensors of others (a hook, or a "
            f"state_dict of its own), and under {name} a worker has parts of the others; keep what is saved in "
            "parameters and buffers, or use mirrored or central_storage"
        )


def refuse_modes(name: str, model: ModelSpec) -> None:
    """Raises UsageError if the optimizer has a train and an eval mode, where workers have parameters of their own."""
    if model.optimizer.modes:
        raise UsageError(
            f"the job's optimizer has a train and an eval mode, and under {name} what it evaluates with would be each "
            "worker's own; use one_device, mirrored, central_storage, fully_sharded or parameter_server"
        )


def refuse_random(name: str, model: ModelSpec, plan: Plan) -> None:
    """Raises UsageError if the job's optimizer draws random numbers, and several processes update parameters."""
    if model.optimizer.random and plan.workers > 1:
        raise UsageError(
            f"{model.optimizer.coupled}, of which the processes of {name} would draw different ones; "
            f"{model.optimizer.remedy}"
        )


class DeviceNeeds(Protocol):
    """What a strategy says of the devices that it runs on, see `Strategy`."""

    name: ClassVar[str]
    fixed_shapes: ClassVar[bool]
    collectives: ClassVar[bool]
    mixes_devices: ClassVar[bool]


def check_device(strategy: DeviceNeeds, plan: Plan, cluster: Cluster) -> None:
    """Refuses devices that cannot run a strategy, with their rows of the device table.

    Raises:
        InfeasiblePlan: workers are on devices of several kinds and cannot be, a device compiles a program for every
            shape and the steps have several, it has no collectives, or its processes must be a launcher's.
    """
    kinds = [kind_of(name) for name in device_kinds(plan)]
    if len(kinds) > 1 and not strategy.mixes_devices:
        raise InfeasiblePlan(
            f"{strategy.name} exchanges tensors among devices of one kind, and those of the workers are "
            f"{' and '.join(kind.row() for kind in kinds)}; give all workers one kind, or use mirrored, "
            "parameter_server, downpour or parameter_averaging, which exchange in host memory"
        )
    for kind in kinds:
        _check_kind(kind, strategy, plan, cluster)


def check_shapes(strategy: DeviceNeeds, device: str | Sequence[str]) -> None:
    """Refuses a named device that a strategy does not run on anywhere, before it is looked for here.

    Raises:
        InfeasiblePlan: it compiles a program for every shape, and the strategy's steps have several.
    """
    for name in one_each(device) or (device,):
        kind = DEVICES.get(str(name).partition(":")[0])
        if kind and kind.fixed_shapes and not strategy.fixed_shapes:
            raise InfeasiblePlan(
                f"{strategy.name} has steps of several shapes (the last batch of an epoch is short), and the device is "
                f"{kind.row()}; use hr.TPU, or device='cpu'"
            )


def _check_kind(kind: DeviceKind, strategy: DeviceNeeds, plan: Plan, cluster: Cluster) -> None:
    check_shapes(strategy, kind.name)
    if plan.workers > 1 and strategy.collectives and not kind.backend and not exchanges_in_host_memory(plan):
        raise InfeasiblePlan(
            f"{plan.workers} workers of {strategy.name} exchange tensors between devices, and the device is "
            f"{kind.row()}; use workers=1, or device='cpu'"
        )
    if plan.workers > 1 and kind.launched and cluster.ranks is None:
        raise InfeasiblePlan(
            f"{plan.workers} workers on {kind.row()} must know their ranks before they import torch; start them by "
            f"torchrun --nproc-per-node {plan.workers}, or use workers=1"
        )
