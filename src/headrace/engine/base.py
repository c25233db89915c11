"""What engines share: their interface, how far a run is, whether a process lives, and the signals of this process.

Outside a run SIGTERM ends the command at once; in a run the first SIGINT or SIGTERM ends it in order. Importing this
module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from headrace import internals
from headrace.errors import UsageError
from headrace.machine.identity import detect
from headrace.machine.temporary import delete_all
from headrace.spec.cluster import Cluster
from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    # For the types alone: they import torch.
    from headrace.shared_memory.control_page import ControlPage
    from headrace.strategies.strategy import Strategy

# Longer than between two calls, and with the time between two heartbeats (0.25 s) shorter than the least timeout.
_GAP_S = 0.5

TERMINATED = "terminated"
"""The status of a run that SIGTERM has ended in order; this process ends next."""

LEFT = "left"
"""The status of a worker that has left a run as it was asked to; the others go on, and its process ends next."""

NOT_ENCRYPTED = (
    "encrypt=False: gradients and activations between hosts can be read and changed on the network between them; "
    "what servers carry stays encrypted, and processes without the run's secret cannot join"
)

FASTER = (
    "where the network itself is trusted (WireGuard, encryption of the cloud's own, NCCL with TLS), encrypt=False lets "
    "devices exchange by"
)

TERMINATED_CODE = 143
"""The exit code of a process that SIGTERM has ended."""

ECHO_S = 1.0
"""A SIGTERM so soon after the first is the same one: `timeout` and others send it to the process and to its group."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, and whether it `stops` soon; `loss` is the mean of the ranks' last ones, None before."""

    step: int
    loss: float | None
    examples: int
    stops: bool = False

    @classmethod
    def read(cls, page: ControlPage) -> RunProgress:
        """Returns the progress that the ranks' heartbeats tell."""
        heartbeats = [record.heartbeat for record in page.ranks]
        losses = [heartbeat.loss for heartbeat in heartbeats if heartbeat.loss]
        loss = fmean(losses) if losses else None
        step, examples = max(each.step for each in heartbeats), sum(each.examples for each in heartbeats)
        return cls(step, loss, examples, bool(page.stop))


_FOLLOW_EVERY_S = 0.5


class Engine(ABC):
    """Starts the processes of a run and watches them.

    Attributes:
        in_caller: whether workers run in the process that calls it, or in processes that run the caller's script.
    """

    in_caller: ClassVar[bool] = False

    def cluster(self, strategy: Strategy, device: str | Sequence[str], encrypt: bool) -> Cluster:
        """Returns the machines that a run will have; an engine of other machines places its processes now."""
        return detect(device, fixed_shapes=strategy.fixed_shapes)

    def release(self) -> None:  # noqa: B027  (most hold nothing between `cluster` and `run`)
        """Gives back what `cluster` has placed; a run that has ended has none."""

    @abstractmethod
    def run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        """Runs to the end; returns "ok", "interrupted" or "terminated".

        Args:
            progress: called a few times a second in the caller's thread.

        Raises:
            WorkerFailed: a worker raised; the first that did.
            PeerLost: a worker was killed, or froze.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every process of this engine."""


def require_no_global_hooks(engine: Engine | None, launched: bool) -> None:
    """Raises UsageError if hooks of all modules or optimizers are here, and workers are processes without them.

    It is asked before the model is built, by a function that may register some, in each worker too.
    """
    here = launched or (engine is not None and engine.in_caller)
    if not here and internals.hooks_of_all_modules():
        raise UsageError(
            "this process has hooks of all modules (torch.nn.modules.module.register_module_forward_hook or the like), "
            "and worker processes would not have them; register them in the function that builds the model, or on its "
            "modules, and remove() these; or use engine=hr.ThreadEngine()"
        )
    if not here and (internals.global_pre_hooks or internals.global_post_hooks):
        raise UsageError(
            "this process has hooks of all optimizers (torch.optim.optimizer.register_optimizer_step_pre_hook or the "
            "like), and worker processes would not have them; register them on the optimizer, in the function that "
            "makes it, and remove() these; or use engine=hr.ThreadEngine()"
        )


class LivenessProbe:
    """Watches one process for signs of life: its heartbeat, or any processor time.

    A step may take as long as it takes: while the process computes it uses processor time, while it sleeps its
    heartbeat goes on. A stopped process (SIGSTOP, a debugger, a dead disk) does neither. Several threads may ask.

    Args:
        pid: the process; 0 for one whose id is unknown.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = monotonic) -> None:
        self.pid = pid
        self._clock = clock
        self._stat = Path(f"/proc/{pid}/stat")
        self._seen: tuple[int, int] = (-1, -1)
        self._silent_s = 0.0
        self._looked = clock()
        self._lock = threading.Lock()

    def silent_s(self, beat: int) -> float:
        """Checks the process, and returns for how many seconds there was no sign of life.

        Args:
            beat: a counter that a thread of the process adds to a few times a second.
        """
        # Without the lock two threads would count the same time twice, and one's old sign of life for a new one.
        with self._lock:
            now = self._clock()
            # A watcher that stood still itself (a suspended laptop) cannot accuse the watched.
            passed = min(now - self._looked, _GAP_S)
            self._looked = now
            fields = self._fields()
            seen = (beat, int(fields[11]) + int(fields[12]) if fields else -1)
            self._silent_s = self._silent_s + passed if seen == self._seen else 0.0
            self._seen = seen
            return self._silent_s

    def is_stopped(self) -> bool:
        """Whether the process is held by SIGSTOP or a debugger."""
        return self._fields()[:1] in (["T"], ["t"])

    def is_gone(self) -> bool:
        """Whether the process does not exist any more, or is a zombie."""
        return self._fields()[:1] in ([], ["Z"], ["X"])

    def _fields(self) -> list[str]:
        try:
            # The name of the program, in brackets, may hold anything.
            return self._stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []


class Terminated(BaseException):
    """A run was ended by SIGTERM, in order: like KeyboardInterrupt, nothing that user code may raise or catch."""


_documents: list[bytes] = []
_companions: set[int] = set()


def answer_with(document: bytes) -> None:
    """Lets `terminate` write this to stdout, where a program may wait for the result."""
    _documents.append(document)


def end_with(pid: int) -> None:
    """Lets `terminate` end a child of this process, too: one that would not see at once that this one is gone."""
    _companions.add(pid)


def leave_alone(pid: int) -> None:
    """Takes that back, before the child is reaped."""
    _companions.discard(pid)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Ends this process at once; a handler of signals.

    Not by an exception: in the middle of an import it would be dropped, or taken for something else. The processes
    that this one has started see its end and follow, or are ended.
    """
    for pid in _companions:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        os.write(1, _documents[-1] if _documents else b"")
        os.write(2, b"error: terminated (SIGTERM)\n")
        delete_all()
    finally:
        # Also where the other end of stdout is closed.
        os._exit(TERMINATED_CODE)


class Stoppable(Protocol):
    """A run whose `stop` is 1 once its processes are to end after the same round."""

    stop: int


_REPLACED = (signal.default_int_handler, signal.SIG_DFL, terminate)


class Interrupts:
    """Whether a signal has asked this process to end its run."""

    def __init__(self) -> None:
        self.terminated = False

    def status(self, page: Stoppable) -> str:
        """Returns how a run ended whose workers have all done their work."""
        if self.terminated:
            return TERMINATED
        return "interrupted" if page.stop else "ok"


def _is_rays(handler: Any) -> bool:
    """Whether Ray has set a handler, as it does when a process connects to a cluster."""
    return str(getattr(handler, "__module__", "")).startswith("ray.")


def _leave_signals() -> None:
    """Lets a child that user code forks end by a signal as any other process does, and the run go on without it."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if str(getattr(signal.getsignal(number), "__module__", "")).startswith("headrace."):
            signal.signal(number, default)


os.register_at_fork(after_in_child=_leave_signals)


@contextmanager
def orderly_interrupts(page: Stoppable) -> Iterator[Interrupts]:
    """Lets this process's first SIGINT, SIGTERM or SIGHUP set `page.stop` instead of interrupting the engine.

    A second one restores the handler from before, and reaches it. Outside the main thread, and where the user's code
    handles a signal, everything stays as it is.
    """
    interrupts = Interrupts()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = {number: handler for number, handler in before.items() if handler in _REPLACED or _is_rays(handler)}
    received: list[float] = []

    def stop(number: int, frame: object) -> None:
        # Not by reading the page, which others' interrupts may have marked.
        received.append(monotonic())
        echo = number == signal.SIGTERM and received[-1] - received[0] <= ECHO_S
        if len(received) > 1 and not echo:
            signal.signal(number, ours[number])
            signal.raise_signal(number)
            return
        # A terminal that is closed sends SIGHUP.
        interrupts.terminated |= number in (signal.SIGTERM, signal.SIGHUP)
        page.stop = 1

    for number in ours:
        signal.signal(number, stop)
    try:
        yield interrupts
    finally:
        for number, handler in ours.items():
            # The terminated command is about to end, and an echo may still come.
            if not (interrupts.terminated and handler is terminate):
                signal.signal(number, handler)


@contextmanager
def followed(page: ControlPage, progress: Callable[[RunProgress], None]) -> Iterator[None]:
    """Calls `progress` while this process works, in a thread; what it raises ends the run, and is raised here."""
    over = threading.Event()
    failures: list[BaseException] = []

    def follow() -> None:
        try:
            while not over.wait(_FOLLOW_EVERY_S):
                progress(RunProgress.read(page))
        except BaseException as error:
            failures.append(error)
            page.stop = 1

    thread = threading.Thread(target=follow, name="headrace-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    for failure in failures:
        raise failure
