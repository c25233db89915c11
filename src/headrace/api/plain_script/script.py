"""What a plain script has in each process of a launcher: the models, optimizers and loaders that all train together."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from headrace.api.plain_script.checks import check_parts, facts_of, guard_batch_norm, refuse_wrappers, say_hooks
from headrace.api.plain_script.gradients import Synchronizer
from headrace.api.plain_script.losses.forwards import FirstForward
from headrace.api.plain_script.losses.loss import LossWatch
from headrace.api.plain_script.meeting import SETUP, Meeting
from headrace.api.plain_script.script_devices import ScriptDevices
from headrace.api.plain_script.shares import ShareLoader, let_others_draw
from headrace.api.plain_script.steps import CentralParameters, SynchronizedSteps
from headrace.devices import HOST
from headrace.engine.base import NOT_ENCRYPTED
from headrace.engine.torchrun.agreement import require_same
from headrace.engine.torchrun.engine import join_group
from headrace.engine.torchrun.refusal import tell_uncaught
from headrace.errors import UsageError
from headrace.machine.identity import versions
from headrace.machine.resources import cores, most_threads
from headrace.machine.versions import notice_of_torch
from headrace.policies.roles import threads_per_worker
from headrace.strategies.broadcast import broadcast


class Script:
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
        torch.set_num_threads(threads_per_worker(cores(), launched.mates, most_threads()))
        for line in notice_of_torch():
            self.meeting.say(line)
        if not encrypt and len(set(launched.hosts)) > 1:
            self.meeting.say(NOT_ENCRYPTED)

    def share(self, loader: DataLoader[Any] | ShareLoader) -> ShareLoader:
        """Returns this process's shares of a loader's batches: the same object for the same loader."""
        if isinstance(loader, ShareLoader):
            return loader
        if id(loader) not in self._loaders:
            self._loaders[id(loader)] = ShareLoader(loader, self.meeting)
        return self._loaders[id(loader)]

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
        shares = None if loader is None else self.share(loader)
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
        return shares

    def let_draw(self) -> None:
        """Lets each process draw random numbers of its own: after the weights, which all draw alike."""
        self.meeting.part()
        self.meeting.say(
            f"{self.meeting.world} processes divide each batch, in the order of the script alone; from here on each "
            "draws random numbers of its own (dropout, noise, mixup of its share), so a script that draws some has "
            "another result than alone"
        )

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


_scripts: list[Script] = []
"""The one of this process, if a launcher has started it and something has joined."""


def join_script(timeout_s: float = 10.0, encrypt: bool = True, facts: dict[str, str] | None = None) -> Script:
    """Returns the script of this process of a launcher, which all join together.

    Raises a `UsageError` where some of the `facts` differ among them.
    """
    if not _scripts:
        _scripts.append(Script(timeout_s, encrypt, facts or {}))
    elif facts is not None:
        _scripts[0].meeting.meet(SETUP)
        _scripts[0].meeting.require_same(facts, "every process needs the same")
    return _scripts[0]


def train_together(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader: DataLoader[Any] | ShareLoader | None,
    strategy: str,
    reduction: str | None,
    timeout_s: float = 10.0,
    encrypt: bool = True,
) -> tuple[Script, ShareLoader | None]:
    """Lets all processes of a launcher train a model; returns their script, and this one's shares of the loader."""
    check_parts(model, optimizer)
    facts = {"strategy": strategy, "reduction": str(reduction), **facts_of(model, optimizer, loader)}
    script = join_script(timeout_s, encrypt, facts)
    return script, script.add(model, optimizer, loader, strategy, reduction)
