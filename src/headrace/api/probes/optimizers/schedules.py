"""Does a schedule give the same learning rates whenever it is made? Each worker makes its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from headrace.errors import UsageError
from headrace.spec.options import Options
from headrace.training.optimizer import build
from headrace.training.update import Schedule
from headrace.training.user_code.untouched import untouched

_STEPS = 8


def check_schedule(options: Options, factory: Callable[..., Any], named: Sequence[tuple[str, Tensor]]) -> None:
    """Makes a schedule twice, and compares the rates of its first steps.

    Raises:
        UsageError: it cannot be used, or they differ.
    """
    first, second = _rates(options, factory, named), _rates(options, factory, named)
    apart = next((step for step in range(_STEPS) if first[step] != second[step]), None)
    if apart is not None:
        raise UsageError(
            f"the schedule gives other learning rates when it is made again ({first[apart]} and {second[apart]} in "
            f"step {apart}): it draws random numbers or reads the clock, and each worker would step with its own; make "
            "them a function of the step alone, or of a generator with a seed that it makes itself"
        )


def _rates(options: Options, factory: Callable[..., Any], named: Sequence[tuple[str, Tensor]]) -> list[list[float]]:
    with untouched(options.schedule):
        optimizer = build(factory, named)
        schedule, rates = Schedule(options, optimizer, 1), []
        # As a checkpoint has it.
        schedule.settings()
        for step in range(_STEPS):
            rates.append([float(group["lr"]) for group in optimizer.param_groups if "lr" in group])
            schedule.advance(step)
    return rates
