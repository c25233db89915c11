"""Would a GPU help? One paragraph, from measured figures, published ones, and what a job's step does."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.bench.figures import Figure, MachineFigures
from headrace.bench.settings import GPU
from headrace.report.format import byte_count, duration, short

START_S = 10e-6
"""How long a GPU's operation takes to start, where it is not measured: an assumption."""
_BUS_BYTES_PER_S = 10e9
"""From the host to a GPU over PCIe, where it is not measured: an assumption."""
_WORTH_IT = 2.0


@dataclass(frozen=True)
class JobFacts:
    """What a job's step does, measured on this machine's processors.

    Attributes:
        step_s: of forward and backward of a batch of `examples`.
        operations: that torch executes in it, each of which a GPU starts.
        batch_bytes: that go to the device for it.
        input_per_s: examples that the job's input gives while nothing trains.
        gpu_step_s: the same step on this machine's GPU, its batch being there; None without one.
    """

    name: str
    examples: int
    step_s: float
    operations: int
    batch_bytes: int
    input_per_s: float
    gpu_step_s: float | None = None


def answer(here: MachineFigures, beside: MachineFigures | None = None, job: JobFacts | None = None) -> str:
    """Returns the paragraph."""
    gains = gpu_gains(here, here)
    other = beside if beside and not gains else None
    if other:
        gains = gpu_gains(here, other)
    if not gains and job and job.gpu_step_s:
        return _measured(job, job.gpu_step_s)
    if not gains:
        return (
            "Whether a GPU would help is not known: this machine has none that torch can use, and nothing is there to "
            "compare with. Give published figures, or those of a machine with a GPU, with --beside."
        )
    least, most = min(gains.values()), max(gains.values())
    columns = ", ".join(dict.fromkeys(column for _, column in gains))
    whose = f"The GPU of {other.name} ({columns})" if other else "This machine's GPU"
    times = _times(most) if _times(least) == _times(most) else f"{_times(least)} to {_times(most)}"
    said = (
        f"{whose} trains the networks above {times} times as fast as this machine's processors, at batches of 16 "
        "images of 224 x 224."
    )
    if job:
        return " ".join([said, *_of_job(job, most, here)])
    return (
        f"{said} A job gains less where its steps are short, since every operation takes a GPU about 10 us to start, "
        "and never more than its input allows; give a job file to have both looked at."
    )


def gpu_gains(here: MachineFigures, there: MachineFigures) -> dict[tuple[str, str], float]:
    """Returns how many times as fast the best GPU column of `there` trains each network as the processors `here`.

    By network and column.
    """
    gains = {}
    for row in here.rows("training"):
        slow = _quickest(here, row, processors=True)
        fast = _quickest(there, row, processors=False)
        if slow and fast:
            gains[row, fast.column] = slow.value / fast.value
    return gains


def _quickest(machine: MachineFigures, row: str, processors: bool) -> Figure | None:
    times = [
        figure
        for figure in machine.figures
        if (figure.part, figure.row) == ("training", row) and figure.column.startswith("CPU") == processors
    ]
    return min(times, key=lambda figure: figure.value, default=None)


def _measured(job: JobFacts, gpu_step_s: float) -> str:
    """Returns the answer where the job itself was measured on both."""
    gain, by_input = job.step_s / gpu_step_s, job.input_per_s * job.step_s / job.examples
    said = (
        f"A step of {job.name} of {job.examples} examples takes {duration(job.step_s)} on the processors and "
        f"{duration(gpu_step_s)} on the GPU, {_times(gain)} times as fast"
    )
    if by_input < gain:
        return f"{said}; but its input gives {short(job.input_per_s)} examples/s, enough for {_times(by_input)} times."
    return f"{said}, and its input is quick enough for that."


def _of_job(job: JobFacts, most: float, here: MachineFigures) -> list[str]:
    if job.gpu_step_s:
        return [_measured(job, job.gpu_step_s)]
    started = here.at("transfer", "an operation on one number", GPU)
    start_s = started.value / 1e6 if started else START_S
    bus = here.at("transfer", "host to GPU, pageable", GPU)
    bus_bytes_per_s = bus.value * 1e9 if bus else _BUS_BYTES_PER_S
    floor_s = job.operations * start_s + job.batch_bytes / bus_bytes_per_s
    now = job.examples / job.step_s
    by_start, by_input = job.step_s / floor_s, job.input_per_s / now
    bound = min(most, by_start, by_input)
    assumed = "" if started else f" (assumed: {START_S * 1e6:.0f} us each, {byte_count(_BUS_BYTES_PER_S)}/s)"
    said = [
        f"A step of {job.name} takes {duration(job.step_s)} here for {job.examples} examples: {job.operations:,} "
        f"operations, which a GPU takes {duration(floor_s)} to start and to get their data for{assumed}.",
        f"Its input gives {short(job.input_per_s)} examples/s, and training takes {short(now)}.",
    ]
    if bound < _WORTH_IT:
        why = "its input" if bound == by_input else "starting its short operations" if bound == by_start else "the GPU"
        return [*said, f"So a GPU would hardly help: at most {_times(bound)} times as fast, held up by {why}."]
    if bound == most:
        return [*said, f"So a GPU would help: up to {_times(bound)} times as fast, if it gains what the networks gain."]
    why = "its input" if bound == by_input else "starting its operations"
    return [*said, f"So a GPU would help: up to {_times(bound)} times as fast, and {why} is what limits it then."]


def _times(value: float) -> str:
    return f"{value:.0f}" if value >= 9.5 else f"{value:.1f}"
