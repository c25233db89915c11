"""Rules for gradients by name."""

from __future__ import annotations

from headrace.aggregation.coded import CodedSum, is_codec
from headrace.aggregation.gradients import GradientAggregation
from headrace.aggregation.robust import WorkerMean
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.registry import Registry, is_place, placed
from headrace.spec.call import parse_call
from headrace.transport.codec import CODECS, Codec

_ROOM = "headrace.aggregation"

AGGREGATIONS: Registry[type[GradientAggregation]] = Registry(
    "headrace.aggregations",
    {
        "power_sgd": f"{_ROOM}.power_sgd:PowerSGD",
        "sign_sgd": f"{_ROOM}.sign_sgd:SignSGD",
        "top_k": f"{_ROOM}.top_k:TopK",
        "trimmed_mean": f"{_ROOM}.robust:TrimmedMean",
    },
    base=f"{_ROOM}.gradients:GradientAggregation",
)
"""Rules by name; other packages add theirs by entry points of the group `headrace.aggregations`."""


def aggregation_of(by: str | GradientAggregation) -> GradientAggregation:
    """Returns a rule by its name, with options if they are given, or the sum by a codec of that name.

    "power_sgd", "top_k(share=0.1)", "int8", "mine.py:Mine(size=3)", where `Mine` is a rule or a codec.

    Raises:
        UnknownName: there is none of that name.
        UsageError: it is something else, or has no such option.
    """
    if isinstance(by, GradientAggregation):
        return by
    if not isinstance(by, str):
        raise UsageError(f"by is a name ('power_sgd'), or a rule such as hr.PowerSGD(rank=2), got {by!r:.100}")
    call = parse_call(by)
    # Those of this package first: the others are asked for names that are unknown here alone.
    known = call.name in AGGREGATIONS.places
    if not known and (is_codec(call.name) or (is_place(call.name) and _makes(placed(call.name), Codec))):
        if call.values or call.options:
            raise UsageError(f"the codec {call.name} has no options; write by='{call.name}'")
        return CodedSum(call.name)
    if call.name not in AGGREGATIONS:
        raise UnknownName("aggregation", call.name, (*AGGREGATIONS, *CODECS))
    try:
        return AGGREGATIONS[call.name](*call.values, **call.options)
    except TypeError as error:
        raise UsageError(f"by={by!r} cannot be made: {error}") from error


def worker_mean(mean: str | WorkerMean | None) -> WorkerMean | None:
    """Returns a mean over workers by its name, or as it is; None for the usual, weighted one.

    Raises:
        UnknownName: there is none of that name.
        UsageError: it is another rule, or none.
    """
    if mean is not None and not isinstance(mean, str | WorkerMean):
        raise UsageError(f"mean is a name ('trimmed_mean'), an hr.WorkerMean or None, got {mean!r:.100}")
    rule = None if mean is None else aggregation_of(mean)
    if rule is not None and not isinstance(rule, WorkerMean):
        raise UsageError(
            f"mean is one over workers, element by element, as 'trimmed_mean' or an hr.WorkerMean, and {mean!r} sums "
            "gradients in another way; use hr.Aggregated(by=...)"
        )
    return rule


def require_workers(rule: GradientAggregation | None, workers: int) -> None:
    """Raises InfeasiblePlan if a mean needs more workers than there are."""
    if isinstance(rule, WorkerMean) and rule.fewest() > workers:
        raise InfeasiblePlan(
            f"{rule!r} needs {rule.fewest()} workers, and there are {workers}; use more workers, or trim fewer"
        )


def _makes(thing: object, kind: type) -> bool:
    return isinstance(thing, kind) or (isinstance(thing, type) and issubclass(thing, kind))
