"""What a script with an Accelerator logs: lines of the first process, and numbers by step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from headrace.accelerate.base import Prepared
from headrace.api.plain_script.setup import processes
from headrace.errors import UnknownName, UsageError
from headrace.machine.extras import require_extra


class _ProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs on the first process, unless `main_process_only=False` is given; with `in_order`, one after the other."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Marks a line with the process's number."""
        return f"[RANK {processes().rank}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Logs a line."""
        here = processes()
        alone, ordered = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        for rank in range(here.world) if ordered else [here.rank]:
            if rank == here.rank and (ordered or not alone or here.is_first):
                super().log(level, msg, *args, **kwargs)
            if ordered:
                here.barrier()


def get_logger(name: str, log_level: str | None = None) -> logging.LoggerAdapter[logging.Logger]:
    """Returns a logger whose lines the first process writes, as that of accelerate.logging.

    Args:
        name: of the logger.
        log_level: from which it logs, "INFO".

    Examples:
        >>> from headrace.accelerate import get_logger
        >>> get_logger("train").info("begins")
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return _ProcessLogger(logger, {})


class TensorBoardTracker:
    """Writes a script's numbers for TensorBoard; Accelerate's name of it is "tensorboard"."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        require_extra("tensorboard", "a tracker")
        # Inside, since most users have no tensorboard.
        from torch.utils.tensorboard import SummaryWriter

        self.name = "tensorboard"
        self.writer: Any = SummaryWriter(str(folder / project))
        for name, value in config.items():
            self.writer.add_text(name, str(value))

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Writes numbers of a step; texts as text."""
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, step)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, value, step)
            else:
                self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Ends the file."""
        self.writer.close()


class Logging(Prepared):
    """Numbers of a script, by step. The first process writes them."""

    def __init__(self, *given: Any, log_with: Any = None) -> None:
        super().__init__(*given)
        listed = list(log_with) if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
        self._wanted = [getattr(each, "value", each) for each in listed]
        for each in self._wanted:
            if isinstance(each, str) and each != "tensorboard":
                raise UnknownName("tracker", each, ("tensorboard",))
        self.trackers: list[Any] = []

    def init_trackers(self, project_name: str, config: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Begins what `log` writes to."""
        if not self.is_main_process:
            return
        for each in self._wanted:
            if not isinstance(each, str):
                self.trackers.append(each)
                continue
            folder = self._settings.logs
            if folder is None:
                raise UsageError('log_with="tensorboard" needs a folder: Accelerator(project_dir="logs")')
            self.trackers.append(TensorBoardTracker(folder, project_name, config or {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a tracker by its name, on the first process; with `unwrap`, what it writes by.

        Raises:
            UnknownName: there is none of this name.
        """
        if not self.is_main_process:
            return None
        for each in self.trackers:
            if each.name == name:
                return each.writer if unwrap else each
        raise UnknownName("tracker", name, [each.name for each in self.trackers])

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Writes numbers of a step."""
        for each in self.trackers:
            each.log(values, step=step)

    def end_training(self) -> None:
        """Ends the trackers' files."""
        for each in self.trackers:
            each.finish()
        self._here.barrier()
