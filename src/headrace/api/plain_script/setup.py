"""setup: a plain training script, three lines changed, in several processes.

    model, optimizer, loader = hr.setup(model, optimizer, loader, strategy="mirrored")

The loop stays: `loss.backward()`, `optimizer.step()`. The loader's batch size is the global one; each process
gets its share of every batch, and gradients are weighted by examples.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from headrace.api.plain_script.processes import ScriptProcesses
from headrace.api.plain_script.script import join_script, train_together
from headrace.api.plain_script.shares import ShareLoader
from headrace.api.verification.script_steps import record_steps
from headrace.engine.torchrun.address import launched_rank, launched_ranks
from headrace.errors import UnknownName, UsageError
from headrace.machine.versions import notice_of_torch

_STRATEGIES = ("central_storage", "mirrored", "one_device")
_REDUCTIONS = ("mean", "sum")


_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer | None)


@overload
def setup(
    model: nn.Module,
    optimizer: _Optimizer,
    loader: DataLoader[Any] | ShareLoader,
    strategy: str = "mirrored",
    *,
    reduction: str | None = None,
    timeout_s: float = 10.0,
    encrypt: bool = True,
) -> tuple[nn.Module, _Optimizer, ShareLoader]: ...


@overload
def setup(
    model: nn.Module,
    optimizer: _Optimizer,
    loader: None,
    strategy: str = "mirrored",
    *,
    reduction: str | None = None,
    timeout_s: float = 10.0,
    encrypt: bool = True,
) -> tuple[nn.Module, _Optimizer, None]: ...


def setup(
    model: nn.Module,
    optimizer: _Optimizer,
    loader: DataLoader[Any] | ShareLoader | None,
    strategy: str = "mirrored",
    *,
    reduction: str | None = None,
    timeout_s: float = 10.0,
    encrypt: bool = True,
) -> tuple[nn.Module, _Optimizer, ShareLoader | None]:
    """Makes a plain script one worker of many: run it with `headrace launch script.py --workers 2`, or torchrun.

    Without a launcher it is one worker, and trains as before.

    Args:
        model: on the CPU, or on this process's accelerator (`hr.processes().device`); all get rank 0's weights.
        optimizer: over this model's parameters; it stays the same object. None where the script updates them itself.
        loader: its batches are divided, in the order that its samplers give them in the script alone. None where each
            process makes batches of its own, of equal size (episodes, samples that are drawn).
        strategy: "mirrored", "central_storage" or "one_device".
        reduction: of the loss, over examples. "mean": gradients are weighted by examples. "sum": they are added. None
            stands for a mean, and a loss that is a sum is refused in its first backward pass.
        timeout_s: a process without a sign of life for this long counts as lost.
        encrypt: False leaves gradients between hosts unencrypted, for networks that are trusted.

    Raises:
        UnknownName: another strategy or reduction.
        UsageError: the launcher's processes do not fit the strategy, or differ in strategy, model, batch size, seed
            or length of the data; models lie on several devices, or parameters are not the optimizer's; the
            loader's batches cannot be divided. From `loss.backward()`, `optimizer.step()` and the loader: the
            processes do different things, or what they have in common differs.
        PeerLost: from `loss.backward()`, where another process was lost.

    Examples:
        >>> model, data = torch.nn.Linear(4, 1), torch.utils.data.TensorDataset(torch.zeros(8, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> model, optimizer, loader = hr.setup(model, optimizer, loader)
        >>> for (inputs,) in loader:
        ...     optimizer.zero_grad()
        ...     model(inputs).square().mean().backward()
        ...     optimizer.step()
    """
    if strategy not in _STRATEGIES:
        raise UnknownName("strategy for plain scripts", strategy, _STRATEGIES)
    if reduction is not None and reduction not in _REDUCTIONS:
        raise UnknownName("reduction", reduction, _REDUCTIONS)
    ranks = launched_ranks() or 1
    if strategy == "one_device" and ranks > 1:
        raise UsageError(f"one_device is one process and the launcher started {ranks}; use strategy='mirrored'")
    if ranks == 1:
        for line in notice_of_torch():
            sys.stderr.write(f"headrace: {line}\n")
        record_steps(model, optimizer, loader, strategy)
        return model, optimizer, loader if loader is None or isinstance(loader, ShareLoader) else ShareLoader(loader)
    script, shares = train_together(model, optimizer, loader, strategy, reduction, timeout_s, encrypt)
    script.let_draw()
    record_steps(model, optimizer, loader, strategy)
    return model, optimizer, shares


def processes() -> ScriptProcesses:
    """Returns the processes that run the script: this one's rank, a barrier, and sums and means over all.

    It may be called before `setup`, and without a launcher: the script is then one process.

    Examples:
        >>> here = hr.processes()
        >>> here.rank, here.world, here.is_first
        (0, 1, True)
        >>> here.mean(0.5, count=8)
        0.5
    """
    return ScriptProcesses(launched_rank(), launched_ranks() or 1, lambda: join_script().meeting)
