"""What a written file is to start."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_LONGEST_NAME = 40
"""Of characters: a pod's name, which a number is added to, has at most 63."""


@dataclass(frozen=True)
class LaunchRequest:
    """A training, and the processes that do it.

    Attributes:
        job: its file, as the processes find it from their working directory.
        name: what the scheduler calls it.
        workers: processes on all hosts together, with those that are parameter servers.
        hosts: None where the scheduler decides.
        arguments: further ones of `headrace train`.
        run_dir: on a file system of all hosts; "" for the scheduler's usual place.
        cores: of each process.
        memory_gb: of each process; None for no limit.
        save_s: seconds that the end of a round and a checkpoint may take.
        cyclic: whether processes are dealt out to the hosts by turns.
        file: where it is written.
    """

    job: Path
    name: str
    workers: int
    hosts: int | None
    arguments: tuple[str, ...]
    run_dir: str
    cores: int
    memory_gb: float | None
    save_s: int
    cyclic: bool
    file: Path

    def train(self, run_dir: str) -> list[str]:
        """Returns the command of each process; a second attempt goes on from what the first one has saved."""
        command = ["headrace", "train", str(self.job), *self.arguments]
        return [*command, "--run-dir", run_dir, "--resume-if-saved"]


def shell(command: list[str]) -> str:
    """Returns a command as a shell reads it; a word that begins with $ is a variable.

    >>> shell(["headrace", "--run-dir", "$run_dir", "--strategy", "pipeline(4)"])
    'headrace --run-dir "$run_dir" --strategy \\'pipeline(4)\\''
    """
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)


def scheduler_name(text: str) -> str:
    """Returns a name that all schedulers take: small letters, digits and hyphens.

    >>> scheduler_name("My_job 2"), scheduler_name("7_days")
    ('my-job-2', 'job-7-days')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"job-{plain}"
    return named[:_LONGEST_NAME].strip("-")
