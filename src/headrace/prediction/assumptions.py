"""What a prediction assumes where neither the model's nor the cluster's file says it, and where that is from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real

from headrace.devices import HOST
from headrace.errors import UnknownName, UsageError

ALGORITHMS = {
    "ring": "all ranks in one ring",
    "tree": "to one rank and back along a tree",
    "halving_doubling": "recursive halving and doubling",
    "hierarchical": "inside hosts, then a ring of hosts",
}
"""All-reduce algorithms by name, with what they do."""
SPREAD = 0.03
"""Of a step's time, where the profile has none: Goyal et al., 2017, see steps that are 12 % longer with 352 GPUs than
with 8 on a network that hides what is sent, which is the slowest of so many steps with a spread of 0.03 to 0.05."""
VARIED_SPREAD = 0.1
"""Where examples differ in length: between batches that are sorted by length, which differ little, and ones that are
not, of which Li et al., "Taming unbalanced training workloads in deep learning with partial collective operations",
2020, measured 0.3 for a Transformer."""
FASTEST_TCP_BYTES_PER_S = 12.5e9
"""What is faster than 100 Gbit/s is taken for RDMA."""
_PAYLOAD = 1448 / 1514
"""The part of a full packet of 1500 bytes that is not a header of Ethernet, IP, or TCP with timestamps."""
_BUS_SHARE = 0.8
"""NCCL counts on 20 of the 25 GB/s of a second or third generation NVLink, and on 12 of PCIe 3.0's 15.75 (topo.h)."""
_NVLINK_BYTES_PER_S = 32e9
"""Above what PCIe 4.0 has."""
_BUS_LATENCY_S, _PCIE_LATENCY_S, _LATENCY_S = 3.4e-6, 5.7e-6, 9.6e-6
"""Of a step of a ring over NVLink, PCIe and a network of devices: NCCL's own model (tuning.cc, Simple protocol)."""
_TCP_LATENCY_S = 25e-6
"""Of a small message by TCP, half of a round trip of 50 us within a data centre."""

_WHOLE = ("steps", "seed", "bucket_bytes")
_MOST_SPREAD = 10.0
_ABOVE_0 = ("steps", "network_share", "bus_share", "apply_bytes_per_s", "memory_bytes_per_s", "tcp_bytes_per_s")


@dataclass(frozen=True)
class Assumptions:
    """What a simulation assumes where neither the model's nor the cluster's file says it.

    Attributes:
        steps: rounds that are simulated.
        spread: standard deviation of a step's computing time over its mean; None for the model's, or 0.03 where it has
            none, and 0.1 where its examples differ in length.
        slow_share, slow_factor: so many of the steps of a worker take so many times as long (stragglers).
        network_share: the part of a link's bytes/s that gradients and parameters attain: 0.9 is common. None for what
            packets' headers leave between CPU hosts, and for all of it between hosts with devices.
        bus_share: the part that they attain of the bus between the devices of a host; None for 0.8.
        tcp_bytes_per_s: the most that devices attain between hosts without RDMA, whatever the link has.
        latency_s, bus_latency_s: of a message between hosts, and between devices of a host, where the cluster does not
            say it; None for NCCL's or TCP's.
        memory_bytes_per_s: of a device's memory, in which gradients are copied and the optimizer works.
        algorithm: of an all-reduce: a key of `ALGORITHMS`, or "auto", NCCL's ring or its tree between devices.
        bucket_bytes: of the gradients that are exchanged while backward runs; None for the runtime's.
        apply_bytes_per_s: at which a server adds a gradient to its parameters.
        input_gradient_share: the part of a backward pass that makes the gradient of the input, where a schedule does
            both parts apart.
        checkpoint_s, restart_s: how long a checkpoint stops the run, and how long it takes to begin again.
        seed: of the random numbers: the same seed, the same result.

    Raises:
        UsageError: a number is out of its range, or there is no such algorithm.

    Examples:
        >>> stragglers = hr.Assumptions(steps=20, slow_share=0.1, slow_factor=3.0)
        >>> predicted = hr.simulate("model.toml", "cluster.toml", hr.Mirrored(workers=16), assumptions=stragglers)
        >>> predicted.efficiency < 0.9
        True
    """

    steps: int = 100
    seed: int = 0
    spread: float | None = None
    slow_share: float = 0.0
    slow_factor: float = 1.0
    network_share: float | None = None
    bus_share: float | None = None
    tcp_bytes_per_s: float = 4e9
    latency_s: float | None = None
    bus_latency_s: float | None = None
    memory_bytes_per_s: float = 900e9
    algorithm: str = "auto"
    bucket_bytes: int | None = None
    apply_bytes_per_s: float = 5e9
    input_gradient_share: float = 0.5
    checkpoint_s: float = 5.0
    restart_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "algorithm" or (value is None and each.default is None):
                continue
            kind, what = (Integral, "a whole number") if each.name in _WHOLE else (Real, "a number")
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise UsageError(f"{each.name} must be {what} of at least 0, got {value!r}")
        if (self.spread or 0) > _MOST_SPREAD:
            raise UsageError(f"spread is a part of the mean, at most {_MOST_SPREAD:g}, got {self.spread!r}")
        for name in ("slow_share", "network_share", "bus_share", "input_gradient_share"):
            if (getattr(self, name) or 0) > 1:
                raise UsageError(f"{name} is a part of the whole, at most 1, got {getattr(self, name)!r}")
        for name in _ABOVE_0:
            if getattr(self, name) == 0:
                raise UsageError(f"{name} must be above 0")
        if self.algorithm not in ("auto", *ALGORITHMS):
            raise UnknownName("all-reduce algorithm", self.algorithm, ("auto", *ALGORITHMS))

    def share_of_link(self, device: str) -> float:
        """Returns `network_share`, or what it is where it is None."""
        if self.network_share is not None:
            return self.network_share
        return _PAYLOAD if device == HOST else 1.0

    def share_of_bus(self, device: str) -> float:
        """Returns `bus_share`, or what it is where it is None."""
        if self.bus_share is not None:
            return self.bus_share
        return 1.0 if device == HOST else _BUS_SHARE

    def latency_of_link(self, device: str) -> float:
        """Returns `latency_s`, or what it is where it is None."""
        if self.latency_s is not None:
            return self.latency_s
        return _TCP_LATENCY_S if device == HOST else _LATENCY_S

    def latency_of_bus(self, device: str, bus_bytes_per_s: float) -> float:
        """Returns `bus_latency_s`, or what it is where it is None: of NVLink or PCIe, by the rate of the bus."""
        if self.bus_latency_s is not None:
            return self.bus_latency_s
        if device == HOST:
            return 0.0
        return _BUS_LATENCY_S if bus_bytes_per_s > _NVLINK_BYTES_PER_S else _PCIE_LATENCY_S
