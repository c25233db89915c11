"""Whether a loop of the user's own draws random numbers for its batch, as mixup does: each worker has a share alone."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from headrace.hooks import OwnHook
from headrace.spec.events.run import Notice
from headrace.worker.session import WorkerSession
from headrace.worker.state import random_states


class DrawGuard:
    """Compares generators before and after what a loop does with a batch, until the model's forward or the step."""

    def __init__(self, session: WorkerSession, looks: bool) -> None:
        self._session = session
        # Threads that train, or that read data, draw from the same generators.
        self._looks = looks and session.group.world > 1 and threading.current_thread() is threading.main_thread()
        self._device = torch.device(session.run.plan.role(session.rank).device)
        self._own: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._hook: RemovableHandle | None = None

    def begin(self) -> None:
        """Begins a round of the loop, whose frames are below this one."""
        done = self._session.progress.done
        # Of a batch that the loop has left out.
        self._forget()
        # Also of a loop that begins to draw later.
        if self._looks and not done & (done - 1) and self._session.loader.counters.parallel != "threads":
            self._own = dict(_generators_of_loop())
            self._before = self._states()
            module = self._session.replica.compute.module
            self._hook = module.register_forward_pre_hook(OwnHook(lambda *_: self.end()))

    def end(self) -> None:
        """Says what has drawn since `begin`, once."""
        if not self._before:
            return
        before = self._forget()
        drawn = [name for name, state in self._states().items() if state != before[name]]
        if drawn:
            self._looks = False
            session = self._session
            if session.group.rank == 0:
                session.events.write(Notice(session.rank, session.events.now(), _SAID.format(", ".join(drawn))))

    def _forget(self) -> dict[str, Any]:
        before, self._before = self._before, {}
        if self._hook is not None:
            self._hook.remove()
        return before

    def _states(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, state in random_states(self._device).items():
            found[name.partition("/")[2]] = bytes(state.numpy())
        return found | {name: _state_of(generator) for name, generator in self._own.items()}


_SAID = (
    "the loop draws random numbers for its batch ({}): each worker draws its own, for its share alone (mixup pairs the "
    "share's examples), so the result is not that of one process; draw in the data set, or use one_device"
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())


def _generators_of_loop() -> Iterator[tuple[str, Any]]:
    """Yields the generators in variables of the user's functions that run, and of their modules, by name."""
    frame, is_loop = inspect.currentframe(), False
    while frame is not None:
        is_own = frame.f_globals.get("__name__", "").partition(".")[0] == "headrace"
        if is_own and is_loop:
            return
        is_loop = not is_own
        if is_loop:
            variables = {**frame.f_globals, **frame.f_locals}
            yield from ((name, each) for name, each in variables.items() if isinstance(each, _GENERATORS))
        frame = frame.f_back
