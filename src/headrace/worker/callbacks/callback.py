"""The base class of users' callbacks, and what they are called with."""

from __future__ import annotations

import math
import re
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from headrace.errors import UsageError
from headrace.spec.patterns import require_name
from headrace.worker.callbacks.picture import save

"""What every tracker takes as the name of a curve."""


@dataclass(frozen=True)
class RunActions:
    """What a callback's wishes do: the last two raise UsageError where the strategy cannot do it."""

    log_values: Callable[[Mapping[str, float]], None]
    log_picture: Callable[[str, Path], None]
    log_text: Callable[[str, str], None]
    stop: Callable[[str], None]
    set_rate_factor: Callable[[float], None]


class Moment:
    """Where a run is, and what a callback may do there.

    Attributes:
        step: rounds that are done; where workers do not go in step, up to this worker's last one.
        epoch: epochs that are done.
        loss: of this worker in its last step; None where it had no example, or is read later (on accelerators).
        turn: the set of parameters that the last step trained, where sets take turns; else "".
        model: rank 0's copy; under pipelines and tensor parallelism the part that it holds.
        run_dir: the run's directory.

    Examples:
        >>> class Norms(hr.Callback):
        ...     def on_step(self, moment):
        ...         norm = sum(each.detach().norm() for each in moment.model.parameters())
        ...         moment.log({"weights/norm": float(norm)})
        >>> hr.fit(job, callbacks=[Norms()]).status
        'ok'
    """

    def __init__(self, model: nn.Module, run_dir: Path, actions: RunActions) -> None:
        self.step = 0
        self.epoch = 0
        self.loss: float | None = None
        self.turn = ""
        self.model = model
        self.run_dir = run_dir
        self._actions = actions

    def log(self, values: Mapping[str, float]) -> None:
        """Writes numbers by name as an event, which trackers show as curves over `step`.

        Raises:
            UsageError: a name or a value that no curve can have.
        """
        self._actions.log_values(values)

    def log_picture(self, name: str, picture: Any) -> Path:
        """Saves a picture in the run's directory, and writes an event, by which trackers show it.

        Args:
            name: of the picture; those of later steps have the same.
            picture: a figure of matplotlib, the bytes of a PNG file, or an array or tensor of height x width (grey) or
                height x width x 3 or 4 (RGB, RGBA): bytes (uint8) from 0 to 255, or floats from 0 to 1; NaN is 0.

        Returns:
            The file: `pictures/<name>-<step>.png`.

        Raises:
            UsageError: it is none of these.
        """
        require_name(name)
        folder = self.run_dir / "pictures"
        folder.mkdir(exist_ok=True)
        path = folder / f"{re.sub(r'[/: ]', '-', name)}-{self.step}.png"
        save(picture, path)
        self._actions.log_picture(name, path)
        return path

    def log_text(self, name: str, text: str) -> None:
        """Writes a text as an event, which trackers show: what the model writes, for one.

        Raises:
            UsageError: a name that no text can have, or no text.
        """
        require_name(name)
        if not isinstance(text, str):
            raise UsageError(f"log_text takes a text, got {text!r:.60} for {name!r}")
        self._actions.log_text(name, text)

    def stop(self, why: str) -> None:
        """Ends the run in order, all workers after the same round; `why` is shown.

        Raises:
            UsageError: the workers train models of their own.
        """
        self._actions.stop(why)

    def set_learning_rate_factor(self, factor: float) -> None:
        """Multiplies all learning rates that optimizer, schedule and warm-up give, from one round on on all workers.

        It takes the place of the factor before, is 1 at first, and is part of checkpoints.

        Raises:
            UsageError: no number above 0, or a strategy whose workers do not update the parameters together.
        """
        if isinstance(factor, bool) or not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise UsageError(f"the factor of the learning rate must be a number above 0, got {factor!r}")
        self._actions.set_rate_factor(float(factor))


class Callback(ABC):  # noqa: B024  (no moment is one that all must take)
    """What runs on rank 0 at named moments of a run: subclass it, and name it in `fit(..., callbacks=[...])`.

    It runs in rank 0's process, while the other workers wait where they next need rank 0; `hr.fit` sends a copy there,
    so that what it keeps stays there. An error in it ends the run. A process that takes rank 0's place begins with a
    new copy.

    Examples:
        >>> class Stops(hr.Callback):
        ...     def on_step(self, moment):
        ...         if moment.step == 2:
        ...             moment.stop("that is enough")
        >>> hr.fit(job, callbacks=[Stops()]).summary.steps < 4
        True
    """

    def on_step(self, moment: Moment) -> None:  # noqa: B027  (each is left out by those who need another)
        """Is called after each step of rank 0."""

    def on_evaluation(self, moment: Moment, metrics: Mapping[str, float]) -> None:  # noqa: B027
        """Is called after each evaluation, with "loss" and the metrics over the whole evaluation set."""

    def on_checkpoint(self, moment: Moment, path: Path) -> None:  # noqa: B027
        """Is called when a checkpoint is complete on the disk; training may be some steps further."""

    def on_end(self, moment: Moment) -> None:  # noqa: B027
        """Is called when the training has ended in order, and the model is the trained one."""
