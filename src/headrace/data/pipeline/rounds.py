"""Which examples a round takes, and how many all hosts take in it together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from headrace.data.pipeline.pipeline import Hosts, InputPipeline


def local(pipeline: InputPipeline) -> InputPipeline:
    """Says that a pipeline lists only what this host stores; every host lists its own, under the same name of a job.

    Each host shuffles its own part and reads nothing of the others'. In every round it takes what is in proportion to
    its part, so that all parts end together, and each example weighs the same, however unequal they are.

    Args:
        pipeline: of this host's examples; at least one.

    Returns:
        The same, marked. Where there is only one host, nothing changes.
    """
    return dataclasses.replace(pipeline, hosts=Hosts())


@dataclass(frozen=True)
class Rounds:
    """The rounds of one epoch.

    A host with `n` of all `N` examples takes those at `[n i // R, n (i + 1) // R)` of its order in round `i` of
    `R = ceil(N / B)`; where all hosts list the same data, those at `[i B, (i + 1) B)`.

    Args:
        pipeline: of the data.
        batch: examples that all workers together take in one round, but for an epoch's last one; where hosts differ,
            on the mean.
    """

    pipeline: InputPipeline
    batch: int

    def __len__(self) -> int:
        return -(-self.total // self.batch)

    @property
    def total(self) -> int:
        """Examples that all hosts have together."""
        hosts = self.pipeline.hosts
        return sum(hosts.counts) if hosts and hosts.counts else len(self.pipeline)

    def span(self, index: int) -> tuple[int, int, int]:
        """Returns what this host takes in a round, `[start, stop)` of its order, and how many all take."""
        hosts = self.pipeline.hosts
        if hosts is None or len(hosts.counts) <= 1:
            start = index * self.batch
            stop = min(start + self.batch, self.total)
            return start, stop, stop - start
        spans = [(count * index // len(self), count * (index + 1) // len(self)) for count in hosts.counts]
        return *spans[hosts.mine], sum(stop - start for start, stop in spans)
