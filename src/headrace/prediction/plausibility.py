"""Figures whose unit is probably wrong: each is compared with its neighbours, which have the same unit.

One figure a thousand or eight times its neighbours' is plausible by itself. Of models only files that a person has
written are looked at: what was measured has the unit that it should have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

import numpy as np

from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec
from headrace.spec.model import ModelSpec

_AGREE = 1.5
"""Neighbours that differ by more do not say what the figure should be."""
_NEAR = 0.1
"""How far a ratio may be from that of two units."""
_ENOUGH = 2
"""Neighbours that are needed to tell which figure is wrong."""
_RATES = {1 / 8: "megabytes", 1 / 1000: "gigabits", 1 / 8000: "gigabytes", 125.0: "kilobytes", 1000.0: "kilobits"}
"""What a rate in Mbit/s may have been given in, by its ratio to the others'."""
_SIZES = {1 / 1000: "terabytes", 1000.0: "megabytes"}
_BUSES = {8.0: "gigabits", 1 / 1000: "terabytes", 1000.0: "megabytes"}
_FLOPS = {1 / 1000: "PFLOP/s", 1000.0: "GFLOP/s"}
_FAR = 300.0
"""Two passes, or two batches, whose times differ by so much more than usual have different units: s, ms or us."""
_LONG_WAY = 10.0
"""A link with a latency so many times the others' is of another kind, and may be as slow as it says."""


def doubtful_units(model: ModelSpec, cluster: Cluster) -> tuple[str, ...]:
    """Returns a warning for each figure whose unit is probably wrong."""
    found = [*_links(cluster), *_hosts(cluster)]
    if not model.origin and model.compute:
        found += [*_batches(model.compute), *_layers(model.compute.batches[0].layers)]
    return tuple(f"warning: {each}" for each in found)


def _links(cluster: Cluster) -> Iterator[str]:
    ways: dict[frozenset[str], Link] = {}
    for link in cluster.links:
        if not link.shared:
            ways.setdefault(frozenset((link.source, link.target)), link)
    links = list(ways.values())
    for place in _extremes([link.bytes_per_s for link in links]):
        link, others = links[place], links[:place] + links[place + 1 :]
        rates = [each.bytes_per_s for each in others]
        far = link.latency_s > _LONG_WAY * median([each.latency_s for each in others] or [0.0]) > 0
        given_in = None if far else _other_unit(link.bytes_per_s, rates, _RATES)
        if given_in:
            yield (
                f"the link between {link.source} and {link.target} has {_mbit(link.bytes_per_s)}, and the "
                f"{len(others)} others have {_mbit(median(rates))}; mbit_per_s is in megabits a second: was it given "
                f"in {given_in}?"
            )
    yield from _latencies(links)


def _latencies(links: Sequence[Link]) -> Iterator[str]:
    """Compares links of one rate: a slow line may have a long latency."""
    rates, every = (np.array([getattr(link, name) for link in links]) for name in ("bytes_per_s", "latency_s"))
    for place, link in enumerate(links):
        alike = (rates <= _AGREE * rates[place]) & (rates[place] <= _AGREE * rates)
        alike[place] = False
        # In another unit it would be far from each, for they agree.
        one = every[alike][:1]
        if ((one < _FAR * link.latency_s) & (link.latency_s < _FAR * one)).any():
            continue
        others = every[alike].tolist()
        given_in = _other_unit(link.latency_s, others, {1 / 1000: "seconds", 1000.0: "microseconds"})
        if given_in:
            yield (
                f"the link between {link.source} and {link.target} has a latency of {1e3 * link.latency_s:g} ms, and "
                f"the {len(others)} others of its rate {1e3 * median(others):g} ms; latency_ms is in milliseconds: was "
                f"it given in {given_in}?"
            )


_FIGURES: tuple[tuple[str, str, Callable[[Host], float], Mapping[float, str]], ...] = (
    ("memory_gb", "gigabytes", lambda host: host.memory_bytes / 1e9, _SIZES),
    ("device_memory_gb", "gigabytes", lambda host: host.device_memory_bytes / 1e9, _SIZES),
    ("device_tflops", "TFLOP/s", lambda host: host.device_flops / 1e12, _FLOPS),
    ("bus_gb_per_s", "gigabytes a second", lambda host: host.bus_bytes_per_s / 1e9, _BUSES),
)


def _hosts(cluster: Cluster) -> Iterator[str]:
    """Compares hosts with as many cores and accelerators."""

    def kind(host: Host) -> tuple[int, int]:
        return host.cores, len(host.accelerators)

    for _, group in groupby(sorted(cluster.hosts, key=kind), key=kind):
        hosts = list(group)
        for key, unit, figure, units in _FIGURES:
            values = [figure(host) for host in hosts]
            # Most clusters have thousands of hosts that are the same.
            if min(values) == max(values):
                continue
            for place in _extremes(values):
                host, others = hosts[place], values[:place] + values[place + 1 :]
                given_in = _other_unit(values[place], others, units)
                if given_in:
                    yield (
                        f"{key} of host {host.name} is {values[place]:g}, and that of the {len(others)} others with as "
                        f"many cores {median(others):g}; it is in {unit}: was it given in {given_in}?"
                    )


def _layers(layers: Sequence[LayerSpec]) -> Iterator[str]:
    """Compares layers that have the same sizes, and so do the same operations."""
    for layer in layers:
        alike = [
            each
            for each in layers
            if each is not layer
            and (each.parameter_bytes, each.crossing_bytes) == (layer.parameter_bytes, layer.crossing_bytes)
        ]
        for key, own, others in (
            ("forward_ms", layer.forward_s, [each.forward_s for each in alike]),
            ("backward_ms", layer.backward_s, [each.backward_s for each in alike]),
        ):
            ratio = own / median(others) if len(others) >= _ENOUGH and median(others) and _agree(others) else 1.0
            if own and not 1 / _FAR < ratio < _FAR:
                yield (
                    f"{key} of layer {layer.name} is {1e3 * own:g}, and that of the {len(others)} layers with the same "
                    f"sizes {1e3 * median(others):g}; it is in milliseconds: was it given in {_time(ratio)}?"
                )
        yield from _passes(layer, f"layer {layer.name}")


def _batches(profile: ComputeProfile) -> Iterator[str]:
    """Compares forward with backward, and each batch with the one before: at least as long, at most in proportion."""
    before: BatchProfile | None = None
    for batch in profile.batches:
        yield from _passes(batch, f"the batch of {batch.examples}")
        if before and before.forward_s and batch.forward_s:
            ratio = batch.forward_s / before.forward_s
            if ratio < 1 / _FAR or ratio > _FAR * batch.examples / before.examples:
                yield (
                    f"forward_ms of the batch of {batch.examples} is {1e3 * batch.forward_s:g}, and that of the batch "
                    f"of {before.examples} {1e3 * before.forward_s:g}; both are in milliseconds"
                )
        before = batch


def _passes(one: BatchProfile | LayerSpec, name: str) -> Iterator[str]:
    if one.forward_s and one.backward_s and not 1 / _FAR < one.backward_s / one.forward_s < _FAR:
        yield (
            f"{name} takes {1e3 * one.forward_s:g} ms forward and {1e3 * one.backward_s:g} ms backward, which usually "
            "takes twice as long; forward_ms and backward_ms are both in milliseconds"
        )


def _other_unit(own: float, others: Sequence[float], units: Mapping[float, str]) -> str | None:
    """Returns the unit that a figure was probably given in; None where it is like the others, or they differ."""
    if len(others) < _ENOUGH or min(others) <= 0 or not _agree(others):
        return None
    ratio = own / median(others)
    return next((unit for factor, unit in units.items() if abs(ratio / factor - 1) < _NEAR), None)


def _extremes(values: Sequence[float]) -> list[int]:
    """Returns the places of the least and the largest: where all others agree, none between them has another unit."""
    return sorted({values.index(min(values)), values.index(max(values))}) if values else []


def _agree(values: Sequence[float]) -> bool:
    return max(values) <= _AGREE * min(values)


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:g} Mbit/s"


def _time(ratio: float) -> str:
    return "seconds" if ratio < 1 else "microseconds"
