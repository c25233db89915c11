"""setup: a plain training script, three lines changed, in several processes.

    model, optimizer, loader = hr.setup(model, optimizer, loader, strategy="mirrored")

The loop stays: `loss.backward()`, `optimizer.step()`. The loader's batch size is the global one; each process
gets its share of every batch, and gradients are weighted by examples.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from headrace import internals
from headrace.collectives.base import ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data import Loader, as_pipeline
from headrace.data.cache.fingerprint import fingerprint
from headrace.engine.torchrun.agreement import require_same
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.engine.torchrun.refusal import tell_uncaught
from headrace.engine.torchrun.secret import NOT_ENCRYPTED
from headrace.engine.torchrun.store import launched_ranks
from headrace.errors import UnknownName, UsageError
from headrace.machine.identity import versions
from headrace.machine.resources import cores
from headrace.machine.versions import notice_of_torch
from headrace.modules import describe
from headrace.policies.roles import threads_per_worker
from headrace.policies.sharding import whole
from headrace.strategies.broadcast import broadcast
from headrace.training.central_storage.exchange import place_parameters, share_parameters
from headrace.training.reduction import CollectiveReduction, Reduction, SharedMemoryReduction
from headrace.worker.loops.rounds import count_examples

_STRATEGIES = ("central_storage", "mirrored", "one_device")


def setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    strategy: str = "mirrored",
    *,
    timeout_s: float = 10.0,
    encrypt: bool = True,
) -> tuple[nn.Module, torch.optim.Optimizer, ShareLoader]:
    """Makes a plain script one worker of many: run it with `headrace launch script.py --workers 2`, or torchrun.

    Without a launcher it is one worker, and trains as before.

    Args:
        model: on the CPU; every process gets rank 0's weights.
        optimizer: over this model's parameters; it stays the same object, so schedulers may hold it.
        loader: its data set, collate_fn, batch size (the global one), drop_last and whether it shuffles are taken over.
        strategy: "mirrored", "central_storage" or "one_device".
        timeout_s: a process without a sign of life for this long counts as lost.
        encrypt: False leaves gradients between hosts unencrypted, for networks that are trusted.

    Raises:
        UnknownName: another strategy.
        UsageError: the launcher's processes do not fit the strategy, or differ in strategy, model, batch size, seed
            or length of the data; the model is on another device, or its parameters are not the optimizer's.
        PeerLost: from `loss.backward()`, where another process was lost.

    Examples:
        >>> model, data = torch.nn.Linear(4, 1), torch.utils.data.TensorDataset(torch.zeros(8, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> model, optimizer, loader = hr.setup(model, optimizer, loader)
        >>> for (inputs,) in loader:
        ...     optimizer.zero_grad()
        ...     model(inputs).sum().backward()
        ...     optimizer.step()
    """
    if strategy not in _STRATEGIES:
        raise UnknownName("strategy for plain scripts", strategy, _STRATEGIES)
    ranks = launched_ranks() or 1
    if strategy == "one_device" and ranks > 1:
        raise UsageError(f"one_device is one process and the launcher started {ranks}; use strategy='mirrored'")
    group, mates = _join(ranks, timeout_s, encrypt, _facts(model, loader, strategy))
    for said in notice_of_torch() if group.rank == 0 else ():
        sys.stderr.write(f"headrace: {said}\n")
    if strategy == "central_storage" and not group.one_memory:
        raise UsageError("central_storage keeps one copy in one host's memory, and there are several; use mirrored")
    shares = ShareLoader(loader, group)
    if ranks > 1:
        torch.set_num_threads(threads_per_worker(cores(), mates))
        _check(model, optimizer)
        broadcast(model, group)
        if strategy == "central_storage":
            _share_parameters(model, optimizer, group)
        _Synchronizer(model, group, shares)
    return model, optimizer, shares


class ShareLoader:
    """Iterates over this process's share of every batch, one epoch at a time; shuffles where `loader` does."""

    def __init__(self, loader: DataLoader[Any], group: ProcessGroup) -> None:
        if loader.batch_size is None:
            raise UsageError("the loader has no batch_size, so there is no global batch to split; give it one")
        pipeline, _ = as_pipeline(loader)
        shares = (1,) * group.world
        self._loader = Loader(pipeline, _seed(loader), loader.batch_size, shares, group.rank, not _shuffles(loader))
        partial = len(pipeline) % loader.batch_size > 0
        self._rounds = self._loader.rounds_per_epoch - (loader.drop_last and partial)
        self._group = group
        self._epoch = 0
        self.weight = 1.0 / group.world

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[Any]:
        first = self._epoch * self._loader.rounds_per_epoch
        shares = self._loader.rounds(first, first + self._rounds)
        self._epoch += 1
        try:
            for _ in range(len(self)):
                share = count_examples(next(shares), self._loader.drops, self._group)
                self.weight = share.examples / max(1, share.of)
                yield share.batch
        finally:
            shares.close()


def _facts(model: nn.Module, loader: DataLoader[Any], strategy: str) -> Mapping[str, str]:
    """Returns what must be the same in all processes, by name: else they go through different batches."""
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    return {
        "strategy": strategy,
        "the model": f"{len(shapes)} parameters with digest {fingerprint(shapes)[:12]}",
        "batch_size": str(loader.batch_size),
        "drop_last": str(loader.drop_last),
        "shuffle": str(_shuffles(loader)),
        "the seed of the loader's generator": str(_seed(loader)),
        "the data": f"{len(loader.dataset):,} examples" if isinstance(loader.dataset, Sized) else "of no length",
    }


def _seed(loader: DataLoader[Any]) -> int:
    return 0 if loader.generator is None else loader.generator.initial_seed()


def _shuffles(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.shuffle
    return not isinstance(loader.sampler, SequentialSampler)


class _Synchronizer:
    """Makes every process's gradients the mean over the global batch, at the end of each backward pass.

    Not at the step, because a script may clip them before. Several backward passes before one step add up, because the
    weights of the processes sum to 1.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, shares: ShareLoader) -> None:
        spec = describe(model)
        self._group = group
        self._shares = shares
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reduction: Reduction
        if group.one_memory:
            self._reduction = SharedMemoryReduction(spec.trainable, group)
        else:
            self._reduction = CollectiveReduction(spec.trainable, group, group, torch.device("cpu"))
        self._gradients = self._reduction.sink
        self._views = self._reduction.layout.views(self._reduction.result)
        self._backward_pass = -1
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._await_end)

    def _await_end(self, _: Tensor) -> None:
        # Not a flag: what is queued in a pass that ends with an error is dropped.
        current = internals.current_backward()
        if current != self._backward_pass:
            self._backward_pass = current
            internals.at_end_of_backward(self._synchronize)

    def _synchronize(self) -> None:
        weight = self._shares.weight
        if weight == 0:
            self._gradients.store_nothing()
        else:
            found = [parameter.grad for parameter in self._parameters]
            self._gradients.store([None if gradient is None else gradient * weight for gradient in found])
        missing = self._reduction.used.settle()
        self._reduction.reduce()
        self._group.barrier()
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            # A copy, because the script may change it, in the parameter's order, as fused optimizers need it.
            parameter.grad = None if index in missing else torch.empty_like(parameter, requires_grad=False).copy_(view)


def _share_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> None:
    """Keeps one copy of the parameters; each process updates, and holds optimizer state for, those it owns."""
    spec = describe(model)
    place_parameters(model, *share_parameters(model, spec, group))
    owners = {segment.parameter: segment.owner for segment in whole(spec.parameters, group.world)}
    foreign = [parameter for name, parameter in model.named_parameters() if owners.get(name) != group.rank]

    def leave_to_owners(*_: object) -> None:
        for parameter in foreign:
            parameter.grad = None

    optimizer.register_step_pre_hook(leave_to_owners)
    optimizer.register_step_post_hook(lambda *_: group.barrier())


def _join(ranks: int, timeout_s: float, encrypt: bool, facts: Mapping[str, str]) -> tuple[ProcessGroup, int]:
    """Returns the processes, and how many of them are on this host."""
    if ranks == 1:
        return ThreadCollective(ThreadGroup(1), 0), 1
    tell_uncaught()
    require_same({**versions(), **facts})
    launched = LaunchedGroup(timeout_s, encrypt)
    atexit.register(launched.close)
    if not encrypt and launched.rank == 0 and len(set(launched.hosts)) > 1:
        sys.stderr.write(f"headrace: {NOT_ENCRYPTED}\n")
    return launched.host, launched.mates


def _check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise UsageError(f"setup works on CPU models, this one is on {', '.join(sorted(devices))}; use hr.fit there")
    known = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise UsageError(f"{strange} of the optimizer's parameters are not the model's; make it from the model")
