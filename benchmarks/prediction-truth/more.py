"""Rows of tables that say one device's rate, the parameters and the links: every constant is the simulator's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rows import Row

from headrace.prediction.simulation.simulate import simulate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.strategies import Mirrored

_TOKENS = 50
"""Of a pair of sentences, both sides, where a table says pairs and tokens a second."""
_NVLINK = 150e9
"""Of a V100's six links, in one direction, where a table names the machine alone."""
_LINE = 100e9 / 8
_VARIED = ("transformer_big", "gnmt")
"""Tables of sentences, which differ in length."""


def more() -> Iterator[Row]:
    """Yields the rows of all tables of published_more.json."""
    path = Path(__file__).parent / "published_more.json"
    for table, about in json.loads(path.read_text(encoding="utf-8")).items():
        if not isinstance(about, dict):
            continue
        for row in about["rows"]:
            yield Row(
                table, f"{row['case']}, {row['devices']} devices", row["published"], _predicted(table, about, row)
            )


def _predicted(table: str, about: dict[str, Any], row: dict[str, Any]) -> float:
    pairs = 128 * _TOKENS
    batch = row.get("batch_a_device", pairs)
    bus = row.get("bus_B_s", _NVLINK)
    most = 8 if "one_host_of_8" in row else 16
    known = about["parameters"], table in _VARIED, batch, bus, most
    if "one_device" in row:
        return _rate(*known, row["one_device"], row["devices"])
    # The rate of a host of 8 says what one device does: what 8 lose to each other is taken from it.
    alone = row["one_host_of_8"] / 8
    return row["one_host_of_8"] * _rate(*known, alone, row["devices"]) / _rate(*known, alone, 8)


@cache
def _rate(parameters: float, varied: bool, batch: int, bus: float, most: int, alone: float, devices: int) -> float:
    seconds = batch / alone
    profile = ComputeProfile((BatchProfile(batch, seconds / 3, 2 * seconds / 3),), varied=varied)
    model = ModelSpec((ParameterSpec("parameters", (round(parameters),)),), compute=profile)
    hosts = tuple(
        Host(f"h{place}", 8, 0, tuple(f"cuda:{index}" for index in range(most)), bus_bytes_per_s=bus)
        for place in range(-(-devices // most))
    )
    cluster = Cluster(hosts, device="cuda", link_bytes_per_s=_LINE)
    return simulate(model, cluster, Mirrored(devices), global_batch_size=devices * batch).examples_per_s
