"""The models that are exported: those of the examples, each trained for a few steps."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

import headrace as hr
from headrace.cli.jobfile import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cnn": ("fashion_mnist/job.py", ()),
    "AlexNet": ("alexnet_two_devices/job.py", ()),
    "char LSTM": ("char_lstm/job.py", ()),
    "transformer": ("transformer_lm/job.py", ()),
    "recommender, candidates": ("youtube_recommender/job.py", ("data=generated",)),
    "recommender, ranking": ("youtube_recommender/ranking.py", ("data=generated",)),
}
"""The job files and their settings."""
_STEPS, _BATCH = 20, 32
_EVALUATED = 2_000


@dataclass(frozen=True)
class Trained:
    """A job with its evaluation set, and the model after a few steps."""

    job: hr.Job
    model: nn.Module


def trained(name: str) -> Trained:
    """Returns a model of the zoo, trained on one device."""
    path, settings = JOBS[name]
    job = load_job(EXAMPLES / path, settings)
    if isinstance(job.eval_data, tuple):
        # Metrics of quantized models take the whole of it.
        job = replace(job, eval_data=tuple(_first(each) for each in job.eval_data))
    short = replace(job, eval_data=None, epochs=None, steps=_STEPS, global_batch_size=_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        model = hr.fit(short, run_dir=Path(folder) / "run").model
    return Trained(job, model.eval())


def _first(values: Tensor) -> Tensor:
    return values[:_EVALUATED]
