"""A run's events as the config and history of a Weights & Biases run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import UsageError
from headrace.machine.extras import require_extra
from headrace.report.trackers.curves import Tracked, TrackedPicture, TrackedText, TrackedValue
from headrace.report.trackers.mlflow import parameters
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import RunStarted

if TYPE_CHECKING:
    from wandb import Run as WandBRun

_STEP = "step"


class WandB(Tracker):
    """Takes events (`fit(..., on_event=WandB("wandb"))`) and writes them to Weights & Biases.

    Each attempt at a run is a run there: strategy, workers and batch are its config, `resumed_step` among them; the
    curves are named as `TensorBoard` names them, over `step`; the last notice and failure are in its summary. Where
    wandb is not installed or refuses to begin, one line says so, and the run goes on without it.

    Args:
        folder: where its files go, made if missing.
        project: the runs' project.
        run_name: None for `<strategy>-<workers>`.
        mode: "offline" writes files alone, which `wandb sync` uploads later; "online" uploads while the run goes on.
        every_s: seconds between two rounds that are written where rounds are shorter; 0 for every round.

    Raises:
        UsageError: there is no such mode, or `every_s` is no number of seconds of at least 0.

    Examples:
        >>> run = hr.fit(job, on_event=hr.WandB("curves"))
    """

    def __init__(
        self,
        folder: Path | str = ".",
        project: str = "headrace",
        run_name: str | None = None,
        mode: str = "offline",
        every_s: float = 0.25,
    ) -> None:
        super().__init__("Weights & Biases", every_s)
        if mode not in ("offline", "online"):
            raise UsageError(f"mode is 'offline' or 'online', got {mode!r}")
        # Now, because a run may change the working directory.
        self._folder = Path(folder).absolute()
        self._project = project
        self._run_name = run_name
        self._mode = mode
        self._run: WandBRun | None = None

    def begin(self, started: RunStarted) -> None:
        require_extra("wandb", "it")
        # Inside, since importing it takes a second, and most users do not have it.
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode="offline" if self._mode == "offline" else "online",
            dir=str(self._folder),
            project=self._project,
            name=self._run_name or f"{started.strategy}-{started.workers}",
            config=dict(parameters(started)),
            # Its lines and its copy of the program's output are not asked for, and two runs may be open.
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )
        # Values of one step come at different times, which its own count of steps would refuse.
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, entries: Sequence[Tracked]) -> None:
        import wandb

        assert self._run is not None  # `begin` comes first
        rows: dict[int, dict[str, Any]] = defaultdict(dict)
        for each in entries:
            match each:
                case TrackedValue():
                    rows[each.step][each.tag] = each.value
                case TrackedText():
                    self._run.summary[each.tag] = each.text
                case TrackedPicture():
                    rows[each.step][each.tag] = wandb.Image(each.path)
        for step, values in rows.items():
            self._run.log({**values, _STEP: step})

    def end(self, status: str) -> None:
        assert self._run is not None  # `begin` comes first
        self._run.finish(exit_code=0 if status == "ok" else 1)
