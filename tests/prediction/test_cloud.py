"""Clusters of rented machines by name, and the profiles that may stand for them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from headrace.errors import UnknownName, UsageError
from headrace.prediction.cloud import cloud_cluster, cloud_machines, cluster_of
from headrace.prediction.profiling.origin import origin_here, require_usable
from headrace.prediction.simulation.simulate import simulate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.model import ModelSpec, ParameterSpec

ROOT = Path(__file__).parents[2]
HERE = origin_here("cpu")
MODEL = ModelSpec(
    (ParameterSpec("weight", (1000,)),), compute=ComputeProfile((BatchProfile(8, 0.01, 0.02),)), origin=HERE
)
CPUS = Cluster((Host("a", 4, 10**9),))
GPUS = Cluster((Host("a", 4, 10**9, ("cuda:0",)),), device="cuda")


def test_every_machine_says_its_price_network_and_source() -> None:
    file = tomllib.loads((ROOT / "src/headrace/prediction/cloud.toml").read_text())
    for about in file.values():
        assert date.fromisoformat(about["prices_date"]) > date(2026, 1, 1)
        assert about["prices_source"]
        assert about["figures_source"]
    for machine in cloud_machines().values():
        assert 0.1 < machine.host.price_per_hour < 200
        assert 100e6 < machine.bytes_per_s < 1e12
        assert machine.host.cores > 0
        assert machine.host.memory_bytes > 1e9
        assert bool(machine.host.device_memory_bytes) == bool(machine.device) == bool(machine.host.accelerators)


def test_a_name_stands_for_so_many_machines() -> None:
    cluster = cluster_of("aws-p4d.24xlarge:2")
    assert [host.name for host in cluster.hosts] == ["aws-p4d.24xlarge-0", "aws-p4d.24xlarge-1"]
    assert (cluster.device, cluster.accelerators, cluster.link_bytes_per_s) == ("cuda", 16, 50e9)
    assert cluster_of("aws-c7i.4xlarge").hosts[0].price_per_hour == 0.714
    assert cluster_of("aws-c7i.4xlarge").device == "cpu"
    assert cluster_of(cluster) is cluster
    with pytest.raises(UnknownName, match=r"did you mean 'aws-p4d\.24xlarge'\? known: aws-c5n"):
        cluster_of("aws-p4d.24large:2")


def test_it_is_a_file_that_can_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cloud_cluster("aws-g5.12xlarge", 3)
    # A file is read as one, whatever its name.
    monkeypatch.chdir(tmp_path)
    Path("aws-g5.12xlarge").write_text(replace(cluster, hosts=cluster.hosts[:2]).toml())
    assert len(cluster_of("aws-g5.12xlarge").hosts) == 2
    assert len(cluster_of("aws-g5.12xlarge:3").hosts) == 3
    with pytest.raises(UsageError, match="cannot be read as a cluster's file"):
        cluster_of("gcp-a2:3")


def test_hosts_of_one_name_and_none_at_all_are_refused() -> None:
    host = Host("a", 4, 10**9)
    with pytest.raises(UsageError, match="two hosts of one name, 'a'"):
        cluster_of(Cluster((host, Host("b", 4, 10**9), host)))
    with pytest.raises(UsageError, match="the cluster has no host"):
        simulate(MODEL, Cluster(()), "mirrored")


def test_a_profile_stands_for_its_versions_and_its_kind_of_device() -> None:
    assert require_usable(MODEL, CPUS) == ()
    with pytest.raises(UsageError, match=r"device: cpu, and here cuda \(each host may say the speed"):
        require_usable(MODEL, GPUS)
    with pytest.raises(UsageError, match=r"torch: 1\.0, and here"):
        require_usable(replace(MODEL, origin={**HERE, "torch": "1.0"}), CPUS)
    quick = replace(GPUS, hosts=(replace(GPUS.hosts[0], speed=20.0),))
    assert require_usable(MODEL, quick) == ()
    of_gpu = replace(MODEL, origin={**HERE, "device": "NVIDIA A100"})
    assert require_usable(of_gpu, GPUS) == ()
    with pytest.raises(UsageError, match="device: NVIDIA A100, and here cpu"):
        require_usable(of_gpu, CPUS)
    # What a person has written belongs to nothing.
    assert require_usable(replace(MODEL, origin={}), GPUS) == ()


def test_a_simulation_refuses_it_or_notes_it() -> None:
    with pytest.raises(UsageError, match="give --force"):
        simulate(MODEL, "aws-g5.xlarge:2", "mirrored")
    forced = simulate(MODEL, "aws-g5.xlarge:2", "mirrored", force=True)
    assert forced.notes[0].startswith("device: cpu, and here cuda")
    assert simulate(MODEL, "aws-c7i.8xlarge:2", "mirrored").workers == 2


def test_the_page_lists_every_machine() -> None:
    page = (ROOT / "docs/guide/simulate.md").read_text()
    rows = {
        f"| `{machine.name}` | {machine.host.cores} | "
        f"{f'{len(machine.host.accelerators)} {machine.device}' if machine.device else 'none'} | "
        f"{machine.bytes_per_s * 8 / 1e9:g} | {machine.host.price_per_hour:g} |"
        for machine in cloud_machines().values()
    }
    assert [row for row in rows if row not in page] == []
    assert page.count("| `aws-") == len(rows)
