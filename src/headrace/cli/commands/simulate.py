"""`headrace simulate`: what a strategy would take on machines that are only described."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, WorkersOption, check_strategies, complete_strategy, help_option
from headrace.cli.output import answering
from headrace.errors import UnknownName, UsageError
from headrace.report.format import byte_count, duration, percent, short

if TYPE_CHECKING:
    from headrace.prediction.simulation.scene import Assumptions
    from headrace.prediction.simulation.simulate import Prediction

_EXAMPLES = """
  headrace simulate model.toml --cluster cluster.toml --strategy mirrored
  headrace simulate model.json --cluster cluster.toml --strategy downpour
  headrace simulate model.json --cluster cluster.toml --run-dir runs/virtual
  headrace simulate model.json --cluster aws-g5.xlarge:8 --strategy mirrored
  headrace simulate model.json --cluster cluster.toml --assume network_share=0.5
"""

ModelFile = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A model's file: a profile (.json), or written by hand (.toml)."
    ),
]
ClusterFile = Annotated[
    Path,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME:N",
        show_default=False,
        help="The hosts and the links between them; or N machines of a cloud, aws-g5.xlarge:4.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Use a profile of other versions or of another kind of device.")
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch-size",
        min=1,
        show_default=False,
        help="Examples of a round. Default: the largest batch of the model's file on every replica.",
    ),
]
AssumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--assume",
        metavar="KEY=VALUE",
        show_default=False,
        help="What neither file says, such as network_share=0.6; may be given again.",
    ),
]


def simulate(
    model: ModelFile,
    cluster: ClusterFile,
    strategy: Annotated[
        str, typer.Option("--strategy", help="How it is distributed.", autocompletion=complete_strategy)
    ] = "mirrored",
    workers: WorkersOption = None,
    global_batch_size: BatchSizeOption = None,
    assume: AssumeOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", metavar="DIR", show_default=False, help="Write the events there, for `headrace report`."
        ),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Run a strategy in virtual time, on machines that need not be there.

    Schedules, shards and policies are those of real runs; nothing is trained, and no process is started.
    """
    with answering(as_json) as answer:
        check_strategies([strategy])
        # Lazily: they import torch.
        from headrace.prediction.simulation.simulate import simulate as run
        from headrace.strategies import resolve

        prediction = run(
            model,
            cluster,
            resolve(strategy, workers),
            global_batch_size=global_batch_size,
            assumptions=assumptions_of(assume or ()),
            run_dir=run_dir,
            force=force,
        )
        answer.give(prediction_plain(prediction), _text(prediction, run_dir))


def assumptions_of(settings: Sequence[str]) -> Assumptions:
    """Returns the assumptions of texts like "network_share=0.6".

    Raises:
        UsageError: there is no such assumption, or its value is not a Python literal.
    """
    # Lazily: it imports numpy.
    from headrace.prediction.simulation.scene import Assumptions

    known = [each.name for each in fields(Assumptions)]
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--assume takes KEY=VALUE, got {setting!r}")
        if key not in known:
            raise UnknownName("assumption", key, known)
        try:
            values[key] = text if key == "algorithm" else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise UsageError(f"--assume {key} takes a number, got {text!r}") from None
    return Assumptions(**values)


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
    devices = f"{prediction.workers} worker{'s' * (prediction.workers > 1)}"
    servers = f", {prediction.servers} server{'s' * (prediction.servers > 1)}" * bool(prediction.servers)
    rows = [
        ("simulated", f"{prediction.strategy.name}, {devices}{servers}"),
        ("step", f"{prediction.global_batch_size} examples in {duration(prediction.step_s)}"),
        ("throughput", f"{short(prediction.examples_per_s)} examples/s"),
        ("speed-up", f"{prediction.speed_up:.2f}, {percent(prediction.efficiency)} of so many devices alone"),
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
    rows += [("note", note) for note in prediction.notes]
    if run_dir is not None:
        rows.append(("run dir", str(run_dir)))
    return "\n".join(f"{name:<12}{value}" for name, value in rows)
