"""What `headrace doctor` says of several hosts: the wrong one in one line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.cli.survey import checks_of, measured, own_facts
from headrace.cli.verdict import Verdict
from headrace.engine.network.survey import HostFacts, LinkFacts, Survey
from headrace.spec.cluster import Cluster, Host, Link

MBIT = 1e6 / 8


def host(name: str, **facts: str) -> HostFacts:
    return HostFacts(Host(name, 4, 10**10, address="127.0.0.1"), {"torch": "2.13.0", **facts}, 10**9)


def survey(names: str, slow: Mapping[str, float] = {}, **changes: LinkFacts) -> Survey:
    """Hosts whose links carry 1000 Mbit/s, or what `slow` says of "ab" or of all links of "a_" and "_b"."""
    links = []
    for a, b in permutations(names, 2):
        rate = min(slow.get(key, 1000) for key in (a + b, a + "_", "_" + b))
        links.append(changes.get(a + b, LinkFacts(a, b, (rate * MBIT,), 1e-4)))
    return Survey(tuple(map(host, names)), tuple(links))


def wrong(found: Survey, said: Cluster | None = None) -> list[tuple[str, str]]:
    return [(line.name, line.found) for line in checks_of(found, said) if line.verdict is not Verdict.OK]


def test_nothing_is_wrong() -> None:
    assert wrong(survey("abcd")) == []


@pytest.mark.parametrize(
    ("names", "slow", "said"),
    [
        ("abcd", {"c_": 100}, "c sends at most 100 Mbit/s, others 1000 Mbit/s"),
        ("abc", {"c_": 100}, "c sends at most 100 Mbit/s, others 1000 Mbit/s"),
        ("abc", {"_c": 100}, "c receives at most 100 Mbit/s, others 1000 Mbit/s"),
        ("abc", {"ab": 100}, "from a to b 100 Mbit/s, elsewhere they have 1000 Mbit/s"),
        ("ab", {"ba": 100}, "b sends at most 100 Mbit/s, others 550 Mbit/s"),
    ],
)
def test_a_slow_one_is_named_once(names: str, slow: dict[str, float], said: str) -> None:
    assert wrong(survey(names, slow)) == [("slow", said)]


def test_devices_and_what_they_exchange_by_are_compared() -> None:
    hosts = [
        host("a", nccl="2.27.5", accelerators="8 x NVIDIA H100, 85 GB"),
        host("b", nccl="2.27.5", accelerators="8 x NVIDIA A100, 42 GB"),
        replace(host("c", nccl="2.26.2", accelerators="8 x NVIDIA H100, 85 GB"), interface="NCCL_SOCKET_IFNAME=eth1"),
    ]
    found = [line for line in checks_of(replace(survey("abc"), hosts=tuple(hosts)), None) if line.name != "host"]
    by_name = {line.name: line for line in found}
    assert (by_name["nccl"].verdict, by_name["accelerators"].verdict) == (Verdict.PROBLEM, Verdict.WARNING)
    assert by_name["nccl"].found == "not the same on all hosts: c has 2.26.2; the others have 2.27.5"
    assert "b has 8 x NVIDIA A100, 42 GB; the others have 8 x NVIDIA H100" in by_name["accelerators"].found
    assert "balance='speed'" in by_name["accelerators"].remedy
    assert by_name["interface"].found == "NCCL_SOCKET_IFNAME=eth1"


def test_a_host_without_devices_is_named_beside_those_that_have_some() -> None:
    hosts = (host("a"), host("b", nccl="2.27.5"), host("c", nccl="2.27.5"))
    found = {line.name: line.found for line in checks_of(replace(survey("abc"), hosts=hosts), None)}
    assert found["nccl"] == "not the same on all hosts: a has nothing; the others have 2.27.5"


def test_what_differs_is_named() -> None:
    found = survey("abc")
    odd = replace(found, hosts=(host("a", data="1"), host("b", data="1"), host("c", data="2", torch="2.12.0")))
    assert wrong(odd) == [
        ("torch", "not the same on all hosts: c has 2.12.0; the others have 2.13.0"),
        ("data", "not the same on all hosts: c has 2; the others have 1"),
    ]
    # Without a majority no host is taken as right.
    two = replace(survey("ab"), hosts=(host("a"), host("b", torch="2.12.0")))
    assert wrong(two) == [("torch", "not the same on all hosts: a has 2.13.0, b has 2.12.0")]


def test_who_does_not_reach_whom() -> None:
    blocked = LinkFacts("a", "b", error="10.0.0.2:5000: timed out")
    assert wrong(survey("ab", ab=blocked)) == [
        ("link", "a does not reach b (10.0.0.2:5000: timed out); from b to a it works")
    ]
    both = survey("ab", ab=blocked, ba=LinkFacts("b", "a", error="refused"))
    assert [said.rpartition("; ")[2] for _, said in wrong(both)] == ["nor the other way"] * 2


def test_a_clock_that_is_ahead() -> None:
    found = survey("ab", ab=LinkFacts("a", "b", (1000 * MBIT,), 1e-4, ahead_s=2.5))
    assert wrong(found) == [("clock", "b is 2.5 s ahead of a")]


def test_little_shared_memory() -> None:
    found = survey("ab")
    assert wrong(replace(found, hosts=(host("a"), replace(host("b"), shared_memory_bytes=64 << 20)))) == [
        ("host", "b has 67.1 MB free in /dev/shm")
    ]


def test_what_the_file_says_otherwise() -> None:
    said = Cluster(
        (Host("a", 8, 1), Host("c", 1, 1, address="no.such.host.invalid", price_per_hour=0.5)),
        links=(Link("a", "b", 2000 * MBIT), Link("b", "a", 1100 * MBIT)),
    )
    found = survey("ab")
    assert [line for line in wrong(found, said) if "resolve" not in line[1]] == [
        ("file", "b is not in the cluster's file"),
        ("file", "a has 4 cores, the file says 8"),
        ("file", "no process runs on c"),
        ("file", "from a to b: 1000 Mbit/s, the file says 2000 Mbit/s"),
    ]
    assert any("c's address 'no.such.host.invalid' does not resolve" in text for _, text in wrong(found, said))


def test_prices_are_those_of_the_file() -> None:
    said = Cluster((Host("a", 8, 1, price_per_hour=0.5),))
    assert [each.price_per_hour for each in measured(survey("ab"), said).hosts] == [0.5, 0.0]


def test_facts_of_a_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import torch, headrace as hr\n"
        "def job(count=4):\n"
        "    data = torch.ones(count, 2), torch.ones(count, 1)\n"
        "    return hr.Job(model=torch.nn.Linear(2, 1), task=hr.tasks.regression(),\n"
        "                  optimizer=torch.optim.SGD, data=data, global_batch_size=2, steps=1)\n"
    )
    first, again, other = (own_facts(job, [f"count={count}"]).facts for count in (4, 4, 6))
    assert first == again
    assert {key for key in first if first[key] != other[key]} == {"data"}
    job.write_text(job.read_text() + "\n")
    assert {key for key, value in own_facts(job, ["count=4"]).facts.items() if value != first[key]} == {"job file"}


def test_a_job_that_is_on_no_host(tmp_path: Path) -> None:
    absent = replace(host("a"), facts=own_facts(tmp_path / "job.py", []).facts)
    found = replace(survey("ab"), hosts=(absent, replace(host("b"), facts=absent.facts)))
    assert [name for name, said in wrong(found) if "job.py" in said] == ["job file", "data"]


def test_without_a_launcher_it_goes_to_all_hosts_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    lines = (f'[[hosts]]\nname = "{name}"\naddress = "10.0.0.{name}"\ncores = 1\nmemory_gb = 1\n' for name in "12")
    file.write_text("".join(lines))
    calls = []

    def over_ssh(hosts: object, command: tuple[str, ...], script: Path, workers: int, ssh: str) -> int:
        calls.append((hosts, command[2:], script, workers, ssh))
        return 3

    monkeypatch.setattr(sys.modules["headrace.cli.commands.doctor"], "over_ssh", over_ssh)
    assert run(["doctor", "--cluster", str(file), "--ssh", "ssh -v"]) == 3
    hosts = [("10.0.0.1", "1"), ("10.0.0.2", "2")]
    assert calls == [(hosts, ("doctor", "--cluster", str(file)), file, 2, "ssh -v")]
    assert run(["doctor", "--cluster", str(file), "--json"]) == 2
