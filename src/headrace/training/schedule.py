"""The learning rate's way through a run: any torch scheduler, stepped by rounds or epochs, after a warm-up."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headrace.errors import UsageError
from headrace.spec.options import Options


class Schedule:
    """Drives the options of an optimizer's groups, and copies them to the optimizer that owns the pieces.

    A scheduler wants every group of the job; an owner of some pieces may have some groups only. So it drives
    the whole one, `template`, whose groups carry names.

    Args:
        options: schedule, its unit, and warm-up.
        template: over the whole parameters.
        optimizer: over this process's pieces; may be the template itself.
        rounds_per_epoch: how many rounds there are between two steps of a schedule that goes by epochs.

    Raises:
        UsageError: the schedule is none, or one that needs a metric.
    """

    def __init__(
        self,
        options: Options,
        template: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer,
        rounds_per_epoch: int,
    ) -> None:
        self._template = template
        self._optimizer = optimizer
        self._warmup = options.warmup
        self._every = rounds_per_epoch if options.schedule_every == "epoch" else 1
        self._scheduler = make(options.schedule, template) if options.schedule else None
        self._spread()

    def advance(self, round_: int) -> None:
        """Goes on after a round, whether or not its update was made."""
        if self._scheduler is None or (round_ + 1) % self._every:
            return
        with warnings.catch_warnings():
            # It looks for an optimizer.step() before its own; the owner's is another one, and may be left out.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step", category=UserWarning)
            self._scheduler.step()
        self._spread()

    def warmth(self, round_: int) -> float:
        """Returns the share of the learning rates that warm-up allows a round."""
        return (round_ + 1) / self._warmup if round_ < self._warmup else 1.0

    @contextmanager
    def warmed(self, round_: int, factor: float = 1.0) -> Iterator[None]:
        """Holds the learning rates of one round at their share during warm-up, times `factor`."""
        if round_ >= self._warmup and factor == 1.0:
            yield
            return
        factor *= self.warmth(round_)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def settings(self) -> dict[str, Any]:
        """Returns the groups and the scheduler's state as JSON values."""
        state = None if self._scheduler is None else plain(self._scheduler.state_dict(), "the schedule's state")
        return {"groups": group_settings(self._template), "schedule": state}

    def load(self, settings: Mapping[str, Any]) -> None:
        """Takes up what `settings` returned in a run with the same groups."""
        for group, saved in zip(self._template.param_groups, settings["groups"], strict=True):
            # What the class knows, and nothing else that a checkpoint may say.
            known = (group.keys() & saved["options"].keys()) - {"params", "param_names"}
            group.update({key: _restored(saved["options"][key]) for key in known})
        if self._scheduler is not None and settings["schedule"] is not None:
            self._scheduler.load_state_dict(_restored(settings["schedule"]))
        self._spread()

    def _spread(self) -> None:
        if self._optimizer is self._template:
            return
        by_names = {tuple(group["param_names"]): group for group in self._template.param_groups}
        for group in self._optimizer.param_groups:
            source = by_names.get(tuple(group.get("param_names", ())))
            if source is not None:
                group.update({key: source[key] for key in source if key not in ("params", "param_names")})


def make(factory: Callable[..., Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Calls the job's schedule with an optimizer.

    Raises:
        UsageError: what it returned is no torch scheduler, one that needs a metric, or one of another optimizer.
    """
    scheduler = factory(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, not rounds or epochs; use a schedule that does (CosineAnnealingLR, "
            "StepLR), or Options(early_stopping=...)"
        )
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"the schedule must return a torch.optim.lr_scheduler.LRScheduler, got {type(scheduler).__name__}; "
            "for example schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
        )
    if scheduler.optimizer is not optimizer:
        raise UsageError("the schedule drives another optimizer than the one that it was given; make it from that one")
    return scheduler


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns an optimizer's groups, a digest of their parameters' names and their options, as JSON values.

    An option that is no such value is left to the job's optimizer factory.
    """
    return [
        {
            "parameters": len(group["param_names"]),
            # A large model's names would fill the manifest of a checkpoint.
            "names": hashlib.sha256("\n".join(group["param_names"]).encode()).hexdigest()[:16],
            "options": dict(_options(group)),
        }
        for group in optimizer.param_groups
    ]


def _options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key not in ("params", "param_names"):
            with suppress(UsageError):
                yield key, plain(value, key)


def plain(value: Any, what: str) -> Any:
    """Returns a value of a scheduler or optimizer as JSON values that `load` restores exactly.

    Raises:
        UsageError: it holds something that is no number, text or collection of them.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # As text, because infinity is no JSON number.
        return {"float": repr(float(value))}
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"tensor": plain(value.item(), what), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [plain(item, what) for item in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[plain(key, what), plain(item, what)] for key, item in value.items()]}
    raise UsageError(f"{what} holds a {type(value).__name__}, which a checkpoint cannot keep; use plain numbers")


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = ((key, item) for key, item in value.items() if key != "dtype")
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return torch.tensor(_restored(inner), dtype=getattr(torch, value["dtype"]))
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](_restored(item) for item in inner)
    pairs = {_restored(key): _restored(item) for key, item in inner}
    return Counter(pairs) if kind == "counter" else pairs
