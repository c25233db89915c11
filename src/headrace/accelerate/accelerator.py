"""Accelerator: the object that scripts written for Accelerate train by, on headrace's processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.accelerate.base import Settings
from headrace.accelerate.gathering import Gathering
from headrace.accelerate.logs import Logging
from headrace.accelerate.ordering import Ordering
from headrace.accelerate.progress import LoopProgress
from headrace.accelerate.saving import Saving
from headrace.accelerate.training import Looping, Preparing
from headrace.api.plain_script.setup import processes
from headrace.engine.torchrun.address import accelerate_option, local_rank
from headrace.errors import UnknownName, UsageError

_PRECISIONS = ("bf16", "no")
_IGNORED = {"cpu": None, "rng_types": None, "dynamo_backend": "no", "gradient_accumulation_plugin": None}
_HANDLERS = ("DistributedDataParallelKwargs", "GradScalerKwargs", "InitProcessGroupKwargs")
"""Whose settings change no numbers: of buckets, unused parameters and timeouts, and of the scaling for fp16."""
_CONFIG = {"dispatch_batches": None, "use_seedable_sampler": False, "use_stateful_dataloader": False}


class Accelerator(Preparing, Looping, Gathering, Ordering, Saving, Logging):
    """What a script written for Accelerate trains by: only its import changes.

    The numbers are those of Accelerate with as many processes: each process takes a batch of the loader in turn, or,
    with `split_batches=True`, a part of each; a last batch is completed by the first examples; a schedule steps once
    for each process. Running statistics of BatchNorm are means over the processes.

    Args:
        split_batches: the loader's batch size is that of all processes together.
        mixed_precision: "no" or "bf16"; prepared models compute in it, and their outputs are float32.
        gradient_accumulation_steps: backward passes before a step of the optimizers.
        device_placement: moves models and batches to this process's device.
        log_with: "tensorboard", or objects with `log(values, step=...)`, `finish()` and a name.
        project_dir: of trackers and numbered states.
        step_scheduler_with_optimizer: False lets schedules step by themselves.
        options: Accelerate's other ones; those that would change the numbers are refused.

    Raises:
        UnknownName: another precision or tracker.
        UsageError: an option that is not carried.

    Examples:
        >>> from headrace.accelerate import Accelerator
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(2, 4)).mean())
        >>> optimizer.step()
    """

    def __init__(
        self,
        *,
        split_batches: bool = False,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        device_placement: bool = True,
        log_with: Any = None,
        project_dir: Any = None,
        step_scheduler_with_optimizer: bool = True,
        **options: Any,
    ) -> None:
        steps = int(accelerate_option("GRADIENT_ACCUMULATION_STEPS") or gradient_accumulation_steps)
        progress = LoopProgress(_steps(options.get("gradient_accumulation_plugin"), steps))
        super().__init__(processes(), local_rank(), progress, log_with=log_with)
        precision = str(mixed_precision or accelerate_option("MIXED_PRECISION") or "no")
        if precision not in _PRECISIONS:
            raise UnknownName("mixed precision", precision, _PRECISIONS)
        config = options.pop("dataloader_config", None)
        for name, plain in _CONFIG.items():
            if getattr(config, name, plain) not in (plain, None, False):
                raise UsageError(f"{name} of the loaders' configuration is not carried; leave it out")
        if not getattr(config, "even_batches", True) and self.use_distributed:
            raise UsageError(
                "even_batches=False lets some processes have fewer batches than others, and all of them take part in "
                "every step; leave it out, or give the loader drop_last=True"
            )
        files = options.pop("project_config", None)
        project = project_dir or getattr(files, "project_dir", None)
        logs = getattr(files, "logging_dir", None) or project
        self._set = Settings(
            *(bool(split_batches or getattr(config, "split_batches", False)), precision),
            *(device_placement, step_scheduler_with_optimizer),
            Path(project) if project else None,
            Path(logs) if logs else None,
            bool(getattr(files, "automatic_checkpoint_naming", False)),
            getattr(files, "total_limit", None),
            int(getattr(files, "iteration", 0)),
        )
        self.split_batches, self.mixed_precision = self._set.split, precision
        self.project_dir, self.logging_dir = self._set.project, self._set.logs
        for handler in options.pop("kwargs_handlers", None) or ():
            hook = getattr(handler, "comm_hook", "no")
            if type(handler).__name__ not in _HANDLERS or getattr(hook, "value", hook) != "no":
                raise UsageError(f"the handler {handler} is not carried; leave it out of kwargs_handlers")
        for name, value in options.items():
            if name not in _IGNORED and value not in (None, []):
                raise UsageError(f"Accelerator({name}=...) is not carried; leave it out, or use hr.fit with a strategy")
        self.state = SimpleNamespace(
            **{name: getattr(self, name) for name in ("num_processes", "process_index", "local_process_index")},
            **{name: getattr(self, name) for name in ("is_main_process", "device", "distributed_type")},
            mixed_precision=precision,
            deepspeed_plugin=None,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"headrace.accelerate.Accelerator has no {name}: what Accelerate does by it is not carried; take it out"
        )

    @property
    def _settings(self) -> Settings:
        return self._set


def _steps(plugin: Any, steps: int) -> int:
    """Returns the passes that are accumulated, of a GradientAccumulationPlugin where there is one."""
    if plugin is None:
        count = steps
    elif not plugin.adjust_scheduler or not plugin.sync_with_dataloader:
        raise UsageError(
            "a GradientAccumulationPlugin with adjust_scheduler=False or sync_with_dataloader=False is not carried; "
            "leave them out"
        )
    else:
        count = plugin.num_steps
    if count < 1:
        raise UsageError(f"gradient_accumulation_steps is {count}, and at least 1 is needed")
    return int(count)
