"""`headrace recommend`: which strategy to take on which machines, why not the others, and when not to distribute."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli.command import argument, command, option
from headrace.cli.commands.profile import GoalOption, known_goal
from headrace.cli.commands.simulate import (
    AssumeOption,
    ClusterFile,
    ForceOption,
    assumptions_of,
    prediction_plain,
)
from headrace.cli.engines import job_on_engine, refuse_launcher
from headrace.cli.goals import batch_lines, goal_plain, rehearsed, rehearsed_lines
from headrace.cli.jobfile import find_job
from headrace.cli.options import SettingsOption
from headrace.cli.output import Answer, say, wrapped, writing
from headrace.errors import UsageError
from headrace.machine import disk

if TYPE_CHECKING:
    from headrace.api.trials.goal_rehearsal import RehearsedChoice
    from headrace.prediction.recommendation.goals import GoalRecommendation
    from headrace.prediction.recommendation.offers import Offer
    from headrace.prediction.recommendation.recommend import Recommendation
    from headrace.spec.cluster import Cluster
    from headrace.spec.model import ModelSpec

_EXAMPLES = """
  headrace recommend job.py --cluster cluster.toml
  headrace recommend model.json --cluster cluster.toml --price
  headrace recommend model.json --cluster cluster.toml --deadline 2h
  headrace recommend job.py --cluster cluster.toml --goal "accuracy 0.9"
  headrace recommend model.json --cluster cluster.toml --out page.html
"""

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLES_DEFAULT = 1_000_000
_WIDTH = 80
_CONTINUED = " \\"
_ACCUMULATE = "options.accumulate"


ModelOrJob = Annotated[
    Path,
    argument(
        "JOB.py|MODEL", "A job, which is profiled here first; or a model's file, a profile (.json) or by hand (.toml)."
    ),
]
SameBatchOption = Annotated[
    int | None,
    option(
        "--global-batch-size",
        "Examples of a round, for all candidates. Default: the job's, or the largest batch of the model's file.",
        min=1,
    ),
]
ExamplesOption = Annotated[
    int | None, option("--examples", "To train in all. Default: the job's; 1000000 for a file.", min=1)
]
DeadlineOption = Annotated[str | None, option("--deadline 2h", "The cheapest that is done by then: 90min, 2h, 3d.")]
RateRuleOption = Annotated[
    str, option("--rate-rule", "With --goal: how the learning rate follows the batch: noise, linear, sqrt, same.")
]
RehearseOption = Annotated[
    bool, option("--rehearse", "With --goal and a job: train the best three here, in virtual time.")
]
AnyUpdatesOption = Annotated[
    bool,
    option("--any-updates", "Also take a strategy whose updates are not one device's, and may need more examples."),
]


@command(_EXAMPLES, "trying strategies")
def recommend(
    answer: Answer,
    model: ModelOrJob,
    cluster: ClusterFile,
    global_batch_size: SameBatchOption = None,
    examples: ExamplesOption = None,
    price: Annotated[bool, option("--price", "Rank by money instead of by time.")] = False,
    deadline: DeadlineOption = None,
    goal: GoalOption = None,
    rate_rule: RateRuleOption = "noise",
    rehearse: RehearseOption = False,
    any_updates: AnyUpdatesOption = False,
    assume: AssumeOption = None,
    out: Annotated[Path | None, option("--out FILE.html", "Write a page with curves there, too.")] = None,
    settings: SettingsOption = None,
    force: ForceOption = False,
) -> None:
    """Simulate every strategy that fits, and name the best.

    No machine but this one is touched; a job is profiled here. Nothing is trained without --rehearse.
    """
    limit_s = None if deadline is None else seconds_of(deadline)
    _check_goal(goal, examples, rehearse, model)
    job = model if model.suffix == ".py" else Path("job.py")
    # Lazily: they import torch.
    from headrace.prediction.cloud import cluster_of

    # Before the model is measured, which takes half a minute.
    machines = cluster_of(cluster)
    known, batch, count, pieces = _known(model, settings, goal)
    from headrace.prediction.recommendation import goals
    from headrace.prediction.recommendation.answer import sentences
    from headrace.prediction.recommendation.page import write_page
    from headrace.prediction.recommendation.recommend import recommend as find

    asked: dict[str, Any] = {"by_money": price, "deadline_s": limit_s, "any_updates": any_updates}
    asked |= {"assumptions": assumptions_of(assume or ()), "force": force}
    reached: goals.GoalRecommendation | None = None
    if goal is None:
        advice = find(
            known, machines, global_batch_size=global_batch_size or batch, examples=examples or count, **asked
        )
    else:
        size = global_batch_size
        reached = goals.recommend_for_goal(known, machines, goal, rate_rule=rate_rule, global_batch_size=size, **asked)
        advice, batch = reached.best.advice, reached.to_goal.global_batch_size
    tried = rehearsed(model, settings, reached, machines, known, asked) if reached and rehearse else []
    told = [*(goals.sentences(reached) if reached else ()), *sentences(advice)]
    chosen = _own_settings(advice.winner.accumulate, pieces, settings or ())
    command = _command(advice, job, machines, cluster, chosen)
    shell_lines = _shell_lines(command)
    needed = _needed(advice, job, batch, reached)
    lines = list(_lines(advice, told, shell_lines, needed, reached, tried))
    if out is not None:
        with writing("the page", out, "--out"):
            write_page(out, advice, [*told, *needed], shell_lines)
        lines.append(f"page: {out}")
    plain = _plain(advice, " ".join(told), " ".join(map(_quoted, command)), needed)
    answer.give(plain | goal_plain(reached, tried), "\n".join(lines))


def _check_goal(goal: str | None, examples: int | None, rehearse: bool, model: Path) -> None:
    if goal is not None and examples is not None:
        raise UsageError("--examples and --goal: the goal says how many examples; leave --examples out")
    if rehearse and (goal is None or model.suffix != ".py"):
        raise UsageError("--rehearse trains a job (.py) to its --goal; give both")


def seconds_of(text: str) -> float:
    """Returns the seconds of "90min", "2h" or "3d".

    Raises:
        UsageError: it is something else.
    """
    for unit, factor in sorted(_UNITS.items(), key=lambda item: -len(item[0])):
        number = text.removesuffix(unit)
        if number != text:
            try:
                seconds = float(number) * factor
            except ValueError:
                break
            if 0 < seconds < math.inf:
                return seconds
    raise UsageError(f"--deadline takes a time above 0 such as 90min, 2h or 3d, got {text!r}")


def _known(path: Path, settings: list[str] | None, goal: str | None) -> tuple[ModelSpec | Path, int | None, int, int]:
    """Returns the model, and of a job its global batch, its examples and its micro-batches a share."""
    if path.suffix != ".py":
        if settings:
            raise UsageError("--set is for a job's file (.py); a model's file has no parameters")
        return path, None, _EXAMPLES_DEFAULT, 1
    refuse_launcher("recommend")
    find_job(path)
    with job_on_engine(path, settings) as (job, engine):
        # Lazily: they import torch.
        from headrace.api.model_profile import profile
        from headrace.data.given import as_pipeline

        to_goal = known_goal(job, goal)
        measured = replace(profile(job, engine=engine, say=lambda line: say(f"measuring {line}")), to_goal=to_goal)
        length = len(as_pipeline(job.data)[0])
    count = job.epochs * length if job.epochs else (job.steps or 1) * job.global_batch_size
    return measured, job.global_batch_size, count, job.options.accumulate


def _own_settings(needed: int, given: int, settings: Sequence[str]) -> list[str]:
    """Returns the settings with the micro-batches a share that the winner needs, where the job has others."""
    if needed == given:
        return list(settings)
    others = [setting for setting in settings if setting.partition("=")[0].strip() != _ACCUMULATE]
    return [*others, f"{_ACCUMULATE}={needed}"]


def _needed(
    advice: Recommendation, job: Path, batch: int | None, reached: GoalRecommendation | None = None
) -> list[str]:
    """Returns what the job must say for the command to train what was recommended; no option of it says so."""
    simulated = advice.winner.prediction.global_batch_size
    if simulated == batch:
        return []
    stated = "" if batch is None else f" in place of {batch}"
    rate = ""
    if reached is not None and reached.best.rate_factor != 1:
        rate = f", and a learning rate {reached.best.rate_factor:.3g} times as large"
    return [f"The command needs global_batch_size={simulated}{stated}{rate} in {job}."]


def _command(advice: Recommendation, job: Path, machines: Cluster, file: Path, settings: Sequence[str]) -> list[str]:
    """Returns the words of what runs the winner: on one host `headrace train`, on several `headrace launch`.

    A file of the cluster has the hosts' addresses. Of machines that are not rented yet the names stand there.
    """
    winner = advice.winner
    trained = [str(job), "--strategy", winner.text, *(word for setting in settings for word in ("--set", setting))]
    if len(winner.hosts) == 1:
        return ["headrace", "train", *trained]
    known = ["--cluster", str(file)] if disk.exists(file) else []
    if not known or len(winner.hosts) < len(machines.hosts):
        known += ["--hosts", ",".join(winner.hosts)]
    processes = winner.candidate.devices + winner.prediction.servers
    return ["headrace", "launch", *known, "--workers", str(processes), *trained]


def _quoted(word: str) -> str:
    """Returns a word for a shell, in double quotes if it has none of its own to protect."""
    quoted = shlex.quote(word)
    return f'"{word}"' if quoted != word and not set(word) & set('"$`\\!') else quoted


def _shell_lines(words: Sequence[str]) -> list[str]:
    """Returns lines of 80 columns that a shell takes for one command; an option stays beside its value.

    A word that is longer has a line of its own.
    """
    groups: list[str] = []
    for word in words:
        beside = groups and groups[-1].startswith("--") and " " not in groups[-1]
        groups[-1:] = [f"{groups[-1]} {_quoted(word)}"] if beside else [*groups[-1:], _quoted(word)]
    lines = [groups[0]]
    for group in groups[1:]:
        if len(f"{lines[-1]} {group}{_CONTINUED}") > _WIDTH:
            lines[-1] += _CONTINUED
            lines.append(f"    {group}")
        else:
            lines[-1] += f" {group}"
    return lines


def _lines(
    advice: Recommendation,
    told: Sequence[str],
    command: Sequence[str],
    needed: Sequence[str],
    reached: GoalRecommendation | None,
    tried: Sequence[RehearsedChoice],
) -> Iterator[str]:
    winner = advice.winner
    yield from wrapped(" ".join(told))
    yield ""
    yield from command
    for sentence in needed:
        yield from wrapped(sentence)
    if winner.accumulate > 1:
        yield from wrapped(
            f"Each share is cut into {winner.accumulate} micro-batches, so that activations fit.", "", ""
        )
    yield ""
    if reached is not None:
        yield from batch_lines(reached)
        yield from rehearsed_lines(tried)
        yield ""
    yield "the best of the others, and why they lost"
    for offer in advice.best:
        if offer.text != winner.text:
            yield from wrapped(f"{offer.text}: {advice.why_not(offer)}", "  ", "      ")
    for note in advice.notes:
        yield from wrapped(note, "  ", "      ")
    for family, why, number in advice.misfits:
        yield from wrapped(f"{family}, {number} candidates: {why}", "  ", "      ")
    simulated, fit = len(advice.offers), len(advice.offers) + len(advice.bounded)
    yield from wrapped(f"{advice.tried} candidates, of which {fit} fit; {simulated} were simulated.", "  ", "      ")
    if advice.bounded:
        yield from wrapped(
            f"{len(advice.bounded)} were bounded, not simulated: their bound is worse than one of their family.",
            "  ",
            "      ",
        )


def _plain(advice: Recommendation, told: str, command: str, needed: Sequence[str]) -> dict[str, Any]:
    return {
        "winner": _offer_plain(advice, advice.winner),
        "answer": told,
        "command": command,
        "distribute": advice.distribute,
        "speed_up": advice.speed_up,
        "knee": advice.knee,
        "candidates": advice.tried,
        "notes": [*needed, *advice.notes],
        "examples": advice.goal.examples,
        "offers": [_offer_plain(advice, offer) for offer in advice.offers],
        "bounded": [
            {
                "strategy": bounded.candidate.text,
                "devices": bounded.candidate.devices,
                "least_seconds": bounded.least_s,
                "better": bounded.better,
            }
            for bounded in advice.bounded
        ],
        "misfits": [{"family": family, "why": why, "candidates": number} for family, why, number in advice.misfits],
    }


def _offer_plain(advice: Recommendation, offer: Offer) -> dict[str, Any]:
    return {
        "strategy": offer.text,
        "devices": offer.candidate.devices,
        "hosts": list(offer.hosts),
        "seconds": offer.seconds,
        "slow_seconds": offer.slow_s,
        "money": offer.money,
        "kilowatt_hours": offer.kilowatt_hours,
        "accumulate": offer.accumulate,
        "why_not": "" if offer.text == advice.winner.text else advice.why_not(offer),
        "prediction": prediction_plain(offer.prediction),
    }
