"""cluster.toml: what it says is read, written and refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.spec.cluster import Cluster, Host, Link

HOSTS = """
[[hosts]]
name = "a"
address = "10.0.0.1"
cores = 8
memory_gb = 32
accelerators = ["cuda:0"]
price_per_hour = 0.4
[[hosts]]
name = "b"
cores = 4
memory_gb = 16
[[hosts]]
name = "c"
cores = 2
memory_gb = 8
"""
NETWORK = """
[network]
mbit_per_s = 2000
latency_ms = 1
"""
LINKS = """
[[links]]
between = ["a", "b"]
mbit_per_s = 200
latency_ms = 0.5
shared = "switch"
[[links]]
from = "c"
to = "a"
mbit_per_s = 80
"""


@pytest.fixture
def load(tmp_path: Path):
    def read(text: str) -> Cluster:
        file = tmp_path / "cluster.toml"
        file.write_text(text)
        return Cluster.load(file)

    return read


def test_what_the_file_says(load) -> None:
    cluster = load(HOSTS + NETWORK + LINKS)
    assert cluster.hosts[0] == Host("a", 8, 32_000_000_000, ("cuda:0",), (), "10.0.0.1", 0.4)
    assert cluster.price_per_hour == 0.4
    assert cluster.link("b", "a") == Link("b", "a", 25e6, 0.0005, "switch")
    assert cluster.link("c", "a") == Link("c", "a", 10e6)
    assert cluster.link("a", "c") == Link("a", "c", 250e6, 0.001)
    assert load(HOSTS).link("a", "b").bytes_per_s == 125e6


@pytest.mark.parametrize("text", [HOSTS, HOSTS + NETWORK, HOSTS + LINKS, HOSTS + NETWORK + LINKS])
def test_what_is_written_is_read(load, text: str) -> None:
    cluster = load(text)
    assert load(cluster.toml()) == cluster


@pytest.mark.parametrize("name", ["\N{ROCKET}", "Zürich", 'a "b" \\ c', "\x7f\t"])
def test_any_name_is_written_and_read(load, name: str) -> None:
    cluster = Cluster((Host(name, 1, 10**9, (f"cuda:{name}",)), Host("b", 1, 10**9)), links=(Link(name, "b", 1e6),))
    assert load(cluster.toml()) == cluster


def test_the_slower_direction_counts_and_shared_links_are_divided(load) -> None:
    cluster = load(HOSTS + LINKS)
    assert cluster.bandwidths([("a", "a"), ("a", "c"), ("b", "c")]) == (math.inf, 10e6, 125e6)
    assert cluster.bandwidths([("a", "b")]) == (25e6,)
    assert cluster.bandwidths([("a", "b"), ("b", "a"), ("b", "c")]) == (12.5e6, 12.5e6, 125e6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts = 3", r"hosts must be tables, \[\[hosts\]\]"),
        ("", "no hosts; a host begins with"),
        ("device = 'gpu'", "device is 'cpu', 'cuda', 'tpu', 'xpu' or 'mps', got 'gpu'"),
        ("hots = []", "there is no key 'hots' of the file; did you mean 'hosts'"),
        (HOSTS.replace('"b"', '"a"'), r"hosts\[0\] and hosts\[1\] have one name, 'a'"),
        (HOSTS.replace("memory_gb", "memory", 1), r"no key 'memory' of hosts\[0\]; did you mean 'memory_gb'"),
        (HOSTS.replace("cores = 4", "cores = 0"), r"hosts\[1\].cores must be a whole number of at least 1, got 0"),
        (HOSTS.replace("cores = 4", ""), r"hosts\[1\].cores is missing; it must be a whole number of at least 1"),
        (HOSTS.replace("16", "'16'"), r"hosts\[1\].memory_gb must be a number of at least 0, got '16'"),
        (HOSTS.replace('["cuda:0"]', "true"), r"hosts\[0\].accelerators must be a number, or a list"),
        (HOSTS.replace('name = "b"', ""), r"hosts\[1\].name is missing; it must be a text"),
        ("network = 5" + HOSTS, "network must be a table"),
        (HOSTS + "hours_between_failures = 1e-310", "hours_between_failures is 1e-310, and no machine has less"),
        (HOSTS + "[network]\nlatency_ms = 1", "network.mbit_per_s is missing; it must be a number of at least 0"),
        (HOSTS + LINKS.replace("200", "0"), r"links\[0\].mbit_per_s must be above 0"),
        (HOSTS + LINKS.replace("0.5", "-1"), r"links\[0\].latency_ms must be a number of at least 0, got -1"),
        (HOSTS + LINKS.replace('"c"', '"d"'), r"there is no host 'd' of links\[1\]; known: a, b, c"),
        (HOSTS + LINKS.replace('"c"', '"b"'), r"links\[1\] and links\[0\] both say what is from 'b' to 'a'"),
        (HOSTS + LINKS.replace('"c"', '"a"'), r"links\[1\] is from 'a' to itself"),
        (HOSTS + LINKS.replace('to = "a"', ""), r"links\[1\] needs either between"),
        (HOSTS + LINKS.replace('to = "a"', 'to = "a"\nbetween = ["a", "b"]'), r"links\[1\] needs either between"),
        (HOSTS + LINKS.replace('["a", "b"]', '["a"]'), r"links\[0\] must name two hosts, got \['a'\]"),
        ("x = [", "cannot be read as a cluster's file"),
    ],
)
def test_what_contradicts_is_refused_with_file_and_key(load, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=rf"cluster\.toml.*{said}"):
        load(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml cannot be read as a cluster's file: .*No such file"):
        Cluster.load(tmp_path / "none.toml")


DEVICES = """
device = "cuda"
[[hosts]]
name = "gpu"
count = 3
cores = 8
memory_gb = 64
accelerators = 4
device_memory_gb = 16
device_tflops = 7.5
bus_gb_per_s = 12
hours_between_failures = 500
"""


def test_a_table_may_stand_for_many_hosts_with_their_devices(load) -> None:
    cluster = load(DEVICES)
    assert [host.name for host in cluster.hosts] == ["gpu-0", "gpu-1", "gpu-2"]
    assert cluster.accelerators == 12
    host = cluster.hosts[2]
    assert (host.device_memory_bytes, host.device_flops, host.bus_bytes_per_s) == (16_000_000_000, 7.5e12, 12e9)
    assert load(cluster.toml()) == cluster


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("memory_gb = 64", "memory_gb = 64e9"), r"hosts\[0\].memory_gb is 6.4e\+10, .* is it in another unit"),
        (("memory_gb = 64", "memory_gb = 64e-9"), r"memory_gb is 6.4e-08, and no machine has less than 0.01"),
        (("device_tflops = 7.5", "device_tflops = 7.5e12"), "device_tflops .* is it in another unit"),
        (("device_tflops = 7.5", "device_tflops = -1"), "device_tflops must be a number of at least 0, got -1"),
        (("bus_gb_per_s = 12", "bus_gb_per_s = 0"), "bus_gb_per_s must be above 0"),
        (("count = 3", "count = 0"), "count must be a whole number of at least 1"),
        (("accelerators = 4", "accelerators = -4"), "accelerators must be a number, or a list"),
    ],
)
def test_figures_of_devices_that_are_refused(load, change: tuple[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(DEVICES.replace(*change))
