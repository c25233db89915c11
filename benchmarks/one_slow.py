"""A strategy's workers, one of them slow, by waiting and not by burning the cores."""

from __future__ import annotations

import time
from typing import ClassVar

from headrace.spec.plan import Plan
from headrace.strategies import Strategy, WorkerContext
from headrace.training.exchange import Replica

SLOWER = 4


class OneSlow(Strategy):
    """Lets every worker sleep in each step, worker 0 four times as long; comes before a strategy."""

    pause_s: ClassVar[float] = 0.05

    def replica(self, plan: Plan, rank: int, parts: WorkerContext) -> Replica:
        pause = self.pause_s * (SLOWER if rank == 0 else 1)
        parts.module.register_forward_pre_hook(lambda *_: time.sleep(pause) if parts.module.training else None)
        return super().replica(plan, rank, parts)
