"""`headrace profile`: what a job's model takes here; `plan`: what memory; `calibrate`: how well that predicts runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.cli.combinations import resolved
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
from headrace.cli.output import Answer, cut, say, wrapped, writing
from headrace.devices import AUTO, HOST
from headrace.errors import UsageError
from headrace.report.format import byte_count, clean, deviation, duration, fixed, percent, short
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    from headrace.prediction.calibration import Calibration
    from headrace.spec.compute import BatchProfile, LayerSpec, StepsToGoal
    from headrace.spec.job import Job
    from headrace.spec.model import ModelSpec

_EXAMPLES = """
  headrace profile job.py
  headrace profile job.py -o model.json --threads 1
  headrace profile job.py --batch-sizes 8,32,128 --seconds 3
  headrace profile job.py --goal "accuracy 0.9"
  headrace profile job.py --json | jq .compute.optimizer_s
"""

_PLANS = """
  headrace plan job.py
  headrace plan job.py --strategy mirrored --workers 4
  headrace plan job.py --strategy fully_sharded --workers 8 --json
"""

GoalOption = Annotated[
    str | None,
    option(
        "--goal TEXT", 'A metric of the evaluation and a number: "accuracy 0.9". Trains the job until it is reached.'
    ),
]

_NAME_WIDTH, _MOST_LAYERS = 32, 10


@command(_EXAMPLES, "measuring the job")
def profile(
    answer: Answer,
    path: JobFile,
    out: Annotated[
        Path | None,
        option("--out -o FILE.json", "Where the profile is written. Default: the job's name with .profile.json, here."),
    ] = None,
    device: DeviceOption = AUTO,
    threads: Annotated[
        int | None, option("--threads", "Of one process. Default: as many as the machine has cores.", min=1)
    ] = None,
    batch_sizes: Annotated[
        str, option("--batch-sizes N,N", "Measured beside the job's own, if they are below it.")
    ] = "1,4,16",
    seconds: Annotated[
        float, option("--seconds SECONDS", "How long each measurement takes.", min=0.01, max=MOST_SECONDS)
    ] = 1.0,
    goal: GoalOption = None,
    settings: SettingsOption = None,
) -> None:
    """Measure what a job's model takes.

    Forward and backward by batch size and by layer, the update, what a step costs besides, and the bytes that autograd
    keeps. The file that is written is what predictions start from. With a goal the job is trained until it is reached,
    and the noise of its gradients says how many steps other batch sizes would take.
    """
    refuse_launcher("profile")
    find_job(path)
    sizes = _sizes(batch_sizes)
    with job_on_engine(path, settings) as (job, engine):
        # Lazily: it imports torch.
        from headrace.api.model_profile import profile as measure

        # First, because it says soonest that it cannot be.
        to_goal = known_goal(job, goal, device)
        measured = measure(
            job,
            device=device,
            threads=threads,
            batch_sizes=sizes,
            seconds=seconds,
            engine=engine,
            say=lambda line: say(f"measuring {line}"),
        )
    measured = replace(measured, to_goal=to_goal)
    file = out or Path(f"{job_name(path)}.profile.json")
    with writing("the profile", file, "--out"):
        file.parent.mkdir(parents=True, exist_ok=True)
        measured.save(file)
    document = {**to_plain(measured), "file": str(file)}
    answer.give(document, "\n".join([*_lines(job_name(path), measured), f"profile: {file}"]))


def known_goal(job: Job, goal: str | None, device: str = AUTO) -> StepsToGoal | None:
    """Returns what a job takes to a goal, which it is trained to here; None without a goal."""
    if goal is None:
        return None
    # Lazily: it imports torch.
    from headrace.api.trials.goals import steps_to_goal

    say(f"training to {goal}")
    return steps_to_goal(job, goal, device=device)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batch-sizes takes numbers of at least 1 with commas between them, got {text!r}")
    return sizes


@command(_PLANS, "planning the job's memory")
def plan(
    answer: Answer,
    path: JobFile,
    strategy: StrategyOption = "one_device",
    workers: WorkersOption = None,
    settings: SettingsOption = None,
) -> None:
    """Find the memory that a job will need.

    The model is made and trained for three rounds, over tensors without values: a model of any size can be planned on
    any machine. Other options, and fully_sharded, are tried, too.
    """
    refuse_launcher("plan")
    find_job(path)
    check_strategies([strategy])
    chosen = resolved(strategy, workers)
    job = load_job(path, settings or ())
    # Lazily: it imports torch.
    from headrace.api.memory.planning import plan_memory

    found = plan_memory(job, chosen)
    answer.give({**to_plain(found), "peak": found.peak}, str(found))


def _lines(name: str, model: ModelSpec) -> Iterator[str]:
    compute = model.compute
    assert compute is not None  # a profile has measured
    elements = sum(parameter.elements for parameter in model.parameters)
    yield from wrapped(
        f"{name}: {model.name}, {short(elements)} parameters ({byte_count(model.parameter_bytes)}), "
        f"{model.origin['device']}, {compute.threads} thread{'s' * (compute.threads > 1)}"
    )
    yield ""
    besides_s = compute.optimizer_s + compute.fixed_s
    yield f"{'batch':>8}{'forward':>12}{'backward':>12}{'step':>12}{'examples/s':>14}{'activations':>16}"
    for batch in compute.batches:
        step_s = batch.forward_s + batch.backward_s + besides_s
        yield (
            f"{batch.examples:>8}{duration(batch.forward_s):>12}{duration(batch.backward_s):>12}"
            f"{duration(step_s):>12}{short(batch.examples / step_s):>14}{byte_count(batch.saved_bytes):>16}"
        )
    yield ""
    top = compute.batches[-1]
    yield from wrapped(
        f"A step of {top.examples} examples: forward {duration(top.forward_s)}, backward {duration(top.backward_s)}, "
        f"the update {duration(compute.optimizer_s)}, everything else {duration(compute.fixed_s)}; its time deviates "
        f"by {percent(compute.spread or 0.0)}. Each micro-batch after the first takes "
        f"{duration(compute.accumulate_s)} more, to add its gradients."
    )
    if model.flops_per_example:
        rate = top.examples * model.flops_per_example / top.forward_s
        yield from wrapped(
            f"Forward computes {model.flops_per_example / 1e6:,.3g} MFLOP an example, here {rate / 1e9:,.3g} GFLOP/s."
        )
    yield ""
    yield from _layer_lines(top)
    if model.to_goal is not None:
        yield from wrapped(_goal_text(model.to_goal))
    if "disturbed" in model.origin:
        yield from wrapped(
            f"NOT IDLE: {model.origin['disturbed']}. The quickest steps count; profile again when nothing else runs."
        )


def _goal_text(known: StepsToGoal) -> str:
    # Lazily: only a goal needs it.
    from headrace.prediction.steps_to_goal import steps_at

    low, high = (known.global_batch_size // 2 or 1, 2 * known.global_batch_size)
    return (
        f"To {known.goal}: {known.steps:,} steps of {known.global_batch_size:,} examples, measured; the critical batch "
        f"is {round(known.critical_batch):,} examples, so that batches of {low:,} would take "
        f"{steps_at(known, low):,} steps, of {high:,} {steps_at(known, high):,}, each with its best learning rate."
    )


def _layer_lines(batch: BatchProfile) -> Iterator[str]:
    layers = batch.layers
    if not layers:
        yield "The model cannot be cut between its layers; it was measured as a whole."
        return
    slowest = sorted(layers, key=_seconds, reverse=True)[:_MOST_LAYERS]
    total = sum(map(_seconds, layers))
    title = f"{len(slowest)} slowest of {len(layers)} layers"
    yield f"{title:{_NAME_WIDTH}}{'forward':>11}{'backward':>11}{'part':>8}{'parameters':>18}"
    for layer in slowest:
        part = percent(_seconds(layer) / total) if total else ""
        yield (
            f"{cut(clean(layer.name), _NAME_WIDTH):{_NAME_WIDTH}}"
            f"{duration(layer.forward_s):>11}{duration(layer.backward_s):>11}"
            f"{part:>8}{byte_count(layer.parameter_bytes):>18}"
        )
    forward_s, backward_s = (sum(getattr(layer, name) for layer in layers) for name in ("forward_s", "backward_s"))
    yield f"{'all, each by itself':{_NAME_WIDTH}}{duration(forward_s):>11}{duration(backward_s):>11}"
    yield ""


def _seconds(layer: LayerSpec) -> float:
    return layer.forward_s + layer.backward_s


_CALIBRATE_EXAMPLES = """
  headrace calibrate runs/a runs/b --model model.json --cluster cluster.toml
  headrace calibrate runs/* --model model.json --cluster cluster.toml --out b
"""


@command(_CALIBRATE_EXAMPLES, "comparing runs with predictions")
def calibrate(
    answer: Answer,
    runs: Annotated[list[Path], argument("RUN_DIR", "Runs of the profile's job.")],
    model: Annotated[Path, option("--model FILE", "The profile, or a model's file.")],
    cluster: Annotated[
        Path | None, option("--cluster FILE|NAME:N", "The machines of the runs, instead of this.")
    ] = None,
    out: Annotated[Path | None, option("--out -o DIR", "Write model.json and cluster.toml as the runs say.")] = None,
    force: Annotated[bool, option("--force", "Use a profile of other versions or devices.")] = False,
) -> None:
    """Compare measured runs with what is predicted of them.

    Two constants are fitted: how long the profile's times are, and how fast the links are. Each run is predicted with
    constants of the other runs alone.
    """
    # Lazily: they import torch.
    from headrace.machine.identity import detect
    from headrace.prediction.calibration import calibrate as fit
    from headrace.prediction.cloud import cluster_of
    from headrace.spec.model import ModelSpec

    profiled = ModelSpec.load(model)
    kind = HOST if profiled.origin.get("device", HOST) == HOST else AUTO
    machines = cluster_of(cluster) if cluster else detect(kind)
    calibration = fit(runs, profiled, machines, force=force)
    if out:
        with writing("the profile", out / "model.json", "--out"):
            out.mkdir(parents=True, exist_ok=True)
            calibration.constants.model(profiled).save(out / "model.json")
        (out / "cluster.toml").write_text(calibration.constants.cluster(machines).toml(), encoding="utf-8")
    document = {
        "compute": calibration.constants.compute,
        "network": calibration.constants.network,
        "runs": [
            {
                "run": run.run,
                "strategy": run.strategy.name,
                "measured_per_s": run.measured,
                "predicted_per_s": run.predicted,
                "calibrated_per_s": run.calibrated,
            }
            for run in calibration.runs
        ],
        "left_out": dict(calibration.left_out),
    }
    answer.give(document, "\n".join(_calibration_lines(calibration, out)))


def _calibration_lines(calibration: Calibration, out: Path | None) -> Iterator[str]:
    yield f"{'examples/s':<30}{'measured':>10}{'predicted':>11}{'error':>9}{'calibrated':>12}{'error':>8}"
    for row in calibration.runs:
        calibrated = short(row.calibrated)
        yield (
            f"{cut(clean(row.run), 29):<30}{short(row.measured):>10}{short(row.predicted):>11}"
            f"{_error(row.predicted, row.measured):>9}{calibrated:>12}{_error(row.calibrated, row.measured):>8}"
        ).rstrip()
    yield ""
    constants = calibration.constants
    network = f"; the links are {fixed(constants.network)} x as fast" if constants.network else ""
    yield from wrapped(f"The profile's times are {fixed(constants.compute)} x as long{network}.")
    if constants.network is None:
        yield from wrapped("These runs do not say how fast the links are: their time does not depend on it.")
    if len(calibration.runs) > 1:
        yield from wrapped("Each run is calibrated with constants of the other runs alone.")
    for run, why in calibration.left_out.items():
        yield from wrapped(f"left out: {run}: {why}")
    if out:
        yield f"calibrated: {out / 'model.json'}, {out / 'cluster.toml'}"


def _error(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else deviation(predicted, measured)
