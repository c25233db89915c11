"""What `headrace recommend --goal` says besides: the batch sizes, and when the rehearsed choices reach the goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.jobfile import load_job
from headrace.cli.output import cut, say, wrapped
from headrace.report.format import duration, short
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    from headrace.api.trials.goal_rehearsal import RehearsedChoice
    from headrace.prediction.recommendation.goals import BatchChoice, GoalRecommendation
    from headrace.spec.cluster import Cluster
    from headrace.spec.model import ModelSpec

_WIDTH = 80


def rehearsed(
    path: Path,
    settings: list[str] | None,
    reached: GoalRecommendation,
    machines: Cluster,
    known: ModelSpec | Path,
    asked: Mapping[str, Any],
) -> list[RehearsedChoice]:
    # Lazily: it imports torch.
    from headrace.api.trials.goal_rehearsal import rehearse_goal

    job, given = load_job(path, settings or ()), {key: asked[key] for key in ("assumptions", "force")}
    return rehearse_goal(job, reached, machines, model=known, say=say, **given)


def batch_lines(reached: GoalRecommendation) -> Iterator[str]:
    priced = any(each.advice.winner.money for each in reached.choices)
    yield f"{'batch':>9}{'steps':>10}{'examples':>13}{'time':>14}{'money':>10}"[: 56 if priced else 46] + "  with"
    for each in reached.choices:
        winner, mark = each.advice.winner, " *" if each is reached.best else ""
        money = f"{short(winner.money):>10}" if priced else ""
        times = f"{each.batch * each.steps:>13,}{duration(winner.seconds):>14}{money}"
        yield cut(f"{each.batch:>9,}{each.steps:>10,}{times}  {winner.text}{mark}", _WIDTH)
    for batch, why in reached.unfit:
        yield from wrapped(f"{batch:>9,}  does not fit: {why}", "", "           ")


def rehearsed_lines(tried: Sequence[RehearsedChoice]) -> Iterator[str]:
    """Yields when the rehearsed choices reach the goal; the best of them may be another than the predicted one."""
    if not tried:
        return
    yield ""
    yield f"{'rehearsed':>9}{'steps':>10}{'predicted':>13}{'time':>14}  with"
    for each in tried:
        choice, steps = each.choice, "never" if each.steps is None else f"{each.steps:,}"
        took = "" if each.seconds is None else duration(each.seconds)
        yield cut(
            f"{choice.batch:>9,}{steps:>10}{choice.steps:>13,}{took:>14}  {choice.advice.winner.text}"
            f"{', as one device' if each.as_one_device else ''}",
            _WIDTH,
        )
        if each.why_ended:
            yield from wrapped(each.why_ended, "           ", "           ")
    met = [each for each in tried if each.seconds is not None]
    first = min(met, key=lambda each: each.seconds or 0.0, default=None)
    if first is None:
        # Lazily: it imports torch.
        from headrace.api.trials.goal_rehearsal import LONGER

        yield from wrapped(
            f"None reaches the goal within {LONGER:g} times the predicted steps: use another --rate-rule."
        )
    elif first is not tried[0]:
        text = first.choice.advice.winner.text
        yield from wrapped(f"Rehearsed, batches of {first.choice.batch:,} with {text} reach the goal first.")


def goal_plain(reached: GoalRecommendation | None, tried: Sequence[RehearsedChoice]) -> dict[str, Any]:
    if reached is None:
        return {}
    rehearsed = [
        {
            "batch": each.choice.batch,
            "strategy": each.choice.advice.winner.text,
            "steps": each.steps,
            "seconds": each.seconds,
            "curve": [list(point) for point in each.curve],
            "as_one_device": each.as_one_device,
            "why_ended": each.why_ended,
        }
        for each in tried
    ]
    plain = {"goal": to_plain(reached.to_goal), "batches": list(map(_choice_plain, reached.choices))}
    return plain | ({"rehearsed": rehearsed} if tried else {})


def _choice_plain(choice: BatchChoice) -> dict[str, Any]:
    winner = choice.advice.winner
    return {
        "batch": choice.batch,
        "steps": choice.steps,
        "rate_factor": choice.rate_factor,
        "strategy": winner.text,
        "seconds": winner.seconds,
        "money": winner.money,
    }
