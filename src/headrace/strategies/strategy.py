"""What a strategy decides, and what it hands over: the base class of every strategy."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from headrace.checkpoint.forms import pack, unpack
from headrace.collectives.base import Collective
from headrace.errors import UnknownName, UsageError
from headrace.modules import is_dense, restore
from headrace.parameter_server.server.server import Server
from headrace.shared_memory.control_page import MEMBERS as MOST_MEMBERS
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan, ProcessCounts
from headrace.strategies.context import ModelProbe, ServerContext, WorkerContext
from headrace.training.exchange import Replica

BALANCES = ("equal", "speed")
"""How a global batch is split."""

COUNTS = ("workers", "stages", "devices")
"""What strategies call the option that says how many ranks compute."""


class Strategy(ABC):
    """How a job is distributed: a frozen dataclass of options that decides; what runs comes from other rooms.

    Attributes:
        name: how the command line and `hr.fit` call it.
        equals_one_device: whether N workers give what one device gives on the same global batch.
        lock_step: whether all workers exchange something in every round, so that none may leave out a step. A strategy
            that says nothing has this guard; workers that equal one device always need it.
        one_model: whether all workers train one model, so that there is one state to save.
        one_host: whether all workers must be on one host.
    """

    name: ClassVar[str]
    equals_one_device: ClassVar[bool]
    lock_step: ClassVar[bool] = True
    one_model: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        """Returns the model spec with what else `plan` needs; most need nothing. The module stays as it is."""
        return model

    @abstractmethod
    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        """Decides what each process does and which parameters it owns. Pure.

        Raises:
            InfeasiblePlan: the cluster cannot hold it, with the numbers.
        """

    @abstractmethod
    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        """Builds what one worker runs. Every worker calls it; it may talk to the others."""

    def processes(self) -> ProcessCounts:
        """Returns how many processes it asks for.

        Raises:
            UsageError: its options do not say.
        """
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        option = next((name for name in COUNTS if name in options), None)
        count = options[option] if option else 1
        if count is None:
            raise UsageError(
                f"{self.name} does not say how many {option} it has, and the cluster is to start them; give "
                f"{option}=2 or another number (--workers 2)"
            )
        servers = options.get("servers", 0)
        return ProcessCounts(count, servers, servers * options.get("backups", 0), self.one_host)

    def check(self, options: Options) -> None:  # noqa: B027  (most can do all)
        """Refuses options that cannot be had under this strategy.

        Raises:
            UsageError: with the remedy.
        """


class ServedStrategy(Strategy):
    """A strategy whose plans may have servers."""

    @abstractmethod
    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        """Builds what the process of a rank runs that is a server or a backup in the plan."""


def refuse_synced_buffers(name: str, options: Options) -> None:
    """Raises UsageError if buffers are to be one on all workers, under a strategy without rounds that all end."""
    if options.sync_buffers != "local":
        raise UsageError(
            f"sync_buffers={options.sync_buffers!r} combines buffers after each round of all workers, and those of "
            f"{name} do not end rounds together; use mirrored, or sync_buffers='local'"
        )


def describe_options(strategy: Strategy) -> dict[str, object]:
    """Returns a strategy's fields as JSON values."""
    assert dataclasses.is_dataclass(strategy)
    return dataclasses.asdict(strategy)


def check_count(name: str, count: int | None) -> None:
    """Raises a `UsageError` unless `count` is None or a whole number of at least 1."""
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        remedy = "leave it out for what there is" if name == "workers" else "give a number such as 1 or 2"
        raise UsageError(f"{name} must be a whole number of at least 1, got {count!r}; {remedy}")


def check_balance(balance: str) -> None:
    """Raises an `UnknownName` unless `balance` says how a batch is split."""
    if balance not in BALANCES:
        raise UnknownName("balance", balance, BALANCES)


def check_elastic(workers: int | None, least: int | None, most: int | None) -> None:
    """Raises a `UsageError` unless `min_workers` and `max_workers` fit each other and `workers`."""
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


def broadcast(module: nn.Module, collective: Collective) -> None:
    """Gives every rank rank 0's parameters and buffers, as far as the ranks hold them."""
    broadcast_tensors((*module.parameters(), *module.buffers()), collective)


def broadcast_tensors(tensors: Iterable[Tensor], collective: Collective) -> None:
    """Gives every rank rank 0's values, as far as the ranks hold the tensors."""
    for tensor in tensors:
        if tensor.is_meta:
            continue
        if not is_dense(tensor):
            _broadcast_sparse(tensor, collective)
            continue
        dense = tensor.data.contiguous()
        collective.broadcast(dense)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(dense)


def _broadcast_sparse(tensor: Tensor, collective: Collective) -> None:
    own = torch.frombuffer(bytearray(pack({"": tensor.cpu()})), dtype=torch.uint8)
    # The others' may have other elements, and so another size.
    (size,) = collective.sum([float(len(own)) if collective.rank == 0 else 0.0])
    content = own if collective.rank == 0 else own.new_empty(int(size))
    content = content.to(tensor.device)
    collective.broadcast(content)
    if collective.rank != 0:
        restore(tensor, unpack(content.cpu().numpy().tobytes())[""])
