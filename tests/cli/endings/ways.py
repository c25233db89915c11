"""Ways for a training to end: what is typed, what happens to it, and what is then said."""

from __future__ import annotations

import os
import re
import signal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.endings.running import Running, parent
from data.readers import tfrecord

PAIR = ("--strategy", "mirrored", "--workers", "2")
SERVED = ("--strategy", "parameter_server(servers=2)", "--workers", "2")
AVERAGED = ("--strategy", "parameter_averaging", "--workers", "2", "--timeout-s", "1")
STAGES = ("--strategy", "pipeline", "--workers", "2")
OFTEN = ("--checkpoint-every", "2")
SHORT = ("--set", "epochs=1")
SMALL_FILES = ("sh", "-c", 'ulimit -f 32; exec "$@"', "sh")
RESUME = re.escape("--resume` goes on from the last checkpoint")
OOM, UNSAVED, RATE = "dmesg", "nothing was saved to go on from", "lower the learning rate"
LINE = r"see .*\.py, line \d+"


def nothing(_: Running) -> None:
    """Leaves the run alone."""


def no_file(_: Path) -> None:
    """Writes nothing."""


@dataclass(frozen=True)
class Way:
    """One way to end.

    Attributes:
        status: of the run.
        code: of the command.
        cause, remedy: what is said, as regular expressions; "" for nothing.
        options: of the command.
        end: of the job, see `job.py`.
        deed: what happens to the run from outside.
        before: the words of another command, behind which the command stands.
        files: writes what the job reads into a folder.
        remark: what is said besides.
        speaks: whether the command itself can say it.
        script: whether it is `script.py` that trains.
    """

    status: str
    code: int
    cause: str
    remedy: str
    options: Sequence[str] = ()
    end: str = ""
    deed: Callable[[Running], None] = nothing
    before: Sequence[str] = ()
    files: Callable[[Path], None] = no_file
    remark: str = ""
    speaks: bool = True
    script: bool = False


def kills(rank: int, number: int = signal.SIGKILL) -> Callable[[Running], None]:
    """Returns what sends a signal to a rank's process once both workers have done some steps."""

    def deed(run: Running) -> None:
        run.wait_for_steps(0, 1)
        os.kill(run.pids()[rank], number)

    return deed


def saved(deed: Callable[[Running], None]) -> Callable[[Running], None]:
    """Returns a deed that waits for a checkpoint first."""

    def later(run: Running) -> None:
        run.wait_for_checkpoint()
        deed(run)

    return later


def kill_servers(run: Running) -> None:
    run.wait_for_steps(0, 1)
    for rank, pid in run.pids().items():
        if rank > 1:
            os.kill(pid, signal.SIGKILL)


def signals(number: int) -> Callable[[Running], None]:
    """Returns what sends the command a signal once its worker has done some steps."""

    def deed(run: Running) -> None:
        run.wait_for_steps(0)
        run.signal(number)

    return deed


def press_twice(run: Running) -> None:
    """Presses Ctrl-C while a step lasts, and once more when the command has said what that does."""
    run.wait_for(run.held.exists)
    run.signal(signal.SIGINT)
    run.wait_for(lambda: "Ctrl-C once more ends it at once" in run.said())
    run.signal(signal.SIGINT)


def kill_fork_server(run: Running) -> None:
    run.wait_for_steps(0, 1)
    os.kill(parent(run.pids()[0]), signal.SIGKILL)


def damaged_records(folder: Path) -> None:
    """Writes 64 records, and another byte into the last."""
    content = bytearray(tfrecord([struct.pack("<4f", 1, 2, 3, number) for number in range(64)]))
    content[-10] ^= 1
    (folder / "train.tfrecord").write_bytes(content)


QUICK = {
    "a worker is killed": Way("failed", 4, "rank 1 .* was lost: killed by signal 9", f"{OOM}.*{RESUME}",
                              (*PAIR, *OFTEN), deed=saved(kills(1))),
    "the loss is not finite": Way("failed", 1, "the loss is (nan|inf) on rank", RATE, PAIR, "nan"),
    "Ctrl-C": Way("interrupted", 130, re.escape("Ctrl-C (SIGINT)"), RESUME, deed=signals(signal.SIGINT)),
    "the command is killed": Way("unfinished", -9, "it was killed", RESUME, OFTEN, deed=saved(signals(signal.SIGKILL)),
                                 speaks=False),
}  # fmt: skip

OTHERS = {
    "all rounds are done": Way("ok", 0, "", "", SHORT),
    "a worker is frozen": Way("failed", 4, "gave no sign of life", "--timeout-s", AVERAGED,
                              deed=kills(1, signal.SIGSTOP)),
    "a server is killed": Way("failed", 4, "a server.*killed by signal 9", OOM, (*SERVED, "--snapshots-every", "0"),
                              deed=kills(2)),
    "all servers are killed": Way("failed", 4, "a server.*killed by signal 9", OOM, SERVED, deed=kill_servers),
    "a stage is killed": Way("failed", 4, r"\(stage 1 of 2\).*killed by signal 9", f"{OOM}.*{UNSAVED}", STAGES,
                             "stages", kills(1)),
    "SIGTERM": Way("interrupted", 143, "^SIGTERM$", RESUME, PAIR, deed=signals(signal.SIGTERM)),
    "the terminal is closed": Way("interrupted", 143, "^SIGTERM$", RESUME, deed=signals(signal.SIGHUP)),
    "SIGTERM to a worker": Way("interrupted", 130, "^SIGTERM came to rank 1$", RESUME, PAIR,
                               deed=kills(1, signal.SIGTERM)),
    "Ctrl-C twice": Way("failed", 130, "before its round was done", RESUME, OFTEN, "holds",
                        saved(press_twice)),
    "Ctrl-C twice, nothing saved": Way("failed", 130, "before its round was done", UNSAVED, (), "holds", press_twice),
    "the gradient is not finite": Way("failed", 1, "the gradient is not finite", RATE, PAIR, "gradient"),
    "the loss grows": Way("ok", 0, "", "", SHORT, "diverged", remark=f"it has diverged; {RATE}"),
    "more workers than cores": Way("ok", 0, "", "", ("--strategy", "mirrored", "--workers", "8", *SHORT),
                                   remark="8 processes share [1-7] cores?.*headrace train .*--workers [1-7]"),
    "an error of the loss": Way("failed", 1, "ValueError: planted", LINE, PAIR, "loss"),
    "an error of the data": Way("failed", 5, "ValueError: planted", "repair that example", PAIR, "data"),
    "an error of a callback": Way("failed", 1, "ValueError: planted", LINE, AVERAGED, "callback"),
    "an error of the optimizer": Way("failed", 1, "ValueError: planted", LINE, SERVED, "optimizer"),
    "the time is over": Way("ok", 0, r"the time that it was given is over \(seconds=0.5\)", "", script=True),
    "a callback stops it": Way("ok", 0, "it is enough", "", (), "stops"),
    "it gets no better": Way("ok", 0, "loss has got no better for 1 evaluation", "", PAIR, "no better"),
    "a damaged record": Way("failed", 5, "record 63 has a wrong checksum", "write the file again", PAIR, "records",
                            files=damaged_records),
    "copies differ": Way("failed", 1, "mirrored keeps them equal", "on one worker alone",
                         (*PAIR, "--no-check"), "copies"),
    "memory runs out": Way("failed", 3, "ran out of memory in forward of step 3", re.escape("Options(accumulate=2)"),
                           (*PAIR, "--no-check"), "memory"),
    "os._exit": Way("failed", 1, "exit code 3 without an error", r"logs/rank-1\.log",
                    (*PAIR, "--no-check"), "os._exit"),
    "sys.exit": Way("failed", 1, "SystemExit: 3", LINE, (*PAIR, "--no-check"), "sys.exit"),
    "a segmentation fault": Way("failed", 4, "killed by signal 11", "PYTHONFAULTHANDLER=1", (*PAIR, "--no-check"),
                                "segfault"),
    "the fork server is killed": Way("failed", 4, "the process that starts the workers was lost", f"{OOM}.*{UNSAVED}",
                                     PAIR, deed=kill_fork_server),
    "files may not be that large": Way("failed", 3, "the limit of file sizes", "ulimit -f unlimited", PAIR,
                                       before=SMALL_FILES),
}  # fmt: skip
