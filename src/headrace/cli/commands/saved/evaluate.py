"""`headrace evaluate`: loss and metrics of a trained model, or of one of its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from headrace.cli.command import argument, command, option
from headrace.cli.commands.saved.job_of_run import job_of_run
from headrace.cli.options import SettingsOption
from headrace.cli.output import Answer
from headrace.errors import UsageError

_EXAMPLES = """
  headrace evaluate runs/a
  headrace evaluate runs/a/checkpoints/step-00000120
  headrace evaluate runs/a --job with_test_set.py --json | jq .metrics
"""
_ONE = re.compile(r"step-([0-9]{8,18})")


@command(_EXAMPLES, "evaluating the model")
def evaluate(
    answer: Answer,
    path: Annotated[Path, argument("PATH", "The directory of a run, or one checkpoint of it.")],
    step: Annotated[int | None, option("--step N", "Of a checkpoint of the run.", min=0)] = None,
    job_file: Annotated[Path | None, option("--job JOB.py", "Another job with the same model.")] = None,
    settings: SettingsOption = None,
) -> None:
    """Evaluate a trained model without training it.

    In one process, over the whole of each set that the job evaluates on, each example once.
    """
    one = _ONE.fullmatch(path.resolve().name)
    if one and step is not None:
        raise UsageError(f"{path} is one checkpoint, and --step {step} names one, too; leave one of them out")
    if one:
        path, step = path.resolve().parent.parent, int(one[1])
    job = job_of_run(path, job_file, settings, otherwise="read run.metrics in the program")
    # Lazily: it imports torch.
    from headrace.api.exporting import evaluate_run

    at, metrics = evaluate_run(job, path, step)
    width = max(map(len, metrics))
    text = "\n".join(f"{name:<{width}}  {value:.6g}" for name, value in metrics.items())
    answer.give({"step": at, "metrics": metrics}, text)
