"""What a simulation is about: the model on the devices of a cluster, and what is assumed beside what is known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.devices import HOST
from headrace.errors import InfeasiblePlan, UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import PipelineSchedule
from headrace.policies.behaviour import Behaviour, Stages
from headrace.policies.roles import split, threads_per_worker
from headrace.prediction.assumptions import SPREAD, VARIED_SPREAD, Assumptions
from headrace.prediction.simulation.network import Network
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, LayerSpec
from headrace.spec.model import ModelSpec

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class DeviceStep:
    """What a step takes on one device, in seconds, without variation."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    fixed_s: float
    accumulate_s: float = 0.0
    layers: tuple[LayerSpec, ...] = ()

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.fixed_s


@dataclass(frozen=True)
class Scene:
    """Workers and servers on the hosts of a cluster.

    Attributes:
        hosts: of each worker.
        servers: hosts of the servers.
        examples: of a global batch.
        behaviour: what the workers do.
        accumulate: micro-batches that a worker makes of its share, one after the other, so that their activations fit.
        drawn: whether the passes of a pipeline's first steps are kept, to draw them.
        memo: what was computed before for the same model and cluster; scenes of one search have one.
    """

    model: ModelSpec
    cluster: Cluster
    hosts: tuple[Host, ...]
    servers: tuple[Host, ...]
    examples: int
    assumptions: Assumptions
    behaviour: Behaviour = field(default_factory=Behaviour)
    accumulate: int = 1
    drawn: bool = True
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def workers(self) -> int:
        """Number of devices that compute."""
        return len(self.hosts)

    @property
    def replicas(self) -> int:
        """Number of copies of the model, each of which one device or several hold."""
        return self.workers // self.behaviour.devices

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The order of passes of replicas that are pipelines."""
        stages = self.behaviour.division
        assert isinstance(stages, Stages)
        return SCHEDULES[stages.schedule](stages.devices, stages.micro_batches, stages.chunks)

    @cached_property
    def network(self) -> Network:
        """The links between the hosts."""
        return Network(self.cluster, self.assumptions)

    @cached_property
    def crowds(self) -> Counter[str]:
        """How many workers each host has."""
        return Counter(host.name for host in self.hosts)

    def shares(self, by_speed: bool = False) -> tuple[int, ...]:
        """Returns how many examples of a global batch each replica gets."""
        firsts = self.hosts[:: self.behaviour.devices]
        speeds = [round(1000 * host.speed) for host in firsts]
        return split(self.examples, speeds if by_speed else (1,) * self.replicas)

    def step(self, host: Host, examples: int) -> DeviceStep:
        """Returns what a step of so many examples takes on a device of a host.

        Raises:
            UsageError: neither a profile nor the device's FLOP/s say.
        """
        # Of what else a host has a step does not depend, and there are thousands of them.
        key = self.step_key(host, examples)
        if key not in self.memo:
            self.memo[key] = self._step(host, examples)
        known: DeviceStep = self.memo[key]
        return known

    def steps(self, examples: int) -> list[DeviceStep]:
        """Returns what a step of so many examples takes on the device of each worker."""
        unlike = {id(host): host for host in self.hosts}
        known = {place: self.step(host, examples) for place, host in unlike.items()}
        return [known[id(host)] for host in self.hosts]

    def step_key(self, host: Host, examples: int) -> tuple[object, ...]:
        """Returns what a step depends on, of one model and one cluster."""
        crowd = self.crowds.get(host.name)
        return ("step", host.speed, host.cores, host.device_flops, crowd, examples, self.accumulate)

    def _step(self, host: Host, examples: int) -> DeviceStep:
        if examples == 0:
            return DeviceStep(0.0, 0.0, 0.0, 0.0)
        profile = self.model.compute
        if profile is None:
            batch = self._from_operations(host, examples)
            return DeviceStep(batch.forward_s, batch.backward_s, self._update_s(), 0.0)
        slower = self._crowding(host) / host.speed
        pieces = min(self.accumulate, examples)
        batch = profile.at(-(-examples // pieces))
        computing = slower * examples / batch.examples
        layers = tuple(
            replace(
                each,
                forward_s=each.forward_s * computing,
                backward_s=each.backward_s * computing,
                # Of all micro-batches: each has its own exchange.
                crossing_bytes=round(each.crossing_bytes * examples / batch.examples),
            )
            for each in batch.layers
        )
        forward_s, backward_s = batch.forward_s * computing, batch.backward_s * computing
        update_s, fixed_s, adding_s = (
            slower * each for each in (profile.optimizer_s, profile.fixed_s, profile.accumulate_s)
        )
        return DeviceStep(forward_s, backward_s + (pieces - 1) * adding_s, update_s, fixed_s, adding_s, layers)

    def _update_s(self) -> float:
        """Returns what an optimizer takes to read and write all that it keeps, and to read the gradients."""
        touched = (2 * self.model.copies - 1) * self.model.trainable_bytes
        return 0.0 if self.cluster.device == HOST else touched / self.assumptions.memory_bytes_per_s

    def _crowding(self, host: Host) -> float:
        """Returns how many times slower a CPU worker is that has fewer threads than the profile had, and neighbours."""
        assert self.model.compute is not None
        if self.cluster.device != "cpu" or host.name not in self.crowds:
            return 1.0
        workers = self.crowds[host.name]
        # More workers than cores take turns.
        own = threads_per_worker(host.cores, workers, host.threads) / max(1.0, workers / host.cores)
        fewer = max(1.0, (self.model.compute.threads or host.cores) / own)
        return fewer * self.model.compute.among(workers)

    def _from_operations(self, host: Host, examples: int) -> BatchProfile:
        if not host.device_flops:
            raise UsageError(
                f"{self.model.name or 'the model'} has no measured time, and host {host.name} does not say "
                "device_tflops, so that nothing says how long a step takes; give one of them"
            )
        forward_s = examples * self.model.flops_per_example / host.device_flops
        # Backward makes two gradients where forward makes one output.
        return BatchProfile(examples, forward_s, 2 * forward_s)

    def variation(self, rounds: int, workers: int, stream: int = 0) -> Seconds:
        """Returns by how much each step of each worker takes longer than on average, (rounds, workers)."""
        assumed, spread = self.assumptions, spread_of(self.model, self.assumptions)
        random = np.random.default_rng([assumed.seed, stream])
        sigma = math.sqrt(math.log1p(spread**2))
        factors: Seconds = np.ones((rounds, workers))
        if spread:
            factors = random.lognormal(-(sigma**2) / 2, sigma, (rounds, workers))
        if assumed.slow_share:
            factors = (
                np.where(random.random((rounds, workers)) < assumed.slow_share, assumed.slow_factor, 1.0) * factors
            )
        return factors


def spread_of(model: ModelSpec, assumed: Assumptions) -> float:
    """Returns the standard deviation of a step's time over its mean: as assumed, as measured, or a usual one."""
    profile = model.compute
    if assumed.spread is not None:
        return assumed.spread
    if profile is None or profile.spread is None:
        return VARIED_SPREAD if profile and profile.varied else SPREAD
    return profile.spread


def place(cluster: Cluster, workers: int, servers: int) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """Returns the hosts of workers and servers: as a launcher says, or workers in blocks, and servers behind them.

    Raises:
        InfeasiblePlan: there are fewer devices, with both numbers.
    """
    hosts = cluster.hosts
    if cluster.ranks is not None and any(host.ranks for host in hosts):
        of_rank = {rank: host for host in hosts for rank in host.ranks}
        if len(of_rank) != workers + servers:
            raise InfeasiblePlan(
                f"{workers} workers and {servers} servers, and the cluster has {len(of_rank)} processes"
            )
        ordered = [of_rank[rank] for rank in sorted(of_rank)]
        return tuple(ordered[:workers]), tuple(ordered[workers:])
    if cluster.device != HOST:
        devices = [host for host in hosts for _ in host.accelerators]
        if len(devices) < workers:
            where = f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
            raise InfeasiblePlan(
                f"{workers} workers need as many devices, and the cluster has {len(devices)} on {where}; "
                f"use workers={len(devices)} or fewer, or more hosts"
            )
        taken = devices[:workers]
    else:
        counts = split(workers, (1,) * min(workers, len(hosts)))
        taken = [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]
    used = {host.name for host in taken}
    free = [host for host in hosts if host.name not in used] or list(reversed(hosts))
    return tuple(taken), tuple(free[index % len(free)] for index in range(servers))
