"""What the parts of one worker share: its run, its replica, its data, the other workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data import Loader
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.job import Share
from headrace.spec.plan import Role
from headrace.training.exchange import Replica
from headrace.worker.evaluation import Evaluation
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import RunSpec


class DeviceGroup:
    """Connects the collective for the devices' own tensors when it is first called; None where memory is shared.

    Attributes:
        moved_bytes: by that collective, so far.
    """

    def __init__(self, run: RunSpec, role: Role, group: ProcessGroup) -> None:
        self.group = group
        self._run, self._role = run, role
        self._connected: Collective | None = None

    def __call__(self) -> Collective | None:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    @property
    def moved_bytes(self) -> int:
        """The group's own traffic is counted by the group."""
        connected = self._connected
        return connected.moved_bytes if connected is not None and connected is not self.group else 0

    def _connect(self) -> Collective | None:
        run, role, group = self._run, self._role, self.group
        if role.device == "cpu":
            return None if group.one_memory else group
        if group.world == 1:
            return ThreadCollective(ThreadGroup(1), 0)
        # Here, because importing torch.distributed costs what a CPU run need not pay.
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from headrace.collectives.torch_distributed import TorchDistributed

        store = FileStore(str(run.run_dir / "rendezvous"), group.world)
        return TorchDistributed(store, role.rank, group.world, role.device, run.timeout_s)


@dataclass
class Progress:
    """How far a worker is.

    Attributes:
        round: the one that is being done, from 0; the last one done in a run that goes on from a checkpoint.
        waited_s: seconds that the worker waited for that data.
    """

    rounds: int
    round: int = -1
    share: Share = field(default_factory=lambda: Share(None, 0, 0, 0))
    waited_s: float = 0.0
    examples: int = 0

    @property
    def done(self) -> int:
        """Rounds that are done when the current one is."""
        return self.round + 1


@dataclass(frozen=True)
class WorkerSession:
    """One worker of a run.

    Attributes:
        evaluation: of the evaluation data; None where the job has none.
    """

    run: RunSpec
    rank: int
    replica: Replica
    loader: Loader
    evaluation: Evaluation | None
    group: ProcessGroup
    page: ControlPage
    events: EventWriter
    devices: DeviceGroup
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        job, resume = self.run.job, self.run.resume
        rounds = job.steps or (job.epochs or 0) * self.loader.rounds_per_epoch
        object.__setattr__(self, "progress", Progress(rounds, resume.done - 1 if resume else -1))

    @property
    def is_replacement(self) -> bool:
        """Whether this worker's process has replaced one that was lost."""
        return bool(self.page.ranks[self.rank].restarts)

    @property
    def mates(self) -> ProcessGroup:
        """The workers that hold the same part of the model as this one."""
        return self.replica.compute.mates or self.group
