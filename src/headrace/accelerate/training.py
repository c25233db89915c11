"""How a script with an Accelerator trains: what it prepares, and the passes and steps of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from headrace.accelerate.base import Prepared
from headrace.accelerate.loaders import PreparedLoader
from headrace.accelerate.steps import PreparedOptimizer, PreparedScheduler, parameters_of
from headrace.api.plain_script.script import train_together
from headrace.errors import UsageError
from headrace.trees import widened


class Preparing(Prepared):
    """What a script hands over before it trains."""

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Returns what the script trains by, in the order of the arguments: models, optimizers, loaders, schedules.

        A model is the same object, with the weights of the first process. What is none of them stays as it is.

        Raises:
            UsageError: an optimizer is over parameters of no model that was prepared; a loader's batches cannot be
                divided; the processes differ.
        """
        made = {id(each): self._one(each) for each in objects if not _is_schedule(each)}
        made |= {id(each): self.prepare_scheduler(each) for each in objects if _is_schedule(each)}
        found = tuple(made[id(each)] for each in objects)
        optimizers = [each for each in found if isinstance(each, PreparedOptimizer)]
        # First those of several models, which are then trained as one.
        for optimizer in sorted(optimizers, key=lambda each: -len(self._models_of(each))):
            self._connect(optimizer)
        for each in found:
            if isinstance(each, nn.Module) and self.use_distributed:
                self._together([each], None)
        return found[0] if len(found) == 1 else found

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepares one model; with `evaluation_mode` it is not trained."""
        prepared = self._model(model)
        if self.use_distributed and not evaluation_mode:
            self._together([model], None)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> PreparedOptimizer:
        """Prepares one optimizer, over parameters of prepared models."""
        prepared = self._optimizer(optimizer)
        self._connect(prepared)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *_: Any, **__: Any) -> PreparedLoader:
        """Prepares one loader."""
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        device = self.device if self._settings.places and self.device.type != "cpu" else None
        loader = PreparedLoader(data_loader, self._progress, self._here, device, self._settings.split)
        self._loaders.append(loader)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares one schedule of learning rates."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        times = None if self._settings.split else self.num_processes
        schedule = PreparedScheduler(scheduler, self._progress, times, self._settings.with_optimizer)
        self._schedulers.append(schedule)
        return schedule

    def skip_first_batches(self, dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader:
        """Returns a loader that begins with a later batch of an epoch, as where a script goes on in the middle."""
        return dataloader.skipping(num_batches)

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Returns the script's own model, which a prepared one is."""
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Forgets what was prepared; returns a None for each of the objects."""
        for each in (self._models, self._optimizers, self._schedulers, self._loaders):
            each.clear()
        return [None] * len(objects)

    def _one(self, each: Any) -> Any:
        if isinstance(each, nn.Module):
            return self._model(each)
        if isinstance(each, torch.optim.Optimizer):
            return self._optimizer(each)
        return self.prepare_data_loader(each) if isinstance(each, DataLoader | PreparedLoader) else each

    def _model(self, model: nn.Module) -> nn.Module:
        if any(model is known for known in self._models):
            return model
        if self._settings.places:
            model.to(self.device)
        if self._settings.precision == "bf16":
            plain = model.forward

            def forward(*values: Any, **named: Any) -> Any:
                with torch.autocast(self.device.type, torch.bfloat16):
                    output = plain(*values, **named)
                return widened(output, torch.bfloat16)

            setattr(model, "forward", forward)  # noqa: B010
        self._models.append(model)
        return model

    def _optimizer(self, optimizer: Any) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        prepared = PreparedOptimizer(optimizer, self._progress)
        self._optimizers.append(prepared)
        return prepared

    def _connect(self, optimizer: PreparedOptimizer) -> None:
        """Lets the processes update the models of an optimizer together."""
        if not self.use_distributed:
            return
        models = self._models_of(optimizer)
        known = {id(parameter) for model in models for parameter in model.parameters()}
        if any(id(parameter) not in known for parameter in parameters_of(optimizer)):
            raise UsageError(
                f"{type(optimizer.optimizer).__name__} is over parameters of no model that was prepared, which each "
                "process would train by itself; give their model to prepare(), too"
            )
        self._together(models, optimizer.optimizer)

    def _models_of(self, optimizer: PreparedOptimizer) -> list[nn.Module]:
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        return [model for model in self._models if any(id(each) in own for each in model.parameters())]

    def _together(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        own = {id(model) for model in models}
        for known, whole in self._trained:
            if own <= known:
                train_together(whole, optimizer, None, "mirrored", "mean")
                return
            if own & known:
                raise UsageError(
                    "an optimizer is over several models, some of which were prepared before it; give all of them to "
                    "one prepare() with it"
                )
        self._trained.append((own, models[0] if len(models) == 1 else nn.ModuleList(models)))
        train_together(self._trained[-1][1], optimizer, None, "mirrored", "mean")


class Looping(Prepared):
    """The passes and steps of a loop."""

    optimizer_step_was_skipped = False

    def backward(self, loss: Tensor, **named: Any) -> None:
        """Runs the backward pass of a loss, divided by the passes that are accumulated."""
        (loss / self.gradient_accumulation_steps).backward(**named)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Stands around each pass: optimizers and schedules step in the last of those that are accumulated."""
        self._progress.begin_pass()
        yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Changes nothing: the gradients of several passes are summed."""
        return nullcontext()

    def autocast(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        """Lets what runs inside compute in the mixed precision, as prepared models do."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._settings.precision == "bf16")

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients down to a norm; returns the norm that they had.

        Raises:
            UsageError: gradients are still accumulated.
        """
        norm: Tensor = self._clip(nn.utils.clip_grad_norm_, parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Cuts gradients off at a value.

        Raises:
            UsageError: gradients are still accumulated.
        """
        self._clip(nn.utils.clip_grad_value_, parameters, clip_value)

    def _clip(self, clip: Callable[..., Any], *given: Any) -> Any:
        if not self.sync_gradients and self.use_distributed:
            raise UsageError(
                "gradients are clipped in a pass that is not the last of those that are accumulated: what is there is "
                "of all processes already, and not of each, as in Accelerate; clip `if accelerator.sync_gradients:`"
            )
        return clip(*given)


def _is_schedule(each: Any) -> bool:
    return isinstance(each, LRScheduler | PreparedScheduler)
