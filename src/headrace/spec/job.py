"""The job, which is the same under every strategy, and one worker's share of its data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from headrace.errors import UsageError
from headrace.spec.notebook.shown import ShownAsTable
from headrace.spec.options import Options, require_count
from headrace.spec.parameter_sets import ParameterSet, TurnOrder, as_sets, check_sets, loss_name
from headrace.spec.patterns import require_name

if TYPE_CHECKING:
    from torch import nn

    from headrace.spec.weights import Weights

_NOT_GIVEN = -(2**63)
"""In the place of a number that a job must have."""


class JobSource(Struct, frozen=True, forbid_unknown_fields=True):
    """A job file: its absolute path, and "key=value" for what its `job(...)` was called with."""

    path: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job(ShownAsTable):
    """One training, whatever it runs on.

    Attributes:
        model: builds the model, or is one, whose weights then start the run.
        optimizer: takes named parameters (or parameters), returns a `torch.optim.Optimizer`:
            `functools.partial(torch.optim.SGD, lr=0.1)`. Or a dict of sets of parameters that are trained in turns, by
            name: an optimizer for the parameters of the part of the model with that name, or an `hr.ParameterSet`.
        data: an `hr.data` pipeline or source, a torch `Dataset` or `DataLoader`, or a tuple of tensors or arrays.
        global_batch_size: examples that all workers together take in one round.
        task: loss, prediction and metrics in one, from `hr.tasks`; or give `loss`.
        loss: `loss(output, target)` returns a scalar, the mean over the batch, or an `hr.Mean`. With several sets of
            parameters a dict: set to `loss(model, batch)`.
        metrics: name to `metric(output, target)`, returning a scalar mean or an `hr.Mean`, or to an object of
            torchmetrics.
        eval_data: what metrics are computed on, in the forms of `data`; or a dict of several such sets by name: the
            first is evaluated as one alone is, and the metrics of the others begin with their names, "test/loss".
        epochs: visits of every example; or give `steps`.
        steps: rounds, where `epochs` is None.
        seed: fixes initialisation, order and augmentation.
        options: see `Options`.
        inputs: selects the model's input from a batch: a key or index, which becomes one argument; several keys,
            which become keywords, or indices, which become positional arguments; or a function, whose result is one
            argument. By default a pair is (input, target), and a dict goes to the model as keywords.
        target: selects what the loss and the metrics get, likewise. By default the second of a pair, or the
            whole dict.
        weights: a folder of safetensors files, one such file, or the URL of either, whose tensors are the model's first
            values, by the names of its `state_dict()`; a folder may have a `model.safetensors.index.json`. An
            `hr.Weights` has names that differ. None for the values that `model` gives.
        callbacks: what rank 0 calls at named moments, before those that `fit` is given; see `hr.Callback`.
        source: the file that it was read from, for commands that read it again; None where a program made it.

    Raises:
        UsageError: two arguments exclude each other, or one is of another kind.

    Examples:
        >>> inputs = torch.randn(64, 4)
        >>> job = hr.Job(
        ...     model=lambda: torch.nn.Linear(4, 2),
        ...     task=hr.tasks.multiclass(2),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     data=(inputs, (inputs.sum(1) > 0).long()),
        ...     global_batch_size=16,
        ...     epochs=3,
        ... )
        >>> hr.fit(job).summary.steps
        12
    """

    model: Callable[[], nn.Module] | nn.Module
    optimizer: Callable[..., Any] | Mapping[str, ParameterSet | Callable[..., Any]]
    data: Any = field(default=None, repr=False)
    global_batch_size: int = _NOT_GIVEN
    task: Any = None
    loss: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    eval_data: Any = field(default=None, repr=False)
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    options: Options = field(default_factory=Options)
    inputs: Any = None
    target: Any = None
    weights: str | os.PathLike[str] | Weights | None = None
    source: JobSource | None = None
    callbacks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.data is None:
            raise UsageError(
                "a job needs data=: a tuple of tensors (inputs, targets), a Dataset, a DataLoader, or a pipeline of "
                "hr.data"
            )
        if self.global_batch_size == _NOT_GIVEN:
            raise UsageError("a job needs global_batch_size=: the examples that all workers together take in one round")
        if isinstance(self.optimizer, Mapping) and self.task is not None:
            raise UsageError(
                "a task has one loss, and optimizer has several sets of parameters; give loss={set: function, ...} and "
                "metrics={...} in its place"
            )
        if (self.task is None) == (self.loss is None):
            raise UsageError("a job has either a task (hr.tasks.multiclass(10)) or a loss, not both or neither")
        if (self.epochs is None) == (self.steps is None):
            raise UsageError(f"give either epochs or steps, got epochs={self.epochs}, steps={self.steps}")
        for name in ("global_batch_size", "epochs", "steps"):
            if name == "global_batch_size" or getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise UsageError(f"seed must be a whole number from 0 to 2**32 - 1, got {self.seed!r}")
        self._check_callables()
        if self.metrics is not None and not isinstance(self.metrics, Mapping):
            raise UsageError(f"metrics must be a dict of names to functions, got {type(self.metrics).__name__}")
        if taken := [name for name in self.metrics or () if name in ("loss", *map(loss_name, self.sets))]:
            raise UsageError(f"evaluations have the job's loss as {taken[0]!r}; give the metric another name")
        if self.weights is not None:
            from headrace.spec.weights import Weights

            Weights.of(self.weights)
        if not isinstance(self.options, Options):
            raise UsageError(f"options must be hr.Options(...), got {type(self.options).__name__}")
        for name in self.eval_sets:
            if name:
                require_name(name)
            if taken := [metric for metric in self.metrics or () if name and metric.startswith(name)]:
                raise UsageError(f"the metrics of an evaluation set begin with {name!r}; call {taken[0]!r} otherwise")

    @property
    def sets(self) -> dict[str, ParameterSet]:
        """The sets of parameters that are trained in turns, by name; {} where one optimizer has all."""
        return as_sets(self.optimizer)

    @property
    def eval_sets(self) -> dict[str, Any]:
        """Sets to evaluate on, by what the names of their metrics begin with: "" for the first, "test/"; {} for none.

        A dict of tensors or arrays is one set: its examples are dicts.
        """
        data = self.eval_data
        if isinstance(data, Mapping) and data and not any(_is_array(each) for each in data.values()):
            return {f"{name}/" if place else "": each for place, (name, each) in enumerate(data.items())}
        return {} if data is None else {"": data}

    @property
    def turns(self) -> TurnOrder | None:
        """Which set is trained in which round; None where one optimizer has all parameters."""
        sets = self.sets
        return TurnOrder({name: chosen.rounds for name, chosen in sets.items()}) if sets else None

    def _check_callables(self) -> None:
        if not callable(self.model):
            raise UsageError(f"model must be callable, got {_shown(self.model)}; give a function that builds one")
        if isinstance(self.optimizer, Mapping):
            check_sets(self.optimizer, self.loss)
            return
        if not callable(self.optimizer):
            raise UsageError(
                f"optimizer must be callable, got {_shown(self.optimizer)}; give what makes one of the parameters, for "
                "example functools.partial(torch.optim.SGD, lr=0.1)"
            )
        if isinstance(self.loss, Mapping):
            raise UsageError(
                f"there is a loss for each of {', '.join(map(str, self.loss))}, and one optimizer; give optimizer="
                "{set: function, ...} with the same sets"
            )


def _is_array(value: object) -> bool:
    return getattr(value, "dtype", None) is not None


def _shown(value: object) -> str:
    """Returns the start of a value's text in one line: an optimizer's has many."""
    return f"{' '.join(repr(value).split()):.60}"


@dataclass(frozen=True)
class Share:
    """One worker's part of one global batch.

    Attributes:
        batch: a tree of tensors `(examples, ...)`; of length 0 where the last batch had none for this worker.
        examples: of this worker.
        of: examples of the global batch.
        epoch: counted from 0.
        round: counted from 0 over the whole run, where its number matters.
        asked: examples that this worker had to read, of which a filter or a collate function may leave out some.
    """

    batch: Any
    examples: int
    of: int
    epoch: int
    round: int = 0
    asked: int = 0
