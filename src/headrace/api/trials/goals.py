"""steps_to_goal: trains a job on one device until its goal, and measures the noise of its gradients meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.api.checks import inspect_job
from headrace.api.fit import launch
from headrace.batches import examples_of
from headrace.engine.threads import ThreadEngine
from headrace.errors import JobError, UsageError
from headrace.modules import copy_module
from headrace.prediction.steps_to_goal import MetricGoal, of_run
from headrace.spec.compute import StepsToGoal
from headrace.spec.job import Job, Share
from headrace.spec.options import Options
from headrace.spec.parameter_sets import one_optimizer
from headrace.strategies import OneDevice
from headrace.training.whole_model import WholeModel, cut
from headrace.worker.session import objective_of
from headrace.worker.worker import Worker

_PIECES = 8
"""A batch is cut into so many at most, whose gradients are compared with the whole batch's."""
_PARTS = 10
"""Of the run, each with a noise scale of its own."""
_EACH = 64
"""Steps before the noise of each is measured; then of every second one until twice as many, and so on."""
_EVALUATIONS = 100
"""In the job's own steps, at most, where its options do not say when it evaluates."""


def steps_to_goal(
    job: Job, goal: str, *, device: str = "auto", say: Callable[[str], object] = lambda line: None
) -> StepsToGoal:
    """Trains a copy of a job's model on one device until an evaluation reaches a goal.

    It trains as the job says, with its steps at most. The noise of the gradients is that between micro-batches of one
    batch, in a copy of the model: nothing of the training changes by it. It takes up to twice a step's time in the
    first steps.

    Args:
        job: what would be trained; it needs evaluation data and a global batch of at least 2.
        goal: "accuracy 0.9": a metric of its evaluation, or "loss", and a number.
        device: as for `fit`.
        say: is told what was evaluated.

    Raises:
        UsageError: the goal is none, is met before training, or is not reached; or options change the gradient's scale.
        DataError, JobError, RunFailed: as for `fit`.

    Examples:
        >>> found = hr.steps_to_goal(job, "loss 0.67", device="cpu")
        >>> found.global_batch_size
        16
    """
    wanted = MetricGoal.of(goal)
    one_optimizer(job.optimizer, "a goal")
    _require(job)
    info = inspect_job(job)
    measuring = _Measuring(job, wanted, copy_module(info.module), info.weighed, say)
    options = replace(job.options, early_stopping=None)
    run = launch(
        measuring.train,
        replace(job, options=options),
        OneDevice(),
        device=device,
        engine=ThreadEngine(),
        checkpoints=False,
        check=False,
    )
    if measuring.steps is None:
        raise UsageError(
            f"the goal {wanted} is not reached: the job's {run.summary.steps} steps end with {wanted.metric} "
            f"{measuring.value:g}; give the job more epochs, or a nearer goal"
        )
    return of_run(wanted, job.global_batch_size, measuring.steps, list(measuring.parts()))


def _require(job: Job) -> None:
    if job.eval_data is None:
        raise UsageError("a goal is a number of the evaluation, and the job has no eval_data; give it some")
    if job.global_batch_size < 2:
        raise UsageError(
            "the noise of gradients is measured within a batch, and global_batch_size is 1; take 2 or more"
        )


class _Measuring:
    """The loop, and what it has seen; `steps` is None until the goal is met."""

    def __init__(
        self, job: Job, goal: MetricGoal, module: nn.Module, weighed: bool, say: Callable[[str], object]
    ) -> None:
        self.steps: int | None = None
        self.value = float("nan")
        self._goal, self._say, self._size = goal, say, job.global_batch_size
        self._pieces = _pieces_of(self._size)
        self._module = module
        # Clipping and loss scaling come after the gradients that are compared.
        options = Options(precision=job.options.precision)
        self._compute = WholeModel(module, objective_of(job, module, weighed), options=options)
        self._seen: list[tuple[int, float, float]] = []
        self._rises = True
        self._every: int | None = job.options.eval_every

    def train(self, worker: Worker) -> None:
        self._module.to(worker.device)
        if self._every is None:
            self._every = max(1, worker.rounds // _EVALUATIONS)
        if self._is_met(worker.evaluate(), first=True):
            raise UsageError(f"the goal {self._goal} is met before training; name a harder one")
        for step, batch in enumerate(worker.batches()):
            if step % (1 + step // _EACH) == 0 and examples_of(batch) == self._size:
                self._seen.append((step, *self._compare(worker.model, batch)))
            worker.step(batch)
            if (step + 1) % self._every == 0 and self._is_met(worker.evaluate()):
                self.steps = step + 1
                return

    def parts(self) -> Iterator[tuple[float, float]]:
        """Yields of equal parts of the run the means of the steps that were measured."""
        assert self.steps is not None
        parts = min(_PARTS, len(self._seen))
        groups: list[list[tuple[float, float]]] = [[] for _ in range(parts)]
        for step, signal, spread in self._seen:
            groups[step * parts // self.steps].append((signal, spread))
        for group in filter(None, groups):
            signals, spreads = zip(*group, strict=True)
            yield sum(signals) / len(group), sum(spreads) / len(group)

    def _is_met(self, metrics: dict[str, float], first: bool = False) -> bool:
        if self._goal.metric not in metrics:
            raise UsageError(f"the goal {self._goal}: evaluations have {', '.join(metrics)}; name one of these")
        self.value = metrics[self._goal.metric]
        if first:
            self._rises = self.value < self._goal.value
            return self.value == self._goal.value
        self._say(f"{self._goal.metric} {self.value:g}")
        return self.value >= self._goal.value if self._rises else self.value <= self._goal.value

    def _compare(self, model: nn.Module, batch: Any) -> tuple[float, float]:
        """Returns the square of the norm of the gradient without noise, and the trace of an example's covariance.

        Unbiased, from the squares of the norms of the micro-batches' gradients and of their mean.
        """
        self._module.load_state_dict(model.state_dict())
        small, pieces, size = 0.0, self._pieces, self._size // self._pieces
        total: list[Tensor] = []
        with torch.random.fork_rng():
            for start in range(0, self._size, size):
                self._module.zero_grad()
                piece = cut(batch, start, start + size, self._size, "a goal")
                self._compute.run(Share(piece, size, size, 0))
                gradients = [each.grad for each in self._module.parameters() if each.grad is not None]
                if any(each.is_sparse for each in gradients):
                    raise JobError("the noise of sparse gradients is not measured; use dense embeddings for a goal")
                small += float(sum(each.double().square().sum() for each in gradients)) / pieces
                if not total:
                    total = [torch.zeros_like(each, dtype=torch.float64) for each in gradients]
                for mean, each in zip(total, gradients, strict=True):
                    mean += each / pieces
        large = float(sum(each.square().sum() for each in total))
        return (pieces * large - small) / (pieces - 1), (small - large) * self._size / (pieces - 1)


def _pieces_of(size: int) -> int:
    """Returns into how many equal micro-batches a batch is cut."""
    fits = [count for count in range(2, min(size, _PIECES) + 1) if size % count == 0]
    # Of a prime number each example is one.
    return max(fits, default=size)
