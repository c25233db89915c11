"""What strategies refuse of the options, as data: refusals before a run, and the table of the docs, are made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.spec.options import Options

_DEFAULTS = Options()


@dataclass(frozen=True)
class Refusal:
    """A value of an option that a strategy cannot have.

    Attributes:
        option: the field of `Options`.
        value: the one that is refused; None for every one but the default.
        why: with "{value}" for the value.
        remedy: what to do in its place.
    """

    option: str
    value: object
    why: str
    remedy: str

    def text(self, options: Options) -> str:
        """Returns why the options are refused, and the remedy; "" where they are not."""
        value = getattr(options, self.option)
        refused = value != getattr(_DEFAULTS, self.option) if self.value is None else value == self.value
        return f"{self.why.format(value=value)}; {self.remedy}" if refused else ""


def refuse(refusals: Iterable[Refusal], options: Options) -> None:
    """Raises UsageError, with the remedy, for the first refusal that the options meet."""
    for refusal in refusals:
        if text := refusal.text(options):
            raise UsageError(text)


def local_steps(name: str, when: str) -> tuple[Refusal, ...]:
    """Returns what needs all workers to have the same parameters, or to decide together, in every round.

    `when` says when workers that step alone synchronize: "every 16 rounds (period)".
    """
    why = "{value!r} needs all workers in every round, and those of " + f"{name} synchronize {when}"
    return (
        Refusal(
            "on_nonfinite", "rollback", f"on_nonfinite={why}", "use 'skip', which leaves out the one step, or 'raise'"
        ),
        Refusal(
            "batch_norm",
            "sync",
            f"batch_norm={why}",
            "use batch_norm='local', whose statistics are averaged with the parameters",
        ),
        Refusal(
            "precision", "fp16", f"precision={why}", "use precision='bf16', which needs no loss scale that all agree on"
        ),
        Refusal("sync_buffers", None, f"sync_buffers={why}", "use mirrored, or sync_buffers='local'"),
    )


def moving_average(name: str) -> Refusal:
    """Returns the refusal of a moving average of parameters that differ between workers."""
    return Refusal(
        "ema_decay",
        None,
        "ema_decay={value:g} averages parameters over rounds, and under "
        f"{name} each worker's are others between two synchronizations",
        "leave it out, or use mirrored",
    )


def served(name: str) -> tuple[Refusal, ...]:
    """Returns what needs workers in lockstep."""
    return (
        Refusal(
            "on_nonfinite",
            "rollback",
            "on_nonfinite='rollback' brings all workers back together, and those of a parameter server are never at "
            "the same round",
            "use 'skip', which drops the one gradient, or 'raise'",
        ),
        Refusal(
            "batch_norm",
            "sync",
            "batch_norm='sync' makes workers meet in every layer, and those of a parameter server do not wait for each "
            "other",
            "use batch_norm='local', or mirrored",
        ),
        Refusal(
            "precision",
            "fp16",
            "precision='fp16' needs one loss scale for all workers, and those of a parameter server do not agree on "
            "anything in a round",
            "use precision='bf16', which needs none",
        ),
        Refusal(
            "sync_buffers",
            None,
            "sync_buffers={value!r} combines buffers after each round of all workers, and those of "
            f"{name} do not end rounds together",
            "use mirrored, or sync_buffers='local'",
        ),
    )


LBFGS = (
    *(
        Refusal(
            option,
            None,
            option + "={value!r:.60} changes steps or gradients, and L-BFGS chooses its steps by gradients as they are",
            f"leave out {option}, or use another strategy",
        )
        for option in ("clip_norm", "clip_value", "schedule", "warmup", "ema_decay")
    ),
    Refusal(
        "on_nonfinite",
        None,
        "on_nonfinite={value!r} leaves out a gradient, and a sum over all portions but one is no gradient of the batch",
        "use on_nonfinite='raise'",
    ),
)

STAGES = (
    Refusal(
        "accumulate",
        None,
        "a pipeline cuts every batch into micro-batches, and Options(accumulate={value}) does so too",
        "leave accumulate out, and give Pipeline(micro_batches=...)",
    ),
    Refusal("compile", None, "the stages of a pipeline are not compiled", "use Options(compile=False)"),
    Refusal(
        "recompute",
        None,
        "a pipeline runs stages again, and Options(recompute={value!r:.60}) blocks",
        "leave it out of the options, and give Pipeline(recompute='always')",
    ),
)

WHOLE_BATCH_NORM = Refusal(
    "batch_norm",
    "sync",
    "Options(batch_norm='sync') normalises over a whole batch, and a pipeline has micro-batches",
    "use batch_norm='local', or Pipeline(micro_batches=1)",
)


PIECES = Refusal(
    "batch_norm",
    "sync",
    "batch_norm='sync' normalises over a whole batch, of which replicas that are pipelines have pieces of parts",
    "use batch_norm='local'",
)


def one_program(what: str) -> Refusal:
    """Returns the refusal of a compiled model, in the middle of which something is exchanged."""
    return Refusal(
        "compile", None, f"compile=True makes one program of a model, and {what}", "use compile=False, or mirrored"
    )
