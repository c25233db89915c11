"""Sets of a model's parameters that are trained in turns, each by an optimizer of its own on a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from headrace.errors import UsageError
from headrace.spec.options import Options, require_count
from headrace.spec.patterns import require_matches


@dataclass(frozen=True)
class ParameterSet:
    """Parameters that one of a job's several optimizers trains: `Job(optimizer={"generator": hr.ParameterSet(...)})`.

    The sets take turns: in each round one of them is trained, on its own loss, and the others stay as they are.

    Attributes:
        optimizer: as in `Job`; it gets the parameters of the set.
        patterns: of their names, as in a shell; () for all parameters of the part of the model that has the set's name.
        rounds: how many rounds in a row its turn lasts.
        schedule, warmup: as in `Options`, counted in rounds of its own; None for those of the job's options.
        clip_norm: the largest norm of the set's gradient; None for that of the job's options.

    Examples:
        >>> from dataclasses import replace
        >>> def sgd(named): return torch.optim.SGD(named, lr=0.1)
        >>> def loss(model, batch): return model(batch[0]).square().mean()
        >>> sets = {"first": hr.ParameterSet(sgd, ["0.*"]), "last": hr.ParameterSet(sgd, ["2.*"], rounds=3)}
        >>> hr.fit(replace(job, task=None, optimizer=sets, loss={"first": loss, "last": loss})).status
        'ok'
    """

    optimizer: Callable[..., Any]
    patterns: Sequence[str] = ()
    rounds: int = 1
    schedule: Callable[..., Any] | None = None
    warmup: int | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise UsageError(f"a set's optimizer must be callable, got {self.optimizer!r:.60}")
        if isinstance(self.patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in self.patterns):
            raise UsageError(
                f"patterns are a list of names or patterns such as ['critic.*'], got {self.patterns!r:.60}"
            )
        require_count("rounds", self.rounds)
        # They are checked as options are.
        self.options(Options())

    def options(self, options: Options) -> Options:
        """Returns the options that the set is trained with, from those of the job."""
        given = {name: getattr(self, name) for name in ("schedule", "warmup", "clip_norm")}
        return replace(options, **{name: value for name, value in given.items() if value is not None})


class TurnOrder:
    """Which set of parameters is trained in which round: one after the other, each for its rounds, again and again."""

    def __init__(self, rounds: Mapping[str, int]) -> None:
        self._rounds = dict(rounds)
        self._cycle = [(name, index) for name, count in rounds.items() for index in range(count)]

    def at(self, round_: int) -> str:
        """Returns the set that is trained in a round, counted from 0."""
        return self._cycle[round_ % len(self._cycle)][0]

    def own_round(self, round_: int) -> int:
        """Returns how many rounds before this one its set was trained in."""
        cycles, place = divmod(round_, len(self._cycle))
        name, index = self._cycle[place]
        return cycles * self._rounds[name] + index


def as_sets(optimizer: object) -> dict[str, ParameterSet]:
    """Returns the sets of a job's `optimizer`, by name in the order of their turns; {} where it is one optimizer."""
    if not isinstance(optimizer, Mapping):
        return {}
    return {name: one if isinstance(one, ParameterSet) else ParameterSet(one) for name, one in optimizer.items()}


def check_sets(optimizer: Mapping[str, object], loss: object) -> None:
    """Raises UsageError unless there is an optimizer and a loss for each set."""
    if not optimizer:
        raise UsageError("optimizer is a dict without an entry; name the sets of parameters that are trained")
    for name, value in optimizer.items():
        if not isinstance(name, str) or not name.replace("_", "").isalnum():
            raise UsageError(f"a set of parameters has a name of letters, digits and _, got {name!r:.60}")
        if not (isinstance(value, ParameterSet) or callable(value)):
            raise UsageError(f"the optimizer of {name!r} must be callable or an hr.ParameterSet, got {value!r:.60}")
    if not isinstance(loss, Mapping):
        raise UsageError(
            f"optimizer has {len(optimizer)} sets of parameters, {', '.join(optimizer)}, and each needs a loss of its "
            f"own; give loss={{{next(iter(optimizer))!r}: function, ...}}, functions of the model and a batch"
        )
    for name in loss:
        if name not in optimizer:
            raise UsageError(f"there is a loss for {name!r}, and optimizer has the sets {', '.join(optimizer)} alone")
    for name in optimizer:
        if name not in loss:
            raise UsageError(f"there is no loss for the set {name!r} of optimizer; add it to loss={{...}}")
        if not callable(loss[name]):
            raise UsageError(f"the loss of {name!r} must be callable, got {loss[name]!r:.60}")


def divide(
    sets: Mapping[str, ParameterSet], parameters: Mapping[str, Sequence[str]], frozen: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Returns the names of each set's parameters.

    Args:
        parameters: every trained parameter by its name, with all the names that it has; tied ones have several.
        frozen: names of the other parameters, which patterns may fit.

    Raises:
        UnknownName: a pattern fits no parameter.
        UsageError: a parameter is in two sets, or in none.
    """
    patterns = {name: tuple(chosen.patterns) or (f"{name}.*",) for name, chosen in sets.items()}
    known = [*(alias for aliases in parameters.values() for alias in aliases), *frozen]
    for fitting in patterns.values():
        require_matches(fitting, known)
    members: dict[str, list[str]] = {name: [] for name in sets}
    for parameter, aliases in parameters.items():
        holders = [
            name
            for name, fitting in patterns.items()
            if any(fnmatchcase(alias, pattern) for alias in aliases for pattern in fitting)
        ]
        if len(holders) > 1:
            tied = f" (it is tied: {', '.join(aliases)})" if len(aliases) > 1 else ""
            raise UsageError(
                f"the parameter {parameter!r} is in the sets {' and '.join(holders)}{tied}; each is trained by one "
                "optimizer: make the patterns of one narrower"
            )
        if not holders:
            raise UsageError(
                f"the parameter {parameter!r} is in none of the sets {', '.join(sets)}; add a pattern for it "
                "(hr.ParameterSet(optimizer, patterns=[...])), or freeze it: hr.frozen(model, ...)"
            )
        members[holders[0]].append(parameter)
    return {name: tuple(names) for name, names in members.items()}


def loss_name(name: str) -> str:
    """Returns what the loss of a set is called in evaluations and curves."""
    return f"loss/{name}"


def one_optimizer(optimizer: object, what: str) -> Callable[..., Any]:
    """Returns a job's optimizer. Raises UsageError where there are several, which `what` cannot work with."""
    if isinstance(optimizer, Mapping):
        raise UsageError(
            f"{what} is for a job with one optimizer, and this one trains {len(optimizer)} sets of parameters in "
            f"turns: {', '.join(optimizer)}; try one of them alone, the others frozen by hr.frozen"
        )
    assert callable(optimizer)
    return optimizer
