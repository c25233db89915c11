"""What a strategy decides, and what it hands over: the base class of every strategy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from headrace.errors import UsageError
from headrace.policies.behaviour import Behaviour
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.notebook.shown import ShownAsTable
from headrace.spec.plan import Plan, ProcessCounts
from headrace.strategies.checks import process_counts
from headrace.strategies.context import ModelProbe, WorkerContext
from headrace.strategies.refusals import Refusal
from headrace.training.exchange import Replica
from headrace.trees import described


class Strategy(ShownAsTable):
    """How a job is distributed: a frozen dataclass of options that decides; what runs comes from other rooms.

    Attributes:
        name: how the command line and `hr.fit` call it.
        lock_step: whether all workers exchange something in every round, so that none may leave out a step. A strategy
            that says nothing has this guard; workers that equal one device always need it.
        one_model: whether all workers train one model, so that there is one state to save.
        one_host: whether all workers must be on one host.
        sparse_tables, turns: whether it trains embeddings with `sparse=True`; sets of parameters that take turns.
        closures: whether it trains with `torch.optim.LBFGS`, which needs several losses a step, and with it alone.
        fixed_shapes: whether all steps have the same shapes, as devices need that compile a program for every shape.
        collectives: whether workers exchange tensors between devices, not through host memory.
        mixes_devices: whether its workers may be on devices of several kinds, or on accelerators of several hosts.
        in_parts: whether its workers can make a large model's parameters one by one, and none builds the whole.
        reads_parts, begins_alike: whether each worker reads its part of stored values, or rank 0 all, for all of them.
        whole_model: whether each worker runs the whole model with all parameters, so that a loss can be a part of it.
        keeps_memory: whether parameters stay in the memory that the model has for them.
        divided: whether several devices hold one replica, so that none computes on examples of its own.
        snapshots: whether servers' snapshots that are taken at different moments can be used together.
        alone: where only the order of pushes differs from one device: the options with which one worker equals it.

    Examples:
        >>> hr.Mirrored(workers=2).equals_one_device, hr.Downpour(workers=2).equals_one_device
        (True, False)
    """

    name: ClassVar[str]
    lock_step: ClassVar[bool] = True
    one_model: ClassVar[bool] = True
    one_host: ClassVar[bool] = False
    sparse_tables: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    closures: ClassVar[bool] = False
    fixed_shapes: ClassVar[bool] = False
    collectives: ClassVar[bool] = False
    mixes_devices: ClassVar[bool] = False
    keeps_memory: ClassVar[bool] = False
    divided: ClassVar[bool] = False
    snapshots: ClassVar[bool] = True
    in_parts: ClassVar[bool] = False
    reads_parts: ClassVar[bool] = False
    begins_alike: ClassVar[bool] = False
    whole_model: ClassVar[bool] = True
    alone: ClassVar[Mapping[str, object] | None] = None

    def __init_subclass__(cls) -> None:
        if "check" in vars(cls):
            raise UsageError(f"{cls.__name__}.check(options) would not be called; return what it refuses in refusals()")

    @property
    @abstractmethod
    def equals_one_device(self) -> bool:
        """Whether N workers give what one device gives on the same global batch; most say it in the class."""

    def sparse_names(self) -> tuple[str, ...]:
        """Returns patterns of the names of embeddings that are sparse though the model does not say so."""
        return ()

    def imports(self) -> tuple[str, ...]:
        """Returns modules that its processes need besides its own, and that are imported once for all of them."""
        return ()

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
        """Returns how many processes it asks for; raises UsageError if its options do not say."""
        return process_counts(self.name, describe_options(self), self.one_host)

    def behave(self, workers: int) -> Behaviour:
        """Returns what so many workers do in a round: for simulations, rehearsals and comparisons."""
        return Behaviour(
            not_simulated=f"{self.name} cannot be simulated: it does not say what its workers do in a round; write its "
            "behave(), or give another strategy",
            not_rehearsed="it does not say what its workers do in a round; write its behave(), or train with real "
            "workers",
        )

    def refuses_channels_last(self) -> str:
        """Returns why weights cannot keep channels-last order under it, and the remedy; "" where they keep it."""
        return (
            f"{self.name} does not keep that order; use one_device, mirrored, central_storage, parameter_averaging "
            "without servers, or unconnected"
        )

    def refusals(self) -> tuple[Refusal, ...]:
        """Returns which options cannot be had under this strategy; most can do all."""
        return ()


def describe_options(strategy: Strategy) -> dict[str, object]:
    """Returns a strategy's fields as JSON values, so that they equal those that a checkpoint has."""
    found: dict[str, object] = described(strategy)
    return found
