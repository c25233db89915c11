"""One worker's part of a run's state: taken for a checkpoint, and restored from one."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.checkpoint import Checkpoint
from headrace.checkpoint.forms import extra_states, load_extra_states
from headrace.checkpoint.spool import Spool
from headrace.data.pipeline.order import derived
from headrace.devices import HOST
from headrace.errors import CheckpointMismatch, CorruptCheckpoint, HeadraceError
from headrace.machine.generators import random_state, set_random_state
from headrace.modules import derived_state, memory_of, parameters_and_buffers, restore
from headrace.spec.plan import EVERY_WORKER, Plan
from headrace.training.compute import Compute
from headrace.training.embeddings.pieces import is_row_piece, is_row_value
from headrace.training.exchange import UpdatingExchange
from headrace.training.optimizer import StatePiece
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.shared_buffers.synced import average_by_weight
from headrace.training.synchronization import PeriodicSync
from headrace.training.update import AVERAGE, OURS, PARAMETER
from headrace.trees import as_bytes
from headrace.worker.attributes import drawn_of
from headrace.worker.evaluations.early_stopping import EarlyStopper
from headrace.worker.guards.saved import declared, settings_of
from headrace.worker.session import WorkerSession, seed_torch

if TYPE_CHECKING:
    from headrace.checkpoint.host_copies import Copied, HostCopies


@dataclass(frozen=True)
class TakenState:
    """One worker's part of a checkpoint, before it is written.

    `description` is that of the whole; `problem` tells why the part is incomplete, where the disk took no rows. Tensors
    of a device may be on their way to host memory, until `copied` has been waited for.
    """

    tensors: dict[str, Tensor]
    description: dict[str, Any]
    problem: OSError | None = None
    copied: Copied | None = None


class WorkerState:
    """One worker's part of a checkpoint: its replica's state, and that of early stopping.

    Attributes:
        copies: of what is on a device, where `take` uses the memory of the last one again; None on a CPU.
    """

    def __init__(self, session: WorkerSession, stopper: EarlyStopper) -> None:
        self._run = session.run
        self._rank = session.rank
        self._replica = session.replica
        self._group = session.group
        self._mates = session.mates
        self._stopper = stopper
        self._rounds_per_epoch = session.loader.rounds_per_epoch
        self._model = session.replica.compute.module
        self._trained = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        self._modes = [(name, part, part.training) for name, part in self._model.named_modules()]
        self._device = torch.device(session.run.plan.role(session.rank).device)
        self.copies: HostCopies | None = None
        if self._device.type != HOST:
            from headrace.checkpoint.host_copies import HostCopies

            replica, run = session.replica, session.run
            # Then nothing but the model's own forward may write to parameters between two updates.
            usual = run.train is None and not run.callbacks and isinstance(replica.exchange, UpdatingExchange)
            self.copies = HostCopies(self._device, late=usual and replica.sync is None)

    def by_user_code(self) -> dict[str, list[str]]:
        """Returns the parameters that user code has frozen since the run began, and the modules of another mode."""
        return {
            "frozen": [name for name, each in self._trained.items() if not each.requires_grad],
            "other_mode": [name for name, part, mode in self._modes if part.training != mode],
        }

    def as_user_code(self, changed: Mapping[str, Collection[str]]) -> None:
        """Changes what `by_user_code` returned elsewhere."""
        for name in self._trained.keys() & set(changed["frozen"]):
            self._trained[name].requires_grad_(False)
        for name, part, mode in self._modes:
            part.training = mode != (name in changed["other_mode"])

    def take(self, done: int, weight: float) -> TakenState:
        """Returns copies of this worker's part, and the description of the whole; all workers call it together."""
        rank = self._group.rank
        if self.copies:
            self.copies.begin()
        # A thread writes them to the checkpoint while training goes on, which changes the rows.
        with Spool(self._run.run_dir) as spool:
            state = declared(self._replica, self._replica.state())
            tensors = owned_pieces(state, self._run.plan, rank, spool, self._value_of)
        tensors |= random_states(self._device)
        own = declared(self._replica, self._replica.own_state())
        tensors |= {f"own/{piece.name}": self._value_of(piece) for piece in own}
        with self._replica.trained_weights():
            averaged = {id(buffer): buffer.detach().clone() for buffer in averaged_buffers(self._model)}
            average_by_weight(list(averaged.values()), self._mates, weight)
            leads = self._run.plan.leads(rank)
            copy = self._copies_of_model()
            tensors |= model_tensors(self._replica.compute, leads, self._mates.world, averaged, copy)
        tensors |= extra_states(self._model, self._replica.compute.has_state_of)
        description = {
            **self._run.description,
            **drawn_of(self._run.job),
            "epoch": done // self._rounds_per_epoch,
            "round_of_epoch": done % self._rounds_per_epoch,
            "settings": settings_of(self._replica),
            "early_stopping": self._stopper.state(),
            "by_user_code": self.by_user_code(),
            "saved_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        return TakenState(tensors, description, spool.problem, self.copies.end() if self.copies else None)

    def _value_of(self, piece: StatePiece) -> Tensor:
        if self.copies and piece.value.device.type != HOST:
            return self.copies.copy(piece.value, piece.in_place, flat=piece.start >= 0)
        return piece.value

    def _copies_of_model(self) -> Callable[[Tensor], Tensor]:
        # Forward writes to buffers, and a synchronization has put averages into parameters for a moment.
        lasting = {memory_of(each) for each in self._model.parameters()} if self._replica.sync is None else set()

        def copy(tensor: Tensor) -> Tensor:
            if self.copies and tensor.device.type != HOST:
                return self.copies.copy(tensor, memory_of(tensor) in lasting)
            return tensor.detach().clone()

        return copy

    def load(self, stored: LoadedCheckpoint) -> None:
        """Loads this worker's state from a checkpoint."""
        resume = self._run.resume
        assert resume is not None
        with making_sense(stored.path):
            # A replacement worker is alone, and no part of the checkpoint is its own.
            at_home = resume.same and stored.ranks == self._group.world
            sync = self._replica.sync if isinstance(self._replica.sync, PeriodicSync) else None
            later = self._run.plan.role(self._rank).data_rank > 0
            alone = sync if sync and sync.own_optimizers and later else None
            pieces = stored.pieces(self._rank if at_home else None, alone)
            if at_home:
                # Before the replica's own state, which may hold running statistics of this worker alone.
                stored.load_buffers(self._model, self._rank, self._group.world)
            if resume.reset_optimizer:
                # The averages are weights, and are loaded with them.
                self._replica.load([piece for piece in pieces if piece.key == AVERAGE or is_row_value(piece)])
            else:
                self._replica.load(pieces, stored.description["settings"])
                self._stopper.load(stored.description["early_stopping"])
            if changed := stored.description.get("by_user_code"):
                self.as_user_code(changed)
            if at_home:
                restore_random_states(stored.random(self._rank), self._device)

    def bring_back(self, stored: LoadedCheckpoint) -> None:
        """Restores the state of a checkpoint of this run, except the position in the data."""
        self._replica.load([*stored.pieces(), *stored.parameter_pieces()])
        stored.load_buffers(self._model, self._rank, self._group.world)


def local_buffers(module: nn.Module, world: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that differ between workers, by checkpoint name."""
    kept = module.state_dict(keep_vars=True) if world == 1 else {}
    for name, buffer in module.named_buffers():
        if name not in kept and not buffer.is_meta:
            yield f"local/{name}", buffer


def model_tensors(
    compute: Compute, leads: bool, world: int, averaged: Mapping[int, Tensor], copy: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns copies of what a rank saves of the model itself: training changes it while it is written.

    `leads` is True on the first of the ranks that hold the same part of the model; `averaged` are copies of averaged
    running statistics, by the `id` of the buffer.
    """
    tensors = {name: copy(averaged.get(id(each), each)) for name, each in compute.whole_tensors(leads)}
    return tensors | {name: copy(buffer) for name, buffer in local_buffers(compute.module, world)}


def owned_pieces(
    pieces: Iterable[StatePiece],
    plan: Plan,
    rank: int,
    spool: Spool | None = None,
    value_of: Callable[[StatePiece], Tensor] = attrgetter("value"),
) -> dict[str, Tensor]:
    """Returns the pieces that this rank saves: the first of the ranks that hold a piece saves it.

    Rows of tables, which may be more than fit into memory, are kept in `spool`.
    """
    shared = {segment.parameter for segment in plan.segments if segment.owner == EVERY_WORKER}
    workers = [each for each in plan.segments if each.owner != EVERY_WORKER and plan.role(each.owner).computes]
    # A worker may hold copies of what another one owns.
    copied = {each.parameter for each in workers} - {each.parameter for each in workers if each.owner == rank}
    leads = plan.leads(rank)
    return {
        f"state/{piece.name}": spool.keep(piece.value) if spool and is_row_piece(piece) else value_of(piece)
        for piece in pieces
        if piece.parameter not in copied and (leads or piece.parameter not in shared)
    }


def seed_worker(seed: int, rank: int, done: int = 0, restarts: int = 0) -> None:
    """Seeds the generators of a worker of a job, that begins after so many rounds."""
    seed_random(derived(seed, rank, done, restarts))


def seed_random(seed: int) -> None:
    """Seeds this process's generators: torch's, numpy's and Python's."""
    seed_torch(seed)
    np.random.seed(divmod(seed, 2**32))
    random.seed(seed)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of this process's generators: torch's, numpy's and Python's."""
    _, words, normal = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    states = {
        "random/torch": torch.get_rng_state(),
        "random/python": torch.tensor(words, dtype=torch.int64),
        "random/python-normal": torch.tensor([] if normal is None else [normal], dtype=torch.float64),
        "random/numpy": torch.tensor(
            [*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"]], dtype=torch.int64
        ),
        "random/numpy-normal": torch.tensor([numpy["gauss"]], dtype=torch.float64),
    }
    if device.type != HOST:
        states[f"random/{device.type}"] = random_state(device)
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores what `random_states` returned."""
    torch.set_rng_state(states["random/torch"].clone())
    normal = states["random/python-normal"].tolist()
    random.setstate((3, tuple(states["random/python"].tolist()), normal[0] if normal else None))
    *keys, position, has_normal = states["random/numpy"].tolist()
    cached = states["random/numpy-normal"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_normal, cached))
    if device.type != HOST and f"random/{device.type}" in states:
        set_random_state(states[f"random/{device.type}"].clone(), device)


@contextmanager
def making_sense(path: Path) -> Iterator[None]:
    """Turns any error in the content of a checkpoint, whose digests are right, into a `CorruptCheckpoint`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, HeadraceError):
            raise
        raise CorruptCheckpoint(path, f"its content makes no sense: {type(error).__name__}: {error}") from error


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Tells whether two dense tensors of one shape are alike; numbers packed into floats may be no number."""
    return torch.equal(*(as_bytes(each.detach().cpu().contiguous()) for each in (one, other)))


class LoadedCheckpoint:
    """The content of a checkpoint, read and verified."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.step = checkpoint.step
        self.description = checkpoint.description
        self.ranks = len(checkpoint.ranks)
        self._by_rank = {rank: checkpoint.read(rank) for rank in checkpoint.ranks}
        self._model = {
            name: tensor
            for tensors in self._by_rank.values()
            for name, tensor in tensors.items()
            if name.startswith(("parameter/", "buffer/"))
        }

        # Of the first rank that has it.
        every = (self._by_rank[rank] for rank in sorted(self._by_rank, reverse=True))
        self._extra = {name: each for own in every for name, each in own.items() if name.startswith("extra/")}

    def load_module(self, module: nn.Module) -> None:
        """Loads the parameters, and the buffers that all ranks share, into a whole module."""
        if any(each.is_meta for each in module.parameters()):
            from headrace.training.deferred.parts import parts_of

            if parts := parts_of(module):
                parts.saved = lambda name: self._model[f"parameter/{name}"].clone()
        beside = derived_state(module)
        with torch.no_grad():
            for name, tensor in parameters_and_buffers(module):
                if not tensor.is_meta:
                    own = f"{name.partition('/')[2]}."
                    if any(each.startswith(own) for each in beside) and not _same_bits(tensor, self._model[name]):
                        # Scales of numbers in 4 bits, say, which are those of the base that was built now.
                        raise CheckpointMismatch(self.path, (f"{own[:-1]!r} has other values, and others beside it",))
                    restore(tensor, self._model[name])

    def load_buffers(self, module: nn.Module, rank: int, world: int) -> None:
        """Loads this rank's own buffers into a module, or the shared ones if it has none."""
        own = self._by_rank[rank] if self.ranks == world else {}
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                saved = own.get(f"local/{name}", self._model.get(f"buffer/{name}"))
                if saved is None or buffer.is_meta:
                    continue
                # One that is not part of the model's state may have grown, and is made again.
                if saved.shape == buffer.shape or f"buffer/{name}" in self._model:
                    restore(buffer, saved)
            load_extra_states(module, {**self._extra, **own})

    def shapes(self) -> dict[str, torch.Size]:
        """Returns the shapes of the parameters and of the buffers that all ranks share, by checkpoint name."""
        return {name: tensor.shape for name, tensor in self._model.items()}

    def random(self, rank: int) -> dict[str, Tensor]:
        """Returns the states of a rank's generators."""
        return {name: tensor for name, tensor in self._by_rank[rank].items() if name.startswith("random/")}

    def pieces(self, rank: int | None = None, sync: PeriodicSync | None = None) -> list[StatePiece]:
        """Returns the optimizer's state and the averages, of all ranks; a rank's own pieces replace shared ones.

        Those of the optimizer of the first replica are not for one with `sync`, which keeps its own.
        """
        shared = [
            StatePiece.parse(name.removeprefix("state/"), tensor)
            for tensors in self._by_rank.values()
            for name, tensor in tensors.items()
            if name.startswith("state/")
        ]
        if rank is not None and sync:
            shared = [each for each in shared if each.key.startswith(OURS) or each.key in sync.state_keys]
        stored = (self._by_rank[rank] if rank is not None else {}).items()
        own = [StatePiece.parse(name.removeprefix("own/"), value) for name, value in stored if name.startswith("own/")]
        return list({piece.name: piece for piece in (*shared, *own)}.values())

    def parameter_pieces(self) -> list[StatePiece]:
        """Returns the parameters as pieces of state, for the ranks that update them."""
        return [
            StatePiece(name.removeprefix("parameter/"), PARAMETER, 0, tensor.flatten())
            for name, tensor in self._model.items()
            if name.startswith("parameter/")
        ]
