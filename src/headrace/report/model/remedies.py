"""What to try next: for a run of `headrace train` the command itself, changed; for a program's call the argument."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from headrace.report.format import plural
from headrace.report.model.inputs import busy_s
from headrace.spec.events import InputStageStats, InputStats, RunStarted

_WAITS = 0.5
"""A stage that does not compute for more than this part of its time waits."""
_CHEAP_S = 50e-6
"""An example that costs less is neither cached nor sent by another process at a gain."""
_MORE = 4
"""So many times as many readers, where they wait."""
_TRAIN = "headrace train "
_ALONE = ("--run-dir", "--strategy", "--workers", "-w", "--servers", "--resume", "--watch")
_FLAGS = ("--resume", "--watch")


@dataclass(frozen=True)
class Remedy:
    """How a run is to be started instead.

    Attributes:
        words: what the change is good for.
        argument: the change as a program writes it.
        strategy: another one, by name; "" for the same.
        own: options of the strategy, by name.
        workers: another number; None for the same.
        settings: for `--set`, by name.
    """

    words: str
    argument: str = ""
    strategy: str = ""
    own: tuple[tuple[str, object], ...] = ()
    workers: int | None = None
    settings: tuple[tuple[str, object], ...] = ()

    def told(self, started: RunStarted | None) -> str:
        """Returns what is good, and the command or the argument that brings it."""
        how = self.command(started) or self.argument
        return f"{self.words}: {how}" if how else self.words

    def command(self, started: RunStarted | None) -> str:
        """Returns the command that has started a run, changed and without its --run-dir; "" where it was none."""
        if started is None or not started.command.startswith(_TRAIN) or not self.changes:
            return ""
        words, kept, options = shlex.split(started.command), list[str](), {"--strategy": started.strategy}
        settings = {f"{name}": f"{value}" for name, value in self.settings}
        while words:
            name, sign, value = words.pop(0).partition("=")
            if name in _ALONE:
                options[name] = value if sign or name in _FLAGS or not words else words.pop(0)
            elif name == "--set":
                setting = value if sign else words.pop(0)
                if setting.partition("=")[0].strip() not in settings:
                    kept += ["--set", setting]
            else:
                kept.append(f"{name}{sign}{value}")
        kept += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        workers = str(self.workers) if self.workers else options.get("--workers", options.get("-w"))
        strategy = self.strategy or _with_options(options["--strategy"], dict(self.own), bool(self.workers))
        if self.strategy == "one_device":
            workers = None
        elif "--servers" in options and not self.strategy:
            kept += ["--servers", options["--servers"]]
        return shlex.join([*kept, "--strategy", strategy, *(("--workers", workers) if workers else ())])

    @property
    def changes(self) -> bool:
        """Whether it is more than words."""
        return bool(self.strategy or self.own or self.workers or self.settings)


def _with_options(strategy: str, own: dict[str, object], other_workers: bool) -> str:
    """Returns `mirrored(overlap=False)` with options in the place of those of the same name, or added.

    With another number of workers, a pipeline has as many stages.
    """
    name, _, rest = strategy.removesuffix(")").partition("(")
    given = [each for each in _arguments(rest) if each.partition("=")[0].strip() not in own]
    if other_workers and name == "pipeline":
        given = [
            each for each in given if "=" in each and each.partition("=")[0].strip() not in ("stages", "partition")
        ]
    given += [f"{key}={value!r}" for key, value in own.items()]
    return f"{name}({', '.join(given)})" if given else name


def _arguments(text: str) -> list[str]:
    """Returns the arguments of a call, which may have brackets and commas of their own."""
    found, depth, begin = list[str](), 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(text[begin:place].strip())
            begin = place + 1
    return [each for each in (*found, text[begin:].strip()) if each]


def processes(started: RunStarted) -> int:
    """Returns how many processes, workers and servers, compute on the cores of the launcher's host."""
    roles = started.plan.get("roles")
    if not isinstance(roles, list | tuple) or not roles or started.device != "cpu":
        return 0
    return sum(each["host"] == roles[0]["host"] for each in roles)


def shared_cores(started: RunStarted | None) -> str:
    """Returns that more processes than cores compute; "" where they do not, or it is not known."""
    if started is None or not 0 < started.cores < processes(started):
        return ""
    return f"{plural(processes(started), 'process', 'es')} share {plural(started.cores, 'core')}"


def has_servers(started: RunStarted | None) -> bool:
    """Whether workers may wait for servers; also where it is not known."""
    roles = started.plan.get("roles") if started else None
    return not isinstance(roles, list | tuple) or any(each.get("kind", "server") != "worker" for each in roles)


def fewer_workers(started: RunStarted | None) -> Remedy | None:
    """Returns as many workers as cores are left by the servers; None where there are no fewer."""
    if started is None or not started.cores:
        return None
    workers = max(1, started.cores - (processes(started) - started.workers))
    if workers >= started.workers:
        return None
    return Remedy("a process a core", f"workers={workers}", workers=workers)


def less_input(stage: InputStageStats, own: InputStats, epochs: float) -> Remedy:
    """Returns what makes the input cheaper, by where its time goes and how it is read already.

    Args:
        stage: that takes most of the input's time.
        own: the worker's input.
        epochs: that the run has; a cache is for those after the first.
    """
    if own.examples and busy_s(own) < _CHEAP_S * own.examples:
        return Remedy("a larger batch: what an example costs is little, and what a batch costs is most")
    readers = _MORE * own.readers
    # Several threads may wait for Python's lock; one alone waits for what is outside.
    alone = own.parallel == "inline" or (own.parallel == "threads" and own.readers == 1)
    if alone and stage.name != "batch" and stage.waiting_s > _WAITS * stage.busy_s:
        more = f"{readers} threads that read, since reading waits"
        return Remedy(more, f"data=hr.data.read_by(data, parallel={readers})", settings=(("data.parallel", readers),))
    is_cached = any(each.name.startswith("cache(") for each in own.stages)
    if epochs > 1 and stage.name != "batch" and not stage.draws and not is_cached:
        kept = "keep what does not change from epoch to epoch"
        if stage.name == "source":
            kept += ", if the data set draws nothing at random"
        return Remedy(kept, 'data=hr.data.read_by(data, cache="memory")', settings=(("data.cache", "memory"),))
    if own.parallel == "inline" or (own.parallel == "threads" and stage.waiting_s > _WAITS * stage.busy_s):
        ahead = "processes that read while the model computes"
        return Remedy(
            ahead, 'data=hr.data.read_by(data, parallel="processes")', settings=(("data.parallel", "processes"),)
        )
    return Remedy("fewer pixels or smaller tensors (uint8, made float by the model), batched=True, or more cores")


def less_turn(started: RunStarted | None) -> Remedy:
    """Returns what makes workers wait less for their turn."""
    if started is not None and not has_servers(started):
        near = "the worker reads itself, since reading takes little"
        how = 'data=hr.data.read_by(data, parallel="inline")'
        return Remedy(near, how, settings=(("data.parallel", "inline"),))
    return Remedy("fewer workers")


def less_exchange(started: RunStarted | None, compute: float) -> Remedy | None:
    """Returns what makes the exchange a smaller part.

    Args:
        compute: the part of a step that computes.
    """
    if started is None:
        return None
    if started.workers > 1 and started.workers * compute < 1.0 and started.strategy in _WHOLE:
        alone = "one process computes more, without an exchange"
        return Remedy(alone, 'strategy="one_device"', strategy="one_device")
    if started.strategy == "parameter_averaging":
        return Remedy("average only as often as it is worth it", 'period="auto"', own=(("period", "auto"),))
    size = 2 * started.global_batch_size
    words = "a larger batch, so that an exchange is of more examples"
    return Remedy(words, f"global_batch_size={size}", settings=(("job.global_batch_size", size),))


_WHOLE = ("mirrored", "central_storage", "fully_sharded", "parameter_server", "downpour", "tensor_parallel")
"""Strategies whose job one process can train as well, where the model fits."""


def more_micro_batches(started: RunStarted | None, count: int) -> Remedy | None:
    """Returns twice as many; None where a batch has not so many examples."""
    if started is not None and 2 * count > started.global_batch_size:
        return None
    return Remedy("more micro-batches", f"micro_batches={2 * count}", own=(("micro_batches", 2 * count),))


def less_transfer(started: RunStarted | None) -> Remedy:
    """Returns what is faster than stages that wait for what they send each other."""
    if started is None or started.strategy != "pipeline":
        return Remedy("fewer stages, or a cut where activations are smaller")
    whole = "the whole model on each worker, where it fits; or a cut where activations are smaller"
    return Remedy(whole, 'strategy="mirrored"', strategy="mirrored", workers=started.workers)


def even_shares(started: RunStarted | None) -> Remedy:
    """Returns how a worker that is slower gets less to do."""
    words = "look at what else runs on its machine, or give it smaller shares of batches"
    if started is not None and started.strategy not in ("mirrored", "central_storage"):
        return Remedy(f"{words}: mirrored and central_storage do, with balance='speed'")
    return Remedy(
        words, 'mirrored(balance="speed")' if started is None else 'balance="speed"', own=(("balance", "speed"),)
    )
