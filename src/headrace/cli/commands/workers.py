"""`headrace workers`: add, remove or list workers of a running run."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from headrace.cli.command import argument, command
from headrace.cli.output import Answer
from headrace.engine.local.scaling import ask_for_states, ask_for_workers
from headrace.errors import UsageError

_EXAMPLES = """
  headrace workers add 2 runs/a
  headrace workers remove 1 runs/a
  headrace workers list runs/a
"""


class Change(StrEnum):
    """What to do with the workers."""

    ADD = "add"
    REMOVE = "remove"
    LIST = "list"


@command(_EXAMPLES)
def workers(
    answer: Answer,
    change: Annotated[Change, argument("add|remove|list", "Whether to add, remove or list.")],
    words: Annotated[
        list[str],
        argument("[N] RUN_DIR", "How many workers, but to list them; and the directory of a run that goes on."),
    ],
) -> None:
    """Add workers to a running job, remove workers, or list them.

    For parameter_server without a bound, downpour and averaging through servers; with min_workers also for mirrored,
    central_storage and parameter_averaging. Under torchrun or srun, `add` says how to start a process that joins.
    """
    if change == Change.LIST:
        states = ask_for_states(_run_dir(change, words, 1))
        lines = [f"rank {worker.rank} on {worker.host}, process {worker.process}: {worker.state}" for worker in states]
        answer.give({"workers": [asdict(worker) for worker in states]}, "\n".join(lines))
        return
    run_dir = _run_dir(change, words, 2)
    count = int(words[0]) if words[0].isdecimal() else 0
    if count < 1:
        raise UsageError(f"N must be at least 1, got {words[0]}")
    reply = ask_for_workers(run_dir, count if change == Change.ADD else -count)
    answer.give({"said": reply}, reply)


def _run_dir(change: Change, words: list[str], wanted: int) -> Path:
    if len(words) != wanted:
        usage = f"headrace workers {change.value} {'N ' * (wanted - 1)}RUN_DIR"
        raise UsageError(f"{usage} has {wanted} argument{'s' * (wanted > 1)}, got {len(words)}: {' '.join(words)}")
    return Path(words[-1])
