"""`headrace simulate` and `rehearse`: what a strategy would take on machines that are not there, and what it learns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli.combinations import refuse_idle, resolved
from headrace.cli.command import argument, command, option
from headrace.cli.engines import refuse_launcher
from headrace.cli.jobfile import find_job, load_job
from headrace.cli.options import (
    JobFile,
    RunDirOption,
    SettingsOption,
    StrategyOption,
    check_strategies,
    complete_strategy,
    default_run_dir,
    job_name,
)
from headrace.cli.output import Answer, say, wrapped
from headrace.errors import UnknownName, UsageError
from headrace.report.format import byte_count, clean, duration, percent, plural, short

if TYPE_CHECKING:
    from headrace.api.rehearsal.rehearse import Rehearsal
    from headrace.api.run import Run
    from headrace.prediction.assumptions import Assumptions
    from headrace.prediction.simulation.simulate import Prediction

_REHEARSALS = """
  headrace rehearse job.py --strategy downpour --workers 64
  headrace rehearse job.py --strategy downpour --cluster aws-g5.xlarge:64
  headrace rehearse job.py --strategy downpour --workers 8 --assume spread=0.3
  headrace rehearse job.py --from runs/a
"""

_EXAMPLES = """
  headrace simulate model.toml --cluster cluster.toml --strategy mirrored
  headrace simulate model.json --cluster cluster.toml --strategy downpour
  headrace simulate model.json --cluster cluster.toml --run-dir runs/virtual
  headrace simulate model.json --cluster aws-g5.xlarge:8 --strategy mirrored
  headrace simulate model.json --cluster cluster.toml --assume network_share=0.5
"""

ClusterFile = Annotated[
    Path,
    option("--cluster FILE|NAME:N", "The hosts and the links between them; or N machines of a cloud, aws-g5.xlarge:4."),
]
ForceOption = Annotated[bool, option("--force", "Use a profile of other versions or of another kind of device.")]
VirtualWorkersOption = Annotated[
    int | None, option("--workers", "How many. Default: as many as the cluster has devices.", min=1)
]
BatchSizeOption = Annotated[
    int | None,
    option(
        "--global-batch-size",
        "Examples of a round. Default: the largest batch of the model's file on every replica.",
        min=1,
    ),
]
AssumeOption = Annotated[
    list[str] | None,
    option("--assume KEY=VALUE", "What neither file says, such as network_share=0.6; may be given again."),
]


@command(_EXAMPLES, "simulating")
def simulate(
    answer: Answer,
    model: Annotated[Path, argument("MODEL", "A model's file: a profile (.json), or written by hand (.toml).")],
    cluster: ClusterFile,
    strategy: StrategyOption = "mirrored",
    workers: VirtualWorkersOption = None,
    global_batch_size: BatchSizeOption = None,
    accumulate: Annotated[int, option("--accumulate", "Micro-batches of a worker's share, one by one.", min=1)] = 1,
    assume: AssumeOption = None,
    run_dir: Annotated[Path | None, option("--run-dir DIR", "Write the events there, for `headrace report`.")] = None,
    force: ForceOption = False,
) -> None:
    """Simulate a strategy on machines that need not be there.

    It runs in virtual time. Schedules, shards and policies are those of real runs; nothing is trained, and no process
    is started.
    """
    check_strategies([strategy])
    # Lazily: they import torch.
    from headrace.prediction.simulation.simulate import simulate as run

    prediction = run(
        model,
        cluster,
        resolved(strategy, workers),
        global_batch_size=global_batch_size,
        accumulate=accumulate,
        assumptions=assumptions_of(assume or ()),
        run_dir=run_dir,
        force=force,
    )
    answer.give(prediction_plain(prediction), _text(prediction, run_dir))


@command(_REHEARSALS, "rehearsing the job")
def rehearse(
    answer: Answer,
    path: JobFile,
    strategy: Annotated[
        str | None,
        option("--strategy", "How it is distributed. Default: as the run of --from.", autocompletion=complete_strategy),
    ] = None,
    workers: VirtualWorkersOption = None,
    cluster: Annotated[
        Path | None, option("--cluster FILE|NAME:N", "As of `headrace simulate`. Default: machines like this one.")
    ] = None,
    model: Annotated[
        Path | None, option("--model FILE", "A profile of the job's model. Default: it is measured here.")
    ] = None,
    record: Annotated[Path | None, option("--from RUN", "A real run, whose order of events is taken.")] = None,
    seed: Annotated[int | None, option("--seed", "Of the variation of computing times. Default: 0.", min=0)] = None,
    assume: AssumeOption = None,
    alone: Annotated[bool, option("--alone/--no-alone", "Also train in one process, to compare with.")] = True,
    run_dir: RunDirOption = None,
    settings: SettingsOption = None,
    force: ForceOption = False,
) -> None:
    """Train as many workers would, in one process.

    Times are virtual, and gradients are real: the loss curve is that of so many workers, on that network.
    """
    refuse_launcher("rehearse")
    find_job(path)
    if not strategy:
        refuse_idle(answer.given("--workers"), "the run of --from has its own; leave it out")
    assumed = assumptions_of([*(assume or ()), *([] if seed is None else [f"seed={seed}"])])
    chosen = resolved(strategy, workers) if strategy else None
    job = load_job(path, settings or ())
    # Lazily: it imports torch.
    from headrace.api.rehearsal.rehearse import rehearse as run

    rehearsal = run(
        job,
        chosen,
        cluster,
        model=model,
        assumptions=assumed,
        from_run=record,
        run_dir=run_dir or default_run_dir(f"rehearsal-{job_name(path)}"),
        alone=alone,
        force=force,
        say=say,
    )
    answer.give(_rehearsal_plain(rehearsal), "\n".join(_rehearsal_lines(rehearsal)))


def assumptions_of(settings: Sequence[str]) -> Assumptions | None:
    """Returns the assumptions of texts like "network_share=0.6"; None without any.

    Raises:
        UsageError: there is no such assumption, or its value is not a Python literal.
    """
    # Lazily: it imports numpy.
    from headrace.prediction.assumptions import Assumptions

    known = [field.name for field in fields(Assumptions)]
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--assume takes KEY=VALUE, got {setting!r}")
        if key not in known:
            raise UnknownName("assumption", key, known)
        if key in values:
            raise UsageError(f"the assumption {key} is given twice; say it once")
        try:
            values[key] = text if key == "algorithm" else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise UsageError(f"--assume {key} takes a number, got {text!r}") from None
    return Assumptions(**values) if values else None


def prediction_plain(prediction: Prediction) -> dict[str, Any]:
    """Returns a prediction as JSON values."""
    failing = prediction.reliability
    return {
        "simulated": True,
        "strategy": prediction.strategy.name,
        "workers": prediction.workers,
        "servers": prediction.servers,
        "global_batch_size": prediction.global_batch_size,
        "examples_per_s": prediction.examples_per_s,
        "useful_examples_per_s": prediction.useful_examples_per_s,
        "step_s": prediction.step_s,
        "speed_up": prediction.speed_up,
        "efficiency": prediction.efficiency,
        "band": [prediction.band.low, prediction.band.high],
        "shares": dict(prediction.shares),
        "bottleneck": prediction.bottleneck,
        "moved_bytes_per_step": prediction.moved_bytes,
        "memory_bytes": prediction.memory_bytes,
        "server_bytes": prediction.server_bytes,
        "staleness": prediction.staleness,
        "hours_between_failures": failing.hours_between if failing else None,
        "checkpoint_every_s": failing.save_every_s if failing else None,
        "notes": list(prediction.notes),
    }


def _text(prediction: Prediction, run_dir: Path | None) -> str:
    devices = plural(prediction.workers, "worker")
    servers = f", {plural(prediction.servers, 'server')}" * bool(prediction.servers)
    low, high = (prediction.examples_per_s * factor for factor in (prediction.band.low, prediction.band.high))
    rows = [
        ("simulated", f"{prediction.strategy.name}, {devices}{servers}"),
        ("step", f"{prediction.global_batch_size} examples in {duration(prediction.step_s)}"),
        ("throughput", f"{short(prediction.examples_per_s)} examples/s, {short(low)} to {short(high)}"),
        ("speed-up", f"{prediction.speed_up:.2f} over one device with the same batch"),
        ("efficiency", f"{percent(prediction.efficiency)} of so many devices that each work alone"),
        ("time", ", ".join(f"{name} {percent(share)}" for name, share in prediction.shares.items())),
        ("bottleneck", prediction.bottleneck),
        ("moved", f"{byte_count(prediction.moved_bytes)} a step and worker, sent and received"),
        ("memory", f"{byte_count(prediction.memory_bytes)} on the fullest worker, without the runtime itself"),
    ]
    if prediction.server_bytes:
        rows.append(("", f"{byte_count(prediction.server_bytes)} on each server"))
    if prediction.staleness is not None:
        rows.append(("staleness", f"{prediction.staleness:.3g} updates on average"))
    if prediction.reliability is not None:
        failing = prediction.reliability
        rows.append(("failures", f"one in {failing.hours_between:.3g} hours"))
        rows.append(
            ("", f"save every {duration(failing.save_every_s)}; then {failing.useful:.1%} of the time is useful")
        )
    lines = [f"{name:<12}{value}" for name, value in rows]
    lines[3:3] = wrapped(str(prediction.band), "band        ", " " * 12)
    for note in prediction.notes:
        lines += wrapped(note, "note        ", " " * 12)
    return "\n".join([*lines, *[f"{'run dir':<12}{run_dir}"] * (run_dir is not None)])


def _rehearsal_plain(rehearsal: Rehearsal) -> dict[str, Any]:
    """Returns a rehearsal as JSON values."""
    run, alone = rehearsal.run, rehearsal.alone
    return {
        "rehearsed": True,
        "strategy": run.plan.strategy,
        "workers": run.plan.workers,
        "metrics": run.metrics,
        "virtual_s": rehearsal.virtual_s,
        "seconds": rehearsal.seconds,
        "memory_bytes": rehearsal.memory_bytes,
        "staleness": _staleness(run),
        "alone": None if alone is None else {"metrics": alone.metrics, "seconds": rehearsal.alone_s},
        "notes": list(rehearsal.notes),
        "run_dir": str(run.run_dir),
    }


def _staleness(run: Run) -> float | None:
    servers = run.summary.servers
    staleness = servers.staleness_of_all if servers is not None else None
    return staleness.mean if staleness is not None else None


def _rehearsal_lines(rehearsal: Rehearsal) -> Iterator[str]:
    """Yields the result beside that of one process, at most 80 columns wide."""
    run, alone = rehearsal.run, rehearsal.alone
    here = f"{run.plan.strategy}, {plural(run.plan.workers, 'worker')}"
    yield f"{'':<14}{here:>28}{'one process' * (alone is not None):>18}"
    for name in run.metrics:
        single = "" if alone is None or name not in alone.metrics else f"{alone.metrics[name]:.4g}"
        yield f"{clean(name)[:13]:<14}{run.metrics[name]:>28.4g}{single:>18}"
    beside = duration(rehearsal.alone_s) if alone is not None and rehearsal.alone_s else ""
    yield f"{'virtual time':<14}{duration(rehearsal.virtual_s):>28}{beside:>18}"
    staleness = _staleness(run)
    if staleness is not None:
        yield f"{'staleness':<14}{f'{staleness:.3g} updates on average':>28}"
    yield f"{'here':<14}{f'{duration(rehearsal.seconds)}, {byte_count(rehearsal.memory_bytes)}':>28}"
    for note in rehearsal.notes:
        yield from wrapped(note, "note          ", " " * 14)
    yield f"run dir: {run.run_dir}"
