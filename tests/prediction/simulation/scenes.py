"""Models and clusters of the simulator's tests: round numbers, so that what must come out is a sum on paper."""

from __future__ import annotations

from dataclasses import replace

import headrace as hr
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.simulation.simulate import Prediction, simulate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec
from headrace.spec.model import ModelSpec, ParameterSpec


def model(megabytes: int = 100, *, spread: float = 0.0, layers: bool = False) -> ModelSpec:
    """8 examples take 10 ms forward, 20 ms backward; the optimizer takes 2 ms."""
    size = megabytes * 1_000_000
    named = tuple(
        LayerSpec(f"l{place}", (f"p{place}",), size // 4, 0.0025, 0.005, 8_000_000, 4_000_000) for place in range(4)
    )
    parameters = [ParameterSpec(f"p{place}", (size // 16,)) for place in range(4)]
    profile = BatchProfile(8, 0.010, 0.020, 32_000_000, named if layers else ())
    compute = ComputeProfile((profile,), 0.002, 0.0, spread)
    return ModelSpec(tuple(parameters), layers=named if layers else (), compute=compute)


def gpus(hosts: int, devices: int = 1, *, gigabytes_per_s: float = 1.0, memory: int = 16_000_000_000) -> Cluster:
    """Hosts with accelerators and a network of 1 GB/s."""
    names = tuple(f"cuda:{index}" for index in range(devices))
    each = [
        Host(f"h{index}", 8, 64_000_000_000, names, device_memory_bytes=memory, bus_bytes_per_s=10e9)
        for index in range(hosts)
    ]
    return Cluster(tuple(each), device="cuda", link_bytes_per_s=gigabytes_per_s * 1e9)


EXACT = Assumptions(
    steps=10, bus_share=1.0, latency_s=0.0, bus_latency_s=0.0, memory_bytes_per_s=1e30, tcp_bytes_per_s=1e30
)
"""Nothing is lost that a sum on paper does not have; all-reduces are of hosts, and then of their rings."""
QUICK = replace(EXACT, algorithm="hierarchical")


def run(strategy: hr.Strategy, cluster: Cluster | None = None, *, examples: int = 32, **changes) -> Prediction:
    return simulate(
        changes.pop("model", model()),
        cluster or gpus(4),
        strategy,
        global_batch_size=examples,
        assumptions=changes.pop("assumptions", QUICK),
        **changes,
    )
