"""What all parts of an Accelerator have: the processes, the progress, and what the script has prepared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.accelerate.loaders import PreparedLoader
from headrace.accelerate.progress import LoopProgress
from headrace.accelerate.steps import PreparedOptimizer, PreparedScheduler
from headrace.api.plain_script.processes import ScriptProcesses


class Settings(NamedTuple):
    """What a script has set.

    Attributes:
        split: the loader's batch size is that of all processes together.
        precision: "no" or "bf16".
        places: models and batches are moved to this process's device.
        with_optimizer: schedules step where the optimizers do.
        project, logs: where files go, and those of trackers.
        numbers: states are numbered.
        keeps: how many numbered states are kept; None for all.
        first: the number of the first one.
    """

    split: bool
    precision: str
    places: bool
    with_optimizer: bool
    project: Path | None
    logs: Path | None
    numbers: bool
    keeps: int | None
    first: int


class Prepared(ABC):
    """The script's processes and parts.

    Attributes:
        num_processes, process_index, local_process_index: how many processes there are, and this one's numbers.
        is_main_process, is_local_main_process, is_last_process: of all; of this host.
        device: where this process computes.
    """

    def __init__(self, here: ScriptProcesses, local: int, progress: LoopProgress) -> None:
        self.num_processes, self.process_index, self.local_process_index = here.world, here.rank, local
        self.is_main_process, self.is_local_main_process = here.is_first, local == 0
        self.is_last_process = here.rank == here.world - 1
        self.use_distributed = here.world > 1
        self.device = torch.device(here.device)
        self._here, self._progress = here, progress
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self._registered: list[Any] = []
        self._trained: list[tuple[set[int], nn.Module]] = []

    @property
    @abstractmethod
    def _settings(self) -> Settings:
        """What the script has set."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current pass is the last before a step of the optimizers."""
        return self._progress.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Backward passes before a step of the optimizers."""
        return self._progress.steps

    @property
    def distributed_type(self) -> str:
        """What Accelerate calls these processes: "NO", "MULTI_CPU" or "MULTI_GPU"."""
        if not self.use_distributed:
            return "NO"
        return "MULTI_CPU" if self.device.type == "cpu" else "MULTI_GPU"
