"""This process is one worker of those that a launcher has started: torchrun, SLURM, MPI, `headrace launch`.

The launcher describes it in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from headrace.engine.base import LEFT, Engine, RunProgress, followed, orderly_interrupts
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.errors import LeftBehind, PeerLost
from headrace.machine.resources import cores
from headrace.policies.roles import threads_per_worker
from headrace.worker.run_spec import RunSpec


class LaunchedEngine(Engine):
    """Runs one worker, in this process, which has joined the others in `group`.

    It computes with so many threads; None for the cores of this host, divided by its processes.
    """

    def __init__(self, group: LaunchedGroup, threads: int | None = None) -> None:
        self.group = group
        self._threads = threads

    def run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        group = self.group
        torch.set_num_threads(self._threads or threads_per_worker(cores(), group.mates))
        page = group.page
        # Another rank may take the place of rank 0.
        shows = followed(page, progress) if group.rank == 0 or spec.plan.min_workers else nullcontext()
        with orderly_interrupts(page) as interrupts, shows:
            try:
                group.work(spec)
            except LeftBehind:
                # The others go on.
                raise
            except BaseException as error:
                # This process may go on, and then the others cannot see its end.
                group.abort(error)
                if isinstance(error, PeerLost) and (part := spec.plan.part_of(error.rank)):
                    raise PeerLost(error.rank, error.host, error.cause, part) from error.__cause__
                raise
        if group.has_left:
            return LEFT
        # Now all have written their last events.
        group.agree("ended")
        progress(RunProgress.read(page))
        return interrupts.status(page)

    def close(self) -> None:
        self.group.close()
