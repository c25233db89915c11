"""What simulations alone say: staleness, what limits the rate, and what slow steps cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from cell import GIGABIT, MACHINES, profile_of, text_of
from table import ROWS, SEEDS, rows_of
from tasks import TASKS

import headrace as hr
from headrace.errors import HeadraceError
from headrace.spec.cluster import Cluster
from headrace.strategies import resolve

SLOW_SHARE, SLOW_FACTOR = 0.05, 4.0
"""One step in twenty takes four times as long."""


@dataclass(frozen=True)
class Simulated:
    """A strategy on the machines of the cells, without training.

    Attributes:
        efficiency: examples a second, over those of as many machines that each work alone.
        slow_network: the same with 1 Gbit/s.
        staleness: mean over the updates; None where no gradient is stale.
        slow_steps: how many times as long a round takes where some steps are slow.
    """

    task: str
    row: str
    workers: int
    efficiency: float
    slow_network: float
    bottleneck: str
    staleness: float | None
    slow_steps: float


def simulate_all() -> list[dict[str, object]]:
    """Returns what is known of every row with every number of workers."""
    every = ((task, row, workers) for task in TASKS for row in rows_of(task) for workers in ROWS[row].workers)
    return [asdict(found) for one in every if (found := _simulated(*one))]


def _simulated(task: str, row: str, workers: int) -> Simulated | None:
    strategy = resolve(text_of(row, workers), workers)
    assumed = hr.Assumptions(seed=SEEDS[0], steps=TASKS[task].rounds)

    def on(cluster: Cluster, assumptions: hr.Assumptions) -> hr.Prediction:
        return hr.simulate(
            profile_of(task),
            cluster,
            strategy,
            global_batch_size=TASKS[task].batch,
            assumptions=assumptions,
            force=True,
        )

    try:
        usual = on(MACHINES, assumed)
        network = on(replace(MACHINES, link_bytes_per_s=GIGABIT), assumed)
        steps = on(MACHINES, replace(assumed, slow_share=SLOW_SHARE, slow_factor=SLOW_FACTOR))
    except HeadraceError:
        return None
    return Simulated(
        task, row, workers, usual.efficiency, network.efficiency, usual.bottleneck, usual.staleness,
        steps.step_s / usual.step_s,
    )  # fmt: skip
