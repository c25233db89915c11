"""A loader that a script has prepared: this process's batches, and which of them is the last."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from headrace.accelerate.batches import Groups, JoinedBatches, JoinedStream, set_epoch
from headrace.accelerate.progress import LoopProgress
from headrace.api.plain_script.processes import ScriptProcesses
from headrace.api.plain_script.script import join_script
from headrace.api.plain_script.shares import ShareLoader
from headrace.errors import UsageError
from headrace.trees import map_tensors

_OPTIONS = (
    *("num_workers", "pin_memory", "timeout", "collate_fn", "generator"),
    *("worker_init_fn", "multiprocessing_context", "persistent_workers", "prefetch_factor"),
)


class PreparedLoader:
    """Iterates over this process's batches; has the loader's other attributes, too.

    Attributes:
        loader: the script's own.
        end_of_dataloader: whether the batch that was given last is the last one.
        remainder: the examples of all processes in it without those that complete it; -1 before it.
        iteration: how many there were.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        progress: LoopProgress,
        here: ScriptProcesses,
        device: torch.device | None = None,
        split: bool = False,
    ) -> None:
        self.loader = loader
        self.end_of_dataloader, self.remainder, self.iteration = False, -1, 0
        self.total_batch_size = _size(loader) * (1 if split else here.world)
        self._progress, self._device, self._skip = progress, device, 0
        self._whole = self
        self._begun: torch.Tensor | None = None
        self._groups: Groups | None = None
        self._shares: DataLoader[Any] | ShareLoader = loader
        if here.world > 1:
            self._shares, self._groups = _joined(loader, here, split)

    def __getattr__(self, name: str) -> Any:
        # A copy has no attributes while it is made.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self._shares) - self._skip

    def set_epoch(self, epoch: int) -> None:
        """Tells the samplers and the data set another epoch than the number of iterations so far."""
        self._whole.iteration = epoch
        set_epoch(self.loader, epoch)

    def skipping(self, batches: int) -> PreparedLoader:
        """Returns a loader over the same data whose iterations begin with a later batch."""
        other = copy.copy(self)
        other._skip, other._whole = batches, self
        return other

    def state(self) -> dict[str, Any]:
        """Returns how many iterations there were, and the sampler's random numbers where the next or current one began.

        An iteration that has given its last batch counts as one.
        """
        whole = self._whole
        now = next((each for each in self._progress.loaders if each._whole is whole), None)
        if now is None or now.end_of_dataloader:
            return {"iteration": whole.iteration + (now is not None), "generator": self._draws()}
        return {"iteration": whole.iteration, "generator": whole._begun}

    def load(self, state: dict[str, Any]) -> None:
        """Takes what `state` has returned."""
        self.iteration = state["iteration"]
        generator = self._generator()
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader, self.remainder = False, -1
        whole = self._whole
        if self._skip and self._skip >= len(self._shares):
            return
        if not self._skip:
            self._progress.resumed.clear()
        self._progress.loaders.append(self)
        try:
            set_epoch(self.loader, whole.iteration)
            whole._begun = self._draws()
            for place, (batch, is_last) in enumerate(self._batches()):
                self.end_of_dataloader = is_last
                if is_last and self._groups is not None:
                    self.remainder = self._groups.real
                if place < self._skip:
                    continue
                if self._skip and place == self._skip:
                    self._progress.resume()
                yield map_tensors(lambda tensor: tensor.to(self._device), batch) if self._device else batch
            whole.iteration += 1
        finally:
            self._progress.loaders.remove(self)

    def _generator(self) -> torch.Generator | None:
        sampler: Any = getattr(self.loader.batch_sampler, "sampler", None)
        found: torch.Generator | None = getattr(sampler, "generator", None)
        return found

    def _draws(self) -> torch.Tensor | None:
        generator = self._generator()
        return None if generator is None else generator.get_state()

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        if self._groups is not None:
            for place, batch in enumerate(self._shares):
                yield batch, self._groups.count == place + 1
            return
        batches = iter(self._shares)
        missing = object()
        batch = next(batches, missing)
        while batch is not missing:
            following = next(batches, missing)
            yield batch, following is missing
            batch = following


def _size(loader: DataLoader[Any]) -> int:
    batches: Any = loader.batch_sampler
    size = loader.batch_size or getattr(batches, "batch_size", None)
    if not size:
        raise UsageError(
            f"the loader's {type(batches).__name__} has no batch_size, and batches of one size are divided evenly "
            "among processes; give it that attribute"
        )
    return int(size)


def _joined(loader: DataLoader[Any], here: ScriptProcesses, split: bool) -> tuple[ShareLoader, Groups]:
    """Returns this process's shares of the batches of all, and what says which is the last."""
    size, processes = _size(loader), 1 if split else here.world
    if split and size % here.world:
        raise UsageError(
            f"with split_batches=True a batch of {size} examples is divided among {here.world} processes; give the "
            f"loader a batch size that is a multiple of {here.world}"
        )
    script = join_script()
    # What cannot be divided is refused as it is given.
    ShareLoader(loader, script.meeting)
    # Without workers there is nothing that is prefetched.
    options = {name: getattr(loader, name) for name in _OPTIONS if name != "prefetch_factor" or loader.num_workers}
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers:
            raise UsageError(
                f"the loader reads an IterableDataset by {loader.num_workers} processes, each of which would end its "
                "part of the data with a batch of its own; give it num_workers=0"
            )
        stream = JoinedStream(loader.dataset, here.world, processes * size, loader.drop_last)
        whole = DataLoader(stream, processes * size, **options)
        return script.share(whole), stream.groups
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the loader's DistributedSampler gives one process's part of the data, and prepare() divides it; give it "
            "a sampler of all examples"
        )
    _share_generator(loader, here)
    batches: Any = loader.batch_sampler
    joined = JoinedBatches(batches, processes, size, bool(getattr(batches, "drop_last", False)))
    whole = DataLoader(loader.dataset, batch_sampler=joined, **options)
    return script.share(whole), joined.groups


def _share_generator(loader: DataLoader[Any], here: ScriptProcesses) -> None:
    """Gives a sampler that draws from the common random numbers a generator of its own, as Accelerate does."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", None) or (
        loader.sampler.sampler if isinstance(loader.sampler, BatchSampler) else None
    )
    if getattr(sampler, "generator", here) is None:
        with here.common():
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(seed)
