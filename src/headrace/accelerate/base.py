"""What all parts of an Accelerator have: the processes, the progress, and what the script has prepared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.accelerate.loaders import PreparedLoader
from headrace.accelerate.progress import Progress
from headrace.accelerate.steps import PreparedOptimizer, PreparedScheduler
from headrace.api.plain_script.processes import ScriptProcesses


class Prepared:
    """The script's processes and parts.

    Attributes:
        num_processes, process_index, local_process_index: how many processes there are, and this one's numbers.
        is_main_process, is_local_main_process, is_last_process: of all; of this host.
        device: where this process computes.
    """

    def __init__(self, here: ScriptProcesses, local: int, progress: Progress) -> None:
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
