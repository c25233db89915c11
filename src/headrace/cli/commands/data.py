"""`headrace data`: where a job's time goes, and whether its data is the same twice."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli.combinations import refuse_idle, resolved
from headrace.cli.command import argument, command, option
from headrace.cli.engines import job_on_engine, refuse_launcher
from headrace.cli.jobfile import find_job, load_job
from headrace.cli.options import (
    MOST_SECONDS,
    DeviceOption,
    JobFile,
    SettingsOption,
    StrategyOption,
    WorkersOption,
    check_strategies,
    job_name,
)
from headrace.cli.output import Answer, cut, say, wrapped
from headrace.devices import AUTO
from headrace.report.format import MISSING, clean, percent, short, to_cells, to_json

if TYPE_CHECKING:
    from headrace.api.profiling import Profile

_EXAMPLES = """
  headrace data profile job.py
  headrace data profile job.py --strategy mirrored --workers 2 --seconds 10
  headrace data profile job.py --json | jq .bottleneck.kind
  headrace data profile job.py --check-deterministic
"""

_NAME_WIDTH = 36


class _Action(StrEnum):
    """What to do with a job's data."""

    PROFILE = "profile"


@command(_EXAMPLES)
def data(
    answer: Answer,
    action: Annotated[_Action, argument("profile", "Measure where the time of a training goes.")],
    path: JobFile,
    strategy: StrategyOption = "one_device",
    workers: WorkersOption = None,
    device: DeviceOption = AUTO,
    seconds: Annotated[
        float, option("--seconds SECONDS", "How long each of three measurements takes.", min=0.1, max=MOST_SECONDS)
    ] = 5.0,
    check: Annotated[
        bool,
        option(
            "--check-deterministic",
            "Measure nothing: read examples twice, and name a transform that gives two results for one example.",
        ),
    ] = False,
    settings: SettingsOption = None,
) -> None:
    """Look at a job's input pipeline.

    Its input alone, its training with batches that lie ready, and both together are measured, one after the other: what
    each transform costs, what the training could do if data cost nothing, and what holds it up, with what to try next.
    """
    refuse_launcher("data")
    check_strategies([strategy])
    find_job(path)
    if check:
        refuse_idle(
            answer.given("--strategy", "--workers", "--device", "--seconds"),
            "for measurements, and --check-deterministic measures nothing; leave one of them out",
        )
        _check(answer, load_job(path, settings or ()))
        return
    with job_on_engine(path, settings) as (job, engine):
        chosen = resolved(strategy, workers)
        from headrace.api.profiling import profile

        profiled = profile(
            job,
            chosen,
            device=device,
            seconds=seconds,
            engine=engine,
            say=lambda line: say(f"measuring {line}"),
        )
    answer.give(_plain(job_name(path), profiled), "\n".join(_lines(job_name(path), profiled)))


def _check(answer: Answer, job: Any) -> None:
    # Lazily: `--help` need not wait for torch.
    from headrace.data.given import as_pipeline
    from headrace.data.transforms import check_deterministic

    pipeline, _ = as_pipeline(job.data)
    count = check_deterministic(pipeline, job.seed)
    text = f"deterministic: {count} examples were read twice, and each was the same after every stage"
    answer.give({"deterministic": True, "examples": count}, text)


def _plain(name: str, profiled: Profile) -> dict[str, Any]:
    # Lazily, as below: `--help` need not wait for reports.
    from headrace.report.views.subjects import BOTTLENECK, INPUT

    together, ceiling = profiled.together, profiled.ceiling
    return {
        "job": name,
        "strategy": together.strategy,
        "workers": together.workers,
        "global_batch_size": together.started.global_batch_size,
        "alone": {"examples_per_s": profiled.alone_per_s, **(to_json(INPUT, profiled.stages) or {})},
        "ceiling": {"examples_per_s": ceiling.examples_per_s},
        "together": {
            "examples_per_s": together.examples_per_s,
            "of_ceiling": _of_ceiling(profiled),
            "second": dict(_second(profiled)),
            "waits": {
                str(rank): times.wait_s / times.total_s if times.total_s else 0.0
                for rank, times in together.times_by_rank.items()
            },
            **(to_json(INPUT, together.inputs) or {}),
        },
        "bottleneck": to_json(BOTTLENECK, profiled.bottleneck),
    }


def _lines(name: str, profiled: Profile) -> Iterator[str]:
    from headrace.report.views.subjects import INPUT_STAGE, readers_text

    together = profiled.together
    workers = f"{together.workers} worker{'s' * (together.workers != 1)}"
    yield from wrapped(f"{name}: {together.strategy}, {workers}, batches of {together.started.global_batch_size}")
    yield ""
    whole = _of_ceiling(profiled)
    rates = (
        ("the input alone", profiled.alone_per_s, f"read by {readers_text(profiled.alone)}"),
        ("the training alone", profiled.ceiling.examples_per_s, "with batches that lie ready: the ceiling"),
        ("both together", together.examples_per_s, f"{percent(whole)} of the ceiling" if whole else ""),
    )
    yield f"{'':20}{'examples/s':>12}"
    for what, rate, why in rates:
        yield f"{what:20}{short(rate):>12}   {why}".rstrip()
    yield ""
    second = ", ".join(f"{what} {1e3 * part:.0f} ms" for what, part in _second(profiled) if part >= 5e-4)
    yield from wrapped(f"A second of a worker goes to: {second or MISSING}.")
    yield ""
    yield f"{'stage':{_NAME_WIDTH}}{'ms an example':>14}{'of the input':>14}{'of it waiting':>15}"
    inputs = together.inputs or profiled.stages
    for stage in inputs.stages:
        cost, part, waits = to_cells(INPUT_STAGE, (inputs, stage))
        yield f"{cut(clean(stage.name), _NAME_WIDTH):{_NAME_WIDTH}}{cost:>14}{part:>14}{waits:>15}"
    if inputs.skipped:
        yield f"{inputs.skipped} examples could not be had and were left out"
    yield ""
    bottleneck = profiled.bottleneck
    if bottleneck is None:
        yield from wrapped("Too little was done to say what holds it up: try more --seconds.")
        return
    yield from wrapped(bottleneck.line)
    yield from wrapped(f"Try next: {bottleneck.remedy}")


def _of_ceiling(profiled: Profile) -> float | None:
    most, reached = profiled.ceiling.examples_per_s, profiled.together.examples_per_s
    return reached / most if most and reached is not None else None


def _second(profiled: Profile) -> list[tuple[str, float]]:
    """Returns the parts of a mean step, as parts of 1."""
    from headrace.report.model.training import STEP_PARTS

    times = profiled.together.times
    if times is None or times.total_s <= 0:
        return []
    return [(name, getattr(times, part) / times.total_s) for part, name in STEP_PARTS.items()]
