"""Figures whose unit is probably wrong are named beside their neighbours, and no others are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from headrace.prediction import plausibility
from headrace.prediction.cloud import cloud_cluster, cloud_machines
from headrace.prediction.plausibility import doubtful_units
from headrace.prediction.recommendation.recommend import recommend
from headrace.prediction.simulation.simulate import simulate
from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.model import ModelSpec

SIMPLE = "parameter_mb = 10\nbatch_size = 8\nforward_ms = 10\nbackward_ms = 20\n"
LAYERS = "batch_size = 8\n" + "".join(
    f'[[layers]]\nname = "block{number}"\nparameter_mb = 4\ncrossing_mb = 1\nforward_ms = 3\nbackward_ms = 6\n'
    for number in range(4)
)
ONE_HOST = Cluster((Host("h", 4, 8_000_000_000),))
EXAMPLES = Path(__file__).parents[2] / "examples"


def written(tmp_path: Path, text: str) -> ModelSpec:
    file = tmp_path / "model.toml"
    file.write_text(text)
    return ModelSpec.load(file)


def linked(tmp_path: Path, *links: tuple[float, float]) -> Cluster:
    """Three hosts, and the links between each two of them: Mbit/s and ms."""
    text = "".join(f'[[hosts]]\nname = "h{number}"\ncores = 4\nmemory_gb = 64\n' for number in range(3))
    for (one, other), (rate, latency) in zip(combinations(range(3), 2), links, strict=True):
        text += f'[[links]]\nbetween = ["h{one}", "h{other}"]\nmbit_per_s = {rate}\nlatency_ms = {latency}\n'
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return Cluster.load(file)


def test_of_many_links_few_are_compared_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    other_unit = plausibility._other_unit

    def counted(own: float, others: list[float], units: Mapping[float, str]) -> str | None:
        compared.append(own)
        return other_unit(own, others, units)

    monkeypatch.setattr(plausibility, "_other_unit", counted)
    hosts = tuple(Host(f"h{number}", 4, (64 + number) * 10**9) for number in range(20))
    links = [Link(a.name, b.name, 1e8 + number, 1e-4) for number, (a, b) in enumerate(combinations(hosts, 2))]
    known = written(tmp_path, SIMPLE)
    assert doubtful_units(known, Cluster(hosts, links=tuple(links))) == ()
    assert len(compared) < 10
    links[7] = replace(links[7], bytes_per_s=1e5, latency_s=1e-4)
    links[9] = replace(links[9], latency_s=1e-7)
    slow, late = doubtful_units(known, Cluster(hosts, links=tuple(links)))
    assert "h0 and h8 has 0.8 Mbit/s, and the 189 others have 800.001 Mbit/s; mbit_per_s" in slow
    assert "h0 and h10 has a latency of 0.0001 ms, and the 188 others of its rate 0.1 ms" in late


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ((125, 0.1), "between h1 and h2 has 125 Mbit/s, and the 2 others have 1000 Mbit/s; .* given in megabytes"),
        ((1, 0.1), "has 1 Mbit/s, and the 2 others have 1000 Mbit/s; .* given in gigabits"),
        ((0.125, 0.1), "given in gigabytes"),
        ((1_000_000, 0.1), "given in kilobits"),
        ((1000, 0.0001), "a latency of 0.0001 ms, and the 2 others of its rate 0.1 ms; .* given in seconds"),
        ((1000, 100), "a latency of 100 ms, and the 2 others of its rate 0.1 ms; .* given in microseconds"),
    ],
)
def test_one_link_in_another_unit(tmp_path: Path, link: tuple[float, float], says: str) -> None:
    known = written(tmp_path, SIMPLE)
    (said,) = doubtful_units(known, linked(tmp_path, (1000, 0.1), (1000, 0.1), link))
    assert said.startswith("warning: the link")
    assert re.search(says, said), said


@pytest.mark.parametrize("link", [(1000, 0.1), (100, 0.1), (940, 0.3), (10_000, 0.02), (1, 20), (125, 15)])
def test_links_that_differ_in_earnest(tmp_path: Path, link: tuple[float, float]) -> None:
    """Slower or quicker Ethernet, and a line to another town."""
    assert doubtful_units(written(tmp_path, SIMPLE), linked(tmp_path, (1000, 0.1), (1000, 0.12), link)) == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"memory_bytes": 64_000_000_000_000},
            "memory_gb of host h2 is 64000, and that of the 3 others .* 64; .* mega",
        ),
        ({"device_flops": 100e9}, r"device_tflops of host h2 is 0\.1, .* 100; it is in TFLOP/s: .* PFLOP/s"),
        ({"bus_bytes_per_s": 96e9}, "bus_gb_per_s of host h2 is 96, .* 12; it is in gigabytes a second: .* gigabits"),
    ],
)
def test_one_host_in_another_unit(tmp_path: Path, change: dict[str, float], says: str) -> None:
    host = Host("h", 4, 64_000_000_000, ("cuda:0",), device_flops=100e12, bus_bytes_per_s=12e9)
    hosts = [replace(host, name=f"h{number}") for number in range(4)]
    assert doubtful_units(written(tmp_path, SIMPLE), Cluster(tuple(hosts), device="cuda")) == ()
    hosts[2] = replace(hosts[2], **change)  # type: ignore[arg-type]
    (said,) = doubtful_units(written(tmp_path, SIMPLE), Cluster(tuple(hosts), device="cuda"))
    assert re.search(says, said), said


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("forward_ms = 3\nbackward_ms = 6", "forward_ms = 0.003\nbackward_ms = 0.006", "forward_ms of layer block0 is"),
        ("forward_ms = 3\n", "forward_ms = 0.003\n", "takes 0.003 ms forward and 6 ms backward"),
        ("backward_ms = 6\n", "backward_ms = 6000\n", "backward_ms of layer block0 is 6000, and that of the 3 layers"),
    ],
)
def test_one_layer_in_another_unit(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert doubtful_units(written(tmp_path, LAYERS), ONE_HOST) == ()
    said = doubtful_units(written(tmp_path, LAYERS.replace(old, new, 1)), ONE_HOST)
    assert any(says in each for each in said), said
    assert all("block0" in each or "batch of 8" in each for each in said)


def test_batches_in_two_units(tmp_path: Path) -> None:
    later = "[[measured]]\nbatch_size = 16\nforward_ms = {}\nbackward_ms = {}\n"
    assert doubtful_units(written(tmp_path, SIMPLE + later.format(19, 38)), ONE_HOST) == ()
    assert doubtful_units(written(tmp_path, SIMPLE + later.format(11, 21)), ONE_HOST) == ()
    (said,) = doubtful_units(written(tmp_path, SIMPLE + later.format(0.019, 0.038)), ONE_HOST)
    assert "forward_ms of the batch of 16 is 0.019, and that of the batch of 8 10; both are in milliseconds" in said


def test_no_false_alarm_on_what_is_there(tmp_path: Path) -> None:
    """Each cluster of a cloud, one of all machines of all clouds, and the files of the examples."""
    known = written(tmp_path, SIMPLE)
    clusters = [cloud_cluster(name, count) for name in cloud_machines() for count in (1, 4)]
    assert len(clusters) >= 10
    every = [replace(host, name=f"{host.name}-{number}") for each in clusters for number, host in enumerate(each.hosts)]
    clusters.append(Cluster(tuple(every), device="cuda"))
    files = sorted(EXAMPLES.rglob("cluster*.toml"))
    assert files
    for cluster in [*clusters, *map(Cluster.load, files)]:
        assert doubtful_units(known, cluster) == ()
    assert doubtful_units(ModelSpec.load(EXAMPLES / "simulate" / "model.toml"), ONE_HOST) == ()


def test_both_commands_say_so(tmp_path: Path) -> None:
    known = written(tmp_path, SIMPLE)
    cluster = linked(tmp_path, (1000, 0.1), (1000, 0.1), (125, 0.1))
    said = doubtful_units(known, cluster)
    assert len(said) == 1
    assert said[0] in simulate(known, cluster, "mirrored", global_batch_size=24).notes
    assert said[0] in recommend(known, cluster, global_batch_size=24).notes
