"""setup: a plain training script, three lines changed, in several processes.

    model, optimizer, loader = hr.setup(model, optimizer, loader, strategy="mirrored")

The loop stays: `loss.backward()`, `optimizer.step()`. The loader's batch size is the global one; each process
gets its share of every batch, and gradients are weighted by examples.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from headrace.api.plain_script.checks import check_parts, facts_of, guard_batch_norm, refuse_wrappers, say_hooks
from headrace.api.plain_script.gradients import Synchronizer
from headrace.api.plain_script.losses.forwards import FirstForward
from headrace.api.plain_script.losses.loss import LossWatch
from headrace.api.plain_script.meeting import SETUP, Meeting
from headrace.api.plain_script.processes import ScriptProcesses
from headrace.api.plain_script.script_devices import ScriptDevices
from headrace.api.plain_script.shares import ShareLoader, let_others_draw
from headrace.api.plain_script.steps import CentralParameters, SynchronizedSteps
from headrace.api.verification.script_steps import record_steps
from headrace.devices import HOST
from headrace.engine.base import NOT_ENCRYPTED
from headrace.engine.torchrun.address import launched_rank, launched_ranks
from headrace.engine.torchrun.agreement import require_same
from headrace.engine.torchrun.engine import join_group
from headrace.engine.torchrun.refusal import tell_uncaught
from headrace.errors import UnknownName, UsageError
from headrace.machine.identity import versions
from headrace.machine.resources import cores
from headrace.machine.versions import notice_of_torch
from headrace.policies.roles import threads_per_worker
from headrace.strategies.broadcast import broadcast

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
        return model, optimizer, _share(loader, None)
    check_parts(model, optimizer)
    facts = {"strategy": strategy, "reduction": str(reduction), **facts_of(model, optimizer, loader)}
    shares = _script(timeout_s, encrypt, facts).add(model, optimizer, loader, strategy, reduction)
    record_steps(model, optimizer, loader, strategy)
    return model, optimizer, shares


class _Script:
    """What `setup` has made in this process of a launcher; several calls share one group of processes."""

    def __init__(self, timeout_s: float, encrypt: bool, facts: dict[str, str]) -> None:
        tell_uncaught()
        require_same({**versions(), **facts})
        launched = join_group(timeout_s, encrypt)
        self.meeting = Meeting(launched.host)
        self._devices = ScriptDevices(self.meeting, launched.hosts, encrypt)
        self._synchronizers: list[Synchronizer] = []
        self._central: dict[int, CentralParameters] = {}
        self._loaders: dict[int, ShareLoader] = {}
        self._known: set[tuple[int, int]] = set()
        self._watch = LossWatch(self.meeting)
        let_others_draw(self.meeting)
        refuse_wrappers()
        register_optimizer_step_pre_hook(self._notice)

        def leave() -> None:
            # An exception that ends a script says why by itself.
            if "last_value" not in vars(sys):
                launched.page.ranks[launched.rank].heartbeat.finished = 1 + self.meeting.passes
            self._devices.close()
            launched.close()

        atexit.register(leave)
        torch.set_num_threads(threads_per_worker(cores(), launched.mates))
        for line in notice_of_torch():
            self.meeting.say(line)
        if not encrypt and len(set(launched.hosts)) > 1:
            self.meeting.say(NOT_ENCRYPTED)

    def add(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loader: DataLoader[Any] | ShareLoader | None,
        strategy: str,
        reduction: str | None,
    ) -> ShareLoader | None:
        """Lets a model be trained by all processes; returns this one's shares."""
        meeting = self.meeting
        shares = loader if isinstance(loader, ShareLoader) else self._loaders.get(id(loader), _share(loader, meeting))
        if loader is not None and shares is not None:
            self._loaders[id(loader)] = shares
        known = next((one for one in self._synchronizers if one.model is model), None)
        if known is None:
            wires = self._devices.collective_of(model)
            broadcast(model, wires[0])
            if strategy == "central_storage":
                if wires[1].type != HOST:
                    raise UsageError(f"central_storage keeps one copy in host memory, not on {wires[1]}; use mirrored")
                if optimizer is None:
                    raise UsageError("central_storage divides an optimizer's updates, and there is none; use mirrored")
                if not meeting.group.one_memory:
                    raise UsageError(
                        "central_storage keeps one copy in one host's memory, and there are several; use mirrored"
                    )
                self._central[id(model)] = CentralParameters(model, meeting)
            known = Synchronizer(model, meeting, len(self._synchronizers), reduction, wires)
            self._synchronizers.append(known)
            guard_batch_norm(model, shares, meeting)
            say_hooks(model, meeting)
            FirstForward(model, meeting)
            if reduction != "mean":
                self._watch.begin(model, reduction == "sum")
        central = self._central.get(id(model))
        if central:
            known.check_values = central.check
        if optimizer is not None and (id(model), id(optimizer)) not in self._known:
            self._known.add((id(model), id(optimizer)))
            SynchronizedSteps(optimizer, known, meeting, central)
        # After the weights, which all ranks draw alike.
        meeting.part()
        meeting.say(
            f"{meeting.world} processes divide each batch, in the order of the script alone; from here on each draws "
            "random numbers of its own (dropout, noise, mixup of its share), so a script that draws some has another "
            "result than alone"
        )
        return shares

    def _notice(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Says that an optimizer steps over parameters that setup was not given."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if optimizer not in self.meeting.optimizers and not any(
            one.knows(parameter) for one in self._synchronizers for parameter in parameters
        ):
            self.meeting.say(
                f"{type(optimizer).__name__} steps over {len(parameters)} parameters that hr.setup was not given, "
                "by gradients of each process's share alone, so processes train different ones; give their model to "
                "hr.setup, too, where they are not a process's own (as inputs that are searched for)"
            )


_scripts: list[_Script] = []
"""The one of this process, if a launcher has started it and there was a setup."""


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
    return ScriptProcesses(
        launched_rank(), launched_ranks() or 1, lambda: (_scripts or [_script(10.0, True, {})])[0].meeting
    )


def _script(timeout_s: float, encrypt: bool, facts: dict[str, str]) -> _Script:
    if _scripts:
        _scripts[0].meeting.meet(SETUP)
        _scripts[0].meeting.require_same(facts, "every process needs the same")
    else:
        _scripts.append(_Script(timeout_s, encrypt, facts))
    return _scripts[0]


def _share(loader: DataLoader[Any] | ShareLoader | None, meeting: Meeting | None) -> ShareLoader | None:
    return loader if loader is None or isinstance(loader, ShareLoader) else ShareLoader(loader, meeting)
