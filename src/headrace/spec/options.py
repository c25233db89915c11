"""How training is done beside the strategy: the same under every one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.devices import GPU, HOST, captures
from headrace.errors import UsageError


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run when evaluations get no better.

    Attributes:
        metric: which number of an evaluation: "loss", or the name of a metric.
        patience: evaluations without an improvement after which the run ends.
        mode: "min" if less is better, "max" if more is.
        min_delta: what counts as an improvement must be more than this.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> from dataclasses import replace
        >>> until_better = hr.EarlyStopping("accuracy", patience=5, mode="max")
        >>> job = replace(job, options=hr.Options(early_stopping=until_better))
        >>> hr.fit(job).status
        'ok'
    """

    metric: str = "loss"
    patience: int = 3
    mode: str = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, ("min", "max"))
        require_count("patience", self.patience)
        if not (isinstance(self.min_delta, int | float) and 0 <= self.min_delta < math.inf):
            raise UsageError(f"min_delta must be a number of at least 0, got {self.min_delta!r}")


@dataclass(frozen=True)
class Options:
    """Attributes:
    clip_norm: largest norm of the gradient of the whole model (2-norm, as `clip_grad_norm_`); None for none.
    clip_value: largest absolute value of an element of the gradient, applied before `clip_norm`; None for none.
    accumulate: micro-batches that a worker's share is cut into, one forward and backward each, one update for
        all: as many examples a round as before, less memory for activations.
    schedule: takes the optimizer, returns a `torch.optim.lr_scheduler.LRScheduler`:
        `functools.partial(StepLR, step_size=10)`; None for a constant learning rate.
    schedule_every: "step" advances the schedule after each round, "epoch" after each epoch.
    warmup: rounds during which the learning rate, rises linearly from 1/warmup to the whole of what the
        schedule gives.
    precision: "fp32" computes in the types of the parameters; "bf16" and "fp16" compute forward under autocast,
        fp16 (CUDA alone) with a loss scale. Parameters and updates keep their types.
    compile: True compiles the model (`torch.compile`), or the name of one of its modes does: "reduce-overhead",
        "max-autotune", "max-autotune-no-cudagraphs"; "cudagraphs" (CUDA alone) replays the model's own kernels as CUDA
        graphs, which costs no launches. "auto" measures before the run, and compiles where a step gets at least 3 %
        shorter.
    recompute: what forward runs again for backward, so that activations need not be kept; numbers are the same, bit for
        bit. "full": each block, the entries of the outermost Sequentials and ModuleLists, of which only the inputs are
        kept; "selective": also the results of matrix products, convolutions and attention; or a pattern of modules'
        names, "encoder.layers.*", or several. "offload" copies what is kept to pinned host memory, and back when
        backward needs it, as `torch.autograd.graph.save_on_cpu` does; alone nothing is run again, and with another
        choice, ["full", "offload"], both are done. None for nothing. Pipelines have their own `recompute`.
    memory_format: order in memory of 4-d weights (those of convolutions over two dims) and of 4-d inputs of the
        model: "preserve" leaves both as they come; "channels_last"; "auto" measures both for about a second before
        the run and takes "channels_last" where a step gets at least 3 % shorter. Numbers are equal up to rounding,
        dropout of images aside, which drops other elements.
    batch_norm: "local" normalises by a worker's own share of the batch; "sync" by the global batch, and then
        N workers equal one device.
    sync_buffers: buffers that forward changes (codebooks, target networks), beside those of BatchNorm. "local": each
        worker's follow its own share. "mean", weighted by examples, or "first", rank 0's: one on all workers after
        each round; integers are rank 0's.
    ema_decay: keeps an exponential moving average of the weights, with this decay a round; evaluations and the
        trained model use it. None for none.
    eval_every: rounds between evaluations; None for one after each epoch.
    eval_batch_size: examples of one evaluation batch a worker; None for its share of the global batch.
    early_stopping: see `EarlyStopping`; None to train to the end.
    on_nonfinite: what a loss or gradient that is NaN or infinite leads to, on all workers alike: "raise" ends
        the run, "skip" leaves out the update, "rollback" also brings back the last checkpoint's parameters and
        optimizer, and in neither case does it reach the parameters. On an accelerator "raise" reads losses a few
        times a second, so as not to wait for each, and so ends the run some rounds later.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> from dataclasses import replace
        >>> job = replace(job, options=hr.Options(clip_norm=1.0, ema_decay=0.9))
        >>> hr.fit(job).status
        'ok'
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    schedule: Callable[..., Any] | None = None
    schedule_every: str = "step"
    warmup: int = 0
    precision: str = "fp32"
    compile: bool | str = False
    recompute: str | Sequence[str] | None = None
    memory_format: str = "preserve"
    batch_norm: str = "local"
    sync_buffers: str = "local"
    ema_decay: float | None = None
    eval_every: int | None = None
    eval_batch_size: int | None = None
    early_stopping: EarlyStopping | None = None
    on_nonfinite: str = "raise"

    def __post_init__(self) -> None:
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise UsageError(f"{name} must be a number above 0, got {value!r}; None switches it off")
        _check_choice("batch_norm", self.batch_norm, ("local", "sync"))
        _check_choice("sync_buffers", self.sync_buffers, ("local", "mean", "first"))
        _check_choice("precision", self.precision, ("fp32", "bf16", "fp16"))
        _check_choice("memory_format", self.memory_format, ("preserve", "channels_last", "auto"))
        _check_choice("schedule_every", self.schedule_every, ("step", "epoch"))
        _check_choice("on_nonfinite", self.on_nonfinite, ("raise", "skip", "rollback"))
        require_count("accumulate", self.accumulate)
        require_count("warmup", self.warmup, 0)
        for name in ("eval_every", "eval_batch_size"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        if not isinstance(self.compile, bool):
            _check_choice("compile", self.compile, ("auto", CUDAGRAPHS, *COMPILE_MODES), "True, False, ")
        if self.compile in OVERWRITING and self.accumulate > 1:
            raise UsageError(
                f"compile={self.compile!r} with accumulate={self.accumulate}: the next micro-batch overwrites the "
                "gradients of a graph; use compile=True, or 'max-autotune-no-cudagraphs'"
            )
        if self.schedule is not None and not callable(self.schedule):
            raise UsageError(
                f"schedule must take an optimizer and return a scheduler, got {self.schedule!r:.60}; "
                "for example functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
            )
        decay = self.ema_decay
        if decay is not None and not (isinstance(decay, int | float) and 0 < decay < 1):
            raise UsageError(f"ema_decay must be a number between 0 and 1, got {decay!r}; None switches it off")
        if self.early_stopping is not None and not isinstance(self.early_stopping, EarlyStopping):
            raise UsageError(f"early_stopping must be hr.EarlyStopping(...), got {self.early_stopping!r:.60}")
        if self.compile and self.memory_format == "auto":
            raise UsageError(
                f"memory_format='auto' with compile={self.compile!r}: what is measured for a second is not the "
                "compiled model, which takes longer to compile; use 'channels_last' or 'preserve'"
            )
        if self.compile and self.batch_norm == "sync":
            raise UsageError(
                f"batch_norm='sync' with compile={self.compile!r}: layers that talk to other workers cut the model "
                "into pieces that are too small to gain by graph mode; use one of the two"
            )
        _check_recompute(self.recompute, self.compile)
        if self.accumulate > 1 and self.batch_norm == "sync":
            raise UsageError(
                f"batch_norm='sync' with accumulate={self.accumulate}: layers would see micro-batches, which depend "
                "on the number of workers, so N workers would not equal one device; use accumulate=1, or 'local'"
            )

    @property
    def again(self) -> str | Sequence[str] | None:
        """What of `recompute` is run again."""
        words = [each for each in _words(self.recompute) if each != OFFLOAD]
        return (words[0] if len(words) == 1 else words) or None

    @property
    def offloads(self) -> bool:
        """Whether what forward keeps goes to host memory."""
        return OFFLOAD in _words(self.recompute)


def _words(choice: str | Sequence[str] | None) -> Sequence[str]:
    return (choice,) if isinstance(choice, str) else choice or ()


def _check_recompute(choice: object, compiled: bool | str) -> None:
    patterns = (choice,) if isinstance(choice, str) or not isinstance(choice, Sequence) else choice
    if choice is not None and not (patterns and all(isinstance(each, str) and each for each in patterns)):
        raise UsageError(
            f"recompute is 'full', 'selective', 'offload', or patterns of modules' names, 'blocks.*', got "
            f"{choice!r:.60}; None switches it off"
        )
    if choice is not None and compiled:
        raise UsageError(
            f"recompute={choice!r:.60} with compile={compiled!r}: a compiled model chooses by itself what it computes "
            "again, and what it keeps; use one of the two"
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        raise UsageError(f"{name} is {more}{' or '.join(map(repr, choices))}, got {value!r}")


def require_count(name: str, value: object, least: int = 1) -> None:
    """Raises UsageError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")


def require_url(name: str, value: object) -> None:
    """Raises UsageError unless `value` is a URL; one with a password, which notices would show, is refused, too."""
    if not isinstance(value, str) or not is_url(value):
        raise UsageError(f"{name} must be a URL, for example 's3://bucket/runs/a', got {value!r:.60}")
    if _PASSWORD.match(value):
        raise UsageError(
            f"{name} holds a password, and would be shown; leave it out, and give it to the client of the file system "
            "in its own way: environment variables, its configuration, or fsspec's"
        )


def is_url(value: object) -> bool:
    """Whether `value` is text with a scheme, "s3://bucket/runs/a"."""
    return isinstance(value, str) and _URL.fullmatch(value) is not None


FULL, SELECTIVE, OFFLOAD = "full", "selective", "offload"
"""Ways to run blocks again, and to keep what is kept elsewhere."""
COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Of `torch.compile`, beside its default."""
CUDAGRAPHS = "cudagraphs"
"""The backend of `torch.compile` that captures eager kernels."""
OVERWRITING = (CUDAGRAPHS, "reduce-overhead", "max-autotune")
"""What may capture CUDA graphs, which write their results to the same memory each time."""

_URL = re.compile(r"[A-Za-z][\w+.:-]*://[^\n]*[^/\n][^\n]*")
_PASSWORD = re.compile(r".*://[^/@]*:[^/@]*@")


@dataclass(frozen=True)
class Checkpoints:
    """When a run saves: at each interval, when it receives SIGTERM or SIGINT, and at its end.

    Attributes:
        every_steps: rounds between two checkpoints; None for no such interval.
        every_s: seconds between two checkpoints; None for no such interval.
        keep: how many of the last checkpoints are kept.
        snapshots_every_s: seconds between two snapshots of each parameter server without a backup, taken while workers
            continue; None for none.
        copy_to: a URL, "s3://bucket/runs/a", to which finished checkpoints are copied in the background, and where the
            last `keep` stay; any file system that fsspec knows. None for no copies.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> often = hr.Checkpoints(every_steps=2, keep=5)
        >>> run = hr.fit(job, run_dir="runs/a", checkpoints=often)
        >>> sorted(path.name for path in run.run_dir.glob("checkpoints/*"))
        ['step-00000002', 'step-00000004']
    """

    every_steps: int | None = None
    every_s: float | None = 600.0
    keep: int = 3
    snapshots_every_s: float | None = 30.0
    copy_to: str | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            require_count("every_steps", self.every_steps)
        require_count("keep", self.keep)
        for name in ("every_s", "snapshots_every_s"):
            seconds = getattr(self, name)
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (number and seconds > 0):
                raise UsageError(f"{name} must be a number of seconds above 0, got {seconds!r}; None switches it off")
        if self.copy_to is not None:
            require_url("copy_to", self.copy_to)


def require_plain_forward(options: Options) -> None:
    """Raises UsageError if options say how forward is run, which a loop of the user's own has done already."""
    plain = Options()
    for name in ("accumulate", "precision", "compile"):
        value = getattr(options, name)
        if value != getattr(plain, name):
            raise UsageError(
                f"Options({name}={value!r}) says how forward is run, and worker.backward(loss) comes after it; "
                f"use worker.step(batch), or leave {name} out and do as much in the loop"
            )


def check_options(options: Options, device: str) -> None:
    """Raises UsageError for options that a kind of device does not support."""
    if options.precision == "fp16" and device == "cpu":
        raise UsageError(
            "precision='fp16' is for GPUs, and the device is the CPU; use precision='bf16', which needs no loss scale, "
            "or 'fp32'"
        )
    if options.compile == CUDAGRAPHS and not captures(device):
        raise UsageError(
            f"compile={CUDAGRAPHS!r} is for CUDA, and the device is {device}; use compile=True, or leave compile out"
        )
    if options.offloads and device == HOST:
        raise UsageError(
            f"recompute={options.recompute!r:.60}: 'offload' copies what forward keeps from an accelerator to host "
            f"memory, where it is anyway on CPUs; leave it out, give device='{GPU}', or use recompute='full', which "
            "needs less memory here, too"
        )
