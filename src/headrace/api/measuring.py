"""Measures runs of a comparison, with what else the machine did meanwhile, and measures doubtful ones again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from headrace.api.run import Run
from headrace.machine.resources import ProcessorTimes, processor_times
from headrace.policies.measurement import MachineLoad, Measurement, doubts

_LOOK_S = 0.25
"""How long other programs are watched before a run and after it."""


def measured(run: Callable[[], Run], average: float | None = None) -> tuple[Run, Measurement]:
    """Runs something and returns it with its measurement.

    Args:
        average: the machine's load average, if no run of ours is in it.
    """
    others = _busy_others()
    before = processor_times()
    result = run()
    after = processor_times()
    others = max(others, _busy_others())
    summary = result.summary
    machine = None
    if before is not None and after is not None and summary.started.device == "cpu":
        used = min(after.cores, summary.workers * summary.started.threads)
        passed = after.total_s - before.total_s
        stolen = (after.stolen_s - before.stolen_s) / passed if passed > 0 else 0.0
        machine = MachineLoad(after.cores, used, others, stolen, average)
    return result, Measurement(summary.examples_per_s, summary.workers, summary.training.spread, machine)


def _busy_others() -> float:
    """Returns how many cores other programs keep busy now: no run of ours computes at this time."""
    before, own = processor_times(), time.process_time()
    began = time.monotonic()
    time.sleep(_LOOK_S)
    after: ProcessorTimes | None = processor_times()
    passed = time.monotonic() - began
    if before is None or after is None or passed <= 0:
        return 0.0
    return max(0.0, after.busy_s - before.busy_s - (time.process_time() - own)) / passed


def settle(
    found: dict[str, Measurement], one: str, again: Callable[[str, int], Measurement | None], retries: int
) -> Mapping[str, tuple[str, ...]]:
    """Measures again what is doubtful, at most so many times, and returns what stays doubtful and why, by label.

    Args:
        found: the measurements by label; new ones replace those before.
        one: the label of one device.
        again: measures a run again, given its label and the number of the attempt; None ends the measuring.
    """
    for attempt in range(1, retries + 1):
        doubtful = _doubtful(found, one)
        # A rate that one device makes impossible may be that one's fault.
        impossible = any(doubts(each, found[one].rate) != doubts(each, None) for each in found.values())
        for label in [*doubtful, *([one] if impossible and one not in doubtful else [])]:
            measurement = again(label, attempt)
            if measurement is None:
                return _doubtful(found, one)
            found[label] = measurement
        if not doubtful:
            break
    return _doubtful(found, one)


def _doubtful(found: Mapping[str, Measurement], one: str) -> dict[str, tuple[str, ...]]:
    why = {label: doubts(each, found[one].rate) for label, each in found.items()}
    return {label: reasons for label, reasons in why.items() if reasons}
