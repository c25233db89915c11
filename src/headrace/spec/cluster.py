"""The machines, for planning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        cores: that the run may use, by affinity and quota.
        memory_bytes: that is free, by the machine and by control groups.
        accelerators: devices by name, "cuda:0"; empty on a CPU machine.
        ranks: of the processes that a launcher has started on it, where there are several hosts.
    """

    name: str
    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    Attributes:
        hosts: in the order of their first ranks.
        ranks: number of processes that a launcher has started (torchrun's WORLD_SIZE); None without a launcher.
        device: where tensors live, "cpu" or "cuda".
        link_bytes_per_s: bandwidth between hosts; assumed, not measured: that of 1 Gbit/s.
    """

    hosts: tuple[Host, ...]
    ranks: int | None = None
    device: str = "cpu"
    link_bytes_per_s: float = 125e6

    @property
    def accelerators(self) -> int:
        """Accelerators of all hosts together."""
        return sum(len(host.accelerators) for host in self.hosts)
